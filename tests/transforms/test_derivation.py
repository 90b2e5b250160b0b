"""The derivation against hand-written cases and a plain loop over the definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fixtures.altered_events import assert_declared, damaged, shuffled, with_column
from fixtures.awkward_logs import Log
from fixtures.swrb_events import Row, event, table
from oracles.coupled_paths import Analysis
from oracles.view_definitions import steps, trajectories

from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import STEPS, TRAJECTORIES
from kvdrift.transforms.derivation import derive_trajectories

NAMES: Row = {"study": "s", "model": "m", "doc": "d", "action": "a", "replicate": 0, "unit": 7}


def trajectory(pattern: str, *, eos_x: int | None = None, eos_y: int | None = None, **names: Any) -> list[Row]:
    """Event rows of one pair: '=' agrees, '#' mismatches, '.' is a missing position."""
    rows = []
    for t, mark in enumerate(pattern, start=1):
        ended = {"x_eos": eos_x is not None and t >= eos_x, "y_eos": eos_y is not None and t >= eos_y}
        both = {"x_token": t, "y_token": t + 1000 * (mark == "#")} | ended
        rows += (
            [event(NAMES | names, "coupled", t, 0.5 if mark == "#" else 0.25, 0.125, both, None)] if mark != "." else []
        )
    return rows


@dataclass(frozen=True)
class Golden:
    """One pair and, by hand: (tau, occupation, exposure, longest agreement, mismatch after agreement), eos_set, lag."""

    pattern: str
    eos_x: int | None
    eos_y: int | None
    expected: tuple[int | None, int, int, int | None, bool | None]
    eos_set: str
    lags: list[int | None]


GOLDEN = {
    "H = 1, agreeing": Golden("=", None, None, (None, 0, 0, None, None), "0", [None]),
    "H = 1, diverging": Golden("#", None, None, (1, 0, 0, 0, False), "0", [0]),
    "never": Golden("====", None, None, (None, 0, 0, None, None), "0000", [None] * 4),
    "tau = 1": Golden("#==#", None, None, (1, 1, 3, 2, True), "0000", [0, 1, 2, 3]),
    "tau = H": Golden("===#", None, None, (4, 0, 0, 0, False), "0000", [None, None, None, 0]),
    "no agreement after": Golden("=###", None, None, (2, 2, 2, 0, False), "0000", [None, 0, 1, 2]),
    "mismatches, then agreement": Golden("=##==", None, None, (2, 1, 3, 2, False), "00000", [None, 0, 1, 2, 3]),
    "longest of two runs": Golden("#==#===#=", None, None, (1, 2, 8, 3, True), "000000000", list(range(9))),
    "e ends the window": Golden("#==#==", 4, None, (1, 1, 5, 2, False), "000122", list(range(6))),
    "e at tau": Golden("=#===", 2, None, (2, 0, 3, 0, False), "01222", [None, 0, 1, 2, 3]),
    "e before tau": Golden("==#==", None, 1, (3, 0, 2, 0, False), "12222", [None, None, 0, 1, 2]),
    "e right after tau": Golden("#====", 2, 4, (1, 0, 4, 0, False), "01223", list(range(5))),
    "both at once": Golden("=====", 3, 3, (None, 0, 0, None, None), "00133", [None] * 5),
    "both at H": Golden("#=#", 3, 3, (1, 1, 2, 1, False), "001", [0, 1, 2]),
    "y first": Golden("#=#=", 4, 2, (1, 1, 3, 0, False), "0122", [0, 1, 2, 3]),
    "eos at 1 on both": Golden("==", 1, 1, (None, 0, 0, None, None), "13", [None, None]),
}


@pytest.mark.parametrize("case", GOLDEN.values(), ids=GOLDEN.keys())
def test_golden(case: Golden) -> None:
    derived = derive_trajectories(table(trajectory(case.pattern, eos_x=case.eos_x, eos_y=case.eos_y)))
    (row,) = derived.trajectories.to_pylist()
    tau, occupation, exposure, longest, after = case.expected
    marks = case.pattern.count("#")
    horizon = len(case.pattern)
    assert row == NAMES | {
        "action_revision": 0, "tau": tau, "eos_x": case.eos_x, "eos_y": case.eos_y, "horizon": horizon, "complete": True, "mismatches": marks,
        "sum_delta": 0.25 * (horizon + marks), "sum_f": 0.125 * horizon, "exposure": exposure, "occupation": occupation,
        "longest_agreement": longest, "mismatch_after_agreement": after,
    }  # fmt: skip
    assert derived.steps["eos_set"].to_pylist() == [int(mark) for mark in case.eos_set]
    assert derived.steps["lag"].to_pylist() == case.lags
    assert derived.steps["mismatch"].to_pylist() == [int(mark == "#") for mark in case.pattern]


def test_a_gap_or_repetition_is_incomplete_and_ends_a_run() -> None:
    rows = trajectory("#==.==", replicate=0) + trajectory("#====", replicate=1) + trajectory(".==", replicate=2)
    rows += [row for row in rows if (row["replicate"], row["t"]) == (1, 3)]  # one position twice
    derived = derive_trajectories(table(rows)).trajectories
    assert derived["complete"].to_pylist() == [False, False, False]
    assert derived["horizon"].to_pylist() == [6, 5, 3]
    assert derived["longest_agreement"].to_pylist() == [2, 3, None]


def random_log(rng: np.random.Generator, pairs: int, longest: int, share: float = 0.0) -> list[Row]:
    """Pairs of different lengths, divergence rates and EOS positions; a share damaged by lost or repeated rows."""
    rows: list[Row] = []
    for replicate in range(pairs):
        horizon = int(rng.integers(1, longest + 1))
        rate = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        pattern = "".join("#" if u < rate else "=" for u in rng.random(horizon))
        eos = [int(rng.integers(1, horizon + 1)) if rng.random() < 0.6 else None for _ in range(2)]
        if rng.random() < 0.15:
            eos[1] = eos[0]
        doc = f"d{rng.integers(3)}" + "é" * int(rng.integers(2))
        names = {"study": f"s{rng.integers(2)}", "doc": doc, "action": f"a{rng.integers(12)}", "replicate": replicate}
        own = trajectory(pattern, eos_x=eos[0], eos_y=eos[1], **names)
        for row in own:
            row["delta"], row["f"] = (float(np.float32(u)) for u in rng.random(2))
        rows += damaged(own, rng) if rng.random() < share else own
    return rows


def by_definition(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Every quantity of definitions.md by plain loops."""
    analysis = Analysis(Log(events=rows))
    return by_key(trajectories(analysis), TRAJECTORIES.key), by_key(steps(analysis), STEPS.key)


