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
    of an SWRB unit, which its name tells. A compaction of ``events`` (``log.compaction``) puts many units of
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

from log.appends import DERIVED, Unit, conform, derived_tables
from log.compaction.derived import commit_derived
from log.compaction.rewriting import Rewriting
from log.moment_rows import append_moments
from log.parquet_files import StoredFile, encode_sealed
from log.projections import UnitCommits
from log.readable_store import ReadableStore
from log.small_tables import KEYED, append_new_rows
from schema.errors import InputError, nearest
from schema.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Store", "StoredFile", "Unit"]

ESTIMATED_TABLES = ("results", "calibration", "scores", "tokens")  # the next run or analysis makes their rows again
_DERIVED = tuple(table for tables in DERIVED.values() for table in tables)


class Store(ReadableStore):
    """A store's tables: reading at versions, appending once. Safe for writers at once, in threads and processes.

    Once a store was used, processes must be spawned and not forked, since delta-rs has threads.
    """

    def __init__(self, location: str | Path) -> None:
        super().__init__(location)
        self._commits = UnitCommits(self._folder, self._units)
        self._current: set[str] = set()  # tables seen with all declared columns, which they do not lose again

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

    def append_units(self, units: Sequence[Unit]) -> int:
        """Make units visible, all by one commit. A unit that the store has already stays as it is.

        Returns:
            The number of new units.

        Raises:
            InputError: The events of a unit are not exactly its own, a replicate range overlaps a stored one with
                other bounds, or writing is not permitted. Then nothing is written.
            UnlikeUnitsError: A unit keeps or reads other entries than those of its document, action, revision and
                estimator. Then nothing is written.
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
        given = conform(TABLES[table], rows, filled=True)
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

    def _put(self, table: str, path: str, data: bytes, rows: int) -> StoredFile:
        self._folder.put(table, path, data)
        return StoredFile(path, len(data), rows)
