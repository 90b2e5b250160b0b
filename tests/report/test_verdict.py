"""The verdict: recommendations follow from intervals of differences and from bytes, never from points."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fixtures.report_views import PAIR, FakeViews, H, content_of, make_views

from kvdrift.report.sections.choice import choose
from kvdrift.report.sections.frontier import (
    bits_sentences,
    bytes_figure,
    frontier_sentence,
    policies_sentence,
    undominated,
)
from kvdrift.report.sections.ranking import glance_table, ranked_table
from kvdrift.report.sections.study import actions_table, study_rows
from kvdrift.report.sections.study import section as study_section
from kvdrift.report.sections.verdict import recommendation, section

THREE = ("snapkv-half", "recent-half", "snapkv-10")


def said(views: FakeViews) -> str:
    """Return all text of the verdict."""
    content = content_of(views)
    words = recommendation(content, choose(content))
    return "\n".join([words.lead, *words.reasons, *words.settles])


GAPS = ("gap", "gap_simultaneous")


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


def test_of_two_actions_the_one_that_surely_diverges_less() -> None:
    words = said(make_views(documents_each=12))
    assert words.startswith(
        "Take snapkv-half: recent-half holds the same bytes and disagrees with the full cache on more positions, by 33."
    )
    assert "pp [30, 36] (95%, exploratory)." in words
    assert "kvdrift confirm writes a study of documents that nobody has seen" in words
    few = said(make_views(documents_each=4))
    assert "This rests on only 4 documents in each of 3 strata." in few


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
    assert [column.head for column in table.columns] == ["action", "diverges at τ", "written tokens that differ"]
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
    content = content_of(views)
    choice = choose(content)
    assert (choice.recommended, choice.ruled_out) == (["snapkv-half", "snapkv-10"], {"recent-half": "snapkv-half"})
    words = said(views)
    assert words.startswith(
        "The choice is one of bytes: take snapkv-half if 597 KiB of prompt cache fit and snapkv-10 "
    )
    assert (
        "recent-half is ruled out by snapkv-half: it holds the same bytes and disagrees on more positions, by 33."
        in words
    )


def test_points_alone_decide_nothing() -> None:
    """With intervals that include 0, equal differences are not settled, and the page says what would settle them."""
    views = gaps(make_views(documents_each=12), low=-0.5, high=0.9)
    choice = choose(content_of(views))
    assert (choice.recommended, choice.unsettled) == ([], [PAIR])
    assert set(choice.places.values()) == {(1, 2)}
    words = said(views)
    assert words.startswith(
        "No action can be recommended: snapkv-half and recent-half hold the same bytes, and the interval"
    )
    assert "includes 0: " in words
    assert "evaluation documents would tell them apart in about half of such studies; this study has 24." in words
    assert "kvdrift gate says whether one action is at most a margin worse" in words
    views = gaps(views, estimate=0.001, low=-0.2, high=0.2)
    assert "more documents will hardly tell them apart" in said(views)


TWELVE = tuple(f"{selector}-{share}" for selector in ("snapkv", "recent", "knorm") for share in (90, 75, 50, 25))


ALL_PAIRS = " (95% over all pairs, exploratory)"


def test_of_many_actions_the_first_sentences_name_few_and_count_the_rest() -> None:
    """Whatever the intervals leave open, the paragraphs and the table below name all actions."""
    views = gaps(make_views(TWELVE, strata=("NIAH-4K",), documents_each=12), low=-0.5, high=0.9)
    content = content_of(views)
    words = recommendation(content, choose(content))
    assert words.lead == f"No action can be recommended: 66 pairs of 12 actions are not told apart in R{ALL_PAIRS}."
    assert len(words.reasons) == 3
    (margin,) = words.settles
    assert margin.startswith("Where a small difference does not matter, kvdrift gate says ")
    *told, more = words.pairs
    assert len(told) == 12
    assert all(" and the interval of their difference in R includes 0: " in pair for pair in told)
    assert all(" tell them apart" in pair for pair in told)
    assert more == "There are 54 more."

    for row in views.views["estimates"]:  # one is told apart from all, and nothing else is
        if row["quantity"] in GAPS and "snapkv-90" in {row["action"], row["baseline"]}:
            row.update({"low": 0.1, "high": 0.2} if row["baseline"] == "snapkv-90" else {"low": -0.2, "high": -0.1})
    content = content_of(bytes_of(views, "snapkv-90", 1.5))
    words = recommendation(content, choose(content))
    assert words.lead == f"Take snapkv-90 at 890 KiB of prompt cache; 11 others are not settled{ALL_PAIRS}."
    (open_ones,) = [reason for reason in words.reasons if reason.startswith("Not settled are ")]
    assert open_ones.endswith(
        " and 5 more: 55 intervals of differences in R between two of them include 0" + f"{ALL_PAIRS}."
    )

    for row in views.views["estimates"]:  # all are told apart, those of more bytes have less R
        if row["quantity"] in GAPS:
            less = TWELVE.index(row["action"]) < TWELVE.index(row["baseline"])
            row.update({"low": -0.2, "high": -0.1} if less else {"low": 0.1, "high": 0.2})
    for place, action in enumerate(TWELVE[1:], 1):
        bytes_of(views, action, 1 - 0.05 * place)
    content = content_of(views)
    words = recommendation(content, choose(content))
    assert re.fullmatch(
        r"The choice is one of bytes: 12 actions can be recommended, from snapkv-90 at [\d.]+ KiB down to knorm-25 at "
        r"[\d.]+ KiB of prompt cache \(95% over all pairs, exploratory\)\.",
        words.lead,
    )

    for action in TWELVE:
        bytes_of(views, action, 0.5 + TWELVE.index(action))  # the first one has least of both
    content = content_of(views)
    words = recommendation(content, choose(content))
    assert words.lead == (
        "Take snapkv-90: each of the other 11 actions holds at least as many bytes and disagrees more with the full "
        f"cache{ALL_PAIRS}."
    )
    (told,) = [
        reason
        for reason in words.reasons
        if reason.startswith("Ruled out, each by an action that holds no more bytes ")
    ]
    assert told.endswith(" by snapkv-90.")
    assert all(action in told for action in TWELVE)


def test_more_bytes_without_less_divergence_are_not_recommended() -> None:
    views = bytes_of(gaps(make_views(documents_each=12), estimate=0.01, low=-0.1, high=0.2), "recent-half", 1.5)
    assert "recommended: recent-half holds 1.49 times the bytes of snapkv-half, and the interval" in said(views)


def test_an_action_of_fewer_bytes_is_not_ruled_out_by_one_of_more() -> None:
    """At half the bytes recent-half may diverge more, since no other action has as few bytes."""
    views = bytes_of(make_views(documents_each=12), "recent-half", 0.5)
    choice = choose(content_of(views))
    assert (choice.recommended, choice.ruled_out) == (["snapkv-half", "recent-half"], {})


def test_a_planned_mirror_image_decides_before_an_exploratory_difference() -> None:
    views = gaps(make_views(documents_each=12), low=-0.5, high=0.9)
    for row in views.views["estimates"]:
        if row["quantity"] in GAPS and (row["action"], row["stratum"]) == ("recent-half", "pooled"):
            row |= {"estimate": 0.3, "low": 0.2, "high": 0.4, "status": "prespecified", "family": "primary"}
    words = said(views)
    assert words.startswith(
        "Take snapkv-half: recent-half holds the same bytes and disagrees with the full cache on more positions, by 30.0 pp"
    )
    assert "The plan named these differences before their outcomes were known" in words
    assert "kvdrift confirm" not in words


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
    choice = choose(content_of(views))
    assert (choice.recommended, choice.unfit) == (["snapkv-half"], ["snapkv-10"])
    words = said(views)
    assert words.startswith(
        "Take snapkv-half, which holds 597 KiB of prompt cache. snapkv-10 holds fewer bytes, but loses more than half of "
        "the right answers: 95.0% [90, 95] (95%, exploratory)."
    )
    assert "The plan named" not in words
    assert "This rests on 3 intervals, all exploratory. Intervals over all pairs of actions hold together. " in words
    assert "Intervals of lost answers hold for one action at a time. kvdrift confirm writes a study" in words
    for row in views.views["estimates"]:
        if row["quantity"] in GAPS and row["stratum"] == "pooled":
            row |= {"status": "prespecified", "family": "primary"}
    assert "This rests on 3 intervals, 2 prespecified and 1 exploratory. " in said(views)
    ranked = {row.cells[0].text: row.cells[-1].under for row in ranked_table(content_of(views), choice).rows}
    assert ranked["snapkv-10"] == "loses right answers, 95%, exploratory"
    assert ranked["recent-half"] == "by snapkv-half, 95% over all pairs, prespecified"


@pytest.mark.parametrize(
    ("views", "words"),
    [
        (make_views(("snapkv-half",)), "snapkv-half is the only action, and nothing can be compared with it."),
        (make_views(split="development", analyzed=False), "no evaluation document has been measured yet."),
        (make_views(analyzed=False), "there are no intervals yet."),
        (make_views(("numerics-floor",)), "nothing is left out or coded, so there is nothing to choose."),
    ],
)
def test_what_stands_in_the_way_is_said(views: FakeViews, words: str) -> None:
    assert said(views).startswith(f"No action can be recommended: {words}")


def test_a_look_that_nobody_planned_recommends_nothing() -> None:
    """Documents of the plan are missing, of one action or of all; or a sequential study stands between two looks."""
    views = make_views(documents_each=12)
    plan = views.views["plans"][0]
    frozen = json.loads(plan["plan"])
    assert said(views).startswith("Take ")
    plan["plan"] = json.dumps(frozen | {"documents_per_stratum": 13})
    words = said(views)
    assert words.startswith("No action can be recommended: the evaluation is not finished, and a look before its end")
    assert words.endswith("kvdrift run goes on to the end of the study.")
    looks = {"resolve": "sign", "bound": 0.0, "looks": [{"share": 0.5}, {"share": 1.0}]}
    plan["plan"] = json.dumps(frozen | {"sequential": looks})
    views.views["sequence"] = []
    assert "a look before its end was not planned" in said(views)
    plan["plan"] = json.dumps(frozen)
    views.views["units"] = [row for row in views.views["units"] if (row["action"], row["doc"]) != (
        "recent-half", "NIAH-4K/evaluation/3")]  # fmt: skip
    assert "a look before its end was not planned" in said(views)


def test_a_control_that_moved_and_bytes_that_nobody_recorded_are_in_the_way() -> None:
    views = make_views()
    views.views["controls"][0]["moved_pairs"] = 1
    assert "the control full is not exactly 0" in said(views)
    views = make_views()
    for row in views.views["units"]:
        row["payload_bytes"] = None
    assert "the bytes that the actions hold are not recorded" in said(views)


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
    assert (cells["recent-half"]["verdict"].text, cells["recent-half"]["verdict"].under) == (
        "ruled out",
        "by snapkv-half, 95% over all pairs, exploratory",
    )
    assert cells["snapkv-half"]["verdict"].under == "", "R has its status in the note"
    assert (
        "R is the share of positions whose token differs from that of the full cache. P(τ ≤ H) is the share "
        in table.note
    )
    assert "lost share" not in table.note
    (record, *_) = table.records
    assert record["prompt_cache_bytes"] == pytest.approx(389.8 * 1560 + 96, rel=0.01)


def test_the_status_below_a_verdict_is_that_of_the_interval_that_decides() -> None:
    views = make_views(documents_each=12)
    for row in views.views["estimates"]:
        if row["quantity"] in GAPS and (row["action"], row["stratum"]) == ("recent-half", "pooled"):
            row |= {"status": "prespecified", "family": "primary"}
    content = content_of(views)
    (out,) = [row for row in ranked_table(content, choose(content)).rows if row.cells[0].text == "recent-half"]
    assert out.cells[-1].under == "by snapkv-half, 95%, prespecified"


def test_numerics_alone_are_named_beside_what_actions_cost() -> None:
    words = said(make_views((*PAIR, "numerics-floor"), documents_each=12))
    assert "numerics-floor leaves out nothing and computes in another way: it disagrees on " in words


def test_the_figure_has_every_action_at_its_share_with_its_name() -> None:
    content = content_of(make_views(THREE))
    (axes,) = bytes_figure(content, choose(content)).axes
    shown = {round(float(line.get_xdata()[0]), 1) for line in axes.get_lines() if len(line.get_xdata()) == 1}
    assert shown == {50.0, 9.9, 100.0}
    assert axes.get_xlabel() == "prompt cache (% of the full one, 1.2 MiB a document)"
    assert {text.get_text() for text in axes.texts if text.get_text()} == {*THREE, "full"}
    assert [text.xy for text in axes.texts if not text.get_text()] == [pytest.approx((50.0, 34.4), abs=0.1)], "the line"
    low, high = axes.get_ylim()
    assert low == 0
    assert high > 73
    views = make_views(THREE)
    views.views["controls"][0]["moved_pairs"] = 1
    content = content_of(views)
    (axes,) = bytes_figure(content, choose(content)).axes
    assert axes.get_xlabel() == "prompt cache (KiB a document, mean)", "of a control that moved there are no shares"


def test_the_frontier_is_what_no_other_action_beats_in_both() -> None:
    content = content_of(make_views(THREE))
    assert undominated(content, choose(content)) == ["snapkv-half", "snapkv-10"]
    words = frontier_sentence(content, choose(content))
    assert words.startswith(
        "The line is the Pareto front by the point estimates: snapkv-half and snapkv-10. Each of the others is matched"
    )
    assert words.endswith(" Shares are of the full cache, which holds 1.2 MiB a document in float32.")
    dear = content_of(bytes_of(make_views(THREE), "snapkv-10", 20))
    assert undominated(dear, choose(dear)) == ["snapkv-half"]
    words = frontier_sentence(dear, choose(dear))
    assert words.startswith("By the point estimates, no other action beats snapkv-half in bytes or in R. ")
    (axes,) = bytes_figure(dear, choose(dear)).axes
    assert all(text.get_text() for text in axes.texts), "there is no line"


def coded(views: FakeViews, codecs: dict[str, str], distances: dict[str, float]) -> FakeViews:
    """Let actions be codecs of the whole cache, with these distances."""
    for row in views.views["actions"]:
        if row["action"] in codecs:
            row.update(selector="full", keep="all", codec=codecs[row["action"]])
    for row in views.views["estimates"]:
        if row["quantity"] == "rollout_tv" and row["action"] in distances:
            row["estimate"] = distances[row["action"]]
    return views


def test_what_fewer_bits_cost_is_said_of_each_family() -> None:
    codecs = dict(zip(THREE, ("int8", "int4", "rotated-int4"), strict=True))
    rising = bits_sentences(content_of(coded(make_views(THREE), codecs, {"snapkv-half": 0.01, "recent-half": 0.2})))
    assert len(rising) == 1, "rotated-int4 is of another family"
    assert rising[0].startswith("Fewer bits, more distance: mean δ, the distance of the two next-token laws, is 1.00%")
    views = coded(make_views(THREE), codecs, {"snapkv-half": 0.2, "recent-half": 0.01})
    falling, *_ = bits_sentences(content_of(gaps(views, low=-0.1, high=0.1)))
    assert falling.startswith(
        "Mean δ, the distance of the two next-token laws, does not rise each time bits fall: it is 20.0% ["
    )
    assert falling.endswith(
        "Mean δ of recent-half is not above that of snapkv-half, and the interval of their difference in R includes 0."
    )
    assert bits_sentences(content_of(make_views(THREE))) == []


def test_what_the_bytes_of_a_policy_count_is_said() -> None:
    views = make_views(documents_each=12)
    assert policies_sentence(content_of(views)) == ""
    for row in views.views["actions"]:
        if row["action"] == "recent-half":
            row.update(selector="full", policy="sliding", policy_parameters='{"sinks": 4}')
    content = content_of(views)
    words = policies_sentence(content)
    assert words.startswith(
        "The bytes of recent-half are the largest size during generation, including generated entries; "
    )
    assert "100%" not in words
    heads = [column.head for column in ranked_table(content, choose(content)).columns]
    assert "cache" in heads
    assert "prompt cache" not in heads
    above = policies_sentence(content_of(bytes_of(views, "recent-half", 4)))
    assert above.endswith(" recent-half may hold more entries than the prompt has, so the share may exceed 100%.")


# --- Windows and states -----------------------------------------------------------------------------------------------


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
    assert "windows and states are not evictable" in ranking.columns[2].meaning
    assert [record["fixed_bytes"] for record in ranking.records] == [100 * 2**10] * 2
    payloads = [row.cells[3] for row in actions_table(content.facts, content.actions).rows]
    assert {cell.under for cell in payloads} == {"100 KiB not evictable"}
    rows = dict(study_rows(content.facts, content.estimates, content.actions))
    assert rows["Not evictable"].startswith("100 KiB of the full cache’s 1.3 MiB are windows and states")
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
        line = section(content).values["endless"]
        assert bool(line) == (chat and ends is None)
        assert not line or (f"H = {H}" in line and "eos under [study]" in line)
        texts = sum((row["action"], row["split"]) == (content.baseline, content.split) for row in trajectories)
        told = dict(study_section(content).values["rows"])["Ends of texts"]
        assert (
            told == f"at 2 ‘2’, 0 ‘0’; {texts if ends else 0} of {texts} continuations X ended ({100 if ends else 0}%)"
        )
    for row in views.views["units"]:
        row["eos_tokens"] = None  # of another generator
    assert "Ends of texts" not in dict(study_section(content_of(views)).values["rows"])


# --- Other weights ----------------------------------------------------------------------------------------------------


def weighted(views: FakeViews, **sizes: int) -> FakeViews:
    """Give some actions weights of their own, of so many bytes; the others have the reference's 4 MiB."""
    names = {name.replace("_", "-"): count for name, count in sizes.items()}
    for row in views.views["actions"]:
        row["weights"] = row["action"] if row["action"] in names else None
    for row in views.views["units"]:
        row["weight_bytes"] = names.get(row["action"], 2**22)
    return views


