"""Scans and residual branches of one segment -> branchings and branching depths, as pure functions of Arrow tables.

This module knows nothing of stores, files or pipelines. ``kvdrift.generator.coupling.residual_branching`` explains
w_s, M and J, and the columns of ``branching_depths`` explain Z_L and W_L. Every pass is one array operation over all
rows or all replicates of the segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.units.unit import NOTHING_DRAWN
from kvdrift.schema.errors import InputError
from kvdrift.schema.rows import Flags, Ints, Reals, Wide, run_begins
from kvdrift.schema.tables import BRANCH, BRANCHING_DEPTHS, BRANCHINGS, EVENTS, SCAN
from kvdrift.transforms.event_columns import SortedEvents, check_columns, check_kinds, table_of, with_nulls


@dataclass(frozen=True)
class DerivedBranchings:
    """The derived rows of one segment: ``branchings`` and ``depths`` in their schemas, sorted by key."""

    branchings: pa.Table
    depths: pa.Table


def derive_branchings(events: pa.Table) -> DerivedBranchings:
    """Derive branchings and their depths from the events of any number of whole SWRB replicates.

    Paper: section "Measuring Occurrence and Subsequent Occupation", equations branch-weights and depth-measurement.

    Args:
        events: N rows with the columns of EVENTS, in any order, of the kinds "scan" and "branch"; names may be plain or
            dictionary-encoded strings. All rows of a (study, model, doc, action, replicate) must be present.

    Returns:
        One branchings row for each replicate and one depth row for each of its depths 1..H, both exactly of their Arrow
        schemas and sorted by key. Weights are summed in order of s, in float64. H is the last position present. If
        positions are missing or repeated, ``complete`` is false and the other columns describe the rows present.
    """
    check_columns(events, [field for field in EVENTS.schema if field.name not in {"action_revision", "unit"}])
    check_kinds(events.column("kind"), (SCAN, BRANCH))
    replicates = _Replicates.of(_sorted_events(events))
    return DerivedBranchings(_branchings(replicates), _depths(replicates))


def _sorted_events(events: pa.Table) -> SortedEvents:
    """Sort a segment's events: each replicate's scan before its branch, by t. ``weight`` is 0 in a branch."""
    values = {name: events.column(name).to_numpy() for name in ("replicate", "t", "x_token", "y_token")}
    of_branch = pc.equal(events.column("kind").cast(pa.string()), BRANCH).to_numpy()
    values |= {"of_branch": of_branch, "weight": _weights(events.column("weight"), of_branch)}
    # Ascending in (replicate, scan before branch, t), in 32, 1 and 31 bits.
    within = (values["replicate"].astype(np.int64) << 32) + (of_branch.astype(np.int64) << 31) + values["t"]
    return SortedEvents.of(events, values, within, ("weight", "y_token", "x_token"))


def _weights(column: pa.ChunkedArray, of_branch: Flags) -> Reals:
    """Return w_t of scan rows and 0 in branches, [N]; every scan row must have a weight in [0, 1]."""
    weight: Reals = np.where(of_branch, 0.0, column.to_numpy())  # null is NaN
    outside = ~((weight >= 0) & (weight <= 1))
    if outside.any():
        raise InputError(f"events of kind '{SCAN}' have weight {weight[outside][0]:g}, must be within [0, 1]")
    return weight


@dataclass(frozen=True)
class _Replicates:
    """The segment's N events and R replicates; ``mass_through`` has a column for each position up to max H."""

    events: SortedEvents
    t: Ints  # [N]
    of_branch: Flags  # [N] false: of the scan
    mismatch: Flags  # [N] I_t of a branch, false in scans
    scan_rows: Wide  # [R]
    branch_rows: Wide  # [R]
    horizon: Ints  # [R] H, the last position present
    scanned: Ints  # [R] last position of the scan, 0 if it has none
    branch: Ints  # [R] J, 0 if there is no branch
    mass_through: Reals  # [R, max H] sum of w_s over s <= column + 1

    @classmethod
    def of(cls, events: SortedEvents) -> _Replicates:
        t, of_branch = events.values["t"], events.values["of_branch"]
        scan_rows, branch_rows = events.count(~of_branch), events.count(of_branch)
        branch_row = events.first_row + scan_rows  # where the branch begins, if there is one
        horizon = np.maximum.reduceat(t, events.first_row) if len(events.rows) else t
        weights = np.zeros((len(events.rows), int(horizon.max(initial=0))))
        np.add.at(weights, (events.of_row, t - 1), events.values["weight"])
        padded = np.append(t, np.int32(0))  # the branch of the last replicate would begin after the last row
        return cls(
            events=events,
            t=t,
            of_branch=of_branch,
            mismatch=of_branch & np.not_equal(events.values["x_token"], events.values["y_token"]),
            scan_rows=scan_rows,
            branch_rows=branch_rows,
            horizon=horizon,
            scanned=np.where(scan_rows > 0, padded[branch_row - 1], np.int32(0)),
            branch=np.where(branch_rows > 0, padded[branch_row], np.int32(0)),
            mass_through=np.cumsum(weights, axis=1),
        )

    @property
    def mass(self) -> Reals:
        """The sum M of the weights of each replicate's scan, [R]."""
        return self.mass_through[:, -1] if len(self.horizon) else np.zeros(0)


