"""A unit: the replicates that a generator commits together; its number, its checks and its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.conform import conform
from kvdrift.log.prompts import KeptEntries
from kvdrift.log.units.whole import whole_unit
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.tables import BRANCH, COUPLED, EVENTS, GROUP_KEY, PLAIN, SCAN, SWRB, UNITS

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
    """Return the group of units that must not share a replicate: all values in ``SPAN`` except the range."""
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

    A record without ``estimator`` becomes that of a plain unit.
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
    said = {"unit": number, "event_rows": events.num_rows, "events_sha256": events_sha256(events)}
    return record | said, events.set_column(at, EVENTS.schema.field("unit"), numbers)


def events_sha256(events: pa.Table) -> str:
    """Return the SHA-256 of a unit's events in the order of ``in_order``, whatever files hold them."""
    digest = hashlib.sha256()
    for field in EVENTS.schema:
        if field.name in {*GROUP_KEY, "action_revision", "unit"}:  # columns of the unit's row in ``units``
            continue
        column = events.column(field.name)
        if pa.types.is_string(field.type):
            values = pc.index_in(column.cast(pa.string()), pa.array(KINDS)).to_numpy().astype("<i4")
        elif pa.types.is_boolean(field.type):
            values = column.to_numpy().astype(np.uint8)
        else:  # null is NaN
            values = column.to_numpy()
            values = values.astype(values.dtype.newbyteorder("<"))
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def counted_events(events: pa.Table) -> dict[str, Any]:
    """Return the columns of ``units`` that follow from a unit's events, which may be in any order."""
    return {"event_rows": events.num_rows, "events_sha256": events_sha256(in_order(events))}


def in_order(events: pa.Table) -> pa.Table:
    """Sort a unit's events as its digest needs them: by replicate, a scan before its branch, and position."""
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
    given = {**_DEFAULTS, **record}
    record = {name: _value(_FIELDS[name], value) if name in record else value for name, value in given.items()}
    if lacking := [name for name in _REQUIRED if record[name] is None]:
        raise InputError(f"units: column '{lacking[0]}' is null in 1 row(s)")
    if record["estimator"] not in DERIVED:
        raise InputError(f"units: estimator is '{record['estimator']}'; {nearest(record['estimator'], DERIVED)}")
    for name, least in (("first_replicate", 0), ("replicates", 1), ("horizon", 1), ("action_revision", 0)):
        if record[name] < least:
            raise InputError(f"units: {name} is {record[name]}, must be at least {least}")
    if record["first_replicate"] + record["replicates"] > _INT32_END:
        raise InputError(f"units: first_replicate {record['first_replicate']} is too large")
    try:
        json.dumps(record, allow_nan=False)
    except ValueError:
        raise InputError(f"units: a field of {unit_name(record)} is not a finite number") from None
    return record


def _value(field: pa.Field, value: Any) -> Any:
    """Return a value in the type of its column."""
    if value is None:
        if field.name in _REQUIRED:
            raise InputError(f"units: column '{field.name}' is null in 1 row(s)")
        return None
    try:
        return pa.scalar(value, type=field.type).as_py()
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        raise InputError(f"units: {field.name} is {value!r}, must be {field.type}") from None
