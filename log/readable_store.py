"""Read a store: its tables at versions, files and rows, and the units left to derive. Nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.checked_files import first_damaged
from kvdrift.log.counts import Counts, stored_counts
from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.parquet_files import StoredFile
from kvdrift.log.units.events import NewRows, RowsOfUnits
from kvdrift.log.units.records import as_rows, missing_records, records_in, records_of
from kvdrift.log.units.revisions import current_documents, current_units
from kvdrift.log.units.rows import Pending, UnitCounts, UnitRows
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.location import is_local, join
from kvdrift.schema.rows import Wide
from kvdrift.schema.tables import DOCUMENTS, TABLES, UNITS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any, Self

    import pyarrow.dataset as pads

    from kvdrift.log.delta.snapshot import Snapshot


_Made = TypeVar("_Made")


class ReadableStore:
    """A store's tables at versions. No rows are kept between calls, so every call sees the current rows."""

    def __init__(self, location: str | Path) -> None:
        self._folder = DeltaFolder(location)
        self._units = UnitRows(self._folder)

    @classmethod
    def open(cls, location: str | Path) -> Self:
        """Open an existing store.

        Raises:
            InputError: There is no store, or it has another schema version.
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
    def id(self) -> str:
        """The store's unique id, which stays the same when the store is moved."""
        return self._load("events").id

    def version(self, table: str) -> int:
        """Return the latest version of a table."""
        return self._load(table).version

    def versions(self) -> dict[str, int]:
        """Return the latest version of every table."""
        return {table: self.version(table) for table in TABLES}

    def data_version(self, table: str, version: int | None = None) -> int:
        """Return the version, up to the given or the latest one, since which no row of a table has changed."""
        return self._folder.data_version(self._load(table, version))

    def paths(self, table: str, version: int | None = None) -> list[str]:
        """Return the paths of the files visible at a version, relative to the table's folder, sorted."""
        return self._load(table, version).paths()

    def files(self, table: str, version: int | None = None) -> list[str]:
        """Return the files visible at a version as absolute paths or URLs, sorted."""
        return self._absolute(table, self.paths(table, version))

    def stored_files(self, table: str, version: int | None = None) -> list[StoredFile]:
        """Return the files visible at a version with the sizes and rows that the log has, sorted by path."""
        return self._load(table, version).files()

    def read_bytes(self, table: str, path: str) -> bytes:
        """Read the content of one of a table's files."""
        self._check_table(table)
        return self._folder.read_bytes(table, path)

    def dataset(self, table: str, version: int | None = None) -> pads.Dataset:
        """Return a table at a version as a dataset of its declared schema, which reads nothing before it is scanned.

        Page checksums are verified.
        """
        return self._folder.dataset(self._load(table, version))

    def read(self, table: str, version: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows of a table at a version, in all or some columns of its declared schema; verify page checksums.

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
        """Return a reader that reads, at each call, the rows added to a table since its last call."""
        self._check_table(table)
        return NewRows(self._folder, table, columns)

    def rows_of_units(self, table: str, version: int | None = None) -> RowsOfUnits:
        """Return a reader of the rows that some units have in ``events`` or in a derived table, at a version."""
        return RowsOfUnits(self._folder, self._load(table, version))

    def records_of(
        self, path: str, units: Collection[int], known: Collection[int], version: int | None = None
    ) -> dict[int, dict[str, Any]]:
        """Make rows of ``units``, by number, for units without a row that have events in a file.

        ``known`` are the numbers of the units that have a row.
        """
        return records_of(self._folder, self._load("events", version), path, units, known)

    def copied_records(self, path: str) -> list[dict[str, Any]]:
        """Return the copies of units' rows in an existing file of ``events``; empty if the file has no copies."""
        return records_in(self._folder, path)

    def unit_counts(self, version: int | None = None) -> UnitCounts:
        """Return the numbers of all units at a version of ``units``, and how many rows each has in every table."""
        return self._units.counts(self._load("units", version))

    def unit_rows(self, numbers: Wide, columns: Sequence[str], version: int | None = None) -> pa.Table:
        """Read the rows of ``units`` that have some numbers, in some columns."""
        return self._units.read(self._load("units", version), numbers, columns)

    def of_files(
        self, table: str, columns: Sequence[str], make: Callable[[pa.Table], _Made], version: int | None = None
    ) -> list[_Made]:
        """Return the results of ``make`` for each visible file's rows; results are kept for later calls."""
        return [*self._folder.of_files(self._load(table, version), columns, make).values()]

    def rows_by_unit(self, table: str, path: str, version: int | None = None) -> Mapping[int, int]:
        """Count the rows of each unit in a visible file; -1 counts rows without a unit."""
        return self._units.rows_by_unit(self._load(table, version), path)

    def units(
        self,
        study: str | None = None,
        model: str | None = None,
        columns: Sequence[str] = UNITS.columns,
        *,
        coded: bool = False,
    ) -> pa.Table:
        """Return the rows of all current units with visible events, including rows not written yet.

        With ``coded``, texts are dictionaries, one for each column, which is faster to count and compare.
        """
        actions = self.read("actions")  # first: a revision is declared before its units are stored
        stored, rows = self._stored_and_missing()
        names = dict.fromkeys((*columns, "study", "model", "action", "action_revision"))
        there = self._folder.read(stored, list(names), coded=coded)
        units = pa.concat_tables([there, rows.select(list(names)).cast(there.schema)]).unify_dictionaries()
        units = current_units(units, actions)
        for name, value in (("study", study), ("model", model)):
            if value is not None:
                units = units.filter(pc.equal(units.column(name), value))
        return units.select(list(columns))

    def documents(self, study: str, model: str, columns: Sequence[str] = DOCUMENTS.columns) -> pa.Table:
        """Return the newest revision of each document of a study and model."""
        names = dict.fromkeys((*columns, "study", "model", "doc", "document_revision"))
        rows = self.read("documents", columns=list(names))
        own = rows.filter(pc.and_(pc.equal(rows["study"], study), pc.equal(rows["model"], model)))
        return current_documents(own).select(list(columns))

    def prompts_of(self, study: str, model: str) -> set[tuple[str, int]]:
        """Return the documents of a study and model whose prompts are stored, each with the revision of its answers."""
        names = ("study", "model", "action", "doc", "document_revision")
        rows = self.read("prompts", columns=names).to_pylist()
        return {
            (row["doc"], row["document_revision"])
            for row in rows
            if (row["study"], row["model"], row["action"]) == (study, model, None)
        }

    def documents_revision(self, study: str, model: str) -> int:
        """Return the newest revision that any document of a study and model has, 0 without documents."""
        return pc.max(self.documents(study, model, ["document_revision"])["document_revision"]).as_py() or 0

    def counts(self, actions: pa.Table) -> Counts:
        """Count documents, the units that they have, and scored pairs.

        ``actions`` are all rows of that table, read before, since a revision is declared before its units are stored.
        """
        return stored_counts(self._folder, actions, self._stored_and_missing)

    def _stored_and_missing(self) -> tuple[Snapshot, pa.Table]:
        """Load ``units``, and make the rows that it lacks for visible events."""
        units = self._load("units")
        return units, as_rows(missing_records(self._folder, self._units, units, self._load("events")))

    def row_count(self, table: str) -> int:
        """Return the number of rows of a table, from its log."""
        return self._folder.count_rows(self._load(table))

    def underived(self, versions: Mapping[str, int] | None = None) -> dict[str, Wide]:
        """Return the sorted numbers of the units without rows in each derived table, at the latest or some versions."""
        return self._units.lacking(versions)

    def pending(self) -> Pending:
        """Find the units left to derive; ``underived`` says what is raised."""
        return self._units.pending()

    def all_underived(self, versions: Mapping[str, int] | None = None) -> Wide:
        """Return the numbers of the units that lack rows in any derived table; ``underived`` says more."""
        return np.unique(np.concatenate([*self.underived(versions).values()]))

    def check_made_from_events(self, versions: Mapping[str, int]) -> None:
        """Check that rows of units and derived tables belong to existing events; reads logs and ``units``."""
        self._units.check_whole(versions)

    def check_files(self, versions: Mapping[str, int], within: float = 0.0) -> None:
        """Read the files of a local store at some versions, and check that they are as committed.

        Files of large tables are passed over if they were found whole ``within`` this many seconds.
        """
        if is_local(self.location):
            files = {table: self.stored_files(table, version) for table, version in versions.items()}
            if damage := first_damaged(Path(self.location), files, within):
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
