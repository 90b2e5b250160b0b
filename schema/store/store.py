"""The append-only store: Delta Lake tables in one folder or behind one object-store URL.

Truth and what follows from it
    ``events`` is the truth. Each unit is one Parquet file that carries the unit's record in its footer, and becomes
    visible by one commit. ``units`` holds these records as rows, which are appended right after. If a writer is killed
    in between, the next writer restores the rows from the footers. Until then ``read("units")`` and ``files("units")``
    can lack a unit whose events are visible. They never have a unit whose events are invisible, if ``events`` is read
    after ``units``. ``Store.units`` reads the footers too and lacks nothing.

Exactly once
    delta-rs refuses a commit if a commit since its snapshot carries one of its application ids; the store then looks
    again at what is still missing. A unit's commit carries two: one of its (study, model, doc, action) under one
    estimator, so that only one writer at a time can extend it, and one of the unit itself. Plain and SWRB replicates of
    one action are numbered separately, each from 0: their ranges do not overlap, and their writers do not wait for each
    other. What is there is said by the paths of units' files and, of compacted ones, by the rows of ``units``.

Compaction
    A derived file has the relative path of its events file, and from that the store knows what is derived:
    ``trajectories`` and ``steps`` from the file of a plain unit, ``branchings`` and ``branching_depths`` from the file
    of an SWRB unit, which its name tells. A compaction of ``events`` (``schema.store.compaction``) puts many units of
    one estimator in a file, with their records in its footer, and that file is derived like any other. Until it is, the
    derived files of its units stand for it. Rewritten files are no new data: ``data_version`` stays.

Schema versions
    A store of an older version is read as it is: columns that came since hold their declared defaults, tables that came
    since are empty. ``create`` upgrades it, and so does the first write that needs what it lacks; ``events`` is
    upgraded last, so that its version is that of the whole store. An upgrade changes no existing file and no row.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from schema.errors import InputError, nearest
from schema.location import is_local, join
from schema.store.appends import (
    DERIVED,
    Unit,
    conform,
    derived_tables,
)
from schema.store.checked_files import first_damaged
from schema.store.compaction.derived import check_derived, commit_derived, lacking_tables
from schema.store.compaction.members import UnitEvents, originals
from schema.store.compaction.new_rows import NewRows
from schema.store.compaction.rewriting import Rewriting
from schema.store.delta import DeltaFolder
from schema.store.moment_rows import append_moments, covered_versions, files_since
from schema.store.parquet_files import StoredFile, encode_sealed
from schema.store.projections import UnitCommits, UnitRows, check_units
from schema.store.revisions import current_units
from schema.store.small_tables import KEYED, append_new_rows
from schema.store.snapshot import Snapshot
from schema.tables import TABLES, UNITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow.dataset as pads

__all__ = ["Store", "StoredFile", "Unit"]

ESTIMATED_TABLES = ("results", "calibration")
_DERIVED = tuple(table for tables in DERIVED.values() for table in tables)


class Store:
    """A store's tables: reading at versions, appending once. Safe for writers at once, in threads and processes.

    No rows are kept in memory between calls: every call sees the tables as they are then. Once a store was used,
    processes must be spawned and not forked, since delta-rs has threads.
    """

    def __init__(self, location: str | Path) -> None:
        self._folder = DeltaFolder(location)
        self._units = UnitRows(self._folder)
        self._commits = UnitCommits(self._folder, self._units)
        self._current: set[str] = set()  # tables seen with all declared columns, which they do not lose again

    @classmethod
    def open(cls, location: str | Path) -> Store:
        """Open an existing store.

        Raises:
            InputError: There is no store, or it has a newer schema version.
            DamagedStoreError: Commits are damaged or lost.

        """
        store = cls(location)
        store.version("events")
        store._folder.check_nothing_lost()
        return store

    @classmethod
    def create(cls, location: str | Path) -> Store:
        """Open the store at ``location``; make its missing tables and upgrade the older ones.

        Several processes may do so at once, and may be killed in between.

        Raises:
            InputError: The store cannot be written.
            DamagedStoreError: Commits are damaged or lost.

        """
        store = cls(location)
        store._folder.check_nothing_lost()
        store.make_tables()
        store.reconcile()
        return store

    @property
    def rewriting(self) -> Rewriting:
        """What changes files and no row."""
        return Rewriting(self._folder)

    @property
    def location(self) -> str:
        """Absolute path or URL."""
        return self._folder.location

    @property
    def id(self) -> str | None:
        """What tells this store from all others, wherever it lies."""
        return self._load("events").id

    def version(self, table: str) -> int:
        """Return the latest version of a table."""
        return self._load(table).version

    def versions(self) -> dict[str, int]:
        """Return the latest version of every table."""
        return {table: self.version(table) for table in TABLES}

    def data_version(self, table: str, version: int | None = None) -> int:
        """Return the version, up to the given or the latest one, since which no row has come to a table."""
        return self._load(table, version).data_version

    def paths(self, table: str, version: int | None = None) -> list[str]:
        """Return the paths of the files visible at a version, relative to the table's folder, sorted."""
        return self._load(table, version).paths()

    def unit_paths(self, version: int | None = None) -> set[str]:
        """Return the paths that the units in ``events`` at a version were appended as; reads compacted files' footers.

        Raises:
            InputError: Such a file is missing or damaged.

        """
        return self.unit_paths_in(self.paths("events", version))

    def unit_paths_in(self, paths: Iterable[str]) -> set[str]:
        """Return the paths that the units in some files of ``events`` were appended as.

        Raises:
            InputError: A compacted file is missing or damaged.

        """
        return originals(self._folder, "events", paths)

    def files(self, table: str, version: int | None = None) -> list[str]:
        """Return the files visible at a version as absolute paths or URLs, sorted."""
        return self._absolute(table, self.paths(table, version))

    def stored_files(self, table: str, version: int | None = None) -> list[StoredFile]:
        """Return the files visible at a version with the sizes and rows that the log has, sorted by path."""
        return self._load(table, version).files()

    def read_bytes(self, table: str, path: str) -> bytes:
        """Read the content of one of a table's files.

        Raises:
            InputError: The file is missing or cannot be read.

        """
        self._check_table(table)
        return self._folder.read_bytes(table, path)

    def files_by_missing_columns(self, table: str, version: int | None = None) -> dict[tuple[str, ...], list[str]]:
        """Group the files visible at a version by the declared columns that they lack.

        Returns:
            Absolute paths or URLs by missing columns; files of the present schema version lack none.

        """
        found = self._folder.paths_by_missing_columns(self._load(table, version))
        return {missing: self._absolute(table, paths) for missing, paths in found.items()}

    def dataset(self, table: str, version: int | None = None) -> pads.Dataset:
        """Return a table at a version as a dataset of its declared schema, which reads nothing before it is scanned.

        Page checksums are verified. The columns that files of older schema versions lack are null; the reader fills in
        their declared defaults.

        Raises:
            InputError: The table or the version is unknown, or the table's log is damaged.

        """
        return self._folder.dataset(self._load(table, version))

    def read(self, table: str, version: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows of a table at a version, in all or some columns of its declared schema; verify page checksums.

        Rows of older schema versions hold the declared defaults in the columns that they lack.

        Raises:
            InputError: The table, a column or the version is unknown, or a file is missing or damaged.

        """
        loaded = self._load(table, version)
        declared = TABLES[table].columns
        for name in columns or ():
            if name not in declared:
                raise InputError(f"{table}: no column '{name}'; {nearest(name, declared)}")
        return self._folder.read(loaded, declared if columns is None else columns)

    def new_rows(self, table: str, columns: Sequence[str]) -> NewRows:
        """Return what reads the rows of a table, in some columns, that came since it was asked last."""
        self._check_table(table)
        return NewRows(self._folder, table, columns)

    def unit_events(self) -> UnitEvents:
        """Return a reader of single units' events, as ``events`` is now."""
        return UnitEvents(self._folder)

    def units(
        self,
        study: str | None = None,
        model: str | None = None,
        columns: Sequence[str] = UNITS.columns,
        *,
        coded: bool = False,
    ) -> pa.Table:
        """Return the rows of all current units whose events are visible, also where a row is still to be written.

        Args:
            study: The study of the units; None for all.
            model: The model of the units; None for all.
            columns: The columns to read.
            coded: Whether texts come as dictionaries, one a column, for who counts and compares them.

        """
        actions = self.read("actions")  # first: a revision is declared before its units are there
        stored, rows = self._units.stored_and_missing()
        names = dict.fromkeys((*columns, "study", "model", "action", "action_revision"))
        there = self._folder.read(stored, list(names), coded=coded)
        units = pa.concat_tables([there, rows.select(list(names)).cast(there.schema)]).unify_dictionaries()
        units = current_units(units, actions)
        for name, value in (("study", study), ("model", model)):
            if value is not None:
                units = units.filter(pc.equal(units.column(name), value))
        return units.select(list(columns))

    def append_units(self, units: Sequence[Unit]) -> int:
        """Make units visible, all by one commit. A unit that the store has already stays as it is.

        Returns:
            The number of new units.

        Raises:
            InputError: The events of a unit are not exactly its own, a replicate range overlaps a stored one with
                other bounds, or writing is not permitted. Then nothing is written.
            OperationError: Writing failed.

        """
        self._prepare("units", "events")
        return self._commits.append(units)

    def adopt_units(self, files: Iterable[tuple[StoredFile, dict[str, Any]]]) -> int:
        """Make units' files that are in place visible; leave out those whose replicates are there.

        Args:
            files: Whole files of units, by the path that the store gave them, with the records in their footers.

        Returns:
            The number of new units.

        """
        self._prepare("units", "events")
        return self._commits.adopt(files)

    def reconcile(self) -> int:
        """Append the ``units`` rows that a killed writer left out, from the events files' footers; return how many."""
        return self._commits.reconcile(lambda: self._prepare("units"))

    def append_rows(self, table: str, rows: pa.Table) -> int:
        """Append rows to a small table, one of ``KEYED``. Rows that the table has already are skipped.

        Nulls in key columns count as equal to each other.

        Returns:
            The number of new rows.

        Raises:
            InputError: The table has a row of the same key and other values, the rows are not of the declared schema,
                or the table is not a small one. Then nothing is appended.

        """
        if table not in KEYED:
            raise InputError(f"rows cannot be appended to '{table}'; {nearest(table, KEYED)}")
        given = conform(TABLES[table], rows)
        self._prepare(table)
        return append_new_rows(self._folder, table, given)

    def append_moments(
        self, rows: pa.Table, version: int, definition: str, covered: Mapping[str, int] | None = None
    ) -> bool:
        """Append rows to ``document_moments`` that were computed when it had a version.

        Args:
            rows: Rows of the declared schema.
            version: The version of ``document_moments`` that they follow.
            definition: What computed them, as text.
            covered: Version by table; with these rows the moments of all documents at these versions are there.

        Returns:
            Whether they were appended; False where the table has gone on since.

        Raises:
            InputError: The rows are not of the declared schema.

        """
        given = conform(TABLES["document_moments"], rows)
        self._prepare("document_moments")
        return append_moments(self._folder, given, version, covered, definition)

    def files_since_moments(self, versions: Mapping[str, int], definition: str) -> dict[str, list[str]] | None:
        """Find out what the rows of ``document_moments`` do not cover; reads logs and no data.

        Args:
            versions: Version by table, of all tables.
            definition: What computes moments now; rows of another definition do not count.

        Returns:
            Absolute paths or URLs of later files of ``trajectories`` and ``documents``, by table; None where there are
            no moments, or where some of what they cover is not there.

        """
        found = files_since(self._folder, versions, definition)
        return None if found is None else {table: self._absolute(table, paths) for table, paths in found.items()}

    def moments_cover(self, versions: Mapping[str, int]) -> bool:
        """Tell whether the last commit of moments was made from just these versions."""
        return all(versions[table] == version for table, version in covered_versions(self._folder).items())

    def row_count(self, table: str) -> int:
        """Return the number of rows of a table, which its log has."""
        return self._load(table).count_rows()

    def pending_segments(self, events_version: int, derived_versions: Mapping[str, int] | None = None) -> list[str]:
        """Return the relative paths of the events files that are not derived; ``pending_tables`` says into what."""
        return list(self.pending_tables(events_version, derived_versions))

    def pending_tables(
        self, events_version: int, derived_versions: Mapping[str, int] | None = None
    ) -> dict[str, tuple[str, ...]]:
        """Find the events files that are not derived.

        Args:
            events_version: The version of ``events`` that is looked at.
            derived_versions: Versions of derived tables; of those that are not named, the latest.

        Returns:
            The tables that lack a file's rows, by the file's relative path, sorted.

        Raises:
            InputError: Another program has rewritten one of the tables.
            DamagedStoreError: A table is derived from events that are not there.

        """
        return lacking_tables(self._folder, self._load("events", events_version), derived_versions or {})

    def check_made_from_events(self, versions: Mapping[str, int]) -> None:
        """Check that rows of units and of derived tables are of events that are there; reads logs and no data.

        Args:
            versions: What is looked at, by table; of tables that are not named, the latest.

        Raises:
            DamagedStoreError: Rows have lost their events.

        """
        events = self._load("events", versions.get("events"))
        check_derived(self._folder, events, versions)
        check_units(self._folder, versions.get("units"), events.paths())

    def check_files(self, versions: Mapping[str, int]) -> None:
        """Check that the files of a local store are as they were committed; each file is read once and remembered.

        Args:
            versions: What is looked at, by table.

        Raises:
            DamagedStoreError: A file is missing or damaged.

        """
        if is_local(self.location):
            files = {table: self.stored_files(table, version) for table, version in versions.items()}
            if damage := first_damaged(Path(self.location), files):
                raise self._folder.damaged(damage)

    def write_parquet(self, table: str, path: str, rows: pa.Table) -> StoredFile:
        """Put a derived file in place as a whole; it is not visible before ``commit_files``.

        ``path`` is the relative one of the events file that the rows were derived from.

        Raises:
            InputError: The rows are not of the table's declared schema, or no such events file is derived into it.

        """
        if table not in derived_tables(path):
            raise InputError(f"{table}: '{path}' is derived into {' and '.join(derived_tables(path))}")
        data = encode_sealed(conform(TABLES[table], rows))
        return self._put(table, path, data, rows.num_rows)

    def commit_files(self, table: str, files: Iterable[StoredFile], app_id: str, version: int) -> int:
        """Make files that ``write_parquet`` put in place visible by one commit; there is none if all are visible.

        The commit carries ``version``, that of the events table which the files cover. A file of many units replaces
        the files of these units.

        Returns:
            The number of files that were not visible before.

        """
        self._check_table(table)
        self._prepare(table)
        return commit_derived(self._folder, table, files, {app_id: version})

    def withdraw_files(self, table: str, paths: Iterable[str]) -> int:
        """Take files of a table that can be made again out of view; return how many were visible.

        Raises:
            InputError: The table's rows are made from nothing else.

        """
        if table not in (*_DERIVED, *ESTIMATED_TABLES):
            raise InputError(
                f"rows of '{table}' cannot be made again; {nearest(table, (*_DERIVED, *ESTIMATED_TABLES))}"
            )
        return self._folder.remove(table, set(paths))

    def covered_version(self, table: str, app_id: str) -> int | None:
        """Return the events version that an application's commits cover in a derived table; None before the first."""
        return self._load(table).transaction_version(app_id)

    def make_tables(self) -> None:
        """Make missing tables and upgrade the older ones."""
        for table in sorted(TABLES, key="events".__eq__):  # events last: where it is and current, all are
            self._folder.create(table)
        self._current.update(TABLES)

    def _prepare(self, *tables: str) -> None:
        """Upgrade the store if a table that is about to be written is missing or lacks a declared column."""
        if not all(table in self._current or self._folder.is_current(table) for table in tables):
            self.make_tables()
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

    def _put(self, table: str, path: str, data: bytes, rows: int) -> StoredFile:
        self._folder.put(table, path, data)
        return StoredFile(path, len(data), rows)
