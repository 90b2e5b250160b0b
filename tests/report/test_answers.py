"""The section on answers: its numbers, and its text if nothing is scored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fixtures.report_views import MODEL, PAIR, STRATA, STUDY, check, content_of, make_scalar_views, make_views

from kvdrift.report.page import build_report
from kvdrift.report.sections.answers import answers_figure, correlation_sentence, records_table

LOST = {"snapkv-half": 0.031, "recent-half": 0.41}


def answer_rows(actions: tuple[str, ...] = PAIR) -> list[dict[str, Any]]:
    keys = {"study": STUDY, "model": MODEL, "split": "evaluation"}
    return [
        keys | {
            "stratum": stratum, "action": action, "documents": 11, "trajectories": 88, "accuracy_reference": 0.8,
            "accuracy": 0.8 - LOST[action] / 2, "score_gap": -LOST[action] / 2, "reference_right": 0.5,
            "lost": LOST[action] / 2, "gained": 0.0, "lost_share": LOST[action], "before": 0.5, "inside": 0.3,
            "after": 0.1, "lost_before": LOST[action], "lost_inside": LOST[action], "lost_after": 0.0,
        }
        for stratum in ("pooled", *STRATA) for action in actions
    ]  # fmt: skip


def test_the_figure_and_the_correlation_with_divergence() -> None:
    views = make_scalar_views()
    views.views["answers"] = answer_rows()
    content = content_of(views)
    assert correlation_sentence(content) == ""
    views.views["answer_correlations"] = [
        {"study": STUDY, "model": MODEL, "split": "evaluation", "stratum": "pooled", "actions": 5, "lost": 0.91,
         "score_gap": -0.5}
    ]  # fmt: skip
    assert re.findall(r"−?\d\.\d\d", correlation_sentence(content)) == ["0.91", "−0.50"]
    views.views["answer_correlations"][0]["actions"] = 4
    assert correlation_sentence(content_of(views)) == "", "any line fits so few"
    (axes,) = answers_figure(content).axes
    assert [float(line.get_ydata()[0]) for line in axes.get_lines() if line.get_markersize() == 7] == [3.1, 41.0]


def test_records_of_lost_answers() -> None:
    """Shares of records that were evicted wholly, in part and not at all, of lost answers beside all answers."""
    views = make_scalar_views()
    names = ("lost", "lost_gone", "lost_partly", "lost_whole", "gone", "partly", "whole")
    shares = {"recent-half": (1995, 0.899, 0, 0.101, 0.63, 0, 0.37), "snapkv-half": (0, 0, 0, 0, 0, 0.7, 0.3)}
    keys = {"study": STUDY, "model": MODEL, "split": "evaluation", "stratum": "pooled", "answers": 50}
    views.views["lost_records"] = [
        keys | {"action": action} | dict(zip(names, values, strict=True)) for action, values in shares.items()
    ]
    table = records_table(content_of(views))
    assert table is not None
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["recent-half", "1,995", "89.9", "0.0", "10.1", "63.0", "0.0", "37.0"]
    ], "an action that loses nothing has no row"
    views.views["lost_records"] = []
    assert records_table(content_of(views)) is None


@pytest.mark.usefixtures("undrawn")
def test_the_section_is_there_if_answers_are_known(tmp_path: Path) -> None:
    """Scored answers have tables, known answers a line; without answers there is no section."""
    views = make_views()
    html = build_report(views, STUDY, MODEL, tmp_path).read_text()
    assert "table-answers" not in check(html).ids
    assert "The answers of 12 documents" in html
    views.views["answers"] = answer_rows()
    html = build_report(views, STUDY, MODEL, tmp_path).read_text()
    assert "11 of 12 evaluation documents" in html
    lines = (tmp_path / "tables" / "answers.csv").read_text().splitlines()
    assert any(line.startswith("pooled,recent-half,,lost_share,,0.41,") for line in lines)
    views.views["documents"] = [row | {"answers": []} for row in views.views["documents"]]
    views.views["answers"] = []
    assert "answers" not in check(build_report(views, STUDY, MODEL, tmp_path / "without").read_text()).ids
