"""The verdict: recommendations follow from intervals of differences and from bytes, never from points."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fixtures.report_views import PAIR, FakeViews, content_of, make_views

from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.sections.choice import Choice, choose
from kvdrift.report.sections.frontier import frontier_values, undominated
from kvdrift.report.sections.study import actions_table, study_rows
from kvdrift.report.sections.study import section as study_section
from kvdrift.report.sections.verdict import (
    Recommendation,
    deciding_table,
    documents_needed,
    glance_table,
    ranked_table,
    recommendation,
    section,
)

THREE = ("snapkv-half", "recent-half", "snapkv-10")
TWELVE = tuple(f"{selector}-{share}" for selector in ("snapkv", "recent", "knorm") for share in (90, 75, 50, 25))
GAPS = ("gap", "gap_simultaneous")


def decided(views: FakeViews) -> tuple[Choice, Recommendation]:
    content = content_of(views)
    choice = choose(content)
    return choice, recommendation(content, choice)


def gaps(views: FakeViews, **ends: Any) -> FakeViews:
    """Give every difference in R these values."""
    for row in views.views["estimates"]:
        if row["quantity"] in GAPS:
            row.update(ends)
    return views


def bytes_of(views: FakeViews, action: str, times: float) -> FakeViews:
    for row in views.views["units"]:
        if row["action"] == action:
            row["payload_bytes"] = int(row["payload_bytes"] * times)
    return views


def planned(views: FakeViews, status: str = "prespecified", **more: Any) -> FakeViews:
    """Let the plan name the differences of recent-half to other actions."""
    for row in views.views["estimates"]:
        if row["quantity"] in GAPS and (row["action"], row["stratum"]) == ("recent-half", "pooled"):
            row.update({"status": status, "family": "primary"} | more)
    return views


def deciding(views: FakeViews) -> dict[tuple[str, str], tuple[str, ...]]:
    """The rows of the table of differences, by action and other action: group, bytes, difference, standing, documents."""
    content = content_of(views)
    table = deciding_table(content, choose(content))
    assert table is not None
    rows = [(row.group, *row.cells) for row in table.rows]
    return {
        (action.text, other.text): (group, times.text, gap.text, standing.text, needed.text)
        for group, action, other, times, gap, standing, needed in rows
    }


def test_of_two_actions_the_one_that_surely_diverges_less() -> None:
    views = make_views(documents_each=12)
    choice, words = decided(views)
    assert (choice.recommended, choice.ruled_out) == (["snapkv-half"], {"recent-half": "snapkv-half"})
    assert "snapkv-half (597 KiB" in words.lead
    assert words.lead.endswith("(95%, exploratory).")
    assert "kvdrift confirm" in words.settles[0]
    assert words.reasons == []
    assert not words.open
    assert deciding(views) == {("recent-half", "snapkv-half"): ("ruled out", "1.00", "33.2", "95%, exploratory", "–")}
    assert "NIAH-4K, NIAH-16K and VT-4K" in decided(make_views(documents_each=4))[1].reasons[0], "few clusters"


def test_the_first_table_says_when_how_much_and_at_what_cost() -> None:
    """The numbers equal the estimates; accuracy has a column only if answers are scored."""
    views = make_views(THREE, documents_each=12)
    rows = views.views["estimates"]
    pooled = {
        (row["action"], row["quantity"]): row for row in rows
        if (row["stratum"], row["baseline"], row["x"]) == ("pooled", None, None)
    }  # fmt: skip
    content = content_of(views)
    choice = choose(content)
    table = glance_table(content, choice)
    assert [(row.cells[0].text, row.cells[0].under) for row in table.rows] == [
        ("snapkv-half", "recommended"), ("recent-half", "ruled out, by snapkv-half"), ("snapkv-10", "recommended"),
    ]  # fmt: skip
    for name, tau, written in (row.cells for row in table.rows):
        assert float(tau.text) == pytest.approx(pooled[name.text, "mean_entry"]["estimate"], abs=0.0501)
        assert float(written.text) == pytest.approx(100 * pooled[name.text, "mismatch_written"]["estimate"], abs=0.0501)
    scored = [row | {"quantity": "score_gap", "estimate": -0.25, "low": -0.3, "high": -0.2} for row in pooled.values()
              if row["quantity"] == "mismatch"]  # fmt: skip
    views.views["estimates"] = rows + scored
    (gap, *_) = (row.cells[-1] for row in glance_table(content_of(views), choice).rows)
    assert (gap.text, gap.under) == ("−25.0", "[−30, −20]")


def test_fewer_bytes_for_more_divergence_is_a_choice_and_a_worse_one_is_ruled_out() -> None:
    views = make_views(THREE, documents_each=12)
    choice, words = decided(views)
    assert (choice.recommended, choice.ruled_out) == (["snapkv-half", "snapkv-10"], {"recent-half": "snapkv-half"})
    assert words.lead.index("snapkv-half (597 KiB") < words.lead.index("snapkv-10 (119 KiB")
    assert deciding(views)["snapkv-half", "snapkv-10"][:3] == ("smaller R", "5.03", "−33.6")
    halved = decided(bytes_of(make_views(documents_each=12), "recent-half", 0.5))[0]
    assert (halved.recommended, halved.ruled_out) == (["snapkv-half", "recent-half"], {}), "no other has as few bytes"


def test_points_alone_decide_nothing() -> None:
    """With intervals that include 0, equal differences are not settled, and the page says what would settle them."""
    views = gaps(make_views(documents_each=12), low=-0.5, high=0.9)
    choice, words = decided(views)
    assert (choice.recommended, choice.unsettled) == ([], [PAIR])
    assert set(choice.places.values()) == {(1, 2)}
    assert words.open
    assert all(action in words.lead for action in PAIR)
    assert "kvdrift gate" in words.settles[0]
    assert deciding(views)[PAIR] == ("not settled", "1.00", "−33.2", "95%, exploratory", "107")
    assert deciding(gaps(views, estimate=0.001, low=-0.2, high=0.2))[PAIR][-1] == "–"


def test_the_documents_that_would_distinguish_two_actions() -> None:
    """Half the width of an interval falls with the root of the number of documents; 25 times as many are too many."""
    gap = Estimate("pooled", "a", "b", "gap", None, 0.1, -0.1, 0.3, 0.95, documents=24)
    assert documents_needed(gap) == 4 * 24
    assert documents_needed(Estimate("pooled", "a", "b", "gap", None, 0.1, 0.0, 0.2, 0.95, documents=20)) == 22
    assert documents_needed(Estimate("pooled", "a", "b", "gap", None, 0.01, -0.1, 0.12, 0.95, documents=24)) is None
    assert documents_needed(Estimate("pooled", "a", "b", "gap", None, 0.1, documents=24)) is None


def test_of_many_actions_the_first_sentence_counts_those_that_it_does_not_name() -> None:
    """Whatever the intervals leave open, the tables have all actions and pairs."""
    views = gaps(make_views(TWELVE, strata=("NIAH-4K",), documents_each=12), low=-0.5, high=0.9)
    choice, words = decided(views)
    assert len(choice.unsettled) == len(deciding(views)) == 66
    assert "66, such as " in words.lead

    for row in views.views["estimates"]:  # one differs surely from all others
        if row["quantity"] in GAPS and "snapkv-90" in {row["action"], row["baseline"]}:
            row.update({"low": 0.1, "high": 0.2} if row["baseline"] == "snapkv-90" else {"low": -0.2, "high": -0.1})
    choice, words = decided(bytes_of(views, "snapkv-90", 1.5))
    assert (choice.recommended, len(choice.unsettled)) == (["snapkv-90"], 55)
    assert "snapkv-90 (890 KiB" in words.lead
    assert "55, such as " in words.lead

    for row in views.views["estimates"]:  # all differ, and those of more bytes have less R
        if row["quantity"] in GAPS:
            less = TWELVE.index(row["action"]) < TWELVE.index(row["baseline"])
            row.update({"low": -0.2, "high": -0.1} if less else {"low": 0.1, "high": 0.2})
    for place, action in enumerate(TWELVE[1:], 1):
        bytes_of(views, action, 1 - 0.05 * place)
    choice, words = decided(views)
    assert choice.recommended == list(TWELVE)
    assert "9 more" in words.lead

    for action in TWELVE:
        bytes_of(views, action, 0.5 + TWELVE.index(action))  # the first has least of both
    choice, words = decided(views)
    assert choice.recommended == ["snapkv-90"]
    assert choice.ruled_out == dict.fromkeys(TWELVE[1:], "snapkv-90")
    assert "8 more (95% over all pairs, exploratory)" in words.lead


def test_a_planned_mirror_image_decides_before_an_exploratory_difference() -> None:
    views = planned(
        gaps(make_views(documents_each=12), low=-0.5, high=0.9), estimate=0.3, low=0.2, high=0.4
    )  # fmt: skip
    choice, words = decided(views)
    assert choice.ruled_out == {"recent-half": "snapkv-half"}
    assert deciding(views) == {("recent-half", "snapkv-half"): ("ruled out", "1.00", "30.0", "95%, prespecified", "–")}
    assert words.settles == [], "nothing is to be confirmed"


def test_what_loses_most_right_answers_is_not_recommended() -> None:
    views = make_views(THREE, documents_each=12)
    lost = {"snapkv-half": 0.2, "recent-half": 0.9, "snapkv-10": 0.95}
    template = next(
        row for row in views.views["estimates"] if row["quantity"] == "mismatch" and row["stratum"] == "pooled"
    )
    views.views["estimates"] += [
        template | {"quantity": "lost_share", "action": action, "estimate": value, "low": value - 0.05, "high": value}
        for action, value in lost.items()
    ]
    choice, words = decided(views)
    assert (choice.recommended, choice.unfit) == (["snapkv-half"], ["snapkv-10"])
    assert "right answers are lost by: snapkv-10" in words.lead
    assert len(words.settles) == 1
    for row in views.views["estimates"]:
        if row["quantity"] in GAPS and row["stratum"] == "pooled":
            row |= {"status": "prespecified", "family": "primary"}
    assert decided(views)[1].settles == [], "nothing is to be confirmed"
    ranked = {row.cells[0].text: row.cells[-1].under for row in ranked_table(content_of(views), choice).rows}
    assert ranked["snapkv-10"] == "loses right answers, 95%, exploratory"
    assert ranked["recent-half"] == "by snapkv-half, 95% over all pairs, prespecified"


def moved() -> FakeViews:
    views = make_views()
    views.views["controls"][0]["moved_pairs"] = 1
    return views


def of_unknown_bytes() -> FakeViews:
    views = make_views()
    for row in views.views["units"]:
        row["payload_bytes"] = None
    return views


@pytest.mark.parametrize(
    ("views", "words", "remedy"),
    [
        (make_views(("snapkv-half",)), "snapkv-half is the only action", "Add a second action"),
        (make_views(split="development", analyzed=False), "no evaluation document", "kvdrift run"),
        (make_views(analyzed=False), "no intervals yet", "kvdrift analyze"),
        (make_views(("numerics-floor",)), "nothing is left out", ""),
        (moved(), "control full is not", "control must be"),
        (of_unknown_bytes(), "bytes that the actions hold", "payload_bytes"),
    ],
)
def test_what_stands_in_the_way_and_what_would_remove_it(views: FakeViews, words: str, remedy: str) -> None:
    choice, found = decided(views)
    assert words in choice.obstacle
    assert choice.obstacle in found.lead
    assert (remedy in choice.remedy) if remedy else not choice.remedy
    assert choice.recommended == []


def test_a_look_that_nobody_planned_recommends_nothing() -> None:
    """Documents of the plan are missing, of one action or of all; or a sequential study stands between two looks."""
    views = make_views(documents_each=12)
    plan = views.views["plans"][0]
    frozen = json.loads(plan["plan"])
    assert not decided(views)[0].obstacle
    plan["plan"] = json.dumps(frozen | {"documents_per_stratum": 13})
    assert "look" in decided(views)[0].obstacle
    looks = {"resolve": "sign", "bound": 0.0, "looks": [{"share": 0.5}, {"share": 1.0}]}
    plan["plan"] = json.dumps(frozen | {"sequential": looks})
    views.views["sequence"] = []
    assert "look" in decided(views)[0].obstacle
    plan["plan"] = json.dumps(frozen)
    views.views["units"] = [row for row in views.views["units"] if (row["action"], row["doc"]) != (
        "recent-half", "NIAH-4K/evaluation/3")]  # fmt: skip
    assert "look" in decided(views)[0].obstacle


def test_the_table_is_ranked_and_ends_with_the_full_cache() -> None:
    content = content_of(make_views(THREE))
    table = ranked_table(content, choose(content))
    cells = {
        row.cells[0].text: dict(zip([c.head for c in table.columns], row.cells, strict=True)) for row in table.rows
    }
    assert list(cells) == ["snapkv-half", "recent-half", "snapkv-10", "full"]
    assert [cells[name]["place"].text for name in cells] == ["1", "2", "3", "–"]
    assert [cells[name]["prompt cache"].under for name in cells] == [
        "50% of full", "50% of full", "9.9% of full", "100% of full"
    ]  # fmt: skip
    assert (cells["full"]["R (token)"].text, cells["full"]["R (token)"].under) == ("0", "exactly")
    assert [cells[name]["verdict"].under for name in THREE] == [
        "", "by snapkv-half, 95% over all pairs, exploratory", ""
    ]  # fmt: skip
    (record, *_) = table.records
    assert record["prompt_cache_bytes"] == pytest.approx(389.8 * 1560 + 96, rel=0.01)
    content = content_of(planned(make_views(documents_each=12)))
    (out,) = [row for row in ranked_table(content, choose(content)).rows if row.cells[0].text == "recent-half"]
    assert out.cells[-1].under == "by snapkv-half, 95%, prespecified", "the status is that of the deciding interval"


def test_numerics_alone_are_named_beside_what_actions_cost() -> None:
    words = decided(make_views((*PAIR, "numerics-floor"), documents_each=12))[1]
    assert any(one.startswith("numerics-floor") and "61.2% [56, 66]" in one for one in words.reasons)


def test_the_front_is_what_no_other_action_beats_in_both() -> None:
    content = content_of(make_views(THREE))
    assert undominated(content, choose(content)) == ["snapkv-half", "snapkv-10"]
    values = frontier_values(content, choose(content))
    assert values == {
        "front": "snapkv-half and snapkv-10", "whole": "1.2 MiB", "dtypes": "float32",
        "kinds": "circle, entries evicted", "policies": "",
    }  # fmt: skip
    dear = content_of(bytes_of(make_views(THREE), "snapkv-10", 20))
    assert undominated(dear, choose(dear)) == ["snapkv-half"]


def test_the_bytes_of_a_policy_are_those_of_a_cache() -> None:
    """They count generated entries too, so the column is not the prompt's."""
    views = make_views(documents_each=12)
    for row in views.views["actions"]:
        if row["action"] == "recent-half":
            row.update(selector="full", policy="sliding", policy_parameters='{"sinks": 4}')
    content = content_of(views)
    assert frontier_values(content, choose(content))["policies"] == "recent-half"
    heads = {column.head for column in ranked_table(content, choose(content)).columns}
    assert heads & {"cache", "prompt cache"} == {"cache"}


