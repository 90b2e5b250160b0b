"""The append-only store: Delta Lake tables in one folder or behind one object-store URL.

Truth and what follows from it
    ``events`` is the truth. Each unit is one Parquet file that carries the unit's record in its footer, and becomes
    visible by one commit. ``units`` holds the same records as rows, appended right after; whatever a killed writer left
    out is put back from the footers. So for the moment between the two commits, or until the next writer after a kill,
    ``read("units")`` and ``files("units")`` can lack a unit whose events are visible. They never have one whose events
    are not, if ``events`` is looked at after ``units``. ``Store.units`` reads the footers too and has no gap.

Exactly once
    delta-rs refuses a commit if a commit since its snapshot carries one of its application ids; the store then looks
    again at what is still missing. A unit's commit carries two: one of its (study, model, doc, action) under one
    estimator, which lets only one writer at a time extend it, and one of the unit itself, which stays in the log
    whatever happens to the files. Plain and SWRB replicates of one action are counted apart, each from 0: their ranges
    do not meet, and their writers do not wait for each other.

Compaction
    The derived tables' files have the relative paths of their events files, and that is how the store knows what is
    derived: from a plain unit's file ``trajectories`` and ``steps``, from an SWRB unit's, which its name tells,
    ``branchings`` and ``branching_depths``. So do not compact ``events`` or these four: reading and appending still
    work after it, but ``pending_segments`` refuses. The small tables and ``units`` may be compacted at any time.

Schema versions
    A store of an older version is read as it is: columns that came since hold their declared defaults, tables that came
    since are empty. ``create`` brings it to the present version, and so does the first write that needs what it lacks;
    ``events`` last, so that its version speaks for the whole store. No file and no row that was there is touched.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from schema.errors import InputError, nearest
from schema.location import join
from schema.store.appends import (
    DERIVED,
    UNIT_FOOTER,
    Span,
    Unit,
    conform,
    conform_unit,
    derived_tables,
    span_of_path,
    span_of_record,
    unit_name,
    unit_path,
    with_defaults,
)
from schema.store.delta import Commit, DeltaFolder, Snapshot, StoredFile, encode_parquet, transactions
from schema.tables import TABLES, UNITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import pyarrow.dataset as pads

__all__ = ["Store", "StoredFile", "Unit"]

_DERIVED = tuple(table for tables in DERIVED.values() for table in tables)
_KEYED = ("documents", "actions", "studies", "plans", "results", "calibration", "exact_values")
_ROWS_APP_ID = "kvdrift.rows"


class Store:
    """A store's tables: reading at versions, appending once. Safe for writers at once, in threads and processes.

    Nothing is kept in memory between calls: every call sees the tables as they are then. (Processes must be spawned,
    not forked, once a store was used: delta-rs has threads.)
    """

    def __init__(self, location: str | Path) -> None:
        self._folder = DeltaFolder(location)
        self._healed = False
        self._current: set[str] = set()  # tables seen with all declared columns, which they do not lose again

    @classmethod
    def open(cls, location: str | Path) -> Store:
        """An existing store; InputError where there is none, or one of a newer schema version."""
        store = cls(location)
        store.version("events")
        return store

    @classmethod
    def create(cls, location: str | Path) -> Store:
        """The store at ``location``, its tables made where missing and brought to the present schema version.

        Safe when several processes do it at once, and when one is killed in between. InputError where the store cannot
        be written.
        """
        store = cls(location)
        store._make_tables()
        store.reconcile()
        return store

    @property
    def location(self) -> str:
        """Absolute path or URL."""
        return self._folder.location

    def version(self, table: str) -> int:
        """The latest version of a table."""
        return self._load(table).version

    def versions(self) -> dict[str, int]:
        """The latest version of every table."""
        return {table: self.version(table) for table in TABLES}

    def paths(self, table: str, version: int | None = None) -> list[str]:
        """Paths of the Parquet files visible at a version, relative to the table's folder, sorted."""
        return self._load(table, version).paths()

    def files(self, table: str, version: int | None = None) -> list[str]:
        """The same as absolute paths or URLs."""
        return self._absolute(table, self.paths(table, version))

    def stored_files(self, table: str, version: int | None = None) -> list[StoredFile]:
        """The same files with the sizes and rows that they have by the log."""
        return self._load(table, version).files()

    def read_bytes(self, table: str, path: str) -> bytes:
        """The content of one of a table's files; InputError where it is missing or cannot be read."""
        self._check_table(table)
        return self._folder.read_bytes(table, path)

    def files_by_missing_columns(self, table: str, version: int | None = None) -> dict[tuple[str, ...], list[str]]:
        """The same, by the declared columns that the files lack: those written by older schema versions."""
        found = self._folder.paths_by_missing_columns(self._load(table, version))
        return {missing: self._absolute(table, paths) for missing, paths in found.items()}

    def dataset(self, table: str, version: int | None = None) -> pads.Dataset:
        """Return a table at a version as a dataset of its declared schema, which reads nothing before it is scanned.

        Page checksums are verified. Null stands in the columns that files of older schema versions lack; their declared
        defaults are left to the reader.

        Raises:
            InputError: the table or the version is unknown, or the table's log is damaged.

        """
        return self._folder.dataset(self._load(table, version))

    def read(self, table: str, version: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a table at a version, in its declared schema or in ``columns`` of it, page checksums verified.

        Rows of older schema versions hold the declared defaults in the columns that they lack.
        InputError for an unknown table, column or version and for a missing or damaged file.
        """
        loaded = self._load(table, version)
        declared = TABLES[table].columns
        for name in columns or ():
            if name not in declared:
                raise InputError(f"{table}: no column '{name}'; {nearest(name, declared)}")
        return self._folder.read(loaded, declared if columns is None else columns)

    def units(self, study: str | None = None, model: str | None = None) -> pa.Table:
        """The ``units`` rows of a study and a model (of all by default) whose events are visible: what need not be run.

        Those of both estimators; each counts its replicates from 0.

        Unlike ``read("units")`` this includes units whose row is still to be written.
        """
        stored, rows = self._units_and_unprojected()
        units = pa.concat_tables([self._folder.read(stored, UNITS.columns), rows])
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
        self._prepare("units", "events")
        if not self._healed:
            self.reconcile()
        written: dict[Span, StoredFile] = {}

        def attempt(events: Snapshot) -> Commit:
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
        self._prepare(table)

        def attempt(loaded: Snapshot) -> Commit | None:
            nonlocal new_rows
            stored = self._folder.read(loaded, TABLES[table].columns)
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
                [self._put(table, f"{content_digest(data)}.parquet", data, len(new))],
                transactions([(_ROWS_APP_ID, loaded.version + 1)]),
            )

        self._folder.commit(table, attempt)
        return new_rows

    def pending_segments(self, events_version: int, derived_versions: Mapping[str, int] | None = None) -> list[str]:
        """Return the events files that lack a file of one of their ``derived_tables``.

        Args:
            events_version: the version of ``events`` that is looked at.
            derived_versions: versions of the derived tables by name, the latest ones by default.

        Returns:
            Relative paths of events files.

        Raises:
            InputError: one of the tables was compacted; its files no longer say what they were made from.

        """
        versions = derived_versions or {}
        done = {table: set(self._own_paths(table, versions.get(table))) for table in _DERIVED}
        paths = self._own_paths("events", events_version)
        return [path for path in paths if not all(path in done[table] for table in derived_tables(path))]

    def write_parquet(self, table: str, path: str, rows: pa.Table) -> StoredFile:
        """Put a Parquet file in place as a whole; it is not visible before ``commit_files``.

        InputError where ``rows`` are not of the table's declared schema, or ``path`` is not that of an events file
        which is derived into ``table``.
        """
        if table not in derived_tables(path):
            raise InputError(f"{table}: '{path}' is derived into {' and '.join(derived_tables(path))}")
        data = encode_parquet(conform(TABLES[table], rows))
        return self._put(table, path, data, rows.num_rows)

    def commit_files(self, table: str, files: Iterable[StoredFile], app_id: str, version: int) -> int:
        """Make files visible by one commit that carries (app_id, version); returns how many were not yet visible.

        Where all are visible there is no commit. ``version`` is that of the events table which the files cover.
        """
        self._check_table(table)
        given = {file.path: file for file in files}
        self._prepare(table)

        def attempt(loaded: Snapshot) -> Commit:
            visible = set(loaded.paths())
            covered = max(version, loaded.transaction_version(app_id) or 0)
            return Commit(
                [file for path, file in given.items() if path not in visible], transactions([(app_id, covered)])
            )

        return self._folder.commit(table, attempt)

    def covered_version(self, table: str, app_id: str) -> int | None:
        """The events version that the derived commits of ``app_id`` cover in ``table``; None before the first."""
        return self._load(table).transaction_version(app_id)

    def _make_tables(self) -> None:
        for table in sorted(TABLES, key="events".__eq__):  # events last: where it is and current, all are
            self._folder.create(table)
        self._current.update(TABLES)

    def _prepare(self, *tables: str) -> None:
        """Upgrade the store if a table that is about to be written is not there or lacks a declared column."""
        if not all(table in self._current or self._folder.is_current(table) for table in tables):
            self._make_tables()
        self._current.update(tables)

    def _absolute(self, table: str, paths: list[str]) -> list[str]:
        return [join(self.location, table, path) for path in paths]

    def _load(self, table: str, version: int | None = None) -> Snapshot:
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

    def _missing(self, events: Snapshot, given: dict[Span, dict[str, Any]]) -> list[Span]:
        """Which of ``given`` are not in ``events``; InputError for a range that overlaps one there or among them."""
        paths = events.paths()
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
        return self._put("events", unit_path(record, content_digest(data)), data, events.num_rows)

    def _put(self, table: str, path: str, data: bytes, rows: int) -> StoredFile:
        self._folder.put(table, path, data)
        return StoredFile(path, len(data), rows)

    def _units_and_unprojected(self) -> tuple[Snapshot, pa.Table]:
        """The ``units`` table, and the rows for visible events files that it lacks."""
        units = self._load("units")
        paths = self.paths("events")
        own = [path for path in paths if span_of_path(path) is not None]
        missing: list[str] = []
        # Equal counts mean nothing is missing, without a look into any file, as every unit is one file and one row.
        if len(own) < len(paths) or len(own) != units.count_rows():
            known = set(self._folder.read(units, ["path"]).column("path").to_pylist())
            missing = [path for path in own if path not in known]
        rows = [{**self._record(path), "path": path} for path in missing]
        return units, pa.Table.from_pylist(rows, schema=UNITS.schema)

    def _record(self, path: str) -> dict[str, Any]:
        text = self._folder.footer("events", path).get(UNIT_FOOTER.encode())
        if text is None:
            raise InputError(f"{self.location}: events/{path} is damaged (no unit record in its footer)")
        return with_defaults(json.loads(text))

    def _append_projection(self, records: Sequence[dict[str, Any]]) -> int:
        """Append ``units`` rows that are not there yet; returns how many."""
        new: list[dict[str, Any]] = []

        def attempt(units: Snapshot) -> Commit | None:
            nonlocal new
            new = [row for row in records if units.transaction_version(span_of_record(row).app_id) is None]
            if not new:
                return None
            data = encode_parquet(pa.Table.from_pylist(new, schema=UNITS.schema))
            spans = [span_of_record(row) for row in new]
            return Commit(
                [self._put("units", f"{content_digest(data)}.parquet", data, len(new))],
                transactions((span.app_id, span.count) for span in spans),
            )

        if records:
            self._prepare("units")
            self._folder.commit("units", attempt)
        return len(new)


def content_digest(data: bytes) -> str:
    """What the name of every file but the derived ones ends in: 16 hexadecimal digits of its content's SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def _key(row: dict[str, Any], key: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(row[name] for name in key)


def _check_same(table: str, key: tuple[str, ...], stored: dict[str, Any], given: dict[str, Any]) -> None:
    for name, value in given.items():
        both_nan = value != value and stored[name] != stored[name]  # noqa: PLR0124
        if stored[name] != value and not both_nan:
            named = ", ".join(f"{column}={given[column]}" for column in key)
            raise InputError(f"{table} ({named}): {name} is {value!r}, but the store has {stored[name]!r}")