def _branchings(replicates: _Replicates) -> pa.Table:
    no_branch = replicates.branch_rows == 0
    columns: dict[str, Any] = {
        **replicates.events.keys(replicates.events.first_row),
        "horizon": replicates.horizon,
        "complete": _complete(replicates),
        "scanned": replicates.scanned,
        "mass": replicates.mass,
        "branch": with_nulls(replicates.branch, null=no_branch),
        "mismatches": replicates.events.count(replicates.mismatch),
    }
    return table_of(columns, BRANCHINGS.schema)


def _complete(replicates: _Replicates) -> Flags:
    """Tell which replicates are whole, [R].

    A whole scan has the positions 1..H, or ends at the position at which survival reached 0. A whole branch has the
    positions J..H, and exists exactly if M > 0.
    """
    events, t, of_branch = replicates.events, replicates.t, replicates.of_branch
    begins = run_begins(events.of_row, of_branch)  # [N] first row of a scan or of a branch
    follows = begins & (of_branch | (t == 1))  # a branch begins anywhere
    follows[1:] |= ~begins[1:] & (np.diff(t) == 1)
    contiguous = events.count(follows) == events.rows

    ended = (events.values["x_token"] == NOTHING_DRAWN) & ~of_branch & (t == replicates.scanned[events.of_row])
    whole_scan = (replicates.scanned == replicates.horizon) | (events.count(ended) > 0)
    branch_last = replicates.branch + replicates.branch_rows - 1  # given that it is contiguous
    has_branch = replicates.branch_rows > 0
    whole_branch = (has_branch == (replicates.mass > 0)) & (~has_branch | (branch_last == replicates.horizon))
    whole: Flags = contiguous & (replicates.scan_rows > 0) & whole_scan & whole_branch
    return whole


def _depths(replicates: _Replicates) -> pa.Table:
    horizon = replicates.horizon
    of_depth = np.repeat(np.arange(len(horizon)), horizon)  # [D] replicate of each depth row, D = sum of H
    depth = np.arange(len(of_depth)) - np.repeat(np.cumsum(horizon) - horizon, horizon) + 1

    of_mismatch = replicates.events.of_row[replicates.mismatch]
    lag = replicates.t[replicates.mismatch] - replicates.branch[of_mismatch]
    inside = np.zeros_like(replicates.mass_through, dtype=np.int64)  # mismatches at each lag, then within it
    np.add.at(inside, (of_mismatch, lag), 1)
    np.cumsum(inside, axis=1, out=inside)

    # sum_s w_s (H - s - L + 1)_+ = sum_{k <= H - L} sum_{s <= k} w_s: a running sum of a running sum.
    beyond = np.pad(np.cumsum(replicates.mass_through, axis=1), ((0, 0), (1, 0)))

    h = horizon[of_depth]
    columns: dict[str, Any] = {
        **replicates.events.keys(replicates.events.first_row[of_depth]),
        "depth": depth.astype(np.int32),
        "observed": replicates.mass[of_depth] * inside[of_depth, depth - 1] / h,
        "capacity": beyond[of_depth, h - depth] / h,
    }
    return table_of(columns, BRANCHING_DEPTHS.schema)
