"""Coupled events of one segment -> trajectories and steps, as pure functions of Arrow tables.

This module knows nothing of stores, files or pipelines. Symbols are those of ``docs/quantities.md``; e_x and e_y are
the positions at which X and Y end, e = min(e_x, e_y), e' = max(e_x, e_y). Every pass is one array operation over all
rows or all trajectories of the segment; strings are compared once for each distinct value, never once for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kvdrift.schema.moments import NEVER
from kvdrift.schema.rows import Flags, Ints, Reals, run_begins
from kvdrift.schema.tables import COUPLED, EVENTS, GROUP_KEY, PAIR_COLUMNS, STEPS, TRAJECTORIES
from kvdrift.transforms.event_columns import SortedEvents, check_columns, check_kinds, filled, table_of, with_nulls


@dataclass(frozen=True)
class DerivedTrajectories:
    """The derived rows of one segment: ``trajectories`` and ``steps`` in their schemas, sorted by key."""

    trajectories: pa.Table
    steps: pa.Table


def derive_trajectories(events: pa.Table) -> DerivedTrajectories:
    """Derive trajectories and steps from the events of any number of whole trajectories.

    I_t marks the positions with different tokens; tau is the first of them. ``docs/quantities.md`` defines exposure,
    occupation and the EOS sets.

    Args:
        events: N rows with the columns of EVENTS, in any order; names may be plain or dictionary-encoded strings.
            ``weight`` is ignored, and ``kind``, ``kl``, ``kl_own``, ``top1``, ``action_revision`` and ``unit`` may be
            absent. All rows of a (study, model, doc, action, revision, replicate) must be present, since tau and H are
            read off them.

    Returns:
        One trajectories row for each pair and one steps row for each event, both exactly of their Arrow schemas and
        sorted by key. Sums are float64. If positions are missing or repeated, ``complete`` is false and the other
        columns describe the rows present; a gap or a repetition ends a run of agreements.
    """
    check_columns(events, [EVENTS.schema.field(name) for name in PAIR_COLUMNS])
    if "kind" in events.column_names:
        check_kinds(events.column("kind"), (COUPLED,))
    pairs = _Pairs.of(_sorted_events(events))
    return DerivedTrajectories(_trajectories(pairs), _steps(pairs))


def _sorted_events(events: pa.Table) -> SortedEvents:
    values = {name: events.column(name).to_numpy() for name in PAIR_COLUMNS if name not in GROUP_KEY}
    nulls = {"kl": np.nan, "kl_own": np.nan, "top1": False}
    values |= {name: filled(events, name, null) for name, null in nulls.items()}
    replicate_and_t = (values["replicate"].astype(np.int64) << 32) + values["t"]
    return SortedEvents.of(
        events, values, replicate_and_t, ("y_eos", "x_eos", "f", "delta", "y_token", "x_token")
    )  # fmt: skip


@dataclass(frozen=True)
class _Pairs:
    """The segment's N events and M trajectories; positions are int32 with NEVER for null."""

    events: SortedEvents
    t: Ints  # [N]
    mismatch: Flags  # [N] I_t
    horizon: Ints  # [M] H, the last position present
    tau: Ints  # [M] first t with I_t = 1
    eos_x: Ints  # [M]
    eos_y: Ints  # [M]
    first_absorbed: Ints  # [M] e, null counting as H + 1
    last_absorbed: Ints  # [M] e', null counting as H + 1

    @classmethod
    def of(cls, events: SortedEvents) -> _Pairs:
        values = events.values
        t, mismatch = values["t"], np.not_equal(values["x_token"], values["y_token"])
        horizon = t[events.first_row + events.rows - 1]
        eos_x, eos_y = (_first_position(values[name], events) for name in ("x_eos", "y_eos"))
        return cls(
            events=events,
            t=t,
            mismatch=mismatch,
            horizon=horizon,
            tau=_first_position(mismatch, events),
            eos_x=eos_x,
            eos_y=eos_y,
            first_absorbed=np.minimum(np.minimum(eos_x, eos_y), horizon + np.int32(1)),
            last_absorbed=np.minimum(np.maximum(eos_x, eos_y), horizon + np.int32(1)),
        )

    def per_row(self, values: Ints) -> Ints:
        """Return for each row the value of its trajectory: [M] -> [N]."""
        return np.repeat(values, self.events.rows)

    def count(self, flags: Flags) -> Ints:
        """Count the rows of each trajectory that have a flag: [N] -> [M]."""
        return self.events.count(flags).astype(np.int32)

    def total(self, values: npt.NDArray[np.float32]) -> Reals:
        """Sum over each trajectory in float64, in the order of t: [N] -> [M]."""
        first_row = self.events.first_row
        return np.add.reduceat(values, first_row, dtype=np.float64) if len(first_row) else np.zeros(0)


