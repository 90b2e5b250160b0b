"""Rows of events as numpy arrays: element types, codes for combinations of names, and runs of equal rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int32]
Wide = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Reals = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]

DISTANCE_ROUNDING = 1e-6
"""How far rounding takes a total variation out of [0, 1]: float32 sums of a whole vocabulary end at 1.0000001."""

_LARGEST = 2**62
_ODD = np.uint64(0x9E3779B97F4A7C15)


def combined_codes(columns: Sequence[tuple[npt.NDArray[Any], int]], rows: int) -> Wide:
    """Return a number for each row's combination of codes, [rows]; in lexicographic order of the codes, numbers rise.

    Each of ``columns`` is a pair: codes, which are integers [rows] of at least 0, and a bound larger than every code.
    """
    combined, size = np.zeros(rows, dtype=np.int64), 1
    for codes, bound in columns:
        if bound <= 1:  # usual case: one study, model, document and action
            continue
        if size * bound > _LARGEST:  # renumber the combinations so far without gaps, before the product overflows
            kept, combined = np.unique(combined, return_inverse=True)
            size = len(kept)
        combined = combined * bound + codes
        size *= bound
    return combined


def rounded_into_range(distances: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return total variations, [N]; those outside of [0, 1] by at most ``DISTANCE_ROUNDING`` become 0 or 1.

    Other values, and NaN, stay.
    """
    if np.all((distances >= 0) & (distances <= 1)):
        return distances
    near = np.abs(distances - 0.5) <= 0.5 + DISTANCE_ROUNDING
    return np.where(near, np.clip(distances, 0, 1), distances)


def run_begins(*columns: npt.NDArray[Any]) -> Flags:
    """Tell where runs of equal rows begin: [N], true in the first row and where any column [N] changes."""
    begins = np.ones(len(columns[0]), dtype=np.bool_)
    begins[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return begins


def run_bounds(*columns: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield for each run of equal rows its first row and the row after its last; the columns are [N] each."""
    if len(columns[0]):
        yield from itertools.pairwise([*np.flatnonzero(run_begins(*columns)).tolist(), len(columns[0])])


def repeats(keys: Sequence[npt.NDArray[Any]], values: Sequence[npt.NDArray[Any]]) -> tuple[Flags, Flags]:
    """Tell which rows repeat the key of an earlier row, and which differ in a value from the first row of their key.

    Rows must be sorted by the columns ``keys`` [N]; those with equal keys stay in their original order.
    """
    begins = run_begins(*keys)
    first = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    return ~begins, np.logical_or.reduce([column != column[first] for column in values])


def row_hashes(columns: Iterable[pa.ChunkedArray]) -> Hashes:
    """Return a 64-bit number for each row of some columns of texts, integers or lists of texts.

    Equal rows have equal numbers within a process. Null is a value like others.
    """
    combined: Hashes | None = None
    for column in columns:
        whole = column.combine_chunks()
        hashes = _list_hashes(whole) if pa.types.is_list(whole.type) else _value_hashes(whole)
        combined = hashes if combined is None else combined * _ODD + hashes  # the order of columns counts
    return np.zeros(0, dtype=np.uint64) if combined is None else combined


def _value_hashes(values: pa.Array) -> Hashes:
    coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    words = np.array([hash(word) % 2**64 for word in (*coded.dictionary.to_pylist(), None)], dtype=np.uint64)
    hashes: Hashes = _mixed(words)[coded.indices.fill_null(len(words) - 1).to_numpy(zero_copy_only=False)]
    return hashes


def _list_hashes(lists: pa.Array) -> Hashes:
    sums = _value_hashes(lists.value_lengths())
    row = pc.list_parent_indices(lists).to_numpy()
    place = np.arange(len(row)) - np.searchsorted(row, row)
    np.add.at(sums, row, _mixed(_value_hashes(lists.flatten()) + place.astype(np.uint64)))
    return sums


def _mixed(values: Hashes) -> Hashes:
    """Apply the last steps of SplitMix64 (Steele, Lea and Flood 2014), which spread each bit over all bits."""
    values = (values + _ODD).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed
