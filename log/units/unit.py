"""A unit: the replicates that a generator commits together; its number, its checks and its digest.

The store and the derivation rely on these checks: which rows a unit has and, in an SWRB unit, how a scan and its branch
belong together. ``kvdrift.ingestion.checks`` checks whether any coupled pair can have the values of a log.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.delta.parquet_files import conform
from kvdrift.log.prompts import KeptEntries
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.rows import run_begins
from kvdrift.schema.tables import BRANCH, COUPLED, EVENTS, GROUP_KEY, PAIR_COLUMNS, PLAIN, SCAN, SWRB, UNITS

KINDS: Final = (COUPLED, SCAN, BRANCH)
_INT32_END = 2**31

DERIVED: Final = {PLAIN: ("unit_moments", "trajectories", "steps"), SWRB: ("branchings", "branching_depths")}
"""The derived tables of each estimator's units, in the order of their commits; the last table is large."""

DERIVED_TABLES: Final = tuple(table for tables in DERIVED.values() for table in tables)

NUMBERED: Final = ("events", *DERIVED_TABLES)
"""The tables whose rows belong to units; column ``unit`` has the unit of each row."""

SPAN: Final = (*GROUP_KEY, "action_revision", "estimator", "first_replicate", "replicates")
"""The columns of ``units`` from which a unit's number is computed."""

_FIELDS: Final = {field.name: field for field in UNITS.schema}
_DEFAULTS: Final = dict.fromkeys(UNITS.columns) | UNITS.defaults

OF_STORE: Final = ("unit", "event_rows", "events_sha256")
"""The columns of ``units`` that the store fills in, not the generator."""

_REQUIRED: Final = tuple(field.name for field in UNITS.schema if not field.nullable and field.name not in OF_STORE)


@dataclass(frozen=True)
class Unit:
    """One replicate range of a (study, model, document, action) with its events.

    Attributes:
        record: A ``units`` row without ``unit``, ``event_rows`` and ``events_sha256``.
        events: Rows of the EVENTS schema without values of ``unit``, which the store fills in; without ``kind`` and
            ``weight`` they are coupled pairs.
        kept: The prompt entries kept after one or several steps; empty if unknown.
    """

    record: dict[str, Any]
    events: pa.Table
    kept: Sequence[KeptEntries] = ()


def unit_number(record: Mapping[str, Any]) -> int:
    """Return the number of a unit: the first 60 bits of the SHA-256 of its values in ``SPAN``, as a JSON list."""
    return _digest(record, SPAN)


def group_of(record: Mapping[str, Any]) -> str:
    """Return the id of a unit's group: the units with equal values in ``SPAN``, except for the range of replicates.

    Units of one group must not share a replicate.
    """
    return f"kvdrift.units-{_digest(record, SPAN[:-2]):x}"


def _digest(record: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return int(hashlib.sha256(json.dumps([record[name] for name in names]).encode()).hexdigest()[:15], 16)


def unit_name(record: Mapping[str, Any]) -> str:
    """Return a unit's name for an error line."""
    last = record["first_replicate"] + record["replicates"]
    what = "replicates" if record["estimator"] == PLAIN else f"{record['estimator']} replicates"
    names = ", ".join(str(record[name]) for name in GROUP_KEY)
    of_revision = f" of revision {record['action_revision']}" if record["action_revision"] else ""
    return f"({names}) {what} [{record['first_replicate']}, {last}){of_revision}"


def conform_unit(unit: Unit) -> tuple[dict[str, Any], pa.Table]:
    """Check a unit, and return its complete record and its events, sorted as ``in_order`` does, with the unit's number.

    A unit without ``estimator`` in its record is one of coupled pairs.
    """
    record = complete_record(unit.record)
    events = conform(EVENTS, _with_revision(unit.events, record["action_revision"]))
    if events["unit"].null_count < events.num_rows:
        raise InputError("events: column 'unit' has values, must be null: the store fills it in")
    for name in (*GROUP_KEY, "action_revision"):
        for value in pc.unique(events.column(name)).to_pylist():
            if value != record[name]:
                raise InputError(f"events: {name} is '{value}', must be '{record[name]}' as in the unit")
    events = whole_unit(record, unit_name(record), events)
    number, at = unit_number(record), events.schema.get_field_index("unit")
    numbers = pa.repeat(pa.scalar(number, pa.int64()), events.num_rows)
    counted = {"unit": number, "event_rows": events.num_rows, "events_sha256": events_sha256(events)}
    return record | counted, events.set_column(at, EVENTS.schema.field("unit"), numbers)


_NULL_FLAG: Final = 2  # stands for null in the digest of a column of flags


def events_sha256(events: pa.Table) -> str:
    """Return the SHA-256 of a unit's events in the order of ``in_order``, whichever files hold them."""
    digest = hashlib.sha256()
    for field in EVENTS.schema:
        if field.name in {*GROUP_KEY, "action_revision", "unit"}:  # columns of the unit's row in ``units``
            continue
        column = events.column(field.name)
        if pa.types.is_string(field.type):
            values = pc.index_in(column.cast(pa.string()), pa.array(KINDS)).to_numpy().astype("<i4")
        elif pa.types.is_boolean(field.type):  # null is 2
            values = column.cast(pa.uint8()).fill_null(_NULL_FLAG).to_numpy()
        else:  # null is NaN
            values = column.to_numpy()
            values = values.astype(values.dtype.newbyteorder("<"))
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def counted_events(events: pa.Table) -> dict[str, Any]:
    """Return the columns of ``units`` that follow from a unit's events, which may be in any order."""
    return {"event_rows": events.num_rows, "events_sha256": events_sha256(in_order(events))}


def in_order(events: pa.Table) -> pa.Table:
    """Sort a unit's events as its digest needs them: by replicate, then scan before branch, then t."""
    branch = pc.equal(events["kind"].cast(pa.string()), BRANCH)
    order = [(name, "ascending") for name in ("replicate", "of_branch", "t")]
    return events.append_column("of_branch", branch).sort_by(order).drop_columns("of_branch")


def _with_revision(events: pa.Table, revision: int) -> pa.Table:
    """Return events with the unit's revision if they have none, since generators need not know revisions."""
    if "action_revision" in events.column_names:
        if events["action_revision"].null_count < len(events):
            return events
        events = events.drop_columns("action_revision")
    return events.append_column("action_revision", pa.repeat(pa.scalar(revision, pa.int32()), len(events)))


def complete_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Check a unit's row, and return the row with all columns but those that the store fills in."""
    for name, value in record.items():
        if name not in UNITS.columns:
            raise InputError(f"units: unknown field '{name}'; {nearest(name, UNITS.columns)}")
        if name in OF_STORE and value is not None:
            raise InputError(f"units: {name} is {value!r}, must be null: the store fills it in")
    record = {name: _value(_FIELDS[name], value) for name, value in {**_DEFAULTS, **record}.items()}
    if lacking := [name for name in _REQUIRED if record[name] is None]:
        raise InputError(f"units: column '{lacking[0]}' is null in 1 row(s)")
    if record["estimator"] not in DERIVED:
        raise InputError(f"units: estimator is '{record['estimator']}'; {nearest(record['estimator'], DERIVED)}")
    for name, least in (("first_replicate", 0), ("replicates", 1), ("horizon", 1), ("action_revision", 0)):
        if record[name] < least:
            raise InputError(f"units: {name} is {record[name]}, must be at least {least}")
    if record["first_replicate"] + record["replicates"] > _INT32_END:
        first, count = record["first_replicate"], record["replicates"]
        raise InputError(
            f"units: first_replicate {first} + replicates {count} is {first + count}, must be at most {_INT32_END}"
        )
    for name, value in record.items():
        _check_finite(name, value, record)
    return record


def _check_finite(name: str, value: Any, record: Mapping[str, Any]) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise InputError(f"units: {name} of {unit_name(record)} is {value!r}, must be finite") from None


def _value(field: pa.Field, value: Any) -> Any:
    try:
        return pa.scalar(value, type=field.type).as_py()
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        raise InputError(f"units: {field.name} is {value!r}, must be {field.type}") from None


NOTHING_DRAWN = -1  # the token of a scan's last position if survival reached 0 there

_KINDS = {PLAIN: (COUPLED,), SWRB: (SCAN, BRANCH)}


def whole_unit(record: dict[str, Any], name: str, events: pa.Table) -> pa.Table:
    """Check that ``events`` are exactly a unit's, and return them sorted by (replicate, scan before branch, t).

    A plain unit has positions 1..H of each replicate, coupled and without weight. An SWRB unit has a scan of each
    replicate: rows t = 1..H, each with two equal tokens and a weight in [0, 1]. Where survival reaches 0, the scan
    ends, with the token -1. Unless all weights are 0, the replicate also has a branch: rows t = J..H without weights,
    where the scan's weight at J is positive, and the branch's tokens at J differ.
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
    for column, actual, expected in (("replicate", replicate, expected_replicate), ("t", t, expected_t)):
        wrong = np.flatnonzero(actual != expected)
        if wrong.size:
            at = wrong[0]
            raise InputError(
                f"events: {column} is {actual[at]} where {name} needs {expected[at]} (sorted row {at + 1})"
            )
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
    weighted = np.asarray(events.column("weight").is_valid())
    stopped = ~branch & (x_token == NOTHING_DRAWN)
    short = ends & (t < horizon) & ~stopped
    check(short, lambda row: f"the rows end at {t[row]}, must go on to {horizon}")
    check(stopped & ~ends, lambda _: f"x_token is {NOTHING_DRAWN}, which only a scan's last row can have")
    check(
        ~branch & (x_token != y_token),
        lambda row: f"x_token is {x_token[row]} and y_token {y_token[row]}, must be equal in a scan",
    )
    check(
        ~branch & (x_eos != y_eos), lambda row: f"x_eos is {x_eos[row]} and y_eos {y_eos[row]}, must be equal in a scan"
    )
    check(~branch & ~weighted, lambda _: "weight is null, must be given in a scan")
    check(~branch & ~((weight >= 0) & (weight <= 1)), lambda row: f"weight is {weight[row]:g}, must be within [0, 1]")
    check(branch & weighted, lambda row: f"weight is {weight[row]:g}, must be null: only a scan has weights")

    possible = ~branch & (weight > 0)  # where the branch can start
    starts = np.flatnonzero(begins & branch)
    branched = np.zeros(len(t), dtype=np.bool_)
    branched[scans[replicate[starts] - first]] = True
    massive = np.zeros(len(t), dtype=np.bool_)
    massive[scans] = np.logical_or.reduceat(possible, scans)
    check(massive & ~branched, lambda _: "the scan has a weight above 0 but no branch")
    check(branched & ~massive, lambda _: "the scan has a branch but no weight above 0")
    origin = scans[replicate[starts] - first] + t[starts] - 1  # the scan's row of position J; starts or above if none
    impossible = np.zeros(len(t), dtype=np.bool_)
    impossible[starts] = ~possible[np.minimum(origin, starts)]
    check(impossible, lambda _: "the branch starts where its scan has no weight above 0")
    check(begins & branch & (x_token == y_token), lambda _: "the tokens are equal where the branch starts, must differ")
    return events


_VALUES: Final = tuple(name for name in PAIR_COLUMNS if name not in GROUP_KEY)

Columns = Mapping[str, npt.NDArray[Any]]


def pairs_sha256(values: Columns) -> str:
    """Return ``events_sha256`` of coupled pairs that are given as columns: whole replicates in key order."""
    digest = hashlib.sha256()
    for name in _VALUES:
        column = values[name]
        digest.update(np.ascontiguousarray(column.view(np.uint8) if column.dtype == np.bool_ else column).tobytes())
    count = len(values["t"])
    digest.update(bytes(4 * count))  # kinds, of which the first is that of coupled pairs
    digest.update(np.full(count, np.nan).tobytes())  # weights
    for _ in ("kl", "kl_own"):
        digest.update(np.full(count, np.nan, dtype=np.float32).tobytes())
    digest.update(np.full(count, _NULL_FLAG, dtype=np.uint8).tobytes())  # top1
    return digest.hexdigest()


def conform_pairs(records: Sequence[Mapping[str, Any]], values: Columns) -> tuple[list[dict[str, Any]], pa.Table]:
    """Check units of coupled pairs; return their complete records, and their events with the units' numbers.

    Args:
        records: Rows of ``units``, without the columns that the store fills in.
        values: The columns of coupled pairs without those of ``GROUP_KEY``, as arrays [rows]: the units one after the
            other, each as whole replicates in key order.

    Raises:
        InputError: A record is wrong, or the rows are not those of the units.
    """
    whole = [complete_record(record) for record in records]
    count = np.array([record["replicates"] for record in whole], np.int64)
    horizon = np.array([record["horizon"] for record in whole], np.int64)
    ends = np.cumsum(count * horizon)
    starts, rows = ends - count * horizon, int(ends[-1]) if whole else 0
    of_row = np.repeat(np.arange(len(whole)), count * horizon)
    within = np.arange(rows) - starts[of_row]
    first = np.array([record["first_replicate"] for record in whole], np.int64)
    wanted = {"replicate": first[of_row] + within // horizon[of_row], "t": within % horizon[of_row] + 1}
    for name in _VALUES:
        if len(values[name]) != rows:
            raise InputError(f"events: {name} has {len(values[name])} values, the units have {rows} rows")
    for name, expected in wanted.items():
        if (wrong := np.flatnonzero(values[name] != expected)).size:
            at = of_row[wrong[0]]
            raise InputError(
                f"events: {name} is {values[name][wrong[0]]} where "
                f"{unit_name(whole[at])} needs {expected[wrong[0]]} (row {wrong[0] + 1})"
            )
    places = pa.array(of_row)
    columns: dict[str, Any] = {
        name: pa.array([record[name] for record in whole], EVENTS.schema.field(name).type).take(places)
        for name in (*GROUP_KEY, "action_revision")
    }
    columns |= {name: pa.array(values[name], EVENTS.schema.field(name).type) for name in _VALUES}
    for record, start, end in zip(whole, starts.tolist(), ends.tolist(), strict=True):
        unit_values = {name: values[name][start:end] for name in _VALUES}
        record |= {"unit": unit_number(record), "event_rows": end - start, "events_sha256": pairs_sha256(unit_values)}
    columns["unit"] = pa.array([record["unit"] for record in whole], pa.int64()).take(places)
    return whole, conform(EVENTS, pa.table(columns))
