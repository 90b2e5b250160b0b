"""The sentences that open sections: which action they name, with which number, and on which side of 0."""

from __future__ import annotations

from fixtures.report_views import FakeViews, content_of, make_scalar_views

from kvdrift.report.printing.numbers import in_text
from kvdrift.report.sections.findings import sentence, signs, span
from kvdrift.stats.registry import Scale

THREE = ("snapkv-half", "recent-half", "snapkv-10")


def test_the_least_and_the_largest_are_those_of_the_estimates() -> None:
    content = content_of(make_scalar_views(THREE))
    risk = {action: content.estimates.get("mismatch", action) for action in THREE}
    least, *_, largest = sorted(THREE, key=lambda action: risk[action].estimate or 0.0)
    text = span(content, {"mismatch": "R", "no_such": "nothing", "exposure": "E"})
    assert text.index(f"{least}, {in_text(risk[least], Scale.PERCENT)}") < text.index(
        f"{largest}, {in_text(risk[largest], Scale.PERCENT)}"
    )
    assert text.endswith(".")
    assert "nothing" not in text
    assert "E is least" in text


def test_a_single_action_is_neither_least_nor_largest() -> None:
    content = content_of(make_scalar_views(("snapkv-half",)))
    number = in_text(content.estimates.get("mismatch", "snapkv-half"), Scale.PERCENT)
    assert span(content, {"mismatch": "R"}) == f"R is {number} under snapkv-half."


def test_noise_floors_are_not_the_least() -> None:
    with_floor = content_of(make_scalar_views((*THREE, "noise-floor")))
    assert span(with_floor, {"mismatch": "R"}) == span(content_of(make_scalar_views(THREE)), {"mismatch": "R"})


def crossing(views: FakeViews, action: str) -> FakeViews:
    """The views, with an interval of an action's gap that includes 0."""
    for row in views.views["estimates"]:
        if (row["quantity"], row["action"], row["baseline"]) == ("gap", action, "snapkv-half"):
            row.update(low=-0.01)
    return views


def test_signs_are_those_of_the_intervals() -> None:
    content = content_of(crossing(make_scalar_views(THREE), "recent-half"), baseline="snapkv-half")
    text = signs(content, "gap", "ΔR", "snapkv-half")
    assert text == "ΔR is above 0 for snapkv-10; undecided for recent-half."
    assert signs(content_of(make_scalar_views(THREE, analyzed=False)), "gap", "ΔR", "snapkv-half") == ""


def test_many_actions_are_counted() -> None:
    assert sentence("X is", {"a": ["1", "2", "3"], "b": list("4567"), "c": []}) == (
        "X is a for 1, 2 and 3; b for 4, 5 and 2 more."
    )
