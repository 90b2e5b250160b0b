"""Make the rows of ``units`` for events that have none: a writer was killed between its two commits, or rows are lost.

The footer of an events file holds a copy of its units' rows. If another program has replaced the file, the units are
found in the events themselves, and values that events do not determine are null.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.units.numbers import with_numbers
from kvdrift.log.units.unit import counted_events, unit_number
from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import COUPLED, EVENTS, GROUP_KEY, PLAIN, SWRB, UNITS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kvdrift.log.delta.folder import DeltaFolder
    from kvdrift.log.delta.snapshot import Snapshot
    from kvdrift.log.units.rows import UnitRows

FOOTER: Final = "kvdrift.records"
_FOOTER_OF_ONE, _FOOTER_OF_PACK = b"kvdrift.unit", b"kvdrift.units"  # schema versions before 11


def footer_of(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the footer of an events file, which holds a copy of its units' rows."""
    text = json.dumps([dict(record) for record in records])
    return {FOOTER: base64.b64encode(zlib.compress(text.encode())).decode()}


def records_in(folder: DeltaFolder, path: str) -> list[dict[str, Any]]:
    """Return the copies of units' rows in the footer of an events file; empty if unreadable."""
    try:
        footer = folder.footer("events", path)
        found: list[dict[str, Any]] = []
        if FOOTER.encode() in footer:
            found = _unpacked(footer[FOOTER.encode()])
        elif _FOOTER_OF_PACK in footer:
            found = [record for _, _, record in _unpacked(footer[_FOOTER_OF_PACK])]
        elif _FOOTER_OF_ONE in footer:
            found = [json.loads(footer[_FOOTER_OF_ONE])]
        known = [{name: value for name, value in record.items() if name in UNITS.columns} for record in found]
        records = [dict.fromkeys(UNITS.columns) | UNITS.defaults | record for record in known]
        return [record | {"unit": unit_number(record)} for record in records]
    except (InputError, ValueError, TypeError, KeyError, zlib.error):
        return []


def _unpacked(text: bytes) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def missing_records(folder: DeltaFolder, rows: UnitRows, units: Snapshot, events: Snapshot) -> list[dict[str, Any]]:
    """Return the rows that ``units`` lacks for visible events; read no file if row counts agree."""
    counted, there = rows.total(units, "events"), folder.count_rows(events)
    if there == counted:
        return []
    if counted is not None and there < counted:
        raise rows.fewer_events(units, there, counted)
    known, found = set(rows.counts(units).number.tolist()), dict[int, dict[str, Any]]()
    for path, new in rows.unknown(units, events):
        found |= records_of(folder, events, path, new, known)
    return [found[number] for number in sorted(found)]


def records_of(
    folder: DeltaFolder, events: Snapshot, path: str, numbers: Collection[int], known: Collection[int]
) -> dict[int, dict[str, Any]]:
    """Return rows of ``units`` for units with events in a file, by number; -1 marks a unit known only from a copy."""
    copies = {record["unit"]: record for record in records_in(folder, path) if record["unit"] not in known}
    found = copies if -1 in numbers else {number: copies[number] for number in numbers if number in copies}
    if lacking := [number for number in numbers if number >= 0 and number not in found]:
        where = pc.field("unit").isin(pa.array(lacking, pa.int64()))
        rows = folder.read(events, EVENTS.columns, where=where)
        for number in lacking:
            if record := record_from(rows.filter(pc.equal(rows["unit"], number))):
                found[number] = record
    return _numbered(folder, events, path, found)


def _numbered(
    folder: DeltaFolder, events: Snapshot, path: str, found: dict[int, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Return the copies with each unit's number and digest of events, which old schema versions lack."""
    if all(record["event_rows"] is not None for record in found.values()):
        return found
    rows = folder.read(events, EVENTS.columns, paths=[path])
    rows = with_numbers("events", rows, as_rows([*found.values()]))
    for number, record in found.items():
        own = rows.filter(pc.equal(rows["unit"], number))
        found[number] = record | counted_events(own)
    return found


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
