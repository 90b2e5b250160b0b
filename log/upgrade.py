"""Upgrade stores of older schema versions: add new columns, and give every row the number of its unit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow.compute as pc

from kvdrift.log.compaction import PACK_ROWS, cut, put_together
from kvdrift.log.delta.commits import Commit
from kvdrift.log.units.events import RowsOfUnits
from kvdrift.log.units.numbers import NUMBERED, numbers_of
from kvdrift.log.units.records import as_rows
from kvdrift.log.units.unit import counted_events
from kvdrift.schema.tables import EVENTS, TABLES, UNITS

if TYPE_CHECKING:
    from kvdrift.log.delta.folder import DeltaFolder
    from kvdrift.log.delta.snapshot import Snapshot
    from kvdrift.log.units.commits import UnitCommits
    from kvdrift.log.units.rows import UnitRows

_UNITS_AT_ONCE: Final = 256


def upgrade(folder: DeltaFolder, rows: UnitRows, commits: UnitCommits) -> None:
    """Make missing tables, add missing columns, and fill in the units of older rows.

    The next upgrade continues an upgrade that was killed.
    """
    older = is_older(folder)
    for table in sorted(TABLES, key="events".__eq__):  # events last: where it is and current, all are
        folder.create(table)
    if not older:
        return
    commits.reconcile()
    for table in NUMBERED:
        loaded = folder.load(table)
        lacking = set(_lacking(folder, loaded))
        for files in cut([file for file in loaded.files() if file.path in lacking], PACK_ROWS):
            put_together(folder, rows, table, files, alone=True)
    _number_units(folder, rows)


def is_older(folder: DeltaFolder) -> bool:
    """Tell whether a store has rows without a unit number."""
    there = (folder.load(table) for table in (*NUMBERED, UNITS.name) if folder.exists(table))
    return any(_lacking(folder, loaded) for loaded in there)


def _lacking(folder: DeltaFolder, loaded: Snapshot) -> list[str]:
    """Return the paths of the files whose rows have no unit numbers."""
    found = folder.paths_by_missing_columns(loaded)
    return [path for missing, paths in found.items() if "unit" in missing for path in paths]


def _number_units(folder: DeltaFolder, rows: UnitRows) -> None:
    """Write the rows of ``units`` again with their numbers, and with the number and digest of their events."""

    def attempt(units: Snapshot) -> Commit | None:
        lacking = _lacking(folder, units)
        if not lacking:
            return None
        old = folder.read(units, UNITS.columns, paths=lacking)
        numbered = zip(old.to_pylist(), numbers_of(old).tolist(), strict=True)
        counted = _counted(folder, rows, [row | {"unit": number} for row, number in numbered])
        return Commit([folder.put_rows("units", as_rows(counted))], [], lacking)

    folder.commit("units", attempt, alone=True)


def _counted(folder: DeltaFolder, rows: UnitRows, units: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count the events of units and compute their digests; values of unreadable events stay null."""
    found, reader = list[dict[str, Any]](), RowsOfUnits(folder, folder.load("events"), rows.spans)
    for begin in range(0, len(units), _UNITS_AT_ONCE):
        part = units[begin : begin + _UNITS_AT_ONCE]
        events = reader.read([unit["unit"] for unit in part], {unit["doc"] for unit in part}, EVENTS.columns)
        for unit in part:
            own = events.filter(pc.equal(events["unit"], unit["unit"]))
            found.append(unit | counted_events(own) if own.num_rows else unit)
    return found
