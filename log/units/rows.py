"""Index the rows of ``units``, and which units the rows of other tables belong to.

A file never changes, so its content is kept while the file is visible. For a table that grows, a call costs only the
new files. Missing units are differences between sets of unit numbers. If row counts, which the logs have, agree,
nothing is missing and no file is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.units.unit import DERIVED, DERIVED_TABLES, NUMBERED
from kvdrift.schema.rows import Flags, Wide
from kvdrift.schema.tables import PLAIN, UNITS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from kvdrift.log.delta.folder import DeltaFolder
    from kvdrift.log.delta.snapshot import Snapshot
    from kvdrift.schema.errors import DamagedStoreError

COUNTED: Final = ("unit", "estimator", "replicates", "horizon", "event_rows")
"""The columns of ``units`` that are counted."""

_NO_UNIT = -1  # stands for the unit of rows without one, which another program appended


@dataclass(frozen=True)
class UnitCounts:
    """The numbers of units and their row counts in each table; all arrays are [units]."""

    number: Wide
    swrb: Flags
    replicates: Wide
    horizon: Wide
    event_rows: Wide

    @classmethod
    def of(cls, units: pa.Table) -> UnitCounts:
        """Return the counts of rows of ``units`` with the columns ``COUNTED``."""
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

    ``events_version`` has all these units; ``whole`` says that it has no others. If not, more rows may be about to
    come.
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
        """Return the rows of ``units`` with some numbers; only files that have such rows are read."""
        paths = [path for path, own in self._counts(units).items() if np.isin(own.number, numbers).any()]
        rows = self._folder.read(units, [*dict.fromkeys((*columns, "unit"))], paths=paths)
        return rows.filter(np.isin(rows["unit"].to_numpy(), numbers)).select(list(columns))

    def _counts(self, units: Snapshot) -> dict[str, UnitCounts]:
        return self._folder.of_files(units, COUNTED, UnitCounts.of)

    def remember(self, path: str, rows: pa.Table) -> None:
        """Keep the rows of a file of ``units`` that is about to become visible."""
        self._folder.made_of_file("units", path, rows, UnitCounts.of)

    def known(self, units: Snapshot, numbers: Sequence[int]) -> set[int]:
        """Return those numbers that have a row in ``units``."""
        there = [part.number for part in self._counts(units).values()]
        return {number for part in there for number in part[np.isin(part, numbers)].tolist()}

    def total(self, units: Snapshot, table: str, without: Wide | None = None) -> int:
        """Return how many rows units have in a table, as ``UnitCounts.total`` does for the units of one file."""
        return sum(part.total(table, without) for part in self._counts(units).values())

    def unknown(self, units: Snapshot, events: Snapshot) -> Iterator[tuple[str, dict[int, int]]]:
        """Find the rows of ``events`` of units that have no row in ``units``; there are more events than rows say.

        The newest files are looked into first, until all rows are accounted for. Yields paths, each with how many rows
        it has of each of these units; -1 stands for rows that belong to none.
        """
        left = self._folder.count_rows(events) - self.total(units, events.table)
        known = set(self.counts(units).number.tolist())
        for path in (file.path for file in events.newest_files()):
            if new := {number: rows for number, rows in self.rows_by_unit(events, path).items() if number not in known}:
                yield path, new
                left -= sum(new.values())
            if left == 0:
                return
        if left:
            raise self._folder.damaged(f"'events' has {left:,} rows more than its units have: rows are there twice")

    def numbers_in(self, table: Snapshot) -> Wide:
        """Return the numbers of all units with rows in a table, sorted."""
        found = [self.rows_by_unit(table, path).keys() for path in table.paths()]
        visible = {(table.table, path) for path in table.paths()}
        self._columns = {at: rows for at, rows in self._columns.items() if at[0] != table.table or at in visible}
        return np.unique(np.fromiter((number for keys in found for number in keys), dtype=np.int64))

    def rows_by_unit(self, table: Snapshot, path: str) -> Mapping[int, int]:
        """Count the rows of each unit in a file; -1 counts rows without a unit."""
        known = self._columns.get((table.table, path))
        if known is None:
            known = self._columns[table.table, path] = _counted(self._folder.parts(table, path, ["unit"]))
        return known

    def lacking(self, versions: Mapping[str, int] | None = None) -> dict[str, Wide]:
        """Return the sorted numbers of the units without rows in each derived table, at the latest or some versions."""
        at = versions or {}
        derived = {table: self._folder.load(table, at.get(table)) for table in DERIVED_TABLES}  # before ``units``
        units = self._folder.load("units", at.get("units"))
        found: dict[str, Wide] = {}
        for *small, many in DERIVED.values():
            for few in small:
                found[few] = self._lacking(derived[few], units)
            # Rows of the small table are committed first, so a unit that it lacks is lacking in the large one, too.
            whole = self.total(units, many, found[few]) == self._folder.count_rows(derived[many])
            found[many] = found[few] if whole else self._lacking(derived[many], units)
        return found

    def files_with(self, table: Snapshot, numbers: Collection[int]) -> list[str]:
        """Return the paths of a table's files that have rows of some units; -1 means rows without a unit."""
        wanted = set(numbers)
        return [path for path in table.paths() if not wanted.isdisjoint(self.rows_by_unit(table, path))]

    def pending(self) -> Pending:
        """Find the units left to derive; ``lacking`` says what is raised."""
        versions = {table: self._folder.load(table).version for table in DERIVED_TABLES}
        units = self._folder.load("units")
        events = self._folder.load("events")  # last: it has the events of all these units
        lacking = self.lacking(versions | {"units": units.version})
        return Pending(lacking, events.version, self.total(units, "events") == self._folder.count_rows(events))

    def there(self, table: Snapshot, numbers: Collection[int]) -> set[int]:
        """Return those of some units that have rows in a derived table."""
        wanted = np.array(sorted(numbers), dtype=np.int64)
        *_, few, many = next(tables for tables in DERIVED.values() if table.table in tables)
        if table.table == many:  # it is large: row counts may tell that it has none of them
            counts = self.counts(self._folder.load("units"))
            others = np.setdiff1d(self.numbers_in(self._folder.load(few)), wanted)
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
        """Check that no table has fewer events, or more rows, than its units have; reads logs and ``units``."""
        tables = {name: self._folder.load(name, versions.get(name)) for name in reversed(NUMBERED)}
        units = self._folder.load("units", versions.get("units"))
        for name, table in tables.items():
            expected, there = self.total(units, name), self._folder.count_rows(table)
            if name == "events" and there < expected and self._is_lost(expected):
                raise self.fewer_events(units, there, expected)
            if name == "events" and there > expected:
                list(self.unknown(units, table))
            if name != "events" and there > expected:
                more = f"'{name}' has {there:,} rows, the units have {expected:,}"
                raise self._folder.damaged(f"{more}: it has rows of units that are lost, or rows twice")

    def fewer_events(self, units: Snapshot, there: int, expected: int) -> DamagedStoreError:
        """Return the error about fewer events than ``units`` says: events are lost, or ``units`` has rows twice."""
        numbers = self.counts(units).number
        if doubled := len(numbers) - len(np.unique(numbers)):
            return self._folder.damaged(f"'units' has {doubled:,} rows more than it has units: rows are there twice")
        return self._folder.damaged(f"'events' has {there:,} rows, its units have {expected:,}: events are lost")

    def _is_lost(self, rows: int) -> bool:
        """Tell whether the latest version of ``events``, too, has fewer rows than ``rows``."""
        return self._folder.count_rows(self._folder.load("events")) < rows


def _counted(parts: Iterable[pa.Table]) -> dict[int, int]:
    """Count rows by unit; -1 counts rows without a unit."""
    found = Counter[int]()
    for rows in parts:
        numbers, counts = np.unique(rows["unit"].fill_null(_NO_UNIT).to_numpy(), return_counts=True)
        found.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
    return dict(found)
