"""The section on answers: its sentence, its numbers, and its text if nothing is scored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fixtures.report_views import MODEL, PAIR, STRATA, STUDY, content_of, make_views

from kvdrift.report.page import build_report
from kvdrift.report.sections.answers import answers_figure, answers_sentence, correlation_sentence, records_sentence

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


def test_the_sentence_names_what_every_action_loses() -> None:
    views = make_views()
    views.views["answers"] = answer_rows()
    content = content_of(views)
    assert answers_sentence(content) == (
        "With snapkv-half, accuracy is 78.5% instead of 80.0%: −1.55 pp. Right answers are lost in 1.55% of pairs and "
        "gained in 0.00%; of the reference’s right answers 3.10% are lost. "
        "With recent-half, accuracy is 59.5% instead of 80.0%: −20.5 pp. Right answers are lost in 20.5% of pairs and "
        "gained in 0.00%; of the reference’s right answers 41.0% are lost."
    )
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


def test_of_many_actions_the_sentence_names_the_highest_and_the_lowest_accuracy() -> None:
    actions = tuple(f"snapkv-{share}" for share in (90, 75, 50, 25, 10))
    views = make_views(actions, strata=("NIAH-4K",))
    whole = [row for row in views.views["estimates"] if row["quantity"] == "mismatch" and row["stratum"] == "pooled"]
    for name, value in (("accuracy", 0.9), ("accuracy_reference", 1.0), ("score_gap", 0.0), ("lost_share", 0.1)):
        views.views["estimates"] += [
            row | {"quantity": name, "estimate": value - 0.1 * place * (name == "accuracy"), "low": None, "high": None}
            for place, row in enumerate(whole)
        ]
    said = answers_sentence(content_of(views))
    first, last = whole[0]["action"], whole[-1]["action"]
    assert said.startswith(f"With {first}, accuracy is 90.0% instead of 100.0%")
    assert f"With {last}, accuracy is 50.0%" in said
    assert said.count("With ") == 2


def test_records_of_lost_answers_in_words() -> None:
    """Shares of records that were evicted wholly, in part and not at all, of lost answers beside all answers."""
    views = make_views()
    names = ("lost", "lost_gone", "lost_partly", "lost_whole", "gone", "partly", "whole")

    def said(shares: Mapping[str, tuple[float, ...]]) -> str:
        views.views["lost_records"] = [
            {
                "study": STUDY,
                "model": MODEL,
                "split": "evaluation",
                "stratum": "pooled",
                "action": action,
                "answers": 50,
            }
            | dict(zip(names, values, strict=True))
            for action, values in shares.items()
        ]
        return records_sentence(content_of(views))

    assert said({"recent-half": (1995, 0.899, 0, 0.101, 0.63, 0, 0.37), "snapkv-half": (0, 0, 0, 0, 0, 0.7, 0.3)}) == (
        "recent-half loses 1,995 answers: the record of 89.9% was wholly evicted, that of 0.0% in part, and 10.1% have "
        "their whole record. Of all answers, lost or not, these shares are 63.0%, 0.0% and 37.0%. The more these "
        "shares differ from the shares of all answers, the more of the loss is associated with eviction. “In part” "
        "means that some layers or KV heads lack some tokens of the record; other layers or heads may still read these "
        "tokens. An answer whose record is whole is "
        "lost by something else: entries by which the model finds the record are missing or less exact; or the pair "
        "had parted, and Y drew other tokens by chance."
    )
    both = said({"snapkv-half": (40, 0.25, 0.75, 0, 0.1, 0.5, 0.4)})
    assert both.startswith(
        "snapkv-half loses 40 answers: the record of 25.0% was wholly evicted, that of 75.0% in part, and 0.0% have "
        "their whole record. Of all answers, lost or not, these shares are 10.0%, 50.0% and 40.0%."
    )
    assert "is whole" not in both
    assert said({"snapkv-half": (3, 0, 0, 1, 0, 0, 1)}).startswith("An answer whose record is whole is lost by")


@pytest.mark.slow
def test_the_page_has_accuracy_and_when_answers_are_lost(tmp_path: Path) -> None:
    views = make_views()
    views.views["answers"] = answer_rows()
    page = build_report(views, STUDY, MODEL, tmp_path).read_text()
    assert "Does it matter?" in page
    assert "11 of 12 evaluation documents have known answers; the rest (1) is not scored." in page
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