def test_what_no_action_can_evict_is_told_beside_the_bytes() -> None:
    """Each cache has 100 KiB of windows and states; nothing is told of models that have none, or do not say."""
    views = make_views(documents_each=12)
    for row in views.views["units"]:
        row["fixed_bytes"], row["payload_bytes"] = 100 * 2**10, row["payload_bytes"] + 100 * 2**10
    content = content_of(views)
    ranking = ranked_table(content, choose(content))
    assert [row.cells[2].under for row in ranking.rows] == [
        "54% of full; 100 KiB not evictable", "54% of full; 100 KiB not evictable", "100% of full; 100 KiB not evictable"
    ]  # fmt: skip
    assert [record["fixed_bytes"] for record in ranking.records] == [100 * 2**10] * 2
    payloads = [row.cells[3] for row in actions_table(content.facts, content.actions).rows]
    assert {cell.under for cell in payloads} == {"100 KiB not evictable"}
    rows = dict(study_rows(content.facts, content.estimates, content.actions))
    assert rows["Not evictable"].startswith("100 KiB of the full cache’s 1.3 MiB")
    for fixed in (0, None):
        for row in views.views["units"]:
            row["fixed_bytes"] = fixed
        content = content_of(views)
        assert "Not evictable" not in dict(study_rows(content.facts, content.estimates, content.actions))
        assert "evict" not in str(ranked_table(content, choose(content)))


