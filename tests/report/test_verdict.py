"""The verdict: recommendations follow from intervals of differences and from bytes, never from points."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from fixtures.house import ROOT
from fixtures.report_views import PAIR, FakeViews, content_of, make_scalar_views

from kvdrift.report.printing.tables import PrintedTable
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.sections.choice import Choice, choose, documents_needed
from kvdrift.report.sections.frontier import frontier_values, undominated
from kvdrift.report.sections.ranking import ranked_table
from kvdrift.report.sections.study import actions_table, study_rows
from kvdrift.report.sections.study import section as study_section
from kvdrift.report.sections.verdict import MOST_WORDS, action_verdicts, glance_rows, section, verdict_record

THREE = ("snapkv-half", "recent-half", "snapkv-10")
SEVEN = ("snapkv-90", "snapkv-75", "snapkv-50", "recent-90", "recent-50", "knorm-90", "knorm-50")
GAPS = ("gap", "gap_simultaneous")


def decided(views: FakeViews) -> tuple[Choice, dict[str, Any]]:
    content = content_of(views)
    record = verdict_record(content)
    assert len(record["sentence"].split()) <= MOST_WORDS
    assert len(record["remarks"]) <= 2
    assert facts_in_sql(views) == facts_of_page(record) or content.split != "evaluation"
    return choose(content), record


Facts = set[tuple[str, str, str | None, str | None, tuple[Any, ...]]]
_VALUES = ("estimate", "low", "high", "level", "status", "documents", "bytes_ratio", "documents_needed")


def facts(action: str, badge: str, row: dict[str, Any]) -> tuple[Any, ...]:
    values = [row[name] for name in _VALUES]
    return action, badge, row["says"], row["other"], tuple(
        round(value, 9) if isinstance(value, float) else value for value in values
    )  # fmt: skip


def facts_of_page(record: dict[str, Any]) -> Facts:
    nothing = dict.fromkeys(("says", "other", *_VALUES))
    return {
        facts(verdict["action"], verdict["badge"], row)
        for verdict in record["actions"] if verdict["badge"] not in {"noise floor", "control"}
        for row in verdict["reasons"] or [nothing]
    }  # fmt: skip


def facts_in_sql(views: FakeViews) -> Facts:
    """The rows of view ``verdict`` over the same rows of other views."""
    connection = duckdb.connect()
    connection.execute("create schema internal")
    pooled = [
        row for row in views.views["decomposition"] if (row["split"], row["stratum"]) == ("evaluation", "pooled")
    ]  # fmt: skip
    status = {
        row["action"]: row["status"] for row in views.views["estimates"]
        if (row["quantity"], row["stratum"], row["baseline"]) == ("mismatch", "pooled", None)
    }  # fmt: skip
    columns = ("study", "model", "action", "mismatch")
    summary = [{name: row[name] for name in columns} | {"status": status.get(row["action"])} for row in pooled]
    summary += [dict.fromkeys((*columns, "status")) | {"action": None}]  # so that no column is without a type
    tables = {
        f"main.{name}": views.rows(name)
        for name in ("units", "actions", "documents", "controls", "sequence", "estimates")
    }
    tables |= {"main.summary": pa.Table.from_pylist(summary), "internal.plans": views.rows("plans")}
    tables["internal.superseded_plans"] = views.rows("plans").slice(0, 0)
    for name, table in tables.items():
        number = {*_VALUES, "estimate", "look"} - {"status"}
        typed = [
            field if not pa.types.is_null(field.type)
            else pa.field(field.name, pa.float64() if field.name in number or "bytes" in field.name else pa.string())
            for field in table.schema
        ]  # fmt: skip
        connection.register("given", table.cast(pa.schema(typed)))
        connection.execute(f"create table {name} as from given")
    for name in ("internal.document_bytes", "main.verdict"):
        (path,) = (ROOT / "sql" / "views").rglob(f"{name.partition('.')[2]}.sql")
        connection.execute(f"create view {name} as {path.read_text(encoding='utf-8')}")
    rows = connection.sql("from main.verdict").to_arrow_table().to_pylist()
    return {facts(row["action"], row["badge"], row) for row in rows}


def ranked(views: FakeViews) -> PrintedTable:
    content = content_of(views)
    choice = choose(content)
    return ranked_table(content, choice, action_verdicts(content, choice))


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


def deciding(views: FakeViews) -> dict[tuple[str, str], tuple[Any, ...]]:
    """The reasons by action and other action: what is said, bytes, difference, status, documents needed."""
    return {
        (verdict["action"], row["other"]): (
            row["says"], row["bytes_ratio"] and round(row["bytes_ratio"], 2), round(100 * row["estimate"], 1),
            row["status"], row["documents_needed"],
        )
        for verdict in decided(views)[1]["actions"] for row in verdict["reasons"]
    }  # fmt: skip


def test_of_two_actions_the_one_that_surely_diverges_less() -> None:
    views = make_scalar_views(documents_each=12)
    choice, record = decided(views)
    assert (choice.recommended, choice.ruled_out) == (["snapkv-half"], {"recent-half": "snapkv-half"})
    assert "snapkv-half, with 50%" in record["sentence"]
    assert "kvdrift confirm" in record["remarks"][0]
    assert [(row["action"], row["badge"]) for row in record["actions"]] == [
        ("snapkv-half", "recommended"), ("recent-half", "ruled out"), ("full", "control")
    ]  # fmt: skip
    assert deciding(views) == {
        ("recent-half", "snapkv-half"): ("ruled out by", 1.0, 33.2, "exploratory", None),
        ("snapkv-half", "recent-half"): ("rules out", 1.0, -33.2, "exploratory", None),
    }


def test_the_first_table_says_when_how_much_and_at_what_cost() -> None:
    """The numbers equal the estimates; accuracy has a column only if answers are scored."""
    views = make_scalar_views(THREE, documents_each=12)
    estimates = views.views["estimates"]
    pooled = {
        (row["action"], row["quantity"]): row for row in estimates
        if (row["stratum"], row["baseline"], row["x"]) == ("pooled", None, None)
    }  # fmt: skip
    content = content_of(views)
    rows = glance_rows(content, action_verdicts(content, choose(content)))
    assert [(row.verdict.action, row.verdict.badge) for row in rows] == [
        ("snapkv-half", "recommended"), ("snapkv-10", "recommended"), ("recent-half", "ruled out"), ("full", "control"),
    ]  # fmt: skip
    largest = max(pooled[row.verdict.action, "mismatch"]["high"] for row in rows[:3])
    for row in rows[:3]:
        risk = pooled[row.verdict.action, "mismatch"]
        assert float(row.entry.text) == pytest.approx(pooled[row.verdict.action, "mean_entry"]["estimate"], abs=0.0501)
        assert float(row.risk.text) == pytest.approx(100 * risk["estimate"], abs=0.0501)
        drawn = [row.risk.value, row.risk.low, row.risk.high]
        assert drawn == pytest.approx([100 * risk[name] / largest for name in ("estimate", "low", "high")])
        assert row.accuracy.text == "–"
        assert content.actions[row.index or 0] == row.verdict.action
    assert [row.held.text for row in rows] == ["50%", "9.9%", "50%", "100%"]
    scored = [row | {"quantity": "score_gap", "estimate": -0.25, "low": -0.3, "high": -0.2} for row in pooled.values()
              if row["quantity"] == "mismatch"]  # fmt: skip
    views.views["estimates"] = estimates + scored
    content = content_of(views)
    gap = glance_rows(content, action_verdicts(content, choose(content)))[0].accuracy
    assert (gap.text, gap.under) == ("−25.0", "[−30, −20]")


def test_fewer_bytes_for_more_divergence_is_a_choice_and_a_worse_one_is_ruled_out() -> None:
    views = make_scalar_views(THREE, documents_each=12)
    choice, words = decided(views)
    assert (choice.recommended, choice.ruled_out) == (["snapkv-half", "snapkv-10"], {"recent-half": "snapkv-half"})
    assert "snapkv-half and snapkv-10" in words["sentence"], "fewer bytes come later"
    assert deciding(views)["snapkv-half", "snapkv-10"][:3] == ("differs from", 5.03, -33.6)
    halved = decided(bytes_of(make_scalar_views(documents_each=12), "recent-half", 0.5))[0]
    assert (halved.recommended, halved.ruled_out) == (["snapkv-half", "recent-half"], {}), "no other has as few bytes"


def test_points_alone_decide_nothing() -> None:
    """With intervals that include 0, equal differences are not settled, and the page says what would settle them."""
    views = gaps(make_scalar_views(documents_each=12), low=-0.5, high=0.9)
    choice, words = decided(views)
    assert (choice.recommended, choice.unsettled) == ([], [PAIR])
    assert set(choice.places.values()) == {(1, 2)}
    assert "1 of 1" in words["sentence"]
    assert "kvdrift gate" in words["remarks"][0]
    assert deciding(views)[PAIR] == ("undecided against", 1.0, -33.2, "exploratory", 107)
    assert deciding(views)[PAIR[::-1]][2:] == (33.2, "exploratory", 107)
    assert deciding(gaps(views, estimate=0.001, low=-0.2, high=0.2))[PAIR][-1] is None


def test_the_documents_that_would_distinguish_two_actions() -> None:
    """Half the width of an interval falls with the root of the number of documents; 25 times as many are too many."""
    gap = Estimate("pooled", "a", "b", "gap", None, 0.1, -0.1, 0.3, 0.95, documents=24)
    assert documents_needed(gap) == 4 * 24
    assert documents_needed(Estimate("pooled", "a", "b", "gap", None, 0.1, 0.0, 0.2, 0.95, documents=20)) == 22
    assert documents_needed(Estimate("pooled", "a", "b", "gap", None, 0.01, -0.1, 0.12, 0.95, documents=24)) is None
    assert documents_needed(Estimate("pooled", "a", "b", "gap", None, 0.1, documents=24)) is None


def test_of_many_actions_the_first_sentence_counts_those_that_it_does_not_name() -> None:
    """Whatever the intervals leave open, the tables have all actions and pairs."""
    views = gaps(make_scalar_views(SEVEN, strata=("NIAH-4K",), documents_each=12), low=-0.5, high=0.9)
    choice, words = decided(views)
    assert len(choice.unsettled) == len(deciding(views)) // 2 == 21
    assert "21 of 21" in words["sentence"]

    for row in views.views["estimates"]:  # one differs surely from all others
        if row["quantity"] in GAPS and "snapkv-90" in {row["action"], row["baseline"]}:
            row.update({"low": 0.1, "high": 0.2} if row["baseline"] == "snapkv-90" else {"low": -0.2, "high": -0.1})
    choice, words = decided(bytes_of(views, "snapkv-90", 1.5))
    assert (choice.recommended, len(choice.unsettled)) == (["snapkv-90"], 15)
    assert "Recommended: snapkv-90" in words["sentence"]

    for row in views.views["estimates"]:  # all differ, and those of more bytes have less R
        if row["quantity"] in GAPS:
            less = SEVEN.index(row["action"]) < SEVEN.index(row["baseline"])
            row.update({"low": -0.2, "high": -0.1} if less else {"low": 0.1, "high": 0.2})
    for place, action in enumerate(SEVEN[1:], 1):
        bytes_of(views, action, 1 - 0.05 * place)
    choice, words = decided(views)
    assert choice.recommended == list(SEVEN)
    assert "4 more" in words["sentence"]

    for action in SEVEN:
        bytes_of(views, action, 0.5 + SEVEN.index(action))  # the first has least of both
    choice, words = decided(views)
    assert choice.recommended == ["snapkv-90"]
    assert choice.ruled_out == dict.fromkeys(SEVEN[1:], "snapkv-90")


def test_a_planned_mirror_image_decides_before_an_exploratory_difference() -> None:
    views = planned(
        gaps(make_scalar_views(documents_each=12), low=-0.5, high=0.9), estimate=0.3, low=0.2, high=0.4
    )  # fmt: skip
    choice, words = decided(views)
    assert choice.ruled_out == {"recent-half": "snapkv-half"}
    assert deciding(views)["recent-half", "snapkv-half"] == ("ruled out by", 1.0, 30.0, "prespecified", None)
    assert words["remarks"] == [], "nothing is to be confirmed"


def test_what_loses_most_right_answers_is_not_recommended() -> None:
    views = make_scalar_views(THREE, documents_each=12)
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
    badges = {row["action"]: row["badge"] for row in words["actions"]}
    assert badges["snapkv-10"] == "loses answers"
    assert len(words["remarks"]) == 1
    for row in views.views["estimates"]:
        if row["quantity"] in GAPS and row["stratum"] == "pooled":
            row |= {"status": "prespecified", "family": "primary"}
    assert decided(views)[1]["remarks"] == [], "nothing is to be confirmed"
    under = {row.cells[0].text: row.cells[-1].under for row in ranked(views).rows}
    assert under["snapkv-10"] == "95%, exploratory"
    assert under["recent-half"] == "by snapkv-half, 95% over all pairs, prespecified"


def moved() -> FakeViews:
    views = make_scalar_views()
    views.views["controls"][0]["moved_pairs"] = 1
    return views


def of_unknown_bytes() -> FakeViews:
    views = make_scalar_views()
    for row in views.views["units"]:
        row["payload_bytes"] = None
    return views


@pytest.mark.parametrize(
    ("made", "words", "remedy"),
    [
        (lambda: make_scalar_views(("snapkv-half",)), "snapkv-half is the only action", "Add a second action"),
        (lambda: make_scalar_views(split="development", analyzed=False), "no evaluation document", "kvdrift run"),
        (lambda: make_scalar_views(analyzed=False), "no intervals yet", "kvdrift analyze"),
        (lambda: make_scalar_views(("numerics-floor",)), "no entries are left out", ""),
        (moved, "control full is not", "control must be"),
        (of_unknown_bytes, "bytes that the actions hold", "payload_bytes"),
    ],
)
def test_what_stands_in_the_way_and_what_would_remove_it(
    made: Callable[[], FakeViews], words: str, remedy: str
) -> None:
    choice, found = decided(made())
    assert words in choice.obstacle
    assert choice.obstacle in found["sentence"]
    assert (remedy in choice.remedy) if remedy else not choice.remedy
    assert choice.recommended == []


def test_a_look_that_nobody_planned_recommends_nothing() -> None:
    """Documents of the plan are missing, of one action or of all; or a sequential study stands between two looks."""
    views = make_scalar_views(documents_each=12)
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
    table = ranked(make_scalar_views(THREE))
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
    (out,) = [
        row for row in ranked(planned(make_scalar_views(documents_each=12))).rows if row.cells[0].text == "recent-half"
    ]
    assert out.cells[-1].under == "by snapkv-half, 95%, prespecified", "the status is that of the deciding interval"


def test_numerics_alone_are_named_beside_what_actions_cost() -> None:
    content = content_of(make_scalar_views((*PAIR, "numerics-floor"), documents_each=12))
    (floor,) = (row for row in action_verdicts(content, choose(content)) if row.action == "numerics-floor")
    assert floor.badge == "noise floor"
    assert "rounding alone" in floor.remark


def test_the_front_is_what_no_other_action_beats_in_both() -> None:
    content = content_of(make_scalar_views(THREE))
    assert undominated(content, choose(content)) == ["snapkv-half", "snapkv-10"]
    values = frontier_values(content, choose(content))
    assert values == {"front": "snapkv-half and snapkv-10", "kinds": "circle, entries evicted", "policies": ""}
    dear = content_of(bytes_of(make_scalar_views(THREE), "snapkv-10", 20))
    assert undominated(dear, choose(dear)) == ["snapkv-half"]


def test_the_bytes_of_a_policy_are_those_of_a_cache() -> None:
    """They count generated entries too, so the column is not the prompt's."""
    views = make_scalar_views(documents_each=12)
    for row in views.views["actions"]:
        if row["action"] == "recent-half":
            row.update(selector="full", policy="sliding", policy_parameters='{"sinks": 4}')
    content = content_of(views)
    assert frontier_values(content, choose(content))["policies"] == "recent-half"
    heads = {column.head for column in ranked(views).columns}
    assert heads & {"cache", "prompt cache"} == {"cache"}


