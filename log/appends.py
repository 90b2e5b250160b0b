"""What may be appended: rows of the declared schema, and units whose events are exactly their own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from log.unit_events import whole_unit
from schema.errors import InputError, nearest
from schema.tables import EVENTS, GROUP_KEY, PLAIN, SWRB, UNITS, Table

UNIT_FOOTER = "kvdrift.unit"
_COMPACTED = "compacted-"

_PATH = re.compile(
    r"(?:[^/]+/){4}(?P<swrb>swrb-)?(?P<group>[0-9a-f]{16})-(?P<first>\d+)-(?P<count>\d+)-[0-9a-f]{16}\.parquet"
)
_INT32_END = 2**31

# The tables that each estimator's segments are derived into.
DERIVED = {PLAIN: ("trajectories", "steps"), SWRB: ("branchings", "branching_depths")}


@dataclass(frozen=True)
class Unit:
    """One replicate range of a (study, model, document, action) with its events.

    Attributes:
        record: A ``units`` row without ``path``.
        events: Rows of the EVENTS schema; without ``kind`` and ``weight`` they are coupled pairs.

    """

    record: dict[str, Any]
    events: pa.Table


@dataclass(frozen=True)
class Span:
    """A range of replicates of a group; a group is one (study, model, doc, action) under one estimator.

    Attributes:
        group: Digest of the four names and, unless it is plain, the estimator.

    """

    group: str
    first: int
    count: int
    estimator: str = PLAIN

    @property
    def app_id(self) -> str:
        """The application id of the unit's commit; the version of that transaction is ``count``."""
        return f"{self.group}-{self.first}"

    def overlaps(self, other: Span) -> bool:
        """Tell whether a replicate belongs to both spans."""
        return (
            self.group == other.group
            and self.first < other.first + other.count
            and other.first < self.first + self.count
        )


def span_of_path(path: str) -> Span | None:
    """Return the span that the path of a unit's file names; None for any other path."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    return Span(match["group"], int(match["first"]), int(match["count"]), SWRB if match["swrb"] else PLAIN)


def span_of_record(record: Mapping[str, Any]) -> Span:
    """Return the span of a ``units`` row."""
    estimator, revision = record["estimator"], record["action_revision"]
    names = [record[name] for name in GROUP_KEY]
    later = [value for value, default in ((estimator, PLAIN), (revision, 0)) if value != default]
    return Span(_digest(*names, *later), record["first_replicate"], record["replicates"], estimator)


def compacted_path(estimator: str, units: int, content: str) -> str:
    """Return the path of an events file that holds many units of one estimator: how many, and a digest of content."""
    mark = "" if estimator == PLAIN else f"{estimator}-"
    return f"{_COMPACTED}{mark}{units}-{content}.parquet"


def compacted_name(content: str) -> str:
    """Return the path of a compacted file of a table that is not derived from events: a digest of its content."""
    return f"{_COMPACTED}{content}.parquet"


def is_compacted(path: str) -> bool:
    """Tell whether a path is that of a file that a compaction made of others."""
    return path.startswith(_COMPACTED)


def is_foreign(path: str) -> bool:
    """Tell whether an events file is neither a unit's nor of a compaction of ours: another program has rewritten it."""
    return "/" not in path and not is_compacted(path)


def unit_count(paths: Iterable[str]) -> int:
    """Count the units in events files, none of them foreign; their names say it."""
    return sum(int(path.rsplit("-", 2)[1]) if is_compacted(path) else 1 for path in paths)


def estimator_of(path: str) -> str:
    """Return the estimator of an events file's units, as its name says it."""
    return SWRB if path.rpartition("/")[2].removeprefix(_COMPACTED).startswith(f"{SWRB}-") else PLAIN


def derived_tables(path: str) -> tuple[str, ...]:
    """Return the tables that an events file is derived into: its path tells whether it is plain or of SWRB.

    Raises:
        InputError: The path is not that of an events file.

    """
    if not is_compacted(path) and span_of_path(path) is None:
        raise InputError(f"'{path}' is not the path of an events file")
    return DERIVED[estimator_of(path)]


def unit_path(record: dict[str, Any], content: str) -> str:
    """Return a unit's path relative to the events table: readable names, then digests of names and content.

    Two writers of one unit have files with different measured seconds. Since the content is part of the name, they
    write different files, and a visible file is never written again.
    """
    span = span_of_record(record)
    folder = "/".join(_slug(str(record[name])) for name in GROUP_KEY)
    mark = "" if span.estimator == PLAIN else f"{span.estimator}-"
    return f"{folder}/{mark}{span.group}-{span.first}-{span.count}-{content}.parquet"


