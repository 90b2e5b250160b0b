"""Find units whose events are lost in part or wholly, and their rows in any file that is still in the store."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.units.records import record_from
from kvdrift.log.units.unit import DERIVED_TABLES, in_order
from kvdrift.schema.errors import InputError
from kvdrift.schema.rows import run_begins
from kvdrift.schema.tables import EVENTS
from kvdrift.transforms.segments import in_parts
from kvdrift.verification.files import UnitRecord, whole_rows
from kvdrift.verification.logs import files_of
from kvdrift.verification.unit_rows import checked_events, rows_by_unit

if TYPE_CHECKING:
    from kvdrift.log.store import Store


class Known(NamedTuple):
    """Rows of ``units`` by number: the visible rows, and copies of rows in other files of the store."""

    rows: Mapping[int, UnitRecord]
    copies: Mapping[int, UnitRecord]

    def record(self, number: int) -> UnitRecord | None:
        """Return the row of a unit, or a copy of the row; None if there is neither."""
        return self.rows.get(number) or self.copies.get(number)


def known_units(store: Store) -> Known:
    """Return the known rows of ``units``; the visible files of ``units`` must be whole."""
    rows = {row["unit"]: row for row in store.read("units").to_pylist()}
    copies: dict[int, UnitRecord] = {}
    for path in _others(store, "units"):
        if (found := whole_rows(store, "units", path)) is not None:
            copies |= {row["unit"]: row for row in found.to_pylist()}
    for path in (*store.paths("events"), *_others(store, "events")):
        copies = {record["unit"]: record for record in store.copied_records(path)} | copies
    return Known(rows, copies)


def broken_units(store: Store, known: Known) -> set[int]:
    """Return the units with a row in ``units``, or with derived rows, whose number of events is wrong."""
    there, _ = rows_by_unit(store, "events")
    wanted = set(known.rows)
    for table in DERIVED_TABLES:
        wanted |= rows_by_unit(store, table)[0].keys()
    return {number for number in wanted - {-1} if not _is_there(known.record(number), there[number])}


def _is_there(record: UnitRecord | None, rows: int) -> bool:
    return rows > 0 if record is None else rows == record["event_rows"]


def whole_copies(store: Store, known: Known, numbers: Collection[int]) -> Iterator[list[tuple[UnitRecord, pa.Table]]]:
    """Search every file of ``events`` in the store, visible or not, for all rows of some units.

    Yields rows of ``units`` with all events of these units, some hundred thousand events at once.
    """
    paths, rows = defaultdict[int, list[str]](list), Counter[int]()
    for path in (*store.paths("events"), *_others(store, "events")):
        found = Counter(_events_in(store, path)["unit"].to_pylist())
        for number in found.keys() & set(numbers):
            paths[number].append(path)
            rows[number] += found[number]
    for part in in_parts(sorted(paths, key=lambda number: (paths[number], number)), rows.__getitem__):
        yield _whole(store, known, part, paths)


def _whole(
    store: Store, known: Known, numbers: list[int], paths: Mapping[int, list[str]]
) -> list[tuple[UnitRecord, pa.Table]]:
    wanted, found = pa.array(numbers, pa.int64()), list[pa.Table]()
    for path in dict.fromkeys(path for number in numbers for path in paths[number]):
        rows = _events_in(store, path)
        found.append(rows.filter(pc.is_in(rows["unit"], wanted)))
    together, whole = pa.concat_tables(found), []
    for number in numbers:
        events = _once(together.filter(pc.equal(together["unit"], number)))
        record = known.record(number) or record_from(events)
        try:
            if record is not None:
                whole.append((record, checked_events(record, events)))
        except InputError:
            continue  # rows are missing, or are not those of the unit
    return whole


def _once(events: pa.Table) -> pa.Table:
    """Return events without repeated rows, since a merged file repeats the rows of the files that it replaced."""
    ordered = in_order(events)
    columns = [ordered[name].to_numpy() for name in ("replicate", "t")]
    kinds = ordered["kind"].combine_chunks().dictionary_encode().indices.to_numpy()
    return ordered.filter(pa.array(run_begins(*columns, kinds))) if ordered.num_rows else ordered


def _events_in(store: Store, path: str) -> pa.Table:
    """Return the rows of a file of ``events`` that have a unit; none if the file is damaged."""
    rows = whole_rows(store, "events", path)
    return EVENTS.schema.empty_table() if rows is None else rows.filter(pc.is_valid(rows["unit"]))


def _others(store: Store, table: str) -> list[str]:
    """Return the files in a table's folder that are not visible."""
    return sorted(set(files_of(store, table)) - set(store.paths(table)))
