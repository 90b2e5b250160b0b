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
        {"study": STUDY, "model": MODEL, "split": "evaluation", "stratum": "pooled", "actions": 5, "lost": 0.91,
         "score_gap": -0.5}
    ]  # fmt: skip
    expected = "Over the 5 actions, the correlation of R with answers lost is 0.91, and with the score gap −0.50."
    assert correlation_sentence(content) == expected
    views.views["answer_correlations"][0]["actions"] = 4
    assert correlation_sentence(content_of(views)) == "", "any line fits so few"
    (axes,) = answers_figure(content).axes
    assert [float(line.get_ydata()[0]) for line in axes.get_lines() if line.get_markersize() == 7] == [3.1, 41.0]


def test_of_many_actions_the_sentence_names_the_least_and_the_most() -> None:
    views = make_views(tuple(f"snapkv-{share}" for share in (90, 75, 50, 25, 10)), strata=("NIAH-4K",))
    whole = [row for row in views.views["estimates"] if row["quantity"] == "mismatch" and row["stratum"] == "pooled"]
    views.views["estimates"] += [
        row | {"quantity": "lost_share", "estimate": 0.1 * place, "low": None, "high": None}
        for place, row in enumerate(whole, 1)
    ]
    least, most = whole[0]["action"], whole[-1]["action"]
    assert lost_sentence(content_of(views)) == (
        f"Of the right answers, {least} loses 10.0%, the least, and {most} 50.0%, the most."
    )


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
