"""Coupled events of one segment -> trajectories and steps, as pure functions of Arrow tables.

Knows nothing of stores, files or pipelines. Symbols are those of the definitions page: I_t, τ, e_x, e_y,
e = min(e_x, e_y), e′ = max(e_x, e_y), H. Every pass is one array operation over all rows or all trajectories of
the segment; identifying strings are compared once per distinct value, never per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schema.runs import run_begins
from schema.tables import COUPLED, EVENTS, STEPS, TRAJECTORIES
from transforms.event_columns import (
    NAMES,
    NEVER,
    Flags,
    Ints,
    Wide,
    check_columns,
    check_kinds,
    dictionary,
    group_of_names,
    key_order,
    nullable,
    table_of,
)

# Files written before there were other kinds than coupled lack that column; weights belong to scans.
_FIELDS = [field for field in EVENTS.schema if field.name not in {"kind", "weight"}]


@dataclass(frozen=True)
class Derived:
    """What one segment becomes: ``trajectories`` (TRAJECTORIES schema) and ``steps`` (STEPS schema), sorted by key."""

    trajectories: pa.Table
    steps: pa.Table


def derive(events: pa.Table) -> Derived:
    """Derive trajectories and steps from the events of any number of whole trajectories.

    Definitions: Objects (I_t, τ, e, e′), Decomposition (exposure, occupation), Local agreement, EOS partition.

    Args:
        events: N rows with the columns of EVENTS, in any order; names may be plain or dictionary-encoded strings.
            ``weight`` is not looked at, and ``kind`` need not be there. All rows of a (study, model, doc, action,
            replicate) must be, since τ and H are read off them.

    Returns:
        One trajectories row per pair and one steps row per event, both exactly of their Arrow schemas and sorted by
        key. Sums are float64. Where positions are missing or repeated, ``complete`` is false and the other columns
        describe the rows present, a gap or a repetition ending a run of agreements.

    Raises:
        InputError: a column is missing, has nulls or another type, a position is outside 1..H, or an event is of
            another kind than "coupled".

    """
    check_columns(events, _FIELDS)
    if "kind" in events.column_names:
        check_kinds(events.column("kind"), (COUPLED,))
    rows = _sorted_rows(events)
    pairs = _Pairs.of(rows)
    return Derived(_trajectories(rows, pairs), _steps(rows, pairs))


@dataclass(frozen=True)
class _Rows:
    """The segment's N events in key order; all arrays are [N] but ``names``."""

    names: dict[str, pa.DictionaryArray]
    group: Wide  # equal where all four names are equal, ascending in their order
    replicate: Ints
    t: Ints
    x_token: Ints
    y_token: Ints
    delta: npt.NDArray[np.float32]
    f: npt.NDArray[np.float32]
    x_eos: Flags
    y_eos: Flags

    def mismatch(self) -> Flags:
        """Return I_t, [N]."""
        return np.not_equal(self.x_token, self.y_token)


