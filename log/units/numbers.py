"""The unit numbers of rows. Rows of schema versions before 11 have no number; it follows from their keys."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from log.units.unit import SPAN, unit_number
from schema.rows import Wide, combined_codes
from schema.tables import COUPLED, EVENTS, GROUP_KEY, PLAIN, SWRB, UNIT_MOMENTS

NUMBERED: Final = ("events", "unit_moments", "trajectories", "steps", "branchings", "branching_depths")
"""The tables whose rows belong to units."""

KEYS: Final = (*GROUP_KEY, "action_revision", "replicate", "unit")
"""The columns that determine a row's unit, besides ``kind`` in events."""

_OF_SWRB = ("branchings", "branching_depths")
_UNKNOWN = -1


def keys_of(table: str) -> tuple[str, ...]:
    """Return the columns of a table that ``with_numbers`` needs."""
    if table == UNIT_MOMENTS.name:  # which came after its rows said their unit
        return ("unit",)
    return (*KEYS, "kind") if table == EVENTS.name else KEYS


def numbers_of(units: pa.Table) -> Wide:
    """Return the numbers of units, int64 [rows of ``units``], computed for rows too old to have a number."""
    if not units["unit"].null_count:
        numbers: Wide = units["unit"].to_numpy()
        return numbers
    return np.array([unit_number(row) for row in units.select(SPAN).to_pylist()], dtype=np.int64)


def with_numbers(table: str, rows: pa.Table, units: pa.Table) -> pa.Table:
    """Return rows with the unit numbers filled in.

    Args:
        table: The table, one of ``NUMBERED``.
        rows: Rows of the table with at least the columns of ``keys_of(table)``.
        units: Rows of ``units`` with the columns ``SPAN`` and ``unit``.

    Returns:
        The rows; ``unit`` is still null in rows that belong to none of the units.

    """
    if not rows["unit"].null_count:
        return rows
    lacking = pc.is_null(rows["unit"])
    found = _looked_up(table, rows.filter(lacking), units)
    numbers = rows["unit"].fill_null(_UNKNOWN).to_numpy().copy()
    numbers[lacking.to_numpy()] = found
    at = rows.schema.get_field_index("unit")
    filled = pa.array(numbers, mask=numbers == _UNKNOWN)
    return rows.set_column(at, rows.schema.field(at), filled)


def _looked_up(table: str, rows: pa.Table, units: pa.Table) -> Wide:
    """Return each row's unit: the unit with its names, revision and estimator that has its replicate."""
    names = (*GROUP_KEY, "action_revision", "estimator")
    both = pa.concat_tables(
        [part.select(names).cast(_plain(part, names)) for part in (_with_estimator(table, rows), units)]
    )
    coded = [_codes(both[name]) for name in names]
    group = combined_codes(coded, both.num_rows)
    of_rows, of_units = group[: rows.num_rows], group[rows.num_rows :]
    first, count = (units[name].to_numpy().astype(np.int64) for name in ("first_replicate", "replicates"))
    order = np.lexsort((first, of_units))
    replicate = rows["replicate"].to_numpy().astype(np.int64)
    # Units sorted by (group, first replicate): a row's unit is the last one that begins no later than the row.
    starts, keys = _joined(of_units[order], first[order], of_rows, replicate)
    at = np.searchsorted(starts, keys, side="right") - 1
    place = order[np.maximum(at, 0)] if len(order) else np.zeros(len(keys), dtype=np.int64)
    if not len(order):
        return np.full(len(keys), _UNKNOWN, dtype=np.int64)
    inside = (at >= 0) & (of_units[place] == of_rows) & (replicate < first[place] + count[place])
    found: Wide = np.where(inside, numbers_of(units)[place], _UNKNOWN)
    return found


def _joined(group: Wide, first: Wide, of_rows: Wide, replicate: Wide) -> tuple[Wide, Wide]:
    """Number (group, replicate) pairs of units and of rows in one common order."""
    codes = combined_codes(
        [
            (np.concatenate([group, of_rows]), int(max(group.max(initial=0), of_rows.max(initial=0))) + 1),
            (np.concatenate([first, replicate]), 2**31),
        ],
        len(group) + len(of_rows),
    )
    return codes[: len(group)], codes[len(group) :]


def _with_estimator(table: str, rows: pa.Table) -> pa.Table:
    if table == EVENTS.name:
        plain = pc.equal(rows["kind"].cast(pa.string()), COUPLED)
        estimator = pc.if_else(plain, PLAIN, SWRB)
    else:
        estimator = pa.array(np.repeat(SWRB if table in _OF_SWRB else PLAIN, rows.num_rows), pa.string())
    return rows.append_column("estimator", estimator)


def _plain(rows: pa.Table, names: tuple[str, ...]) -> pa.Schema:
    """Return a schema with plain texts in place of dictionaries."""
    fields = [rows.schema.field(name) for name in names]
    coded = pa.types.is_dictionary
    return pa.schema([(field.name, field.type.value_type if coded(field.type) else field.type) for field in fields])


def _codes(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], int]:
    coded = column.combine_chunks().dictionary_encode()
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    return coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(coded.dictionary)
