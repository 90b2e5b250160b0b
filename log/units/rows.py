"""Index the rows of ``units``, and the units to which rows of other tables belong; read and commit rows of units.

A file never changes, so its content is kept while the file is visible. For a table that grows, a call costs only the
new files. Missing units are differences between sets of unit numbers. If row counts, which the logs have, agree,
nothing is missing and no file is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.delta.commits import Commit, transactions
from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.parquet_files import StoredFile
from kvdrift.log.delta.versions import Snapshot
from kvdrift.log.units.unit import DERIVED, DERIVED_TABLES, NUMBERED, in_order
from kvdrift.schema.errors import UNREADABLE, DamagedStoreError
from kvdrift.schema.rows import Flags, Wide
from kvdrift.schema.tables import PLAIN, UNITS

COUNTED: Final = ("unit", "estimator", "replicates", "horizon", "event_rows")
"""The columns of ``units`` from which ``UnitCounts`` is made."""

_NO_UNIT = -1  # stands for the unit of rows without one, which another program appended


@dataclass(frozen=True)
class UnitCounts:
    """Units as arrays [units]: the number that identifies each, and what determines its count of rows in each table.

    ``swrb`` marks the units of residual branching.
    """

    number: Wide
    swrb: Flags
    replicates: Wide
    horizon: Wide
    event_rows: Wide

    @classmethod
    def of(cls, units: pa.Table) -> UnitCounts:
        """Return the counts of units that are given as rows of table ``units`` with the columns ``COUNTED``."""
        swrb = pc.not_equal(units["estimator"].cast(pa.string()), PLAIN).to_numpy()
        replicates, horizon = (units[name].to_numpy().astype(np.int64) for name in ("replicates", "horizon"))
        return cls(units["unit"].to_numpy(), swrb, replicates, horizon, units["event_rows"].to_numpy())

    @classmethod
    def all(cls, parts: Sequence[UnitCounts]) -> UnitCounts:
        """Concatenate the units of several files."""
        parts = [cls.of(UNITS.schema.empty_table()), *parts]
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def rows_in(self, table: str) -> Wide:
        """Return how many rows each unit has in a table, int64 [units], 0 without any."""
        if table == "events":
            return self.event_rows
        rows_of: dict[str, tuple[Wide | int, bool]] = {
            "unit_moments": (1, False), "trajectories": (self.replicates, False), "steps": (self.event_rows, False),
            "branchings": (self.replicates, True), "branching_depths": (self.replicates * self.horizon, True),
        }  # fmt: skip
        rows, of_swrb = rows_of[table]
        return np.where(self.swrb == of_swrb, rows, 0)

    def total(self, table: str, without: Wide | None = None) -> int:
        """Return how many rows all units (or all except ``without``) have in a table."""
        rows = self.rows_in(table)
        return int((rows if without is None else rows[np.isin(self.number, without, invert=True)]).sum())


class Pending(NamedTuple):
    """The units left to derive: for each derived table the numbers of the units without rows in it.

    ``events_version`` is a version of ``events`` that has all these units. ``whole`` tells whether every unit in this
    version has a row in ``units``; a missing row may be about to come.
    """

    lacking: dict[str, Wide]
    events_version: int
    whole: bool


class UnitRows:
    """The index of a store's units, and of the units in each of its tables."""

    def __init__(self, folder: DeltaFolder) -> None:
        self._folder = folder
        self._columns: dict[tuple[str, str], Mapping[int, int]] = {}  # rows by unit, by table and path

    def counts(self, units: Snapshot) -> UnitCounts:
        """Return the counts of all visible rows of ``units``."""
        return UnitCounts.all([*self._counts(units).values()])

    def read(self, units: Snapshot, numbers: Wide, columns: Sequence[str]) -> pa.Table:
        """Return the rows of ``units`` that have the given numbers; only files with such rows are read."""
        paths = [path for path, counted in self._counts(units).items() if np.isin(counted.number, numbers).any()]
        rows = self._folder.read(units, [*dict.fromkeys((*columns, "unit"))], paths=paths)
        return rows.filter(np.isin(rows["unit"].to_numpy(), numbers)).select(list(columns))

    def _counts(self, units: Snapshot) -> dict[str, UnitCounts]:
        return self._folder.of_files(units, COUNTED, UnitCounts.of)

    def remember(self, path: str, rows: pa.Table) -> None:
        """Keep the counts of a file of ``units`` that is about to become visible, so that it need not be read."""
        self._folder.made_of_file("units", path, rows, UnitCounts.of)

    def known(self, units: Snapshot, numbers: Sequence[int]) -> set[int]:
        """Return those of the given numbers that have a row in ``units``."""
        there = [part.number for part in self._counts(units).values()]
        return {number for part in there for number in part[np.isin(part, numbers)].tolist()}

    def total(self, units: Snapshot, table: str, without: Wide | None = None) -> int:
        """Return how many rows units have in a table, as ``UnitCounts.total`` does for the units of one file."""
        return sum(part.total(table, without) for part in self._counts(units).values())

    def unknown(self, units: Snapshot, events: Snapshot) -> Iterator[tuple[str, dict[int, int]]]:
        """Find the events of units without a row in ``units``, if there are more events than ``units`` counts.

        The newest files are read first, until all rows are accounted for. Yields paths, each with how many rows
        the file has of each of these units; -1 stands for rows that belong to no unit.

        Raises:
            DamagedStoreError: The units with a row have more or fewer events than ``units`` counts.
        """
        left = self._folder.count_rows(events) - self.total(units, events.table)
        known = set(self.counts(units).number.tolist())
        for path in (file.path for file in events.newest_files()):
            if new := {number: rows for number, rows in self.rows_by_unit(events, path).items() if number not in known}:
                yield path, new
                left -= sum(new.values())
            if left == 0:
                return
        if left > 0:
            raise self._folder.damaged(f"'events' has {left:,} more row(s) than 'units' counts: some are there twice")
        if left < 0:
            raise self._folder.damaged(f"'events' lacks {-left:,} row(s) of units that 'units' has")

    def numbers_in(self, table: Snapshot) -> Wide:
        """Return the numbers of all units with rows in a table, sorted."""
        numbers = [self.rows_by_unit(table, path).keys() for path in table.paths()]
        visible = {(table.table, path) for path in table.paths()}
        self._columns = {at: rows for at, rows in self._columns.items() if at[0] != table.table or at in visible}
        return np.unique(np.fromiter((number for keys in numbers for number in keys), dtype=np.int64))

    def rows_by_unit(self, table: Snapshot, path: str) -> Mapping[int, int]:
        """Return how many rows of a file each unit has, by the unit's number, or -1 for rows without a unit."""
        known = self._columns.get((table.table, path))
        if known is None:
            known = self._columns[table.table, path] = _counted(self._folder.parts(table, path, ["unit"]))
        return known

    def lacking(self, versions: Mapping[str, int] | None = None) -> dict[str, Wide]:
        """Return for each derived table the sorted numbers of units that lack rows, at the latest or given versions.

        Raises:
            DamagedStoreError: A derived table has rows of units that ``units`` lacks.
        """
        at = versions or {}
        derived = {table: self._folder.load(table, at.get(table)) for table in DERIVED_TABLES}  # before ``units``
        units = self._folder.load("units", at.get("units"))
        lacking: dict[str, Wide] = {}
        for *small, many in DERIVED.values():
            for small_table in small:
                lacking[small_table] = self._lacking(derived[small_table], units)
            # Rows of the small table are committed first, so a unit that it lacks is lacking in the large one, too.
            whole = self.total(units, many, lacking[small_table]) == self._folder.count_rows(derived[many])
            lacking[many] = lacking[small_table] if whole else self._lacking(derived[many], units)
        return lacking

    def files_with(self, table: Snapshot, numbers: Collection[int]) -> list[str]:
        """Return the paths of a table's files that have rows of some units; -1 means rows without a unit."""
        wanted = set(numbers)
        return [path for path in table.paths() if not wanted.isdisjoint(self.rows_by_unit(table, path))]

    def pending(self) -> Pending:
        """Find the units left to derive; raises as ``lacking`` does."""
        versions = {table: self._folder.load(table).version for table in DERIVED_TABLES}
        units = self._folder.load("units")
        events = self._folder.load("events")  # last: it has the events of all these units
        lacking = self.lacking(versions | {"units": units.version})
        return Pending(lacking, events.version, self.total(units, "events") == self._folder.count_rows(events))

    def there(self, table: Snapshot, numbers: Collection[int]) -> set[int]:
        """Return those of the given numbers that have rows in a derived table."""
        wanted = np.array(sorted(numbers), dtype=np.int64)
        *_, small, many = next(tables for tables in DERIVED.values() if table.table in tables)
        if table.table == many:  # it is large: row counts may show that it has no row of these units
            counts = self.counts(self._folder.load("units"))
            others = np.setdiff1d(self.numbers_in(self._folder.load(small)), wanted)
            rows = counts.rows_in(many)[np.isin(counts.number, others)]
            if rows.sum() == self._folder.count_rows(table):
                return set()
        return set(np.intersect1d(wanted, self.numbers_in(table)).tolist())

    def _lacking(self, table: Snapshot, units: Snapshot) -> Wide:
        if self.total(units, table.table) == self._folder.count_rows(table):
            return np.zeros(0, dtype=np.int64)
        counts, there = self.counts(units), self.numbers_in(table)
        if lost := np.count_nonzero(np.isin(there, counts.number, invert=True)):
            raise self._folder.damaged(f"'{table.table}' has rows of {lost} units that 'units' does not have")
        wanted = counts.number[counts.rows_in(table.table) != 0]
        return np.unique(wanted[np.isin(wanted, there, invert=True)])

    def check_whole(self, versions: Mapping[str, int]) -> None:
        """Check that ``events`` has no fewer rows, and no table more rows, than ``units`` counts.

        This reads logs and ``units``, and files of ``events`` only if there are more events than ``units`` counts.

        Raises:
            DamagedStoreError: A table has too few or too many rows.
        """
        tables = {name: self._folder.load(name, versions.get(name)) for name in reversed(NUMBERED)}
        units = self._folder.load("units", versions.get("units"))
        for name, table in tables.items():
            expected, there = self.total(units, name), self._folder.count_rows(table)
            if name == "events" and there < expected and self._is_lost(expected):
                raise self.fewer_events(units, there, expected)
            if name == "events" and there > expected:
                list(self.unknown(units, table))
            if name != "events" and there > expected:
                more = f"'{name}' has {there:,} rows, 'units' counts {expected:,}"
                raise self._folder.damaged(f"{more}: some rows are of lost units, or are there twice")

    def fewer_events(self, units: Snapshot, there: int, expected: int) -> DamagedStoreError:
        """Return the error about fewer events than ``units`` says: events are lost, or ``units`` has rows twice."""
        numbers = self.counts(units).number
        if doubled := len(numbers) - len(np.unique(numbers)):
            return self._folder.damaged(f"'units' has {doubled:,} row(s) too many: some are there twice")
        return self._folder.damaged(f"'events' has {there:,} rows, 'units' counts {expected:,}: events are lost")

    def _is_lost(self, rows: int) -> bool:
        """Tell whether the latest version of ``events``, too, has fewer rows than ``rows``."""
        return self._folder.count_rows(self._folder.load("events")) < rows