def test_a_chat_in_which_no_text_ended_is_told() -> None:
    """What ended, whether a template was applied and which tokens end a text are facts of the store."""
    views = make_views(documents_each=1)
    trajectories = views.views["analyzed_trajectories"]
    for row in views.views["units"]:
        row["eos_tokens"] = "2,0"
    for chat, ends in ((True, None), (True, 41), (False, None)):
        for row in views.views["studies"]:
            row["settings"] = json.dumps({"documents": [{"chat_template": None}, {"chat_template": chat}]})
        for row in trajectories:
            row["eos_x"] = ends
        content = content_of(views)
        texts = sum((row["action"], row["split"]) == (content.baseline, content.split) for row in trajectories)
        assert section(content).values["endless"] == (texts if chat and ends is None else 0)
        told = dict(study_section(content).values["rows"])["Ends of texts"]
        assert f"{texts if ends else 0} of {texts} " in told
        assert told.startswith("at 2 ‘2’, 0 ‘0’; ")


def weighted(views: FakeViews, **sizes: int) -> FakeViews:
    """Give some actions weights of their own, of so many bytes; the others have the reference's 4 MiB."""
    names = {name.replace("_", "-"): count for name, count in sizes.items()}
    for row in views.views["actions"]:
        row["weights"] = row["action"] if row["action"] in names else None
    for row in views.views["units"]:
        row["weight_bytes"] = names.get(row["action"], 2**22)
    return views


def test_bytes_of_cache_and_of_weights_are_both_compared() -> None:
    """With the same bytes of cache, less R and no more weights rule out; less R for more weights is a choice."""
    lighter = weighted(make_views(documents_each=12), snapkv_half=2**20, recent_half=2**21)
    choice, words = decided(lighter)
    assert choice.ruled_out == {"recent-half": "snapkv-half"}
    assert "597 KiB of prompt cache and 1.0 MiB of weights" in words.lead
    content = content_of(lighter)
    (verdict,) = (one for one in ranked_table(content, choice).columns if one.head == "verdict")
    assert "weights" in verdict.meaning
    heavier = weighted(make_views(documents_each=12), snapkv_half=2**21, recent_half=2**20)
    assert decided(heavier)[0].recommended == ["snapkv-half", "recent-half"], "the order is by weights"
    assert "weights" not in decided(make_views(THREE, documents_each=12))[1].lead