def by_key(rows: list[Row], key: Sequence[str]) -> list[Row]:
    return sorted(rows, key=lambda row: [row[name] for name in key])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.by_default(*"01234567")
def test_against_the_definitions_one_position_at_a_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = random_log(rng, pairs=200, longest=(1, 3, 9, 24)[seed % 4])
    rng.shuffle(rows)  # type: ignore[arg-type]
    wanted, wanted_steps = by_definition(rows)
    derived = derive_trajectories(table(rows))
    assert derived.steps.to_pylist() == wanted_steps
    for got, expected in zip(derived.trajectories.to_pylist(), wanted, strict=True):
        assert got["sum_delta"] == pytest.approx(expected.pop("sum_delta"), abs=1e-12)
        assert got["sum_f"] == pytest.approx(expected.pop("sum_f"), abs=1e-12)
        assert got == got | expected


@pytest.mark.parametrize("seed", range(5))
def test_damaged_logs_keep_what_is_defined(seed: int) -> None:
    rows = random_log(np.random.default_rng(seed), pairs=200, longest=7, share=0.7)
    wanted, _ = by_definition(rows)
    differing = Counter(row["replicate"] for row in rows if row["x_token"] != row["y_token"])  # a repeated row counts
    got = derive_trajectories(table(rows)).trajectories
    assert got["mismatches"].to_pylist() == [differing[row["replicate"]] for row in wanted]
    for name in ("tau", "eos_x", "eos_y", "horizon", "complete", "exposure", "mismatch_after_agreement"):
        assert got[name].to_pylist() == [row[name] for row in wanted], name


def test_row_order_and_string_encoding_do_not_matter() -> None:
    rng = np.random.default_rng(3)
    events = table(random_log(rng, pairs=300, longest=12, share=0.3))
    expected = derive_trajectories(events)
    for _ in range(5):
        derived = derive_trajectories(shuffled(events, rng))
        assert derived.trajectories.equals(expected.trajectories)
        assert derived.steps.equals(expected.steps)


@pytest.mark.parametrize("rows", [[], trajectory("=#="), trajectory("=", doc="a") + trajectory("##", doc="b")])
def test_output_has_exactly_the_declared_schemas(rows: list[Row]) -> None:
    derived = derive_trajectories(table(rows))
    assert_declared(derived.trajectories, TRAJECTORIES.schema)
    assert_declared(derived.steps, STEPS.schema)
    assert derived.steps.num_rows == len(rows)


def test_trajectories_are_told_apart_by_every_key_column() -> None:
    rows: list[Row] = []
    for name in ("study", "model", "doc", "action", "action_revision", "replicate"):
        for value in (1, 2) if name in {"action_revision", "replicate"} else ("u", "v"):
            rows += trajectory("=#", **{name: value})
    derived = derive_trajectories(table(rows)).trajectories
    assert derived.num_rows == 12
    keys = list(zip(*(derived[name].to_pylist() for name in TRAJECTORIES.key), strict=True))
    assert keys == sorted(set(keys))


def test_events_from_before_there_were_kinds() -> None:
    events = table(trajectory("=#==", eos_y=4))
    older = derive_trajectories(events.drop_columns(["kind", "weight"]))
    assert older.trajectories.equals(derive_trajectories(events).trajectories)
    assert older.steps.equals(derive_trajectories(events).steps)


def test_wrong_input_is_one_clear_line() -> None:
    events = table(trajectory("=#"))
    with pytest.raises(InputError, match="lack the columns delta, f"):
        derive_trajectories(events.drop_columns(["delta", "f"]))
    for name, values, said in (
        ("t", pa.array([1.0, 2.0]), "'t' is double, must be int32"),
        ("doc", pa.array([1, 2], pa.int32()), "'doc' is int32, must be string"),
        ("x_eos", [None, True], "'x_eos' has 1 nulls"),
        ("kind", ["coupled", "scan"], "'kind' has 'scan', must be 'coupled'"),
        ("kind", ["coupled", None], "'kind' has None, must be 'coupled'"),
        ("t", [0, 1], "positions t from 0 to 1"),
    ):
        with pytest.raises(InputError, match=said):
            derive_trajectories(with_column(events, name, values))
