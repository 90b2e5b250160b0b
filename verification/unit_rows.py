"""Count the rows of each unit in a table, and compare stored rows with those that the events of the unit give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kvdrift.log.store import Unit
from kvdrift.log.units.unit import DERIVED_TABLES, OF_STORE, conform_unit
from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import GROUP_KEY, TABLES, UNIT_MOMENTS
from kvdrift.transforms.segments import COVERED

if TYPE_CHECKING:
    from kvdrift.log.store import Store
    from kvdrift.verification.files import UnitRecord

# A derivation on another machine may add up in another order. A sum of n terms of one sign then differs by at most
# n 2^-53 of its value; the longest sums here have 2 H terms. EOS gaps have terms of both signs of at most 1 / H each:
# their sums differ by at most n 2^-53.
ROUNDING = 1e-12
_OF_THE_UNIT = (*GROUP_KEY, "action_revision", "unit")


def covered_versions(store: Store) -> dict[str, int]:
    """Return the events version through which each derived table says that it is complete; -1 if it says nothing.

    Call this before choosing the versions to check, so that these include everything covered.
    """
    versions = {table: store.covered_version(table, COVERED) for table in DERIVED_TABLES}
    return {table: -1 if version is None else version for table, version in versions.items()}


def units_at(store: Store, version: int) -> set[int]:
    """Return the numbers of the units whose events were visible at a version of ``events``."""
    return {n for path in store.paths("events", version) for n in store.rows_by_unit("events", path, version)}


def rows_by_unit(
    store: Store, table: str, version: int | None = None, without: Collection[str] = ()
) -> tuple[Counter[int], bool]:
    """Count the rows of each unit in all files of a table except some; also return whether every file was read.

    -1 counts rows without a unit.
    """
    found, readable = Counter[int](), not without
    version = store.version(table) if version is None else version  # the same for all files
    for path in store.paths(table, version):
        try:
            found.update({} if path in without else store.rows_by_unit(table, path, version))
        except InputError:
            readable = False
    return found, readable


def checked_events(record: UnitRecord, events: pa.Table) -> pa.Table:
    """Check that events are exactly a unit's, and return them as ``conform_unit`` does; ``record`` is the unit's row.

    Raises:
        InputError: They are not; the message begins with a verb or with the wrong field.
    """
    wanted = record["event_rows"]
    if events.num_rows != wanted:
        raise InputError(f"has {events.num_rows:,} of {wanted:,} rows")
    given = {name: value for name, value in record.items() if name not in OF_STORE}
    found, rows = conform_unit(Unit(given, events.drop_columns("unit")))
    digest = record["events_sha256"]
    if digest != found["events_sha256"]:
        raise InputError(f"its events have SHA-256 {found['events_sha256']}, must have {digest} as in units")
    return rows


def by_unit(rows: pa.Table, numbers: Sequence[int]) -> Iterator[pa.Table]:
    """Yield the rows of each of some units, in their order in ``rows``."""
    found = rows["unit"].to_numpy()
    order = np.argsort(found, kind="stable")
    rows, found = rows.take(pa.array(order)), found[order]
    for begin, end in zip(np.searchsorted(found, numbers), np.searchsorted(found, numbers, side="right"), strict=True):
        yield rows.slice(begin, end - begin)


def first_difference(table: str, stored: pa.Table, derived: pa.Table) -> str | None:
    """Return how stored rows differ from derived rows, in the first column that differs; None if they are equal.

    Both are of the table's declared schema, sorted by key. Doubles, in lists too, may differ by ``ROUNDING`` of
    their value, and moments by ``ROUNDING``.
    """
    if stored.num_rows != derived.num_rows:
        return f"there are {stored.num_rows} rows, must be {derived.num_rows} as its events give"
    for name in TABLES[table].columns:
        if stored[name].equals(derived[name]):
            continue
        differ = _differ(stored[name], derived[name], 1.0 if table == UNIT_MOMENTS.name else 0.0)
        if not differ.any():
            continue
        row = int(np.argmax(differ))
        key = [f"{part} {derived[part][row]}" for part in TABLES[table].key if part not in _OF_THE_UNIT]
        at = f" at {', '.join(key)}" if key else ""
        return (
            f"{name} is {_text(stored[name][row])}{at}{and_more(int(differ.sum()) - 1)}, "
            f"must be {_text(derived[name][row])} as its events give"
        )
    return None


def _differ(stored: pa.ChunkedArray, derived: pa.ChunkedArray, least: float) -> npt.NDArray[np.bool_]:
    if pa.types.is_float64(stored.type):
        return _beyond_rounding(stored.to_numpy(), derived.to_numpy(), least)  # null is NaN
    pairs = zip(stored.to_pylist(), derived.to_pylist(), strict=True)
    if pa.types.is_list(stored.type):
        each = ((np.array(one), np.array(other)) for one, other in pairs)
        return np.array([a.shape != b.shape or _beyond_rounding(a, b, least).any() for a, b in each])
    return np.array([value != wanted for value, wanted in pairs])


def _beyond_rounding(
    values: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64], least: float
) -> npt.NDArray[np.bool_]:
    close = np.abs(values - wanted) <= ROUNDING * np.maximum(np.abs(wanted), least)
    return ~(close | (np.isnan(values) & np.isnan(wanted)))


def _text(value: pa.Scalar) -> str:
    found = value.as_py()
    return "null" if found is None else repr(found)


def and_more(others: int) -> str:
    """Return text such as ``" and 3 more"``; empty if there are no others."""
    return f" and {others:,} more" if others else ""
