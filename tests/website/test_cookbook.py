"""Ask each query of ``docs/cookbook.md`` of a finished study, and compare the answers with independent values."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.house import ROOT

from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.log.store import Store
from kvdrift.sql.catalog import Views, open_views

PAGE = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
QUESTION = re.compile(r"^### (\d+)\. (.*?)\n\n```sql\n(.*?)```\n(.*?)(?=^##|\Z)", re.DOTALL | re.MULTILINE)
QUERIES = {int(number): query for number, _, query, _ in QUESTION.findall(PAGE)}
Pair = dict[tuple[str, int, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def views(finished: Path) -> Iterator[Views]:
    with open_views(Store.open(finished)) as views:
        yield views


@pytest.fixture(scope="module")
def pairs(finished: Path) -> Pair:
    """Positions of each evaluated pair by document, replicate and action, from the stored events alone."""
    store = Store.open(finished)
    evaluated = {row["doc"] for row in store.read("documents").to_pylist() if row["split"] == "evaluation"}
    made: Pair = defaultdict(list)
    for row in store.read("events").sort_by("t").to_pylist():
        if row["doc"] in evaluated:
            made[row["doc"], row["replicate"], row["action"]].append(row)
    return made


def ask(views: Views, number: int) -> list[dict[str, Any]]:
    return views.table(QUERIES[number]).to_pylist()


def test_there_are_twenty_three_questions() -> None:
    assert list(QUERIES) == list(range(1, 24))
    assert all(meaning.strip() for _, _, _, meaning in QUESTION.findall(PAGE))


@pytest.mark.parametrize("number", range(1, 24))
def test_every_query_has_rows(views: Views, number: int) -> None:
    rows = ask(views, number)
    assert rows
    if number == 16:  # nobody is right within this study's horizon
        assert {row["before"] for row in rows} == {None}
        return
    assert any(value not in {None, 0} for row in rows for name, value in row.items() if name != "action")


def test_mismatch_is_that_of_the_events(views: Views, pairs: Pair) -> None:
    """Documents have equally many replicates and strata equally many documents, so that R is one plain mean."""
    shares: dict[str, list[float]] = defaultdict(list)
    for (_, _, action), rows in pairs.items():
        shares[action].append(statistics.fmean(row["x_token"] != row["y_token"] for row in rows))
    truth = {action: statistics.fmean(values) for action, values in shares.items()}
    for number in (1, 2, 10):
        for row in ask(views, number):
            assert row["mismatch"] == pytest.approx(truth[row["action"]])
    (gap,) = ask(views, 4)
    assert gap["gap"] == pytest.approx(truth["recent-half"] - truth["snapkv-half"])
    assert gap["occurrence_share"] + gap["exposure_share"] + gap["rate_share"] == pytest.approx(1)
    for row in ask(views, 3):
        assert row["estimate"] == pytest.approx(truth[row["action"]] - truth[row["baseline"]])


def test_distances_are_those_of_the_events(views: Views, pairs: Pair) -> None:
    sums: dict[str, list[float]] = defaultdict(list)
    for (_, _, action), rows in pairs.items():
        sums[action].append(statistics.fmean(row["delta"] - row["f"] for row in rows))
    for number, column in ((7, "missed"), (11, "history_gap")):
        for row in ask(views, number):
            assert row[column] == pytest.approx(statistics.fmean(sums[row["action"]]), abs=1e-6)


def test_divergences_are_those_of_the_events(views: Views, pairs: Pair) -> None:
    """Where no pair ends early all positions weigh the same; else ratios of means over pairs and strata do."""
    events = [row for rows in pairs.values() for row in rows]
    assert all(row["f"] <= (row["kl"] / 2) ** 0.5 * (1 + 1e-6) + 1e-7 for row in events if row["kl"] is not None)
    known = defaultdict[str, list[dict[str, Any]]](list)
    for row in events:
        assert (row["kl"] is None) == (row["kl_own"] is None) == (row["top1"] is None)
        if row["kl"] is not None:
            known[row["action"]].append(row)
    for row in ask(views, 22):
        of_action = known[row["action"]]
        assert row["kl_fixed_history"] == pytest.approx(statistics.fmean(one["kl"] for one in of_action), rel=1e-6)
        assert row["top1_agreement"] == pytest.approx(statistics.fmean(one["top1"] for one in of_action))
        assert row["kl_infinite"] == 0
    largest = sorted((row["kl"] for row in events if row["kl"] is not None), reverse=True)
    assert [row["kl"] for row in ask(views, 23)] == largest[:10]


def test_half_have_parted_by_then(views: Views, pairs: Pair) -> None:
    first: dict[str, list[float]] = defaultdict(list)
    for (_, _, action), rows in pairs.items():
        first[action].append(next((row["t"] for row in rows if row["x_token"] != row["y_token"]), float("inf")))
    for row in ask(views, 5):
        places = sorted(first[row["action"]])
        half = places[(len(places) - 1) // 2]
        assert row["half_by"] == (None if half == float("inf") else half)
        assert row["diverged_at_all"] == pytest.approx(statistics.fmean(place < float("inf") for place in places))


def test_the_worst_documents_are_in_order(views: Views) -> None:
    lead = [row["recent_half"] - row["snapkv_half"] for row in ask(views, 13)]
    assert lead == sorted(lead, reverse=True)


def test_controls_hold_still(views: Views) -> None:
    assert {row["moved_pairs"] for row in ask(views, 19) if row["selector"] == "full"} == {0}


def test_a_pair_is_read_as_text(views: Views, pairs: Pair) -> None:
    doc = min(doc for doc, _, _ in pairs)
    stored, read = pairs[doc, 0, "recent-half"], token_reader("kvdrift/tiny")
    assert read is not None
    (row,) = ask(views, 20)
    assert row["doc"] == doc
    assert row["tau"] == next((event["t"] for event in stored if event["x_token"] != event["y_token"]), None)
    for side in "xy":
        own = [read(event[f"{side}_token"]) for event in stored if not event[f"{side}_eos"]]
        assert row[f"{side}_text"] == "".join(own)