def test_what_no_action_can_evict_is_told_beside_the_bytes() -> None:
    """Each cache has 100 KiB of windows and states; nothing is told of models that have none, or do not say."""
    views = make_scalar_views(documents_each=12)
    for row in views.views["units"]:
        row["fixed_bytes"], row["payload_bytes"] = 100 * 2**10, row["payload_bytes"] + 100 * 2**10
    content = content_of(views)
    ranking = ranked(views)
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
        assert "evict" not in str(ranked(views))


def test_a_chat_in_which_no_text_ended_is_told() -> None:
    """What ended, whether a template was applied and which tokens end a text are facts of the store."""
    views = make_scalar_views(documents_each=1)
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
    lighter = weighted(make_scalar_views(documents_each=12), snapkv_half=2**20, recent_half=2**21)
    choice, words = decided(lighter)
    assert choice.ruled_out == {"recent-half": "snapkv-half"}
    assert "25% of the reference’s weights" in words["sentence"]
    (verdict,) = (column for column in ranked(lighter).columns if column.head == "verdict")
    assert "weights" in verdict.meaning
    heavier = weighted(make_scalar_views(documents_each=12), snapkv_half=2**21, recent_half=2**20)
    assert decided(heavier)[0].recommended == ["snapkv-half", "recent-half"], "the order is by weights"
    assert "weights" not in decided(make_scalar_views(THREE, documents_each=12))[1]["sentence"]


def test_the_first_screen_has_the_bytes_of_weights_beside_those_of_caches() -> None:
    content = content_of(weighted(make_scalar_views(THREE, documents_each=12), snapkv_half=2**20))
    rows = {row.verdict.action: row.weights for row in glance_rows(content, action_verdicts(content, choose(content)))}
    assert (rows["snapkv-half"].text, rows["snapkv-half"].value) == ("25%", 25.0)
    assert (rows["recent-half"].text, rows["recent-half"].value) == ("100%", 100.0)