def _trajectories(pairs: _Pairs) -> pa.Table:
    events, t, mismatch = pairs.events, pairs.t, pairs.mismatch
    diverged = pairs.tau != NEVER
    after_tau = t > pairs.per_row(pairs.tau)  # never true without divergence

    # 1..H are present exactly once: the rows start at 1 and each goes on by exactly one.
    follows = np.zeros(len(t), dtype=np.bool_)  # [N] this row's position is its predecessor's plus one
    follows[1:] = np.diff(t) == 1
    follows[events.first_row] = t[events.first_row] == 1
    complete = pairs.count(follows) == events.rows

    window = after_tau & (t < pairs.per_row(pairs.first_absorbed))  # tau < t < e
    agreement = window & ~mismatch
    longest = _longest_run(agreement, follows, events)
    first_agreement = _first_position(agreement, events)
    returned = pairs.count(window & mismatch & (t > pairs.per_row(first_agreement))) > 0

    columns: dict[str, Any] = {
        **events.keys(events.first_row),
        "tau": with_nulls(pairs.tau, null=~diverged),
        "eos_x": with_nulls(pairs.eos_x, null=pairs.eos_x == NEVER),
        "eos_y": with_nulls(pairs.eos_y, null=pairs.eos_y == NEVER),
        "horizon": pairs.horizon,
        "complete": complete,
        "mismatches": pairs.count(mismatch),
        "sum_delta": pairs.total(events.values["delta"]),
        "sum_f": pairs.total(events.values["f"]),
        "exposure": np.where(diverged, pairs.horizon - pairs.tau, 0),
        "occupation": pairs.count(mismatch & after_tau),
        "longest_agreement": with_nulls(longest, null=~diverged),
        "mismatch_after_agreement": with_nulls(returned, null=~diverged),
    }
    return table_of(columns, TRAJECTORIES.schema)


def _steps(pairs: _Pairs) -> pa.Table:
    t, tau = pairs.t, pairs.per_row(pairs.tau)
    before = t < tau  # all rows of a pair that never diverges
    first, last = pairs.per_row(pairs.first_absorbed), pairs.per_row(pairs.last_absorbed)
    columns: dict[str, Any] = {
        **pairs.events.keys(),
        "t": t,
        "mismatch": pairs.mismatch.astype(np.int32),
        "lag": with_nulls(np.where(before, np.int32(0), t - tau), null=before),
        "eos_set": (t >= first).astype(np.int32) + (t > first) + (t > last),
        "delta": pairs.events.values["delta"],
        "f": pairs.events.values["f"],
    }
    unknown = np.isnan(pairs.events.values["kl"])
    for name in ("kl", "kl_own", "top1"):
        columns[name] = with_nulls(pairs.events.values[name], null=unknown)
    return table_of(columns, STEPS.schema)


def _first_position(flags: Flags, events: SortedEvents) -> Ints:
    """Find the first flagged t of each trajectory, NEVER if none is flagged: [N] -> [M]."""
    first = np.full(len(events.rows), NEVER, dtype=np.int32)
    flagged = np.flatnonzero(flags)
    replicates = events.of_row[flagged]
    begins = run_begins(replicates)
    first[replicates[begins]] = events.values["t"][flagged[begins]]
    return first


def _longest_run(agreement: Flags, follows: Flags, events: SortedEvents) -> Ints:
    """Find the longest run of agreements at consecutive positions of each trajectory: [N] -> [M].

    ``follows`` marks the rows whose position is one more than that of the row before. A run never crosses into the next
    trajectory: the first row of a trajectory is at or before its tau, and ``agreement`` is true only after tau.
    """
    continues = np.zeros(len(agreement), dtype=np.bool_)
    continues[1:] = agreement[1:] & agreement[:-1] & follows[1:]
    begin = np.flatnonzero(agreement & ~continues)
    ends = agreement.copy()
    ends[:-1] &= ~continues[1:]
    longest = np.zeros(len(events.rows), dtype=np.int32)
    np.maximum.at(longest, events.of_row[begin], (np.flatnonzero(ends) - begin + 1).astype(np.int32))
    return longest
