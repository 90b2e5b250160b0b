"""Columns of events tables as arrays: checked, in key order, and back to the tables of a declared schema.

What both derivations of a segment share; knows no quantity of the definitions page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schema.errors import InputError

Ints = npt.NDArray[np.int32]
Wide = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NAMES = ("study", "model", "doc", "action")
NEVER = np.int32(2**31 - 1)  # stands for a null position: later than every t


def check_columns(events: pa.Table, fields: Sequence[pa.Field]) -> None:
    """Refuse (InputError) a table in which a field is missing, of another type or null where none may be, or t < 1."""
    missing = [field.name for field in fields if field.name not in events.column_names]
    if missing:
        raise InputError(f"events lack the column{'s' * (len(missing) > 1)} {', '.join(missing)}")
    for field in fields:
        column = events.column(field.name)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if kind != field.type and not (pa.types.is_string(field.type) and pa.types.is_large_string(kind)):
            raise InputError(f"events column '{field.name}' is {column.type}, not {field.type}")
        if column.null_count and not field.nullable:
            raise InputError(f"events column '{field.name}' has {column.null_count} nulls")
    if events.num_rows:
        positions = pc.min_max(events.column("t")).as_py()
        if positions["min"] < 1 or positions["max"] >= NEVER - 1:
            raise InputError(f"events have positions t from {positions['min']} to {positions['max']}, not within 1..H")


def check_kinds(kind: pa.ChunkedArray, allowed: Sequence[str]) -> None:
    """Refuse (InputError) events of other kinds than those ``allowed``, or of none."""
    foreign = [word for word in kind.unique().to_pylist() if word not in allowed]
    if foreign:
        raise InputError(f"events column 'kind' has {foreign[0]!r}, must be {' or '.join(map(repr, allowed))}")


def dictionary(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Encode a string column, [N], as int32 codes into its sorted distinct values."""
    encoded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    if encoded.num_chunks == 1:
        whole = encoded.chunk(0)
    else:
        whole = pa.chunked_array(encoded.chunks, type=encoded.type).unify_dictionaries().combine_chunks()
        whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    words = whole.dictionary
    used = pc.unique(words).sort()  # a writer's dictionary may hold words twice or unused
    rank = pc.index_in(words, used).to_numpy(zero_copy_only=False).astype(np.int32)
    codes = whole.indices.to_numpy(zero_copy_only=False)
    return pa.DictionaryArray.from_arrays(pa.array(rank[codes]), used.cast(pa.string()))


def group_of_names(names: Sequence[pa.DictionaryArray], rows: int) -> Wide:
    """[N] one number per combination of names, ascending in their lexicographic order."""
    group, size = np.zeros(rows, dtype=np.int64), 1
    for codes in names:
        distinct = len(codes.dictionary)
        if distinct <= 1:  # the usual segment has one study, model, document and action
            continue
        if size * distinct > 2**62:  # make it dense again before it would overflow
            kept, group = np.unique(group, return_inverse=True)
            size = len(kept)
        group = group * distinct + codes.indices.to_numpy()
        size *= distinct
    return group


def key_order(group: Wide, key: Wide, rest: Sequence[npt.NDArray[Any]]) -> Wide | None:
    """Find the permutation of N rows into the order of (group, key), None where they are in it and keys are unique.

    Rows of one key go by ``rest``, least significant first, so that no result depends on the order they arrive in.
    """
    same_group = np.diff(group) == 0
    if np.all(np.diff(group) >= 0) and not np.any(same_group & (np.diff(key) <= 0)):
        return None
    order = np.lexsort((key, group))
    repeated = (np.diff(group[order]) == 0) & (np.diff(key[order]) == 0)
    return np.lexsort((*rest, key, group)) if repeated.any() else order


def nullable(values: npt.NDArray[Any], *, null: Flags) -> pa.Array:
    """[N] values as an Arrow array that is null where ``null`` is true."""
    return pa.array(values, mask=null)


def table_of(columns: dict[str, Any], schema: pa.Schema) -> pa.Table:
    """Build a table of exactly ``schema`` from arrays of numpy or Arrow by column name, cast where types differ."""
    arrays = []
    for field in schema:
        values = columns[field.name]
        array = values if isinstance(values, pa.Array) else pa.array(values, type=field.type)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)
