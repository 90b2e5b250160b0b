"""The append-only store: Delta Lake tables in one folder or behind one object-store URL.

Truth and what follows from it
    ``events`` is the truth. Each unit is one Parquet file that carries the unit's record in its footer, and becomes
    visible by one commit. ``units`` holds the same records as rows, appended right after; whatever a killed writer left
    out is put back from the footers. So for the moment between the two commits, or until the next writer after a kill,
    ``read("units")`` and ``files("units")`` can lack a unit whose events are visible. They never have one whose events
    are not, if ``events`` is looked at after ``units``. ``Store.units`` reads the footers too and has no gap.

Exactly once
    delta-rs refuses a commit if a commit since its snapshot carries one of its application ids; the store then looks
    again at what is still missing. A unit's commit carries two: one of its (study, model, doc, action), which lets only
    one writer at a time extend it, and one of the unit itself, which stays in the log whatever happens to the files.

Compaction
    The derived tables' files have the relative paths of their events files, and that is how the store knows what is
    derived. So do not compact ``events``, ``trajectories`` or ``steps``: reading and appending still work after it, but
    ``pending_segments`` refuses. The small tables and ``units`` may be compacted at any time.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from schema.appends import (
    UNIT_FOOTER,
    Span,
    Unit,
    conform,
    conform_unit,
    span_of_path,
    span_of_record,
    unit_name,
    unit_path,
)
from schema.delta import Commit, DeltaFolder, StoredFile, encode_parquet, transactions
from schema.errors import InputError, nearest
from schema.tables import TABLES, UNITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from deltalake import DeltaTable

__all__ = ["Store", "StoredFile", "Unit"]

_DERIVED = ("trajectories", "steps")
_KEYED = ("documents", "actions", "studies", "plans", "results", "calibration")
_ROWS_APP_ID = "kvdrift.rows"


class Store:
    """A store's tables: reading at versions, appending once. Safe for writers at once, in threads and processes.

    Nothing is kept in memory between calls: every call sees the tables as they are then. (Processes must be spawned,
    not forked, once a store was used: delta-rs has threads.)
    """

    def __init__(self, location: str | Path) -> None:
        self._folder = DeltaFolder(location)
        self._healed = False

    @classmethod
    def open(cls, location: str | Path) -> Store:
        """An existing store; InputError where there is none, or one of a newer schema version."""
        store = cls(location)
        store.version("events")
        return store

    @classmethod
    def create(cls, location: str | Path) -> Store:
        """The store at ``location``, its tables made where missing; InputError where it cannot be written."""
        store = cls(location)
        for table in sorted(TABLES, key="events".__eq__):  # events last: where it is, all are
            store._folder.create(table)
        store.reconcile()
        return store

    @property
    def location(self) -> str:
        """Absolute path or URL."""
        return self._folder.location

    def version(self, table: str) -> int:
        """The latest version of a table."""
        return int(self._load(table).version())

    def versions(self) -> dict[str, int]:
        """The latest version of every table."""
        return {table: self.version(table) for table in TABLES}

    def paths(self, table: str, version: int | None = None) -> list[str]:
        """Paths of the Parquet files visible at a version, relative to the table's folder, sorted."""
        return self._folder.paths(self._load(table, version))

    def files(self, table: str, version: int | None = None) -> list[str]:
        """The same as absolute paths or URLs: what DuckDB reads."""
        return [f"{self.location}/{table}/{path}" for path in self.paths(table, version)]

    def read(self, table: str, version: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a table at a version, in its declared schema or in ``columns`` of it, page checksums verified.

        InputError for an unknown table, column or version and for a missing or damaged file.
        """
        loaded = self._load(table, version)
        declared = TABLES[table].columns
        for name in columns or ():
            if name not in declared:
                raise InputError(f"{table}: no column '{name}'; {nearest(name, declared)}")
        return self._folder.read(table, loaded, declared if columns is None else columns)

    def units(self, study: str | None = None, model: str | None = None) -> pa.Table:
        """The ``units`` rows of a study and a model (of all by default) whose events are visible: what need not be run.

        Unlike ``read("units")`` this includes units whose row is still to be written.
        """
        units, rows = self._units_and_unprojected()
        units = pa.concat_tables([self._folder.read("units", units, UNITS.columns), rows])
        for name, value in (("study", study), ("model", model)):
            if value is not None:
                units = units.filter(pc.equal(units.column(name), value))
        return units

    def append_units(self, units: Sequence[Unit]) -> int:
        """Make units visible, all by one commit; returns how many were new. Idempotent, safe for writers at once.

        A unit that is already there stays as it is. InputError, before anything is written, for events that are not the
        unit's or not complete, for a replicate range that overlaps a stored one with other bounds, and where writing is
        not permitted; OperationError where writing fails.
        """
        given: dict[Span, tuple[dict[str, Any], pa.Table]] = {}
        for unit in units:
            record, events = conform_unit(unit)
            given.setdefault(span_of_record(record), (record, events))
        if not self._healed:
            self.reconcile()
        written: dict[Span, StoredFile] = {}

        def attempt(events: DeltaTable) -> Commit:
            new = self._missing(events, {span: record for span, (record, _) in given.items()})
            for span in new:
                if span not in written:
                    written[span] = self._put_unit(*given[span])
            groups = ((span.group, span.first + span.count) for span in new)
            return Commit(
                [written[span] for span in new],
                transactions([*groups, *((span.app_id, span.count) for span in new)]),
            )

        self._healed = False  # until the rows are there too
        count = self._folder.commit("events", attempt)
        visible = set(self.paths("events")) if written else set()
        new = [{**given[span][0], "path": file.path} for span, file in written.items() if file.path in visible]
        self._append_projection(new)
        self._healed = True
        return count

    def reconcile(self) -> int:
        """Append the ``units`` rows that a killed writer left out, from the events files' footers; returns how many."""
        _, rows = self._units_and_unprojected()
        count = self._append_projection(rows.to_pylist())
        self._healed = True
        return count

    def append_rows(self, table: str, rows: pa.Table) -> int:
        """Append rows of a small keyed table (one of ``_KEYED``); returns how many were new.

        Rows already there are skipped; nulls in key columns are equal to each other. InputError for a row whose key is
        there with other values, for rows not of the declared schema, and for any other table; then nothing is appended.
        """
        if table not in _KEYED:
            raise InputError(f"rows cannot be appended to '{table}'; {nearest(table, _KEYED)}")
        given = conform(TABLES[table], rows)
        key_columns = TABLES[table].key
        new_rows = 0

        def attempt(loaded: DeltaTable) -> Commit | None:
            nonlocal new_rows
            stored = self._folder.read(table, loaded, TABLES[table].columns)
            known = {_key(row, key_columns): row for row in stored.to_pylist()}
            new = []
            for row in given.to_pylist():
                there = known.setdefault(_key(row, key_columns), row)
                if there is row:
                    new.append(row)
                else:
                    _check_same(table, key_columns, there, row)
            new_rows = len(new)
            if not new:
                return None
            data = encode_parquet(pa.Table.from_pylist(new, schema=given.schema))
            return Commit(
                [self._put(table, f"{_content(data)}.parquet", data, len(new))],
                transactions([(_ROWS_APP_ID, int(loaded.version()) + 1)]),
            )

        self._folder.commit(table, attempt)
        return new_rows

    def pending_segments(self, events_version: int) -> list[str]:
        """Relative paths of events files at ``events_version`` that lack their trajectories or steps file.

        InputError where one of the three tables was compacted: its files no longer say what they were made from.
        """
        derived = [set(self._own_paths(table)) for table in _DERIVED]
        return [path for path in self._own_paths("events", events_version) if not all(path in done for done in derived)]

    def write_parquet(self, table: str, path: str, rows: pa.Table) -> StoredFile:
        """Put a Parquet file in place as a whole; it is not visible before ``commit_files``.

        InputError where ``rows`` are not of the table's declared schema or ``path`` is no events file's.
        """
        self._check_table(table)
        if span_of_path(path) is None:
            raise InputError(f"{table}: '{path}' is not the path of an events file")
        data = encode_parquet(conform(TABLES[table], rows))
        return self._put(table, path, data, rows.num_rows)

    def commit_files(self, table: str, files: Iterable[StoredFile], app_id: str, version: int) -> int:
        """Make files visible by one commit that carries (app_id, version); returns how many were not yet visible.

        Where all are visible there is no commit. ``version`` is that of the events table which the files cover.
        """
        self._check_table(table)
        given = {file.path: file for file in files}

        def attempt(loaded: DeltaTable) -> Commit:
            visible = set(self._folder.paths(loaded))
            covered = max(version, loaded.transaction_version(app_id) or 0)
            return Commit(
                [file for path, file in given.items() if path not in visible], transactions([(app_id, covered)])
            )

        return self._folder.commit(table, attempt)

    def covered_version(self, table: str, app_id: str) -> int | None:
        """The events version that the derived commits of ``app_id`` cover in ``table``; None before the first."""
        found = self._load(table).transaction_version(app_id)
        return None if found is None else int(found)

    def _load(self, table: str, version: int | None = None) -> DeltaTable:
        self._check_table(table)
        return self._folder.load(table, version)

    @staticmethod
    def _check_table(table: str) -> None:
        if table not in TABLES:
            raise InputError(f"no table '{table}'; {nearest(table, TABLES)}")

    def _own_paths(self, table: str, version: int | None = None) -> list[str]:
        paths = self.paths(table, version)
        for path in paths:
            if span_of_path(path) is None:
                raise InputError(f"{self.location}: table '{table}' was compacted ({path}): derive into a new store")
        return paths

    def _missing(self, events: DeltaTable, given: dict[Span, dict[str, Any]]) -> list[Span]:
        """Which of ``given`` are not in ``events``; InputError for a range that overlaps one there or among them."""
        paths = self._folder.paths(events)
        spans = [span_of_path(path) for path in paths]
        stored = {span for span in spans if span is not None}
        if len(stored) < len(paths):  # compacted: the files no longer say, the units rows and the log do
            stored |= {span_of_record(row) for row in self.read("units").to_pylist()}
            stored |= {span for span in given if events.transaction_version(span.app_id) == span.count}
        groups: dict[str, list[Span]] = {}
        for span in [*stored, *given]:
            groups.setdefault(span.group, []).append(span)
        for span, record in given.items():
            for other in groups[span.group]:
                if other != span and other.overlaps(span):
                    raise InputError(
                        f"unit {unit_name(record)} overlaps the replicates "
                        f"[{other.first}, {other.first + other.count}) of the same action that are there or given"
                    )
        return [span for span in given if span not in stored]

    def _put_unit(self, record: dict[str, Any], events: pa.Table) -> StoredFile:
        data = encode_parquet(events, {UNIT_FOOTER: json.dumps(record)})
        return self._put("events", unit_path(record, _content(data)), data, events.num_rows)

    def _put(self, table: str, path: str, data: bytes, rows: int) -> StoredFile:
        self._folder.put(table, path, data)
        return StoredFile(path, len(data), rows)

    def _units_and_unprojected(self) -> tuple[DeltaTable, pa.Table]:
        """The ``units`` table, and the rows for visible events files that it lacks."""
        units = self._load("units")
        events = self._load("events")
        paths = self._folder.paths(events)
        own = [path for path in paths if span_of_path(path) is not None]
        missing: list[str] = []
        # Equal counts mean nothing is missing, without a look into any file, as every unit is one file and one row.
        if len(own) < len(paths) or len(own) != self._folder.count_rows(units):
            known = set(self._folder.read("units", units, ["path"]).column("path").to_pylist())
            missing = [path for path in own if path not in known]
        rows = [{**self._record(path), "path": path} for path in missing]
        return units, pa.Table.from_pylist(rows, schema=UNITS.schema)

    def _record(self, path: str) -> dict[str, Any]:
        text = self._folder.footer("events", path).get(UNIT_FOOTER.encode())
        if text is None:
            raise InputError(f"{self.location}: events/{path} is damaged (no unit record in its footer)")
        record: dict[str, Any] = json.loads(text)
        return record

    def _append_projection(self, records: Sequence[dict[str, Any]]) -> int:
        """Append ``units`` rows that are not there yet; returns how many."""
        new: list[dict[str, Any]] = []

        def attempt(units: DeltaTable) -> Commit | None:
            nonlocal new
            new = [row for row in records if units.transaction_version(span_of_record(row).app_id) is None]
            if not new:
                return None
            data = encode_parquet(pa.Table.from_pylist(new, schema=UNITS.schema))
            spans = [span_of_record(row) for row in new]
            return Commit(
                [self._put("units", f"{_content(data)}.parquet", data, len(new))],
                transactions((span.app_id, span.count) for span in spans),
            )

        if records:
            self._folder.commit("units", attempt)
        return len(new)


def _content(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _key(row: dict[str, Any], key: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(row[name] for name in key)


def _check_same(table: str, key: tuple[str, ...], stored: dict[str, Any], given: dict[str, Any]) -> None:
    for name, value in given.items():
        both_nan = value != value and stored[name] != stored[name]  # noqa: PLR0124
        if stored[name] != value and not both_nan:
            named = ", ".join(f"{column}={given[column]}" for column in key)
            raise InputError(f"{table} ({named}): {name} is {value!r}, but the store has {stored[name]!r}")
