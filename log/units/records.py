"""Make the rows of ``units`` for events that have none: a writer was killed between its two commits, or rows are lost.

The footer of an events file holds a copy of its units' rows. If another program has replaced the file, the units are
found in the events themselves, and values that events do not determine are null.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.versions import Snapshot
from kvdrift.log.units.rows import UnitRows
from kvdrift.log.units.unit import counted_events, unit_number
from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import COUPLED, EVENTS, GROUP_KEY, PLAIN, SWRB, UNITS

FOOTER: Final = "kvdrift.records"


def footer_of(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the footer of an events file, which holds a copy of its units' rows."""
    text = json.dumps([dict(record) for record in records])
    return {FOOTER: base64.b64encode(zlib.compress(text.encode())).decode()}


def records_in(folder: DeltaFolder, path: str) -> list[dict[str, Any]]:
    """Return the copies of units' rows in the footer of an events file; empty if unreadable."""
    try:
        text = folder.footer("events", path)[FOOTER.encode()]
        found = json.loads(zlib.decompress(base64.b64decode(text)))
        return [{name: record[name] for name in UNITS.columns} for record in found]
    except (InputError, ValueError, TypeError, KeyError, zlib.error):
        return []


def missing_records(folder: DeltaFolder, rows: UnitRows, units: Snapshot, events: Snapshot) -> list[dict[str, Any]]:
    """Return the rows that ``units`` lacks for visible events; read no file if row counts agree."""
    counted, there = rows.total(units, "events"), folder.count_rows(events)
    if there == counted:
        return []
    if there < counted:
        raise rows.fewer_events(units, there, counted)
    known, found, lacking = set(rows.counts(units).number.tolist()), dict[int, dict[str, Any]](), list[int]()
    for path, new in rows.unknown(units, events):
        copies = _copies(folder, path, new, known)
        found |= copies
        lacking += [number for number in new if number >= 0 and number not in copies]
    if lacking:
        # The program that merged the file may have appended the rows first, after ``units`` was loaded here.
        newest = folder.read(folder.load("units"), UNITS.columns, where=_numbered(lacking)).to_pylist()
        found |= {row["unit"]: row for row in newest}
        found |= _made_from_events(folder, events, [number for number in lacking if number not in found])
    return [found[number] for number in sorted(found)]


def records_of(
    folder: DeltaFolder, events: Snapshot, path: str, numbers: Collection[int], known: Collection[int]
) -> dict[int, dict[str, Any]]:
    """Return rows of ``units``, by number, for units with events in a file that are not ``known``.

    The number -1 marks events that belong to no unit, and no row is made for these.
    """
    copies = _copies(folder, path, numbers, known)
    lacking = [number for number in numbers if number >= 0 and number not in copies]
    return copies | _made_from_events(folder, events, lacking)


def _copies(
    folder: DeltaFolder, path: str, numbers: Collection[int], known: Collection[int]
) -> dict[int, dict[str, Any]]:
    """Return the copies of rows of ``units`` in a file's footer, by number, of units that are not ``known``."""
    copies = {record["unit"]: record for record in records_in(folder, path) if record["unit"] not in known}
    return {number: copies[number] for number in numbers if number in copies}


def _made_from_events(folder: DeltaFolder, events: Snapshot, numbers: Collection[int]) -> dict[int, dict[str, Any]]:
    """Return rows of ``units`` made from events alone, by number; none for units that are not whole."""
    if not numbers:
        return {}
    rows = folder.read(events, EVENTS.columns, where=_numbered(numbers))
    made = {number: record_from(rows.filter(pc.equal(rows["unit"], number))) for number in numbers}
    return {number: record for number, record in made.items() if record is not None}


def _numbered(numbers: Collection[int]) -> pc.Expression:
    """Return the condition that a row is of one of some units."""
    return pc.field("unit").isin(pa.array(numbers, pa.int64()))


def record_from(events: pa.Table) -> dict[str, Any] | None:
    """Return a unit's row made from its events alone; None if the events are not those of one whole unit.

    Values that events do not determine are null.
    """
    if not events.num_rows:
        return None
    first = events.slice(0, 1).to_pylist()[0]
    replicates = events["replicate"].unique().to_numpy()
    record = dict.fromkeys(UNITS.columns) | {
        **{name: first[name] for name in (*GROUP_KEY, "action_revision")},
        "estimator": PLAIN if first["kind"] == COUPLED else SWRB,
        "first_replicate": int(replicates.min()),
        "replicates": len(replicates),
        "horizon": int(pc.max(events["t"]).as_py()),
        "unit": first["unit"],
    }
    return record | counted_events(events) if unit_number(record) == first["unit"] else None


def as_rows(records: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return records as rows of ``units``."""
    return pa.Table.from_pylist([dict(record) for record in records], schema=UNITS.schema)
