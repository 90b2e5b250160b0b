"""The append-only store: Delta Lake tables in one folder or behind one object-store URL.

Truth and what follows from it
    ``events`` is the truth: the commit of a unit's events makes the unit visible. Its row of ``units`` is appended
    right after. If a writer is killed in between, the next writer makes the row (``kvdrift.log.units.commits``); until
    then ``read("units")`` lacks a unit whose events are visible, and ``Store.units`` does not. If ``events`` is read
    after ``units``, every unit in ``units`` has its events.

Files are not keys
    Every row of ``events`` and of derived tables has the number of its unit. Which units exist and which are derived
    follows from these numbers alone. File names mean nothing, so any Delta tool may rewrite the files of any table at
    any time. A commit that only rewrites files leaves ``data_version`` as it was.

Exactly once
    A commit has application ids. delta-rs refuses the commit if another commit with one of these ids came after the
    snapshot from which the commit was made. The store then finds again which units are still missing
    (``kvdrift.log.units.commits``).

Schema versions
    Each table has the version of its schema as a property. A store of another version is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from kvdrift.log.checked_files import first_damaged
from kvdrift.log.compaction import GATHERED_ROWS, Rewritten, compact, delete_replaced, gather
from kvdrift.log.counts import Counts, stored_counts
from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.parquet_files import StoredFile, conform
from kvdrift.log.delta.versions import Snapshot
from kvdrift.log.forgotten import refuse_forgotten
from kvdrift.log.prompts import append_prompts, kept_row
from kvdrift.log.small_tables import KEYED, append_new_rows
from kvdrift.log.units.commits import ContradictionError, UnitCommits, as_rows, missing_records, records_in, records_of
from kvdrift.log.units.revisions import current_documents, current_units
from kvdrift.log.units.rows import (
    DerivedFile,
    Pending,
    RowsOfUnits,
    UnitCounts,
    UnitRows,
    commit_derived,
    withdraw_units,
)
from kvdrift.log.units.unit import DERIVED_TABLES, Columns, Unit, conform_pairs, in_order
from kvdrift.schema.errors import DamagedStoreError, InputError, nearest
from kvdrift.schema.location import filesystem_of, is_local, join
from kvdrift.schema.locking import sweep
from kvdrift.schema.rows import Wide
from kvdrift.schema.tables import DOCUMENTS, PAIR_COLUMNS, TABLES, UNITS

__all__ = ["DerivedFile", "Store", "Unit"]

ESTIMATED_TABLES = ("results", "calibration", "scores", "tokens")  # the next run or analysis makes lost rows again

CONTRADICTIONS = "set-aside/contradictions"
"""The folder of a store with the events of units that contradicted the store, a Parquet file for each unit."""

_COMPARED = (*PAIR_COLUMNS[PAIR_COLUMNS.index("replicate") :], "kind", "weight")

_Made = TypeVar("_Made")


class Store:
    """The tables of a store: read them at versions, and append each row once.

    Several writers may work at the same time, in threads and processes.

    Once a store was used, new processes must be spawned and not forked, since delta-rs has threads.
    """

    def __init__(self, location: str | Path) -> None:
        self._folder = DeltaFolder(location)
        self._units = UnitRows(self._folder)
        self._commits = UnitCommits(self._folder, self._units)

    @classmethod
    def open(cls, location: str | Path) -> Store:
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
        """Return the last version, up to ``version`` or else the latest, whose commit changed a row of a table."""
        return self._folder.data_version(self._load(table, version))

    def paths(self, table: str, version: int | None = None) -> list[str]:
        """Return the paths of the files visible at a version, relative to the table's folder, sorted."""
        return self._load(table, version).paths()

    def files(self, table: str, version: int | None = None) -> list[str]:
        """Return the files visible at a version as absolute paths or URLs, sorted."""
        return [join(self.location, table, path) for path in self.paths(table, version)]

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
            InputError: The table, a column or the version is unknown.
            DamagedStoreError: A file is missing or damaged.
        """
        loaded = self._load(table, version)
        declared = TABLES[table].columns
        for name in columns or ():
            if name not in declared:
                raise InputError(f"{table}: no column '{name}'; {nearest(name, declared)}")
        return self._folder.read(loaded, declared if columns is None else columns)

    def rows_of_units(self, table: str, version: int | None = None) -> RowsOfUnits:
        """Return a reader of ``events`` or of a derived table at a version, which returns the rows of given units."""
        return RowsOfUnits(self._folder, self._load(table, version))

    def records_of(
        self, path: str, units: Collection[int], known: Collection[int], version: int | None = None
    ) -> dict[int, dict[str, Any]]:
        """Return by unit number the rows that table ``units`` lacks for units with events in the file ``path``.

        ``units`` are the numbers of these units, and ``known`` the numbers of units that have a row.
        """
        return records_of(self._folder, self._load("events", version), path, units, known)

    def copied_records(self, path: str) -> list[dict[str, Any]]:
        """Return the copies of units' rows in an existing file of ``events``; empty if the file has no copies."""
        return records_in(self._folder, path)

    def unit_counts(self, version: int | None = None) -> UnitCounts:
        """Return which units a version of ``units`` has, by number, and how many rows each unit has in every table."""
        return self._units.counts(self._load("units", version))

    def unit_rows(self, numbers: Wide, columns: Sequence[str], version: int | None = None) -> pa.Table:
        """Read the given columns of the rows of ``units`` that have the given numbers."""
        return self._units.read(self._load("units", version), numbers, columns)

    def of_files(
        self, table: str, columns: Sequence[str], make: Callable[[pa.Table], _Made], version: int | None = None
    ) -> list[_Made]:
        """Return the results of ``make`` for each visible file's rows; results are kept for later calls."""
        return [*self._folder.of_files(self._load(table, version), columns, make).values()]

    def rows_by_unit(self, table: str, path: str, version: int | None = None) -> Mapping[int, int]:
        """Return how many rows of a visible file each unit has, by the unit's number, or -1 for rows without a unit."""
        return self._units.rows_by_unit(self._load(table, version), path)

    def units(
        self,
        study: str | None = None,
        model: str | None = None,
        columns: Sequence[str] = UNITS.columns,
        *,
        coded: bool = False,
    ) -> pa.Table:
        """Return the rows of current units with visible events, of one or all studies and models.

        Rows that table ``units`` lacks are included.

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
        of_study = rows.filter(pc.and_(pc.equal(rows["study"], study), pc.equal(rows["model"], model)))
        return current_documents(of_study).select(list(columns))

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

        ``actions`` are all rows of table ``actions``, read before this call, since a revision is declared before its
        units are stored.
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
        """Return for each derived table the sorted numbers of units that lack rows, at the latest or given versions.

        Raises:
            DamagedStoreError: A derived table has rows of units that ``units`` lacks.
        """
        return self._units.lacking(versions)

    def pending(self) -> Pending:
        """Find the units left to derive; raises as ``underived`` does."""
        return self._units.pending()

    def all_underived(self, versions: Mapping[str, int] | None = None) -> Wide:
        """Return the numbers of the units that lack rows in any derived table; ``underived`` says more."""
        return np.unique(np.concatenate([*self.underived(versions).values()]))

    def check_made_from_events(self, versions: Mapping[str, int]) -> None:
        """Check that no events of stored units are lost, and that no table has rows that belong to no stored unit.

        This reads logs and ``units``, and files of ``events`` only if there are more events than ``units`` counts.

        Raises:
            DamagedStoreError: Events are lost, or a table has rows that belong to no stored unit.
        """
        self._units.check_whole(versions)

    def check_files(self, versions: Mapping[str, int], within: float = 0.0) -> None:
        """Read the files of a local store at some versions, and check that they are as committed.

        Files of large tables are passed over if they were found whole less than ``within`` seconds ago.

        Raises:
            DamagedStoreError: A file is damaged.
        """
        if is_local(self.location):
            files = {table: self.stored_files(table, version) for table, version in versions.items()}
            if damage := first_damaged(Path(self.location), files, within):
                raise self.damaged(damage)

    def damaged(self, what: str) -> DamagedStoreError:
        """Return the error about the store's damage, with the command that repairs it."""
        return self._folder.damaged(what)

    def covered_version(self, table: str, app_id: str) -> int | None:
        """Return the events version that commits of ``app_id`` cover in a derived table; None without such commits."""
        return self._load(table).transaction_version(app_id)

    def _load(self, table: str, version: int | None = None) -> Snapshot:
        self._check_table(table)
        return self._folder.load(table, version)

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
            sweep(Path(store.location))  # first, since a full disk may refuse the next steps
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
            raise _set_aside(self, error) from None

    def add_units(self, units: Sequence[Unit]) -> set[int]:
        """Make units visible, all by one commit; return the numbers of the new ones. A stored unit stays unchanged.

        Units are compared with the store's units at the time of the commit.

        Raises:
            ContradictionError: The store has a unit with other events. No unit is then committed.
            InputError: The events are not exactly those of the unit, a replicate range overlaps a stored range
                with other bounds, or writing is not permitted. No unit is then committed.
            UnlikeUnitsError: A unit keeps or reads other entries than other units of its document, action,
                revision and estimator, or has another horizon, seed or model than its study. No unit is then committed.
            OperationError: Writing failed.
        """
        refuse_forgotten(self.location, (unit.record for unit in units))
        # Prompts first: a visible unit then has its kept entries. Kept entries of a refused unit are never read.
        append_prompts(self._folder, (kept_row(unit.record, kept) for unit in units for kept in unit.kept))
        return self._commits.append(units)

    def add_pairs(self, records: Sequence[Mapping[str, Any]], values: Columns) -> set[int]:
        """Make many units of coupled pairs visible, as ``add_units`` does; arguments are those of ``conform_pairs``."""
        refuse_forgotten(self.location, records)
        return self._commits.append_complete(*conform_pairs(records, values))

    def stored_units(self, records: Sequence[Mapping[str, Any]]) -> set[int]:
        """Return the numbers of the given units that the store has; see ``UnitCommits.stored`` for the argument."""
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
        conformed = conform(TABLES[table], rows, filled=True)
        if table == DOCUMENTS.name:
            refuse_forgotten(self.location, conformed.select(["study", "model", "doc"]).to_pylist())
        return append_new_rows(self._folder, table, conformed)

    def put_derived(self, table: str, rows: pa.Table) -> DerivedFile:
        """Write derived rows, all rows of some units, as one file, which ``commit_derived`` makes visible.

        Raises:
            InputError: The rows are not of the table's declared schema, or a row has no unit.
        """
        if table not in DERIVED_TABLES:
            raise InputError(f"'{table}' is not a derived table; {nearest(table, DERIVED_TABLES)}")
        conformed = conform(TABLES[table], rows)
        if conformed["unit"].null_count:
            raise InputError(f"{table}: column 'unit' is null in {conformed['unit'].null_count} row(s)")
        return DerivedFile(self._folder.put_rows(table, conformed), tuple(conformed["unit"].unique().to_pylist()))

    def commit_derived(self, table: str, files: Iterable[DerivedFile], app_id: str, version: int) -> int:
        """Make derived rows visible by one commit, without units that the table has; return how many units are new.

        The commit records under the application id ``app_id`` the ``version`` of ``events`` that the rows cover. No
        commit is made if no unit is new.
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
        """Merge files of each table that has many; return how many were replaced.

        A call costs only as much as the files that came since the last call. Readers of a growing store then open at
        most some hundred files, however many units the store has. Files with at least half of ``most`` rows, and
        damaged files, are not merged.
        """
        return sum(gather(self._folder, table, most) for table in TABLES)

    def compact(self, table: str, done: Callable[[int], None] = lambda _: None) -> Rewritten:
        """Merge all small files of a table, in the order of keys; ``done`` gets the number of files of each merge."""
        return compact(self._folder, table, done)

    def delete_replaced(self, table: str, age: timedelta) -> tuple[int, int]:
        """Delete the files of a table that were replaced at least ``age`` ago; return their number and their bytes."""
        return delete_replaced(self._folder, table, age)

    def rewrite_rows(
        self, table: str, change: Callable[[pa.Table], pa.Table], docs: Sequence[str] | None = None
    ) -> int:
        """Replace the files whose rows ``change`` changes; return how many were replaced.

        ``change`` returns the same object for rows that stay. With ``docs``, the sorted ids of the documents whose rows
        may change, only files that may have such rows are read.
        """

        def candidates(loaded: Snapshot) -> list[str]:
            paths = loaded.paths()
            return paths if docs is None else self._folder.files_with(loaded, "doc", docs, paths)

        return self._folder.rewrite(table, change, candidates)

    def forget_history(self, table: str) -> None:
        """Delete all versions of a local table before the present one; ``DeltaFolder.forget_history`` says more."""
        self._folder.forget_history(table)

    def make_tables(self) -> None:
        """Make missing tables, ``events`` last: if it is there, all are."""
        for table in sorted(TABLES, key="events".__eq__):
            self._folder.create(table)

    @staticmethod
    def _check_table(table: str) -> None:
        if table not in TABLES:
            raise InputError(f"no table '{table}'; {nearest(table, TABLES)}")


def _set_aside(store: Store, error: ContradictionError) -> ContradictionError:
    """Write the events of contradicting units to the folder ``CONTRADICTIONS``; return the error that names it."""
    filesystem, folder = filesystem_of(join(store.location, CONTRADICTIONS))
    filesystem.create_dir(folder)
    for record, events in error.units:
        sink = pa.BufferOutputStream()
        pq.write_table(events, sink, compression="zstd")
        name = f"{record['events_sha256'][:24]}.parquet"
        with filesystem.open_output_stream(f"{folder}/.{name}") as file:
            file.write(sink.getvalue())
        filesystem.move(f"{folder}/.{name}", f"{folder}/{name}")
    (record, events), *others = error.units
    more = f", and {len(others)} more units likewise" if others else ""
    aside = f"the given events are set aside in {join(store.location, CONTRADICTIONS)}"
    return ContradictionError.of(error.units, f"{_difference(store, record, events)}{more}; {aside}")


def _difference(store: Store, record: Mapping[str, Any], events: pa.Table) -> str:
    """Return the first value in which the given events of a unit differ from the stored events."""
    reader = store.rows_of_units("events")
    stored = in_order(reader.read([record["unit"]], [record["doc"]], [*_COMPARED, "unit"], events.num_rows))
    if stored.num_rows != events.num_rows:
        return f"{events.num_rows:,} events are given, but the store has {stored.num_rows:,}"
    events = in_order(events)
    for name in _COMPARED:
        new, held = events[name], stored[name].cast(events[name].type)
        differ = pc.fill_null(pc.not_equal(new, held), fill_value=False).to_numpy(zero_copy_only=False)
        if differ.any():
            row = int(np.argmax(differ))
            at = f"replicate {events['replicate'][row].as_py()}, t {events['t'][row].as_py()}"
            return f"{name} is {new[row].as_py()!r} at {at}, but the store has {held[row].as_py()!r}"
    return "its events differ from those in the store"
