"""Scans and residual branches of one segment -> branchings and branching depths, as pure functions of Arrow tables.

Knows nothing of stores, files or pipelines. Symbols are those of the definitions page, "Residual-branch conditional
Monte Carlo": w_s, M, J, Z_L, W_L, H. Every pass is one array operation over all rows or all replicates of the segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schema.errors import InputError
from schema.runs import run_begins
from schema.store.unit_events import NOTHING_DRAWN
from schema.tables import BRANCH, BRANCHING_DEPTHS, BRANCHINGS, EVENTS, SCAN
from transforms.event_columns import (
    NAMES,
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

Reals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DerivedBranchings:
    """What one segment becomes: ``branchings`` (BRANCHINGS schema) and ``depths`` (BRANCHING_DEPTHS), sorted by key."""

    branchings: pa.Table
    depths: pa.Table


def derive_branchings(events: pa.Table) -> DerivedBranchings:
    """Derive branchings and their depths from the events of any number of whole SWRB replicates.

    Section "Measuring Occurrence and Subsequent Occupation", equations branch-weights and depth-measurement.

    Args:
        events: N rows with the columns of EVENTS, in any order, of the kinds "scan" and "branch"; names may be plain or
            dictionary-encoded strings. All rows of a (study, model, doc, action, replicate) must be here.

    Returns:
        One branchings row per replicate and one depth row for each of its depths 1..H, both exactly of their Arrow
        schemas and sorted by key. Weights are summed in order of s, in float64. H is the last position present. Where
        positions are missing or repeated, ``complete`` is false and the other columns describe the rows present.

    Raises:
        InputError: a column is missing, has another type or nulls where none may be, an event is of another kind, a
            position is outside 1..H, or a scan's weight is no probability.

    """
    check_columns(events, list(EVENTS.schema))
    check_kinds(events.column("kind"), (SCAN, BRANCH))
    rows = _sorted_rows(events)
    replicates = _Replicates.of(rows)
    return DerivedBranchings(_branchings(rows, replicates), _depths(rows, replicates))


@dataclass(frozen=True)
class _Rows:
    """The segment's N events, each replicate's scan before its branch, by t; all arrays are [N] but ``names``."""

    names: dict[str, pa.DictionaryArray]
    group: Wide  # equal where all four names are equal, ascending in their order
    replicate: Ints
    of_branch: Flags  # false: of the scan
    t: Ints
    x_token: Ints
    y_token: Ints
    weight: Reals  # w_t, 0 in a branch

    def mismatch(self) -> Flags:
        """Return I_t of a branch, false in scans, [N]."""
        return self.of_branch & np.not_equal(self.x_token, self.y_token)


@dataclass(frozen=True)
class _Replicates:
    """The segment's R replicates; ``horizon`` is H, and the matrices have a column for each position up to max H."""

    first_row: Wide  # [R]
    of_row: Ints  # [N] index of each row's replicate
    scan_rows: Wide  # [R]
    branch_rows: Wide  # [R]
    horizon: Ints  # [R] last position present
    scanned: Ints  # [R] last position of the scan, 0 where it has none
    branch: Ints  # [R] J, 0 where there is no branch
    mass_through: Reals  # [R, max H] sum of w_s over s <= column + 1

    @classmethod
    def of(cls, rows: _Rows) -> _Replicates:
        first_row = np.flatnonzero(run_begins(rows.group, rows.replicate))
        found = len(first_row)
        of_row = np.repeat(np.arange(found, dtype=np.int32), np.diff(first_row, append=len(rows.t)))
        scan_rows, branch_rows = (
            np.bincount(of_row[own], minlength=found) for own in (~rows.of_branch, rows.of_branch)
        )
        branch_row = first_row + scan_rows  # where the branch begins, if it does
        horizon = np.maximum.reduceat(rows.t, first_row) if found else rows.t
        weights = np.zeros((found, int(horizon.max(initial=0))))
        np.add.at(weights, (of_row, rows.t - 1), rows.weight)
        padded = np.append(rows.t, np.int32(0))  # the branch of the last replicate would begin after the last row
        return cls(
            first_row=first_row,
            of_row=of_row,
            scan_rows=scan_rows,
            branch_rows=branch_rows,
            horizon=horizon,
            scanned=np.where(scan_rows > 0, padded[branch_row - 1], np.int32(0)),
            branch=np.where(branch_rows > 0, padded[branch_row], np.int32(0)),
            mass_through=np.cumsum(weights, axis=1),
        )

    @property
    def mass(self) -> Reals:
        """M, [R]."""
        return self.mass_through[:, -1] if len(self.horizon) else np.zeros(0)

    def count(self, flags: Flags) -> Wide:
        """[N] -> [R]: how many rows of each replicate have the flag."""
        return np.bincount(self.of_row[flags], minlength=len(self.horizon))


