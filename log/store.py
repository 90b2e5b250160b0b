"""The append-only store: Delta Lake tables in one folder or behind one object-store URL.

Truth and what follows from it
    ``events`` is the truth: the commit of a unit's events makes the unit visible. Its row of ``units`` is appended
    right after. If a writer is killed in between, the next writer makes the row (``kvdrift.log.units.records``); until
    then ``read("units")`` lacks a unit whose events are visible, and ``Store.units`` does not. If ``events`` is read
    after ``units``, every unit in ``units`` has its events.

Files are not keys
    Every row of ``events`` and of derived tables has the number of its unit. Which units exist and which are derived
    follows from these numbers alone. File names mean nothing, so any Delta tool may rewrite the files of any table at
    any time. A commit that only rewrites files leaves ``data_version`` as it was.

Exactly once
    delta-rs refuses a commit if a later commit than its snapshot has one of its application ids. The store then looks
    again which units are still missing (``kvdrift.log.units.commits``).

Schema versions
    Each table has the version of its schema as a property. A store of another version is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from kvdrift.log.compaction import GATHERED_ROWS, compact, delete_replaced, gather
from kvdrift.log.conform import conform
from kvdrift.log.forgotten import refuse_forgotten
from kvdrift.log.prompts import append_prompts, kept_row
from kvdrift.log.readable_store import ReadableStore
from kvdrift.log.small_tables import KEYED, append_new_rows
from kvdrift.log.units.commits import UnitCommits
from kvdrift.log.units.contradictions import ContradictionError, set_aside
from kvdrift.log.units.derived import DerivedFile, commit_derived, withdraw_units
from kvdrift.log.units.many import Columns, conform_pairs
from kvdrift.log.units.unit import DERIVED_TABLES, Unit
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.location import is_local
from kvdrift.schema.locking import sweep
from kvdrift.schema.tables import DOCUMENTS, TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import timedelta
    from typing import Any

    from kvdrift.log.compaction import Rewritten

__all__ = ["DerivedFile", "Store", "Unit"]

ESTIMATED_TABLES = ("results", "calibration", "scores", "tokens")  # the next run or analysis makes lost rows again


class Store(ReadableStore):
    """A store's tables: reading at versions, appending once. Safe for writers at once, in threads and processes.

    Once a store was used, processes must be spawned and not forked, since delta-rs has threads.
    """

    def __init__(self, location: str | Path) -> None:
        super().__init__(location)
        self._commits = UnitCommits(self._folder, self._units)

    @classmethod
    def create(cls, location: str | Path) -> Store:
        """Open the store at ``location``; make its missing tables.

        Several processes may do so at once, and may be killed in between.

        Raises:
            InputError: The store cannot be written, or has another schema version.
            DamagedStoreError: Commits are damaged or lost.
        """
        store = cls(location)
        if is_local(store.location):
            sweep(Path(store.location))  # first, since a full disk may refuse what follows
        store._folder.check_nothing_lost()
        store.make_tables()
        store.reconcile()
        return store

    def append_units(self, units: Sequence[Unit]) -> int:
        """Make units visible as ``add_units`` does; return how many are new.

        Raises:
            ContradictionError: As ``add_units`` says; the events of the units that contradict the store are set aside.
        """
        try:
            return len(self.add_units(units))
        except ContradictionError as error:
            raise set_aside(self, error) from None

    def add_units(self, units: Sequence[Unit]) -> set[int]:
        """Make units visible, all by one commit; return the numbers of the new ones. A stored unit stays unchanged.

        Units are compared with what the store has at the commit, whoever wrote it and whenever.

        Raises:
            ContradictionError: The store has a unit with other events. Nothing is then committed.
            InputError: A unit has events that are not exactly its own, a replicate range overlaps a stored range
                with other bounds, or writing is not permitted. Nothing is then written.
            UnlikeUnitsError: A unit keeps or reads other entries than stored units of its document, action,
                revision and estimator, or has another horizon, seed or model than its study. Nothing is then written.
            OperationError: Writing failed.
        """
        refuse_forgotten(self.location, (unit.record for unit in units))
        # Prompts first: a visible unit then has its kept entries. Kept entries of a refused unit are never read.
        append_prompts(self._folder, (kept_row(unit.record, kept) for unit in units for kept in unit.kept))
        return self._commits.append(units)

    def add_pairs(self, records: Sequence[Mapping[str, Any]], values: Columns) -> set[int]:
        """Make many units of coupled pairs visible, as ``add_units`` does; ``conform_pairs`` says what is given."""
        refuse_forgotten(self.location, records)
        return self._commits.append_complete(*conform_pairs(records, values))

    def stored_units(self, records: Sequence[Mapping[str, Any]]) -> set[int]:
        """Return the numbers of those of some units that the store has; ``UnitCommits.stored`` says what is given."""
        return self._commits.stored(records)

    def append_prompts(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Append rows of ``prompts`` unless the table has their keys; return how many are new."""
        return append_prompts(self._folder, rows)

    def adopt_units(self, events: pa.Table, records: Sequence[Mapping[str, Any]]) -> int:
        """Make lost events visible again; ``UnitCommits.adopt`` describes arguments and result."""
        return self._commits.adopt(events, records)

    def append_records(self, records: Sequence[Mapping[str, Any]]) -> int:
        """Append rows of ``units`` for units whose events are visible and that have no row; return how many."""
        return self._commits.append_rows(records)

    def reconcile(self) -> int:
        """Append the rows of ``units`` that a killed writer did not append; return how many."""
        return self._commits.reconcile()

    def append_rows(self, table: str, rows: pa.Table) -> int:
        """Append rows to a small table, one of ``KEYED``, without the rows that the table has; return how many are new.

        Nulls in key columns count as equal to each other.

        Raises:
            InputError: The table has a row of the same key and other values, the rows are not of the declared
                schema, or the table is not a small one. Then nothing is appended.
        """
        if table not in KEYED:
            raise InputError(f"rows cannot be appended to '{table}'; {nearest(table, KEYED)}")
        given = conform(TABLES[table], rows, filled=True)
        if table == DOCUMENTS.name:
            refuse_forgotten(self.location, given.select(["study", "model", "doc"]).to_pylist())
        return append_new_rows(self._folder, table, given)

    def put_derived(self, table: str, rows: pa.Table) -> DerivedFile:
        """Write derived rows, all rows of some units, as one file, which ``commit_derived`` makes visible.

        Raises:
            InputError: The rows are not of the table's declared schema, or a row has no unit.
        """
        if table not in DERIVED_TABLES:
            raise InputError(f"'{table}' is not derived; {nearest(table, DERIVED_TABLES)}")
        given = conform(TABLES[table], rows)
        if given["unit"].null_count:
            raise InputError(f"{table}: column 'unit' is null in {given['unit'].null_count} row(s)")
        return DerivedFile(self._folder.put_rows(table, given), tuple(given["unit"].unique().to_pylist()))

    def commit_derived(self, table: str, files: Iterable[DerivedFile], app_id: str, version: int) -> int:
        """Make derived rows visible by one commit, each unit once, and return how many units were not visible before.

        The commit records ``version``, the version of ``events`` that the rows cover. No commit is made if no unit is
        new.
        """
        self._check_table(table)
        return commit_derived(self._folder, self._units, table, [*files], {app_id: version})

    def withdraw_files(self, table: str, paths: Iterable[str]) -> int:
        """Hide files of a table, and return how many were visible. Their rows must be made again."""
        self._check_table(table)
        return self._folder.remove(table, set(paths))

    def withdraw_units(self, table: str, numbers: Collection[int]) -> int:
        """Hide the rows of some units, -1 meaning rows without a unit; return how many files had such rows."""
        return withdraw_units(self._folder, self._units, table, numbers)

    def gather(self, most: int = GATHERED_ROWS) -> int:
        """Merge files if a table has many, at the cost of the files since the last call; return how many were replaced.

        Readers of a growing store then open at most some hundred files, however many units the store has. Files with at
        least half of ``most`` rows, and damaged files, are not merged.
        """
        return sum(gather(self._folder, table, most) for table in TABLES)

    def compact(self, table: str, done: Callable[[int], None] = lambda _: None) -> Rewritten:
        """Merge all small files of a table, sorted by key; ``done`` is called with the number of files done so far."""
        return compact(self._folder, table, done)

    def delete_replaced(self, table: str, age: timedelta) -> tuple[int, int]:
        """Delete the files of a table that were replaced at least ``age`` ago; return their number and their bytes."""
        return delete_replaced(self._folder, table, age)

    def rewrite_rows(
        self, table: str, change: Callable[[pa.Table], pa.Table], docs: Sequence[str] | None = None
    ) -> int:
        """Replace the files whose rows ``change`` changes; return how many were replaced.

        ``change`` returns the same object for rows that stay. If only rows of some documents change, sorted ``docs``,
        only files that may have some of them are read.
        """
        loaded = self._load(table)
        paths = loaded.paths()
        return self._folder.rewrite(
            table, change, paths if docs is None else self._folder.files_with(loaded, "doc", docs, paths)
        )

    def forget_history(self, table: str) -> None:
        """Delete all earlier versions of a local table; ``DeltaFolder.forget_history`` says more."""
        self._folder.forget_history(table)

    def make_tables(self) -> None:
        """Make missing tables, ``events`` last: if it is there, all are."""
        for table in sorted(TABLES, key="events".__eq__):
            self._folder.create(table)
