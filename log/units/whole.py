"""Check that a unit has exactly its events: whole coupled pairs, or whole scans with their residual branches.

The store and the derivation rely on these checks: which rows a unit has and, in an SWRB unit, how a scan and its branch
belong together (definitions page, "Residual-branch conditional Monte Carlo"). ``kvdrift.ingestion.checks`` checks
whether the values of a log follow the definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.schema.errors import InputError
from kvdrift.schema.rows import run_begins
from kvdrift.schema.tables import BRANCH, COUPLED, PLAIN, SCAN, SWRB

NOTHING_DRAWN = -1  # the token of a scan's last position where survival reached 0 there

_KINDS = {PLAIN: (COUPLED,), SWRB: (SCAN, BRANCH)}


def whole_unit(record: dict[str, Any], name: str, events: pa.Table) -> pa.Table:
    """Check that rows are exactly a unit's events, and sort them by (replicate, kind with scan before branch, t).

    A plain unit has positions 1..H of each replicate, coupled and without weight. An SWRB unit has for each replicate a
    scan t = 1..s of equal tokens with weights in [0, 1], where s is H unless survival reached 0 there (its token is
    then -1); and, unless all weights are 0, a branch t = J..H without weights, from a J of positive weight, at which
    its tokens differ.
    """
    kinds = _KINDS[record["estimator"]]
    for kind in pc.unique(events.column("kind")).to_pylist():
        if kind not in kinds:
            wanted = " or ".join(f"'{known}'" for known in kinds)
            raise InputError(f"events: kind is '{kind}' in {name}, must be {wanted}")
    return _pairs(record, name, events) if record["estimator"] == PLAIN else _branchings(record, name, events)


def _pairs(record: dict[str, Any], name: str, events: pa.Table) -> pa.Table:
    first, count, horizon = record["first_replicate"], record["replicates"], record["horizon"]
    if events.num_rows != count * horizon:
        raise InputError(
            f"events: {events.num_rows} rows for {name}, must be {count * horizon} "
            f"({count} replicates x {horizon} positions)"
        )
    if events.column("weight").null_count < events.num_rows:
        raise InputError(f"events: weight is given in {name}, must be null: only a scan has weights")
    expected_replicate = np.repeat(np.arange(first, first + count), horizon)
    expected_t = np.tile(np.arange(1, horizon + 1), count)
    replicate, t = (events.column(column).to_numpy() for column in ("replicate", "t"))
    if not (np.array_equal(replicate, expected_replicate) and np.array_equal(t, expected_t)):
        events = events.sort_by([("replicate", "ascending"), ("t", "ascending")])
        replicate, t = (events.column(column).to_numpy() for column in ("replicate", "t"))
    for column, found, expected in (("replicate", replicate, expected_replicate), ("t", t, expected_t)):
        wrong = np.flatnonzero(found != expected)
        if wrong.size:
            at = wrong[0]
            raise InputError(f"events: {column} is {found[at]} where {name} needs {expected[at]} (sorted row {at + 1})")
    return events


def _branchings(record: dict[str, Any], name: str, events: pa.Table) -> pa.Table:
    first, count, horizon = record["first_replicate"], record["replicates"], record["horizon"]
    branch = np.asarray(pc.equal(events.column("kind"), BRANCH))
    replicate, t = (events.column(column).to_numpy() for column in ("replicate", "t"))
    order = np.lexsort((t, branch, replicate))
    if np.any(order[1:] < order[:-1]):
        events, branch, replicate, t = events.take(pa.array(order)), branch[order], replicate[order], t[order]

    def check(wrong: npt.NDArray[np.bool_], say: Callable[[int], str]) -> None:
        if wrong.any():
            row = int(np.argmax(wrong))
            kind = BRANCH if branch[row] else SCAN
            raise InputError(f"events: {say(row)} ({kind} of replicate {replicate[row]}, t = {t[row]}) in {name}")

    # A run is the rows of one kind of one replicate; a replicate's branch follows its scan.
    begins = run_begins(replicate, branch)
    ends = np.roll(begins, -1)
    wanted = np.where(begins, np.where(branch, t, 1), np.roll(t, 1) + 1)
    check((replicate < first) | (replicate >= first + count), lambda _: "the replicate is not one of the unit's")
    check((t < 1) | (t > horizon), lambda row: f"t is {t[row]}, must be within 1..{horizon}")
    check(t != wanted, lambda row: f"t is {t[row]}, must be {wanted[row]}")
    scans = np.flatnonzero(begins & ~branch)
    without = np.setdiff1d(np.arange(first, first + count), replicate[scans])
    if without.size:
        raise InputError(f"events: replicate {without[0]} of {name} has no scan rows")

    x_token, y_token, x_eos, y_eos, weight = (
        events.column(column).to_numpy() for column in ("x_token", "y_token", "x_eos", "y_eos", "weight")
    )
    given = np.asarray(events.column("weight").is_valid())
    stopped = ~branch & (x_token == NOTHING_DRAWN)
    short = ends & (t < horizon) & ~stopped
    check(short, lambda row: f"the rows end at {t[row]}, must go on to {horizon}")
    check(stopped & ~ends, lambda _: f"x_token is {NOTHING_DRAWN}, which only a scan's last row can have")
    check(~branch & (x_token != y_token), lambda row: f"x_token is {x_token[row]} and y_token {y_token[row]} in a scan")
    check(~branch & (x_eos != y_eos), lambda row: f"x_eos is {x_eos[row]} and y_eos {y_eos[row]} in a scan")
    check(~branch & ~given, lambda _: "weight is null")
    check(~branch & ~((weight >= 0) & (weight <= 1)), lambda row: f"weight is {weight[row]:g}, must be within [0, 1]")
    check(branch & given, lambda row: f"weight is {weight[row]:g}, must be null: only a scan has weights")

    possible = ~branch & (weight > 0)  # where the branch can start
    starts = np.flatnonzero(begins & branch)
    branched = np.zeros(len(t), dtype=np.bool_)
    branched[scans[replicate[starts] - first]] = True
    massive = np.zeros(len(t), dtype=np.bool_)
    massive[scans] = np.logical_or.reduceat(possible, scans)
    check(massive & ~branched, lambda _: "the scan has weight above 0 but no branch")
    check(branched & ~massive, lambda _: "the scan has a branch but no weight above 0")
    origin = scans[replicate[starts] - first] + t[starts] - 1  # the scan's row of position J; starts or above if none
    impossible = np.zeros(len(t), dtype=np.bool_)
    impossible[starts] = ~possible[np.minimum(origin, starts)]
    check(impossible, lambda _: "the branch starts where its scan has no weight above 0")
    check(begins & branch & (x_token == y_token), lambda _: "the tokens are equal where the branch starts, must differ")
    return events
