"""The section on answers: its sentence, its numbers, and what it says where nothing is scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures.report_views import MODEL, PAIR, STRATA, STUDY, FakeViews, make_views

from report.page import build_report
from report.parts.answers import answers_figure, correlation_sentence, lost_sentence
from report.reading.content import read_content
from report.reading.source import Provenance, StudyRows

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


def content_of(views: FakeViews) -> Any:
    source = StudyRows(views, STUDY, MODEL)
    return read_content(source, baseline=None, token_text=None, provenance=Provenance(), latex=False)


def test_the_sentence_names_what_every_action_loses() -> None:
    views = make_views()
    views.views["answers"] = answer_rows()
    content = content_of(views)
    assert lost_sentence(content) == "snapkv-half loses 3.10% of the right answers, recent-half 41.0%."
    assert correlation_sentence(content) == ""
    views.views["answer_correlations"] = [
        {"study": STUDY, "model": MODEL, "split": "evaluation", "stratum": "pooled", "actions": 4, "lost": 0.91,
         "score_gap": -0.5}
    ]  # fmt: skip
    expected = "Over the 4 actions, the correlation of R with answers lost is 0.91, and with the score gap −0.50."
    assert correlation_sentence(content) == expected
    (axes,) = answers_figure(content).axes
    assert [float(line.get_ydata()[0]) for line in axes.get_lines() if line.get_markersize() == 7] == [3.1, 41.0]


@pytest.mark.slow
def test_the_page_has_accuracy_and_when_answers_are_lost(tmp_path: Path) -> None:
    views = make_views()
    views.views["answers"] = answer_rows()
    page = build_report(views, STUDY, MODEL, tmp_path).read_text()
    assert "Does it matter?" in page
    assert "11 of 12 evaluation documents know their answers; those without, 1, are not scored." in page
    lines = (tmp_path / "tables" / "answers.csv").read_text().splitlines()
    assert any(line.startswith("pooled,recent-half,,lost_share,,0.41,") for line in lines)
    assert (tmp_path / "figures" / "answers.svg").is_file()


@pytest.mark.slow
def test_a_page_says_where_answers_are_not_scored(tmp_path: Path) -> None:
    views = make_views()
    assert (
        "The answers of 12 documents are known, and no continuation"
        in build_report(views, STUDY, MODEL, tmp_path).read_text()
    )
    views.views["documents"] = [row | {"answers": []} for row in views.views["documents"]]
    assert "Does it matter?" not in build_report(views, STUDY, MODEL, tmp_path / "without").read_text()