def _counted(parts: Iterable[pa.Table]) -> dict[int, int]:
    """Return how many rows each unit has, by the unit's number, or -1 for rows without a unit."""
    counts_by_unit = Counter[int]()
    for rows in parts:
        numbers, counts = np.unique(rows["unit"].fill_null(_NO_UNIT).to_numpy(), return_counts=True)
        counts_by_unit.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
    return dict(counts_by_unit)


_GUARD = "kvdrift.derived"  # the application id that all commits of a derived table share


@dataclass(frozen=True)
class DerivedFile:
    """A file of derived rows that is written, but not committed; it has all rows of the units numbered ``units``."""

    file: StoredFile
    units: tuple[int, ...]


def commit_derived(
    folder: DeltaFolder, rows: UnitRows, table: str, files: Sequence[DerivedFile], marks: Mapping[str, int]
) -> int:
    """Make derived rows visible by one commit, without rows of units that the table has; return how many units are new.

    ``marks`` are events versions by application id; the commit records each unless an earlier commit has a later
    version.
    """
    new = 0

    def attempt(loaded: Snapshot) -> Commit | None:
        nonlocal new
        numbers = {number for file in files for number in file.units}
        there = rows.there(loaded, numbers)
        new = len(numbers) - len(there)
        if not new:
            return None
        left = [_without(folder, table, file, there) for file in files if not there.issuperset(file.units)]
        covered = {app: max(version, loaded.transaction_version(app) or 0) for app, version in marks.items()}
        return Commit(left, transactions({**covered, _GUARD: 0}.items()))

    folder.commit(table, attempt, alone=True)
    return new


