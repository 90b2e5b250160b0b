"""Count the rows that tables have of units, and check whether rows are exactly a unit's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from log.store import Unit
from log.units.unit import DERIVED_TABLES, conform_unit
from schema.errors import InputError
from transforms.segments import COVERED

if TYPE_CHECKING:
    from log.store import Store
    from verification.files import UnitRecord

_OF_STORE: Final = ("unit", "event_rows", "events_sha256")  # columns of ``units`` that the store itself fills in


def covered_versions(store: Store) -> dict[str, int]:
    """Return the events version through which each derived table says that it is complete; -1 if it says nothing.

    Call this before choosing the versions to check, so that these include everything covered.
    """
    versions = {table: store.covered_version(table, COVERED) for table in DERIVED_TABLES}
    return {table: -1 if version is None else version for table, version in versions.items()}


def units_at(store: Store, version: int) -> set[int]:
    """Return the numbers of the units whose events were visible at a version of ``events``.

    Raises:
        InputError: The files of that version are not all there.

    """
    return {n for path in store.paths("events", version) for n in store.rows_by_unit("events", path, version)}


def rows_by_unit(
    store: Store, table: str, version: int | None = None, without: Collection[str] = ()
) -> tuple[Counter[int], bool]:
    """Count the rows of each unit in all files of a table except some; -1 counts rows without a unit.

    Returns:
        The counts, and whether every file was read.

    """
    found, readable = Counter[int](), not without
    for path in store.paths(table, version):
        try:
            found.update({} if path in without else store.rows_by_unit(table, path, version))
        except InputError:
            readable = False
    return found, readable


def checked_events(record: UnitRecord, events: pa.Table) -> pa.Table:
    """Check that events are exactly a unit's.

    Args:
        record: The row of the unit.
        events: Rows of EVENTS.

    Returns:
        The events, sorted by (replicate, kind with scan before branch, t), each with the unit's number.

    Raises:
        InputError: They are not; the message begins with a verb or with the wrong field.

    """
    wanted = record["event_rows"]
    if wanted is not None and events.num_rows != wanted:
        raise InputError(f"has {events.num_rows:,} of {wanted:,} rows")
    given = {name: value for name, value in record.items() if name not in _OF_STORE}
    found, rows = conform_unit(Unit(given, events.drop_columns("unit")))
    digest = record["events_sha256"]
    if digest is not None and digest != found["events_sha256"]:
        raise InputError(f"its events have SHA-256 {found['events_sha256']}, must have {digest} as in units")
    return rows


def by_unit(rows: pa.Table, numbers: Sequence[int]) -> Iterator[pa.Table]:
    """Yield the rows of each of some units, in their order in ``rows``."""
    found = rows["unit"].to_numpy()
    order = np.argsort(found, kind="stable")
    rows, found = rows.take(pa.array(order)), found[order]
    for begin, end in zip(np.searchsorted(found, numbers), np.searchsorted(found, numbers, side="right"), strict=True):
        yield rows.slice(begin, end - begin)
