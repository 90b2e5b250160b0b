"""N events as numpy columns: converted from Arrow to the stored types, and completed after both sides have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.schema.rows import Flags, Ints, rounded_into_range, run_begins
from kvdrift.schema.tables import EVENTS, GROUP_KEY, PAIR_COLUMNS

VALUES = tuple(name for name in PAIR_COLUMNS if name not in GROUP_KEY)
INTEGERS = tuple(name for name in VALUES if EVENTS.schema.field(name).type == pa.int32())
DISTANCES = tuple(name for name in VALUES if EVENTS.schema.field(name).type == pa.float32())

Column: TypeAlias = pa.Array | pa.ChunkedArray
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)


@dataclass(frozen=True)
class EventRows:
    """N events in the types of table ``events``; ``flaws`` marks values that are null or do not fit their type."""

    group: Ints  # the number of the row's (study, model, doc, action)
    replicate: Ints
    t: Ints
    x_token: Ints
    y_token: Ints
    delta: npt.NDArray[np.float32]
    f: npt.NDArray[np.float32]
    x_eos: Flags
    y_eos: Flags
    flaws: npt.NDArray[np.uint16]  # bit i: VALUES[i] is null; bit 8 + i: it does not fit the type

    def __len__(self) -> int:
        return len(self.group)

    def take(self, chosen: Any) -> EventRows:
        """Return the rows of a slice, a mask or an array of indices."""
        return EventRows(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def is_flawed(self, name: str) -> Flags:
        """Tell which values of a column are null or do not fit its type, [N]."""
        flawed: Flags = self.flaws & np.uint16(0x101 << VALUES.index(name)) != 0
        return flawed

    @staticmethod
    def concatenated(parts: Sequence[EventRows]) -> EventRows:
        """Return the rows of all ``parts``; there must be at least one part."""
        if len(parts) == 1:
            return parts[0]
        return EventRows(*(np.concatenate([getattr(p, field.name) for p in parts]) for field in fields(EventRows)))


def converted(batch: pa.RecordBatch | pa.Table, group: Ints) -> EventRows:
    """Convert the values of N events to the types of table ``events``; ``group`` has the number of each event's group.

    Null and unfit values become 0 or NaN, and are marked in ``flaws``.
    """
    flaws = np.zeros(batch.num_rows, dtype=np.uint16)
    values: dict[str, npt.NDArray[Any]] = {}
    for bit, name in enumerate(VALUES):
        values[name], null, misfit = exact(batch.column(name), EVENTS.schema.field(name).type)
        for flawed, shift in ((null, bit), (misfit, 8 + bit)):
            if flawed.any():
                flaws |= flawed.astype(np.uint16) << np.uint16(shift)
    return EventRows(group, flaws=flaws, **values)


def exact(column: Column, kind: pa.DataType) -> tuple[npt.NDArray[Any], Flags, Flags]:
    """Convert a column [N] to ``kind``: an integer type or bool, without loss, or float32 for a distance, rounded.

    271.0 fits as the integer 271; 271.5 does not fit. 0 and 1 fit as flags, but true and false do not fit as numbers.
    Distances that are outside of [0, 1] by rounding alone become 0 or 1 before they are rounded to float32.

    Returns:
        The values, whether each is null, and whether each does not fit, all [N].
    """
    column = plain(column)
    null = unread = _nulls(column)
    if pa.types.is_decimal(column.type):
        values = [exact_value(value, kind) for value in column.to_pylist()]
        column = pa.array(values, pa.float64() if kind == pa.float32() else kind)
        unread = _nulls(column)
    elif not any(is_kind(column.type) for is_kind in _NUMBERS):
        column, unread = pa.nulls(len(column), kind), np.ones(len(column), np.bool_)
    if unread.any():
        column = column.fill_null(pa.scalar(0, pa.int8()).cast(column.type))
    array = column.to_numpy(zero_copy_only=False)
    if kind == pa.float32():
        real = array if array.dtype.kind == "f" else array.astype(np.float64)
        with np.errstate(over="ignore"):  # an overflow becomes infinity, which is outside 0..1 as well
            distances = rounded_into_range(real).astype(np.float32)
        return np.where(unread, np.float32(np.nan), distances), null, (unread | (array.dtype == np.bool_)) & ~null
    low, end = _bounds(kind)
    if array.dtype == np.bool_:
        fits = np.full(len(array), kind == pa.bool_())
    elif array.dtype.kind == "f":
        array = array.astype(np.float64)  # in float16 the bounds would be infinite
        fits = (array >= low) & (array < end) & (array == np.floor(array))
    else:
        fits = (array >= low) & (array < end)
    whole = array if fits.all() else np.where(fits, array, 0)
    return whole.astype(np.bool_ if kind == pa.bool_() else f"i{kind.bit_width // 8}"), null, (unread | ~fits) & ~null


def _nulls(column: Column) -> Flags:
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    null: Flags = column.is_null().to_numpy(zero_copy_only=False)
    return null


def _bounds(kind: pa.DataType) -> tuple[int, int]:
    """Return the least whole number that fits ``kind``, an integer type or bool, and the first above all that fit."""
    return (0, 2) if kind == pa.bool_() else (-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1))


def exact_value(value: object, kind: pa.DataType) -> Any:
    """Return a Python value as ``exact`` converts it, a distance as a double; None if it does not fit ``kind``."""
    if isinstance(value, bool | np.bool_):
        return bool(value) if kind == pa.bool_() else None
    if not isinstance(value, int | float | Decimal | np.integer | np.floating):
        return None
    try:
        if kind == pa.float32():
            return float(value)
        whole = int(value)
    except (ValueError, OverflowError):  # not finite, or too large
        return None
    low, end = _bounds(kind)
    if whole != value or not low <= whole < end:
        return None
    return bool(whole) if kind == pa.bool_() else whole


def plain(column: Column) -> Column:
    """Decode dictionaries, runs, extension types and string views of a column, which some Arrow functions refuse."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.cast(column.type.storage_type)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    return column.cast(pa.large_string()) if pa.types.is_string_view(column.type) else column