def _without(folder: DeltaFolder, table: str, derived: DerivedFile, there: Collection[int]) -> StoredFile:
    """Return the file without the rows of units that another derivation has committed meanwhile."""
    units = set(there) & set(derived.units)
    if not units:
        return derived.file
    return folder.put_rows(table, _other(folder.read_file(table, derived.file.path), units))


def withdraw_units(folder: DeltaFolder, rows: UnitRows, table: str, numbers: Collection[int]) -> int:
    """Hide the rows of some units, -1 meaning rows without a unit; return how many files had such rows."""
    return folder.rewrite(table, lambda read: _other(read, numbers), lambda loaded: rows.files_with(loaded, numbers))


def _other(rows: pa.Table, numbers: Collection[int]) -> pa.Table:
    gone = pc.is_in(rows["unit"].fill_null(_NO_UNIT), pa.array(sorted(numbers), pa.int64()))
    return rows.filter(pc.invert(gone))


_FILES_AT_ONCE = 256  # files of one scan: Arrow holds their footers
_NEWEST = 8  # files that are read first: requested rows are mostly the newest


class RowsOfUnits:
    """Reads the rows of units from a table at one version.

    ``unreadable`` has the path of each file that was passed over, with the reason. Files hold documents in order, and
    footers have the first and last document of each part. Reading some documents therefore skips the other parts.
    """

    def __init__(self, folder: DeltaFolder, table: Snapshot) -> None:
        self._folder, self._table = folder, table
        self.unreadable = dict[str, str]()

    def read(
        self, units: Collection[int], docs: Collection[str], columns: Sequence[str], count: int | None = None
    ) -> pa.Table:
        """Return the rows of the units ``units``, whose documents are ``docs``, in some columns, texts as dictionaries.

        Page checksums are verified. If ``count``, the number of rows, is known, reading stops once all are found: the
        newest files are read first, and no more at a time than are needed for the missing rows. Rows in unreadable
        files are left out.
        """
        names = [*dict.fromkeys((*columns, "unit"))]
        wanted = pa.array(sorted(units), pa.int64())
        files = [file for file in self._table.newest_files() if file.path not in self.unreadable]
        size, missing = (_FILES_AT_ONCE, math.inf) if count is None else (_NEWEST, count)
        parts = [self._read([], docs, names)]
        while files and missing > 0:
            part, files, size = self._with_documents(files[:size], docs), files[size:], _FILES_AT_ONCE
            while part and missing > 0:
                number = _enough(part, missing)
                rows, part = self._part([file.path for file in part[:number]], docs, names), part[number:]
                parts.append(rows.filter(pc.is_in(rows["unit"], wanted)))
                missing -= parts[-1].num_rows
        return pa.concat_tables(parts).unify_dictionaries().select(columns)

    def read_each(
        self, units: Sequence[int], docs: Collection[str], columns: Sequence[str], count: int
    ) -> list[pa.Table]:
        """Return the events of each unit as ``read`` does, sorted by replicate, then scan before branch, then t.

        Raises:
            DamagedStoreError: A file cannot be read.
        """
        names = [*dict.fromkeys((*columns, "unit", "replicate", "kind", "t"))]
        rows = self.read(units, docs, names, count)
        for why in self.unreadable.values():
            raise DamagedStoreError(why)
        return [in_order(rows.filter(pc.equal(rows["unit"], number))).select(columns) for number in units]

    def _part(self, paths: list[str], docs: Collection[str], names: Sequence[str]) -> pa.Table:
        try:
            return self._read(paths, docs, names)
        except UNREADABLE:
            parts = [self._read([], docs, names)]
        for path in paths:
            try:
                parts.append(self._read([path], docs, names))
            except UNREADABLE as error:
                self.unreadable[path] = str(error)
        return pa.concat_tables(parts)

    def _with_documents(self, files: Sequence[StoredFile], docs: Collection[str]) -> list[StoredFile]:
        if not docs:
            return []
        paths = set(self._folder.files_with(self._table, "doc", sorted(docs), [file.path for file in files]))
        return [file for file in files if file.path in paths]

    def _read(self, paths: Sequence[str], docs: Collection[str], names: Sequence[str]) -> pa.Table:
        if not paths:
            return self._folder.read(self._table, names, paths=[], coded=True)
        doc, wanted = pc.field("doc"), sorted(docs)
        where = (doc >= wanted[0]) & (doc <= wanted[-1]) & doc.isin(wanted)  # Arrow skips row groups by these bounds
        return self._folder.read(self._table, names, where=where, paths=paths, coded=True, compared=["doc"])


def _enough(files: Sequence[StoredFile], rows: float) -> int:
    """Return how many files, from the first on, have ``rows`` rows together; all files if a file's rows are unknown."""
    for number, file in enumerate(files, 1):
        if file.rows is None:
            break
        rows -= file.rows
        if rows <= 0:
            return number
    return len(files)