def _branchings(rows: _Rows, replicates: _Replicates) -> pa.Table:
    no_branch = replicates.branch_rows == 0
    columns: dict[str, Any] = {
        **_keys(rows, replicates.first_row),
        "horizon": replicates.horizon,
        "complete": _complete(rows, replicates),
        "scanned": replicates.scanned,
        "mass": replicates.mass,
        "branch": nullable(replicates.branch, null=no_branch),
        "mismatches": replicates.count(rows.mismatch()),
    }
    return table_of(columns, BRANCHINGS.schema)


def _complete(rows: _Rows, replicates: _Replicates) -> Flags:
    """[R] the scan is 1..H or ends where survival reached 0; the branch is J..H, and is there exactly if M > 0."""
    begins = run_begins(replicates.of_row, rows.of_branch)  # [N] first row of a scan or of a branch
    follows = begins & (rows.of_branch | (rows.t == 1))  # a branch begins anywhere
    follows[1:] |= ~begins[1:] & (np.diff(rows.t) == 1)
    contiguous = replicates.count(follows) == replicates.scan_rows + replicates.branch_rows

    ended = (rows.x_token == NOTHING_DRAWN) & ~rows.of_branch & (rows.t == replicates.scanned[replicates.of_row])
    whole_scan = (replicates.scanned == replicates.horizon) | (replicates.count(ended) > 0)
    branch_last = replicates.branch + replicates.branch_rows - 1  # given that it is contiguous
    has_branch = replicates.branch_rows > 0
    whole_branch = (has_branch == (replicates.mass > 0)) & (~has_branch | (branch_last == replicates.horizon))
    whole: Flags = contiguous & (replicates.scan_rows > 0) & whole_scan & whole_branch
    return whole


def _depths(rows: _Rows, replicates: _Replicates) -> pa.Table:
    horizon = replicates.horizon
    of_depth = np.repeat(np.arange(len(horizon)), horizon)  # [D] replicate of each depth row, D = sum of H
    depth = np.arange(len(of_depth)) - np.repeat(np.cumsum(horizon) - horizon, horizon) + 1

    mismatch = rows.mismatch()
    of_mismatch = replicates.of_row[mismatch]
    lag = rows.t[mismatch] - replicates.branch[of_mismatch]
    inside = np.zeros_like(replicates.mass_through, dtype=np.int64)  # mismatches at each lag, then within it
    np.add.at(inside, (of_mismatch, lag), 1)
    np.cumsum(inside, axis=1, out=inside)

    # sum_s w_s (H - s - L + 1)_+ = sum_{k <= H - L} sum_{s <= k} w_s: a running sum of a running sum.
    beyond = np.pad(np.cumsum(replicates.mass_through, axis=1), ((0, 0), (1, 0)))

    h = horizon[of_depth]
    columns: dict[str, Any] = {
        **_keys(rows, replicates.first_row[of_depth]),
        "depth": depth.astype(np.int32),
        "observed": replicates.mass[of_depth] * inside[of_depth, depth - 1] / h,
        "capacity": beyond[of_depth, h - depth] / h,
    }
    return table_of(columns, BRANCHING_DEPTHS.schema)


def _keys(rows: _Rows, chosen: Wide) -> dict[str, Any]:
    return {name: codes.take(pa.array(chosen)) for name, codes in rows.names.items()} | {
        "replicate": rows.replicate[chosen]
    }


def _sorted_rows(events: pa.Table) -> _Rows:
    names = {name: dictionary(events.column(name)) for name in NAMES}
    group = group_of_names(list(names.values()), events.num_rows)
    values = {name: events.column(name).to_numpy() for name in ("replicate", "t", "x_token", "y_token")}
    of_branch = pc.equal(events.column("kind").cast(pa.string()), BRANCH).to_numpy()
    values |= {"of_branch": of_branch, "weight": _weights(events.column("weight"), of_branch)}
    # Ascending in (replicate, scan before branch, t), in 32, 1 and 31 bits.
    key = (values["replicate"].astype(np.int64) << 32) + (of_branch.astype(np.int64) << 31) + values["t"]
    order = key_order(group, key, [values[name] for name in ("weight", "y_token", "x_token")])
    if order is not None:
        names = {name: codes.take(pa.array(order)) for name, codes in names.items()}
        group = group[order]
        values = {name: column[order] for name, column in values.items()}
    return _Rows(names, group, **values)


def _weights(column: pa.ChunkedArray, of_branch: Flags) -> Reals:
    """[N] w_t of scan rows, 0 in branches."""
    weight: Reals = np.where(of_branch, 0.0, column.to_numpy())  # null is NaN
    outside = ~((weight >= 0) & (weight <= 1))
    if outside.any():
        raise InputError(f"events of kind '{SCAN}' have weight {weight[outside][0]:g}, must be within [0, 1]")
    return weight