@dataclass(frozen=True)
class _Pairs:
    """The segment's M trajectories; positions are int32 with NEVER for null."""

    first_row: Wide  # [M]
    rows: Wide  # [M] number of rows
    of_row: Ints  # [N] index of each row's trajectory
    horizon: Ints  # [M] H, the last position present
    tau: Ints  # [M] first t with I_t = 1
    eos_x: Ints  # [M]
    eos_y: Ints  # [M]
    first_absorbed: Ints  # [M] e, null counting as H + 1
    last_absorbed: Ints  # [M] e', likewise

    @classmethod
    def of(cls, rows: _Rows) -> _Pairs:
        first_row = np.flatnonzero(run_begins(rows.group, rows.replicate))
        length = np.diff(first_row, append=len(rows.t))
        of_row = np.repeat(np.arange(len(first_row), dtype=np.int32), length)
        horizon = rows.t[first_row + length - 1]
        eos_x = _first_position(rows.x_eos, rows.t, of_row, len(first_row))
        eos_y = _first_position(rows.y_eos, rows.t, of_row, len(first_row))
        return cls(
            first_row=first_row,
            rows=length,
            of_row=of_row,
            horizon=horizon,
            tau=_first_position(rows.mismatch(), rows.t, of_row, len(first_row)),
            eos_x=eos_x,
            eos_y=eos_y,
            first_absorbed=np.minimum(np.minimum(eos_x, eos_y), horizon + np.int32(1)),
            last_absorbed=np.minimum(np.maximum(eos_x, eos_y), horizon + np.int32(1)),
        )

    def per_row(self, values: Ints) -> Ints:
        """[M] -> [N]: each row gets its trajectory's value."""
        return np.repeat(values, self.rows)

    def count(self, flags: Flags) -> Ints:
        """[N] -> [M]: how many rows of each trajectory have the flag."""
        return np.bincount(self.of_row[flags], minlength=len(self.rows)).astype(np.int32)

    def total(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """[N] -> [M]: sums in float64, in order of t."""
        return np.add.reduceat(values, self.first_row, dtype=np.float64) if len(self.rows) else np.zeros(0)


def _trajectories(rows: _Rows, pairs: _Pairs) -> pa.Table:
    mismatch = rows.mismatch()
    diverged = pairs.tau != NEVER
    tau_of_row = pairs.per_row(pairs.tau)
    after_tau = rows.t > tau_of_row  # never true without divergence

    # 1..H present exactly once: starts at 1, ends at H = number of rows, and every row goes on by exactly one.
    follows = np.zeros(len(rows.t), dtype=np.bool_)  # [N] this row's position is its predecessor's plus one
    follows[1:] = np.diff(rows.t) == 1
    follows[pairs.first_row] = rows.t[pairs.first_row] == 1
    complete = pairs.count(follows) == pairs.rows

    window = after_tau & (rows.t < pairs.per_row(pairs.first_absorbed))  # tau < t < e
    agreement = window & ~mismatch
    longest = _longest_run(agreement, follows, pairs)
    first_agreement = _first_position(agreement, rows.t, pairs.of_row, len(pairs.rows))
    returned = pairs.count(window & mismatch & (rows.t > pairs.per_row(first_agreement))) > 0

    exposure = np.where(diverged, pairs.horizon - pairs.tau, 0)
    columns: dict[str, Any] = {
        **{name: codes.take(pa.array(pairs.first_row)) for name, codes in rows.names.items()},
        "replicate": rows.replicate[pairs.first_row],
        "tau": nullable(pairs.tau, null=~diverged),
        "eos_x": nullable(pairs.eos_x, null=pairs.eos_x == NEVER),
        "eos_y": nullable(pairs.eos_y, null=pairs.eos_y == NEVER),
        "horizon": pairs.horizon,
        "complete": complete,
        "mismatches": pairs.count(mismatch),
        "sum_delta": pairs.total(rows.delta),
        "sum_f": pairs.total(rows.f),
        "exposure": exposure,
        "occupation": pairs.count(mismatch & after_tau),
        "longest_agreement": nullable(longest, null=~diverged),
        "mismatch_after_agreement": nullable(returned, null=~diverged),
    }
    return table_of(columns, TRAJECTORIES.schema)


def _steps(rows: _Rows, pairs: _Pairs) -> pa.Table:
    tau = pairs.per_row(pairs.tau)
    before = rows.t < tau  # all rows of a pair that never diverges
    first, last = pairs.per_row(pairs.first_absorbed), pairs.per_row(pairs.last_absorbed)
    eos_set = (rows.t >= first).astype(np.int32) + (rows.t > first) + (rows.t > last)
    columns: dict[str, Any] = {
        **rows.names,
        "replicate": rows.replicate,
        "t": rows.t,
        "mismatch": rows.mismatch().astype(np.int32),
        "lag": nullable(np.where(before, np.int32(0), rows.t - tau), null=before),
        "eos_set": eos_set,
        "delta": rows.delta,
        "f": rows.f,
    }
    return table_of(columns, STEPS.schema)


def _first_position(flags: Flags, t: Ints, of_row: Ints, pairs: int) -> Ints:
    """[N] flags of sorted rows -> [M] first t with the flag, NEVER where none."""
    first = np.full(pairs, NEVER, dtype=np.int32)
    flagged = np.flatnonzero(flags)[::-1]  # the last write wins, so write the earliest position last
    first[of_row[flagged]] = t[flagged]
    return first


def _longest_run(agreement: Flags, follows: Flags, pairs: _Pairs) -> Ints:
    """[N] -> [M]: longest run of agreements at consecutive positions.

    A run never crosses into the next trajectory: the first row of a trajectory is at or before its τ, so it is
    outside the window that ``agreement`` is limited to.
    """
    continues = np.zeros(len(agreement), dtype=np.bool_)
    continues[1:] = agreement[1:] & agreement[:-1] & follows[1:]
    begin = np.flatnonzero(agreement & ~continues)
    ends = agreement.copy()
    ends[:-1] &= ~continues[1:]
    longest = np.zeros(len(pairs.rows), dtype=np.int32)
    np.maximum.at(longest, pairs.of_row[begin], (np.flatnonzero(ends) - begin + 1).astype(np.int32))
    return longest


def _sorted_rows(events: pa.Table) -> _Rows:
    names = {name: dictionary(events.column(name)) for name in NAMES}
    group = group_of_names(list(names.values()), events.num_rows)
    values = {field.name: events.column(field.name).to_numpy() for field in _FIELDS if field.name not in NAMES}
    pair_and_t = (values["replicate"].astype(np.int64) << 32) + values["t"]  # ascending in (replicate, t)
    rest = [values[name] for name in ("y_eos", "x_eos", "f", "delta", "y_token", "x_token")]
    order = key_order(group, pair_and_t, rest)
    if order is not None:
        names = {name: codes.take(pa.array(order)) for name, codes in names.items()}
        group = group[order]
        values = {name: column[order] for name, column in values.items()}
    return _Rows(names, group, **values)