def test_bytes_are_said_to_be_the_caches_if_weights_differ() -> None:
    """With the same bytes of cache, the action with less R and no more weights rules the other out."""
    words = said(weighted(make_views(documents_each=12), snapkv_half=2**20, recent_half=2**21))
    assert words.startswith("Take snapkv-half: recent-half holds the same bytes of cache and disagrees with ")
    open_pair = said(gaps(weighted(make_views(documents_each=12), snapkv_half=2**20), low=-0.1, high=0.1))
    assert "recent-half hold the same bytes of cache, and the interval of their difference in R includes 0" in open_pair
    assert "the same bytes, " not in open_pair


def test_a_choice_of_bytes_names_those_of_weights_too() -> None:
    """If all actions have the same weights, weights are not mentioned; else bytes of cache and of weights are both given."""
    views = weighted(make_views(THREE, documents_each=12), snapkv_half=2**21, recent_half=2**21, snapkv_10=2**20)
    words = said(views)
    assert "take snapkv-half if 597 KiB of prompt cache and 2.0 MiB of weights fit and snapkv-10 if no more" in words
    assert "of prompt cache and 1.0 MiB of weights fit" in words
    content = content_of(views)
    (verdict,) = (one for one in ranked_table(content, choose(content)).columns if one.head == "verdict")
    assert "no more bytes of cache and of weights" in verdict.meaning
    assert "of weights" not in said(make_views(THREE, documents_each=12))


def test_of_equal_caches_the_one_with_more_weights_comes_first() -> None:
    """Less R for more weights is a choice; the order is by weights then."""
    content = content_of(weighted(make_views(documents_each=12), snapkv_half=2**21, recent_half=2**20))
    assert choose(content).recommended == ["snapkv-half", "recent-half"]
