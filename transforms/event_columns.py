"""Check the columns of events, sort them by key, cut them into replicates, and build tables of a declared schema.

The derivations of coupled pairs and of residual branching use this module. It computes no quantity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.schema.errors import InputError
from kvdrift.schema.moments import NEVER
from kvdrift.schema.rows import Flags, Ints, Wide, combined_codes, run_begins
from kvdrift.schema.tables import EVENTS, GROUP_KEY

_LATER = {"action_revision": 0, "unit": -1}  # columns that older events lack, with the value that stands for null


def check_columns(events: pa.Table, fields: Sequence[pa.Field]) -> None:
    """Check that an events table has the columns ``fields``, of their types and nullability, and positions above 0.

    Raises:
        InputError: A column is missing, of another type, or has nulls that its field forbids; or a position t is below
            1 or too large.
    """
    missing = [field.name for field in fields if field.name not in events.column_names]
    if missing:
        raise InputError(f"events lack the column{'s' * (len(missing) > 1)} {', '.join(missing)}")
    for field in fields:
        column = events.column(field.name)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if kind != field.type and not (pa.types.is_string(field.type) and pa.types.is_large_string(kind)):
            raise InputError(f"events column '{field.name}' is {column.type}, must be {field.type}")
        if column.null_count and not field.nullable:
            raise InputError(f"events column '{field.name}' has {column.null_count} nulls, must have none")
    if events.num_rows:
        positions = pc.min_max(events.column("t")).as_py()
        if positions["min"] < 1 or positions["max"] >= NEVER - 1:
            raise InputError(
                f"events have positions t from {positions['min']} to {positions['max']}, must be within 1..H"
            )


def check_kinds(kind: pa.ChunkedArray, allowed: Sequence[str]) -> None:
    """Check that all events are of the allowed kinds."""
    foreign = [word for word in kind.unique().to_pylist() if word not in allowed]
    if foreign:
        raise InputError(f"events column 'kind' has {foreign[0]!r}, must be {' or '.join(map(repr, allowed))}")


@dataclass(frozen=True)
class SortedEvents:
    """N events in the order of their keys, cut into M replicates; a replicate's rows follow each other.

    Attributes:
        names: [N] study, model, doc and action, encoded in the sorted order of their words.
        values: [N] the other columns by name; ``action_revision`` is 0, and ``unit`` -1, if events have none.
        first_row: [M] the first row of each replicate.
        rows: [M] the number of rows of each replicate.
        of_row: [N] the replicate that each row belongs to, numbered from 0.
    """

    names: dict[str, pa.DictionaryArray]
    values: dict[str, npt.NDArray[Any]]
    first_row: Wide
    rows: Wide
    of_row: Ints

    @classmethod
    def of(
        cls, events: pa.Table, values: Mapping[str, npt.NDArray[Any]], within: Wide, rest: Sequence[str]
    ) -> SortedEvents:
        """Sort events and cut them into replicates.

        Args:
            events: N rows that have the columns of ``GROUP_KEY``.
            values: Arrays [N] of the other columns, among them ``replicate``.
            within: [N] numbers that sort the rows of one group, first by replicate.
            rest: Names of the values by which rows of equal keys are sorted, the least significant first, so that no
                result depends on the order in which such rows arrive.
        """
        names = {name: _dictionary(events.column(name)) for name in GROUP_KEY}
        ordered = dict(values) | {name: filled(events, name, null) for name, null in _LATER.items()}
        coded = [(codes.indices.to_numpy(), len(codes.dictionary)) for codes in names.values()]
        coded.append((ordered["action_revision"], int(ordered["action_revision"].max(initial=0)) + 1))
        group = combined_codes(coded, events.num_rows)
        order = _key_order(group, within, [ordered[name] for name in rest])
        if order is not None:
            names = {name: codes.take(pa.array(order)) for name, codes in names.items()}
            group = group[order]
            ordered = {name: column[order] for name, column in ordered.items()}
        first_row = np.flatnonzero(run_begins(group, ordered["replicate"]))
        rows = np.diff(first_row, append=len(group))
        return cls(names, ordered, first_row, rows, np.repeat(np.arange(len(rows), dtype=np.int32), rows))

    def keys(self, rows: Wide | None = None) -> dict[str, Any]:
        """Return the columns that name a replicate and its unit, at ``rows``; None stands for all rows."""
        at = slice(None) if rows is None else rows
        names = (
            self.names if rows is None else {name: column.take(pa.array(rows)) for name, column in self.names.items()}
        )
        numbers = {name: self.values[name][at] for name in ("replicate", "action_revision")}
        unit = self.values["unit"][at]
        return names | numbers | {"unit": with_nulls(unit, null=unit == _LATER["unit"])}

    def count(self, flags: Flags) -> Wide:
        """Count the rows of each replicate that have a flag: [N] -> [M]."""
        return np.bincount(self.of_row[flags], minlength=len(self.rows))


def with_nulls(values: npt.NDArray[Any], *, null: Flags) -> pa.Array:
    """Return [N] values as an Arrow array that is null where ``null`` is true."""
    return pa.array(values, mask=null)


def table_of(columns: dict[str, Any], schema: pa.Schema) -> pa.Table:
    """Build a table of exactly ``schema`` from numpy or Arrow arrays by column name, cast where types differ."""
    arrays = []
    for field in schema:
        values = columns[field.name]
        array = values if isinstance(values, pa.Array) else pa.array(values, type=field.type)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def filled(events: pa.Table, name: str, null: float) -> npt.NDArray[Any]:
    """Return a column [N] with ``null`` in place of nulls, and in all rows if the table lacks the column."""
    if name not in events.column_names:
        kind = pa.array([null], EVENTS.schema.field(name).type).to_numpy(zero_copy_only=False).dtype
        return np.full(events.num_rows, null, dtype=kind)
    values: npt.NDArray[Any] = events.column(name).fill_null(null).to_numpy()
    return values


def _dictionary(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Encode a string column [N] as int32 codes into its sorted distinct values."""
    encoded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    if encoded.num_chunks == 1:
        whole = encoded.chunk(0)
    else:
        whole = pa.chunked_array(encoded.chunks, type=encoded.type).unify_dictionaries().combine_chunks()
        whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    words = whole.dictionary
    if len(words) == 1:  # the usual segment has one study, model, document and action
        return pa.DictionaryArray.from_arrays(whole.indices.cast(pa.int32()), words.cast(pa.string()))
    used = pc.unique(words).sort()  # a dictionary may hold words twice, and words that no row has
    rank = pc.index_in(words, used).to_numpy(zero_copy_only=False).astype(np.int32)
    codes = whole.indices.to_numpy(zero_copy_only=False)
    return pa.DictionaryArray.from_arrays(pa.array(rank[codes]), used.cast(pa.string()))


def _key_order(group: Wide, within: Wide, rest: Sequence[npt.NDArray[Any]]) -> Wide | None:
    """Find the permutation that sorts N rows by the key (group, within), and rows of equal keys by ``rest``.

    None if the rows are in the order of their keys and no key repeats.
    """
    same_group = np.diff(group) == 0
    if np.all(np.diff(group) >= 0) and not np.any(same_group & (np.diff(within) <= 0)):
        return None
    order = np.lexsort((within, group))
    repeated = (np.diff(group[order]) == 0) & (np.diff(within[order]) == 0)
    return np.lexsort((*rest, within, group)) if repeated.any() else order
