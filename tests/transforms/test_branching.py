"""Branchings and their depths against hand-written cases, a plain loop over the definitions, and the laws' own values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fixtures.altered_events import assert_declared, damaged, shuffled, with_column
from fixtures.swrb_events import Row, event, random_laws, swrb_replicate, table
from oracles.swrb_definitions import branching_depth_rows, branching_rows

from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import BRANCHING_DEPTHS, BRANCHINGS
from kvdrift.transforms.residual_branches import derive_branchings

NAMES: Row = {"study": "s", "model": "m", "doc": "d", "action": "a", "action_revision": 0, "replicate": 0, "unit": 7}


def scan(weights: list[float], **names: Any) -> list[Row]:
    """Return scan rows at 1, 2, ..."""
    both = {"x_token": 1, "y_token": 1, "x_eos": False, "y_eos": False}
    return [event(NAMES | names, "scan", t, 0.5, 0.5, both, weight) for t, weight in enumerate(weights, start=1)]


def branch(start: int, pattern: str, **names: Any) -> list[Row]:
    """Branch rows from ``start`` on: '=' agrees, '#' mismatches, '.' is a missing position."""
    rows = []
    for t, mark in enumerate(pattern, start=start):
        both = {"x_token": 1, "y_token": 1 + (mark == "#"), "x_eos": False, "y_eos": False}
        rows += [event(NAMES | names, "branch", t, 0.5, 0.5, both, None)] if mark != "." else []
    return rows


def derived(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    found = derive_branchings(table(rows))
    return found.branchings.to_pylist(), found.depths.to_pylist()


# The paper's figure "swrb-measurement": H = 5, M = .3, J = 3, mismatches at 3 and 5.
PICTURED = [*scan([0.03, 0.06, 0.09, 0.075, 0.045]), *branch(3, "#=#")]


def test_the_pictured_replicate() -> None:
    (row,), depths = derived(PICTURED)
    mass = row.pop("mass")
    assert row == NAMES | {"horizon": 5, "complete": True, "scanned": 5, "branch": 3, "mismatches": 2}
    assert mass == pytest.approx(0.3, abs=1e-15)
    assert [d["depth"] for d in depths] == [1, 2, 3, 4, 5]
    assert [d["observed"] for d in depths] == pytest.approx([0.06, 0.06, 0.12, 0.12, 0.12], abs=1e-15)
    by_hand = [0.03 * 4 + 0.06 * 3 + 0.09 * 2 + 0.075, 0.03 * 3 + 0.06 * 2 + 0.09, 0.03 * 2 + 0.06, 0.03, 0]
    assert [d["capacity"] for d in depths] == pytest.approx([value / 5 for value in by_hand], abs=1e-15)


INCOMPLETE = {
    "no branch for mass": scan([0.1, 0.2, 0.3]),
    "a branch for no mass": [*scan([0.0, 0.0, 0.0]), *branch(2, "#=")],
    "no scan": branch(2, "#="),
    "the scan's first position is missing": [*scan([0.1, 0.2, 0.3])[1:], *branch(2, "#=")],
    "a scan position is missing": [row for row in PICTURED if (row["kind"], row["t"]) != ("scan", 3)],
    "the scan's last position is missing": [row for row in PICTURED if (row["kind"], row["t"]) != ("scan", 5)],
    "a scan position is there twice": [*PICTURED, PICTURED[2]],
    "a branch position is missing": [*scan([0.1] * 4), *branch(1, "#=.#")],
    "the branch's last position is missing": [*scan([0.1] * 4), *branch(1, "#=#")],
    "a branch position is there twice": [*PICTURED, PICTURED[-1]],
    "the branch goes on after the scan": [*scan([0.1] * 3), *branch(2, "#==")],
}


@pytest.mark.parametrize("rows", INCOMPLETE.values(), ids=INCOMPLETE.keys())
def test_incomplete_replicates_say_so_and_keep_what_is_there(rows: list[Row]) -> None:
    complete = [row | {"replicate": 1} for row in PICTURED]
    found, depths = derived([*rows, *complete])
    assert [row["complete"] for row in found] == [False, True]
    assert_same(found, branching_rows([*rows, *complete]))
    assert_same(depths, branching_depth_rows([*rows, *complete]))


def assert_same(found: list[Row], expected: list[Row]) -> None:
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            # Sums of at most 24 products within [0, 1], in another order: a few units of 2^-53 each.
            assert got[name] == (pytest.approx(value, abs=1e-13) if isinstance(value, float) else value), name


def random_log(chance: np.random.Generator, replicates: int, longest: int, share: float = 0.0) -> list[Row]:
    rows: list[Row] = []
    for replicate in range(replicates):
        h = int(chance.integers(1, longest + 1))
        laws = random_laws(
            chance,
            h,
            apart=float(chance.choice([0.0, 0.1, 0.9])),
            apart_at=int(chance.choice([0, 0, 1, h, int(chance.integers(1, h + 1))])),
        )
        doc = f"d{chance.integers(3)}" + "é" * int(chance.integers(2))
        names = {"study": f"s{chance.integers(2)}", "model": "m", "doc": doc, "action": f"a{chance.integers(4)}"}
        own = swrb_replicate({**names, "replicate": replicate}, laws, chance)
        rows += damaged(own, chance) if chance.random() < share else own
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_against_the_definitions_one_replicate_at_a_time(seed: int) -> None:
    chance = np.random.default_rng(seed)
    rows = random_log(chance, replicates=60, longest=(1, 3, 9, 24)[seed % 4], share=0.5 * (seed >= 4))
    rows = [rows[at] for at in chance.permutation(len(rows))]
    found, found_depths = derived(rows)
    assert_same(found, branching_rows(rows))
    assert_same(found_depths, branching_depth_rows(rows))
    if seed < 4:
        assert all(row["complete"] for row in found)


def test_random_logs_have_the_corners() -> None:
    """The comparison is worth only as much as the cases in its logs."""
    rows = random_log(np.random.default_rng(3), replicates=60, longest=24)
    found, _ = derived(rows)
    corners = {"M = 0" for row in found if row["mass"] == 0}
    corners |= {"J = H" for row in found if row["branch"] == row["horizon"] > 1}
    corners |= {"J = 1 < H" for row in found if row["branch"] == 1 < row["horizon"]}
    corners |= {"survival ends early" for row in found if row["scanned"] < row["horizon"]}
    corners |= {"0 < M < 1" for row in found if 0 < row["mass"] < 1 - 1e-9}
    corners |= {"M = 1" for row in found if abs(row["mass"] - 1) < 1e-12}
    corners |= {"U ends" for row in rows if row["kind"] == "scan" and row["x_eos"]}
    assert len(corners) == 7


def test_row_order_encoding_and_other_replicates_do_not_matter() -> None:
    chance = np.random.default_rng(9)
    rows = random_log(chance, replicates=40, longest=9, share=0.3)
    events = table(rows)
    expected = derive_branchings(events)
    for _ in range(4):
        found = derive_branchings(shuffled(events, chance))
        assert found.branchings.equals(expected.branchings)
        assert found.depths.equals(expected.depths)
    key = [rows[0][name] for name in BRANCHINGS.key]
    alone = [row for row in rows if [row[name] for name in BRANCHINGS.key] == key]
    found_alone, depths_alone = derived(alone)
    assert found_alone[0] in expected.branchings.to_pylist()  # bit for bit
    assert all(d in expected.depths.to_pylist() for d in depths_alone)


@pytest.mark.parametrize("rows", [[], PICTURED, [*scan([0.0], doc="a"), *PICTURED]])
def test_output_has_exactly_the_declared_schemas(rows: list[Row]) -> None:
    found = derive_branchings(table(rows))
    assert_declared(found.branchings, BRANCHINGS.schema)
    assert_declared(found.depths, BRANCHING_DEPTHS.schema)


def test_wrong_input_is_one_clear_line() -> None:
    def changed(name: str, values: list[Any]) -> pa.Table:
        return with_column(table(PICTURED), name, values)

    with pytest.raises(InputError, match="lack the column weight"):
        derive_branchings(table(PICTURED).drop_columns(["weight"]))
    with pytest.raises(InputError, match="'kind' has 'coupled', must be 'scan' or 'branch'"):
        derive_branchings(changed("kind", ["coupled", *["scan"] * 7]))
    with pytest.raises(InputError, match="'kind' has 1 nulls"):
        derive_branchings(changed("kind", [None, *["scan"] * 7]))
    with pytest.raises(InputError, match="positions t from 0 to 8"):
        derive_branchings(changed("t", [0, 2, 3, 4, 5, 6, 7, 8]))
    for weight, said in ((None, "nan"), (1.5, "1.5"), (-0.1, "-0.1"), (math.nan, "nan")):
        with pytest.raises(InputError, match=rf"kind 'scan' have weight {said}, must be within \[0, 1\]"):
            derive_branchings(changed("weight", [0.1, 0.1, 0.1, 0.1, weight, None, None, None]))
