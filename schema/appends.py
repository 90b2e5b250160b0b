"""What may be appended: tables of the declared schema, and units whose events are complete and their own."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schema.delta import digest
from schema.errors import InputError, nearest
from schema.tables import EVENTS, UNITS, Table

UNIT_FOOTER = "kvdrift.unit"

_GROUP = ("study", "model", "doc", "action")
_PATH = re.compile(r"(?:[^/]+/){4}(?P<group>[0-9a-f]{16})-(?P<first>\d+)-(?P<count>\d+)-[0-9a-f]{16}\.parquet")
_INT32_END = 2**31


@dataclass(frozen=True)
class Unit:
    """One (study, model, document, action, replicate range): a ``units`` row without ``path``, and its events."""

    record: dict[str, Any]
    events: pa.Table  # EVENTS schema, sorted by (replicate, t)


@dataclass(frozen=True)
class Span:
    """Which replicates of which group, a group being one (study, model, doc, action)."""

    group: str  # digest of the four names
    first: int
    count: int

    @property
    def app_id(self) -> str:
        """The unit's application id; its transaction's version is ``count``."""
        return f"{self.group}-{self.first}"

    def overlaps(self, other: Span) -> bool:
        """Whether a replicate belongs to both."""
        return (
            self.group == other.group
            and self.first < other.first + other.count
            and other.first < self.first + self.count
        )


def span_of_path(path: str) -> Span | None:
    """The span that an events file's path names; None for a file that the store did not name (a compacted one)."""
    match = _PATH.fullmatch(path)
    return Span(match["group"], int(match["first"]), int(match["count"])) if match else None


def span_of_record(record: dict[str, Any]) -> Span:
    """The span of a ``units`` row."""
    group = digest(*(record[name] for name in _GROUP))
    return Span(group, record["first_replicate"], record["replicates"])


def unit_path(record: dict[str, Any], content: str) -> str:
    """The unit's place below the events table: readable names, then digests of the full names and of the content.

    The content is part of the name so that two writers of one unit, whose files differ in their measured seconds, never
    write one file: a visible file is never touched again.
    """
    span = span_of_record(record)
    folder = "/".join(_slug(str(record[name])) for name in _GROUP)
    return f"{folder}/{span.group}-{span.first}-{span.count}-{content}.parquet"


def _slug(name: str) -> str:
    """``name`` in characters that file systems and URLs share; never hidden, as Delta takes ``.`` and ``_`` for."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:48].lstrip("._-") or "x"


def unit_name(record: dict[str, Any]) -> str:
    """The unit as error lines name it."""
    last = record["first_replicate"] + record["replicates"]
    return f"({', '.join(str(record[name]) for name in _GROUP)}) replicates [{record['first_replicate']}, {last})"


def conform(table: Table, rows: pa.Table) -> pa.Table:
    """``rows`` in the declared schema of ``table``: columns in order, no null where none may be.

    InputError names the table and the field where a column is missing, unknown, of another type, or null.
    """
    for name in rows.column_names:
        if name not in table.columns:
            raise InputError(f"{table.name}: unknown column '{name}'; {nearest(name, table.columns)}")
    if len(set(rows.column_names)) < len(rows.column_names):
        raise InputError(f"{table.name}: a column is given twice")
    for field in table.schema:
        if field.name not in rows.column_names:
            raise InputError(f"{table.name}: column '{field.name}' is missing")
        column = rows.column(field.name)
        if column.type != field.type:
            raise InputError(f"{table.name}: column '{field.name}' is {column.type}, must be {field.type}")
        if column.null_count and not field.nullable:
            raise InputError(f"{table.name}: column '{field.name}' is null in {column.null_count} row(s)")
    return rows.select(table.columns).cast(table.schema)


def conform_unit(unit: Unit) -> tuple[dict[str, Any], pa.Table]:
    """The unit's record with every ``units`` column but ``path``, and its events sorted by (replicate, t).

    InputError names table, field and value where the record lacks a field or the events are not exactly its replicates'
    positions 1..H.
    """
    for name in unit.record:
        if name not in UNITS.columns or name == "path":
            raise InputError(f"units: unknown field '{name}'; {nearest(name, UNITS.columns)}")
    row = conform(UNITS, _row({name: unit.record.get(name) for name in UNITS.columns} | {"path": ""}))
    record: dict[str, Any] = row.drop_columns("path").to_pylist()[0]
    for name, least in (("first_replicate", 0), ("replicates", 1), ("horizon", 1)):
        if record[name] < least:
            raise InputError(f"units: {name} is {record[name]}, must be at least {least}")
    if record["first_replicate"] + record["replicates"] > _INT32_END:
        raise InputError(f"units: first_replicate {record['first_replicate']} is too large")
    try:
        json.dumps(record, allow_nan=False)
    except ValueError:
        raise InputError(f"units: a field of {unit_name(record)} is not a finite number") from None

    events = conform(EVENTS, unit.events)
    for name in _GROUP:
        for value in pc.unique(events.column(name)).to_pylist():
            if value != record[name]:
                raise InputError(f"events: {name} is '{value}', must be '{record[name]}' as in the unit")
    return record, _complete(record, events)


def _row(record: dict[str, Any]) -> pa.Table:
    columns = {}
    for field in UNITS.schema:
        try:
            columns[field.name] = pa.array([record[field.name]], type=field.type)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            raise InputError(f"units: {field.name} is {record[field.name]!r}, must be {field.type}") from None
    return pa.table(columns)


def _complete(record: dict[str, Any], events: pa.Table) -> pa.Table:
    first, count, horizon = record["first_replicate"], record["replicates"], record["horizon"]
    if events.num_rows != count * horizon:
        raise InputError(
            f"events: {events.num_rows} rows for {unit_name(record)}, must be {count * horizon} "
            f"({count} replicates x {horizon} positions)"
        )
    expected_replicate = np.repeat(np.arange(first, first + count), horizon)
    expected_t = np.tile(np.arange(1, horizon + 1), count)
    replicate, t = (events.column(name).to_numpy() for name in ("replicate", "t"))
    if not (np.array_equal(replicate, expected_replicate) and np.array_equal(t, expected_t)):
        events = events.sort_by([("replicate", "ascending"), ("t", "ascending")])
        replicate, t = (events.column(name).to_numpy() for name in ("replicate", "t"))
    for name, found, expected in (("replicate", replicate, expected_replicate), ("t", t, expected_t)):
        wrong = np.flatnonzero(found != expected)
        if wrong.size:
            at = wrong[0]
            raise InputError(
                f"events: {name} is {found[at]} where {unit_name(record)} needs {expected[at]} (sorted row {at + 1})"
            )
    return events
