"""The unit numbers of rows. Rows of schema versions before 11 have no number; it follows from their keys."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.units.unit import SPAN, unit_number
from kvdrift.schema.rows import Wide, combined_codes
from kvdrift.schema.tables import COUPLED, EVENTS, GROUP_KEY, PLAIN, SWRB, UNIT_MOMENTS

NUMBERED: Final = ("events", "unit_moments", "trajectories", "steps", "branchings", "branching_depths")
"""The tables whose rows belong to units."""

KEYS: Final = (*GROUP_KEY, "action_revision", "replicate", "unit")
"""The columns that determine a row's unit, besides ``kind`` in events."""

_OF_SWRB = ("branchings", "branching_depths")


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
    """Return rows with at least the columns of ``keys_of(table)``, with the unit numbers filled in.

    ``units`` has rows of that table with the columns ``SPAN`` and ``unit``. In rows that belong to none of them,
    ``unit`` is still null.
    """
    if not rows["unit"].null_count:
        return rows
    lacking = pc.is_null(rows["unit"])
    found = _looked_up(table, rows.filter(lacking), units)
    at = rows.schema.get_field_index("unit")
    filled = pc.replace_with_mask(rows["unit"].combine_chunks(), lacking.combine_chunks(), found)
    return rows.set_column(at, rows.schema.field(at), filled)


def _looked_up(table: str, rows: pa.Table, units: pa.Table) -> pa.Array:
    """Return each row's unit: the unit with its names, revision and estimator that has its replicate; null if none."""
    counts = units["replicates"].to_numpy()
    unit = np.repeat(np.arange(units.num_rows), counts)  # of each replicate of all units
    within = np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
    replicate = units["first_replicate"].to_numpy()[unit] + within
    replicates = units.take(unit).append_column("replicate", pa.array(replicate, pa.int32()))
    names = (*GROUP_KEY, "action_revision", "estimator", "replicate")
    parts = [part.select(names) for part in (_with_estimator(table, rows), replicates)]
    both = pa.concat_tables([part.cast(_plain(part, names)) for part in parts])
    codes = pa.array(combined_codes([_codes(both[name]) for name in names], both.num_rows))
    at = pc.index_in(codes[: rows.num_rows], value_set=codes[rows.num_rows :])
    return pa.array(numbers_of(units)[unit]).take(at)


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