def _digest(*parts: object) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of ``parts`` written as a JSON list."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _slug(name: str) -> str:
    """Write a name in characters that file systems and URLs share; Delta hides files that begin with ``.`` or ``_``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:48].lstrip("._-") or "x"


def unit_name(record: Mapping[str, Any]) -> str:
    """Name a unit for an error line."""
    last = record["first_replicate"] + record["replicates"]
    what = "replicates" if record["estimator"] == PLAIN else f"{record['estimator']} replicates"
    names = ", ".join(str(record[name]) for name in GROUP_KEY)
    of_revision = f" of revision {record['action_revision']}" if record["action_revision"] else ""
    return f"({names}) {what} [{record['first_replicate']}, {last}){of_revision}"


def conform(table: Table, rows: pa.Table, *, filled: bool = False) -> pa.Table:
    """Put rows, columns in any order, into the declared schema of a table.

    A column that came after the table may be missing, and gets its default; so do its nulls if they are to be
    ``filled``.

    Raises:
        InputError: A column is missing, unknown, repeated, of another type, or null where it must not be.

    """
    names, declared, defaults = rows.column_names, table.columns, table.defaults
    for name in names:
        if name not in declared:
            raise InputError(f"{table.name}: unknown column '{name}'; {nearest(name, declared)}")
    given = dict(zip(names, rows.columns, strict=True))
    if len(given) < len(names):
        raise InputError(f"{table.name}: two columns have the same name")
    columns = []
    for field in table.schema:
        if field.name not in given and field.name not in defaults:
            raise InputError(f"{table.name}: column '{field.name}' is missing")
        column = given.get(field.name)
        if column is None:
            column = pa.chunked_array([pa.repeat(pa.scalar(defaults[field.name], field.type), rows.num_rows)])
        if column.type != field.type:
            raise InputError(f"{table.name}: column '{field.name}' is {column.type}, must be {field.type}")
        if filled and column.null_count and defaults.get(field.name) is not None:
            column = column.fill_null(pa.scalar(defaults[field.name], field.type))
        columns.append(column)
        if column.null_count and not field.nullable:
            raise InputError(f"{table.name}: column '{field.name}' is null in {column.null_count} row(s)")
    return pa.Table.from_arrays(columns, schema=table.schema)


def conform_unit(unit: Unit) -> tuple[dict[str, Any], pa.Table]:
    """Check a unit and complete its record.

    Returns:
        The record with every ``units`` column but ``path``, where a record without ``estimator`` is that of a plain
        unit; and the events sorted by (replicate, kind with scan before branch, t).

    Raises:
        InputError: The record lacks a field, or the events are not exactly the unit's.

    """
    record = _conform_record(unit.record)
    events = conform(EVENTS, _with_revision(unit.events, record["action_revision"]))
    for name in (*GROUP_KEY, "action_revision"):
        for value in pc.unique(events.column(name)).to_pylist():
            if value != record[name]:
                raise InputError(f"events: {name} is '{value}', must be '{record[name]}' as in the unit")
    return record, whole_unit(record, unit_name(record), events)


def _with_revision(events: pa.Table, revision: int) -> pa.Table:
    """Give events the unit's revision if they have none: what makes events need not know of revisions."""
    if "action_revision" in events.column_names:
        if events["action_revision"].null_count < len(events):
            return events
        events = events.drop_columns("action_revision")
    return events.append_column("action_revision", pa.repeat(pa.scalar(revision, pa.int32()), len(events)))


def with_defaults(record: dict[str, Any]) -> dict[str, Any]:
    """Complete a ``units`` record of an older schema version by the defaults of the columns that it lacks."""
    return UNITS.defaults | record


def _conform_record(record: dict[str, Any]) -> dict[str, Any]:
    for name in record:
        if name not in UNITS.columns or name == "path":
            raise InputError(f"units: unknown field '{name}'; {nearest(name, UNITS.columns)}")
    given = dict.fromkeys(UNITS.columns) | with_defaults(record) | {"path": ""}
    record = {field.name: _value(field, given[field.name]) for field in UNITS.schema if field.name != "path"}
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
    """Return a value as its column holds it."""
    if value is None:
        if not field.nullable:
            raise InputError(f"units: column '{field.name}' is null in 1 row(s)")
        return None
    try:
        return pa.scalar(value, type=field.type).as_py()
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        raise InputError(f"units: {field.name} is {value!r}, must be {field.type}") from None
