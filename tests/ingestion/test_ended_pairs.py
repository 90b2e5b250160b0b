"""Replicates that stop after both sides have ended: the missing rows follow from the definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fixtures.event_logs import (
    LOG,
    PAIR_KEY,
    H,
    Run,
    canonical,
    stopped,
    stored,
)

from kvdrift.ingestion.event_rows import VALUES, EventRows, converted, filled

Row = dict[str, Any]


def open_at_end(log: pa.Table) -> pa.Table:
    """The rows of the replicates of which a side has not ended at H, and of the others in a file of its own."""
    last = [row for row in log.to_pylist() if row["t"] == H and not (row["x_eos"] and row["y_eos"])]
    pairs = {tuple(row[name] for name in PAIR_KEY if name != "t") for row in last}
    return pa.array([tuple(row[name] for name in PAIR_KEY if name != "t") in pairs for row in log.to_pylist()])


@pytest.mark.parametrize("after", [0, 2])
def test_rows_after_both_ends_need_not_be_there(tmp_path: Path, run: Run, after: int) -> None:
    short = stopped(LOG, after=after)
    assert short.num_rows < LOG.num_rows - 20
    shuffled = short.take(np.random.default_rng(1).permutation(short.num_rows))
    report = run(shuffled)
    assert (report.findings, report.taken.units, report.taken.events) == ([], 8, LOG.num_rows)
    assert stored(tmp_path / "store").equals(canonical(LOG))
    again = run(LOG, short)
    assert (again.findings, again.taken.units, again.present.events) == ([], 0, 2 * LOG.num_rows)


def test_the_horizon_of_pairs_that_all_stop_must_be_given(tmp_path: Path, run: Run) -> None:
    ending = LOG.filter(pa.array(~open_at_end(LOG).to_numpy(zero_copy_only=False)))
    for after in (0, 2):
        finding = run(stopped(ending, after=after)).findings[0]
        assert (finding.kind, "--horizon" in finding.text) == ("horizon", True)
    assert not (tmp_path / "store" / "events").exists() or not stored(tmp_path / "store").num_rows
    report = run(ending)
    assert report.findings == [], "all are padded to one position"
    assert stored(tmp_path / "store").equals(canonical(ending))
    assert run(stopped(LOG)).findings == [], "the horizon is known by now"
    assert stored(tmp_path / "store").equals(canonical(LOG))


def plainly_filled(rows: list[Row], horizon: int) -> list[Row]:
    """The rows of one replicate, by position, and those that follow from the definitions."""
    last = rows[-1]
    if not (last["x_eos"] and last["y_eos"]):
        return rows
    firsts = {side: next(row["t"] for row in rows if row[f"{side}_eos"]) for side in "xy"}
    token = last["x_token"] if firsts["x"] <= firsts["y"] else last["y_token"]
    more = [
        last | {"t": t, "x_token": token, "y_token": token, "delta": 0.0, "f": 0.0}
        for t in range(last["t"] + 1, horizon + 1)
    ]
    return rows + more


def test_filling_is_its_plain_twin() -> None:
    chance = np.random.default_rng(5)
    for _ in range(30):
        groups, whole = [], []
        horizon = int(chance.integers(1, 9))
        for pair in range(chance.integers(1, 6)):
            ends, length = chance.integers(1, 12, 2), int(chance.integers(1, horizon + 1))
            rows: list[Row] = [
                {
                    "replicate": pair, "t": t, "x_token": int(chance.integers(9)), "y_token": int(chance.integers(9)),
                    "delta": 0.5, "f": 0.25, "x_eos": t >= ends[0], "y_eos": t >= ends[1],
                }
                for t in range(1, length + 1)
            ]  # fmt: skip
            if length > (both := max(ends)):
                for row in rows[both:]:
                    row["y_token"] = row["x_token"]
            groups.append(rows)
            whole += plainly_filled(rows, horizon)
        given = pa.Table.from_pylist([row for rows in groups for row in rows])
        found = filled(converted(given, np.zeros(given.num_rows, np.int32)), np.array([horizon], np.int32))
        assert [dict(zip(VALUES, values, strict=True)) for values in columns(found)] == whole


def columns(rows: EventRows) -> list[tuple[Any, ...]]:
    return list(zip(*(getattr(rows, name).tolist() for name in VALUES), strict=True))
