"""What a store answers: its tables at versions, their files and rows, and what is left to derive; it writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from log.checked_files import first_damaged
from log.compaction.counts import Counts, stored_counts
from log.compaction.derived import check_derived, lacking_tables
from log.compaction.members import UnitEvents, originals
from log.compaction.new_rows import NewRows
from log.delta.folder import DeltaFolder
from log.moment_rows import covered_versions, files_since
from log.parquet_files import StoredFile
from log.projections import UnitRows, check_units
from log.revisions import current_documents, current_units
from schema.errors import InputError, nearest
from schema.location import is_local, join
from schema.tables import DOCUMENTS, TABLES, UNITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Self

    import pyarrow.dataset as pads

    from log.delta.snapshot import Snapshot


class ReadableStore:
    """A store's tables at versions. No rows are kept in memory between calls: every call sees them as they are then."""

    def __init__(self, location: str | Path) -> None:
        self._folder = DeltaFolder(location)
        self._units = UnitRows(self._folder)

    @classmethod
    def open(cls, location: str | Path) -> Self:
        """Open an existing store.

        Raises:
            InputError: There is no store, or it has a newer schema version.
            DamagedStoreError: Commits are damaged or lost.

        """
        store = cls(location)
        store.version("events")
        store._folder.check_nothing_lost()
        return store

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

    def documents(self, study: str, model: str, columns: Sequence[str] = DOCUMENTS.columns) -> pa.Table:
        """Return the newest revision of each document of a study and model.

        Args:
            study: The study of the documents.
            model: The model of the documents.
            columns: The columns to read.

        """
        names = dict.fromkeys((*columns, "study", "model", "doc", "document_revision"))
        rows = self.read("documents", columns=list(names))
        own = rows.filter(pc.and_(pc.equal(rows["study"], study), pc.equal(rows["model"], model)))
        return current_documents(own).select(list(columns))

    def documents_revision(self, study: str, model: str) -> int:
        """Return the newest revision that any document of a study and model has, 0 without documents."""
        return pc.max(self.documents(study, model, ["document_revision"])["document_revision"]).as_py() or 0

    def counts(self) -> Counts:
        """Count documents, what units they have and scored pairs; of what was compacted, the footers say it.

        Raises:
            InputError: A file is missing or damaged.

        """
        return stored_counts(self._folder, self._units.stored_and_missing)

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

    def covered_version(self, table: str, app_id: str) -> int | None:
        """Return the events version that an application's commits cover in a derived table; None before the first."""
        return self._load(table).transaction_version(app_id)

    def _absolute(self, table: str, paths: list[str]) -> list[str]:
        return [join(self.location, table, path) for path in paths]

    def _load(self, table: str, version: int | None = None) -> Snapshot:
        self._check_table(table)
        return self._folder.load(table, version)

    @staticmethod
    def _check_table(table: str) -> None:
        if table not in TABLES:
            raise InputError(f"no table '{table}'; {nearest(table, TABLES)}")
