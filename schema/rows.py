"""Rows of events as numpy arrays: element types, one number for each combination of names, and runs of equal rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Wide = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Reals = npt.NDArray[np.float64]

_LARGEST = 2**62


def combined_codes(columns: Sequence[tuple[npt.NDArray[Any], int]], rows: int) -> Wide:
    """Number the combinations of several coded columns.

    Args:
        columns: For each column its codes, integers [N] of at least 0, and a bound that lies above all of them.
        rows: N.

    Returns:
        [N] one number for each combination of codes, ascending in the lexicographic order of the combinations.

    """
    combined, size = np.zeros(rows, dtype=np.int64), 1
    for codes, bound in columns:
        if bound <= 1:  # the usual segment has one study, model, document and action
            continue
        if size * bound > _LARGEST:  # number the combinations so far densely before the product overflows
            kept, combined = np.unique(combined, return_inverse=True)
            size = len(kept)
        combined = combined * bound + codes
        size *= bound
    return combined


def run_begins(*columns: npt.NDArray[Any]) -> Flags:
    """Tell where runs of equal rows begin: [N], true in the first row and where any column [N] changes."""
    begins = np.ones(len(columns[0]), dtype=np.bool_)
    begins[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return begins


def repeats(keys: Sequence[npt.NDArray[Any]], values: Sequence[npt.NDArray[Any]]) -> tuple[Flags, Flags]:
    """Find rows that repeat the key of an earlier row.

    Args:
        keys: Columns [N], by which the rows are sorted; rows of one key are in the order in which they came.
        values: The other columns [N].

    Returns:
        [N] whether an earlier row has the key; [N] whether the first row of the key has another value.

    """
    begins = run_begins(*keys)
    first = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    return ~begins, np.logical_or.reduce([column != column[first] for column in values])