def filled(rows: EventRows, horizon: Ints) -> EventRows:
    """Add the positions up to H of replicates that stop after both sides have ended.

    Their values are known, since a side that has ended stays ended: delta and f are 0, the flags stay true, and both
    sides repeat one token, that of the side that ended first. Other replicates are returned as they are.

    Args:
        rows: N rows in key order, without gaps.
        horizon: H of each group.
    """
    if not len(rows):
        return rows
    last = np.append(np.flatnonzero(run_begins(rows.group, rows.replicate))[1:], len(rows)) - 1
    lacking = np.where(rows.x_eos[last] & rows.y_eos[last], horizon[rows.group[last]] - rows.t[last], 0)
    if not (lacking > 0).any():
        return rows
    copies = np.ones(len(rows), np.int64)
    copies[last] += np.maximum(lacking, 0)
    grown = rows.take(np.repeat(np.arange(len(rows)), copies))
    first = np.cumsum(copies) - copies
    after = (np.arange(len(grown)) - np.repeat(first, copies)).astype(np.int32)  # positions after the row that is there
    before = np.maximum(np.arange(len(rows)) - 1, 0)
    y_first = rows.y_eos[before] & ~rows.x_eos[before] & (rows.t > 1)
    token = np.repeat(np.where(y_first, rows.y_token, rows.x_token), copies)
    zero = np.float32(0)
    return replace(
        grown, t=grown.t + after,
        **{name: np.where(after > 0, token, getattr(grown, name)) for name in ("x_token", "y_token")},
        **{name: np.where(after > 0, zero, getattr(grown, name)) for name in DISTANCES},
    )  # fmt: skip


def only_repeats(rows: EventRows) -> Flags:
    """Tell which rows look like positions after both ends, [N]: both flags true, equal tokens, distances of 0.

    The row of the later of the two ends may look so, too.
    """
    repeated: Flags = rows.x_eos & rows.y_eos & (rows.x_token == rows.y_token) & (rows.delta == 0) & (rows.f == 0)
    return repeated


def without_tokens(rows: EventRows, chosen: Flags) -> EventRows:
    """Return the rows with both tokens 0 where ``chosen``: used for rows after both ends, whose tokens mean nothing."""
    tokens = {name: np.where(chosen, np.int32(0), getattr(rows, name)) for name in ("x_token", "y_token")}
    return replace(rows, **tokens)
