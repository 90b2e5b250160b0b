"""Compare stored derived rows with the rows that their events give."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schema.tables import GROUP_KEY, TABLES

# A derivation elsewhere may add up in another order: a sum of n terms that are not negative is then off by at most
# n 2^-53 of itself, and the longest sums here have 2 H terms.
ROUNDING = 1e-12


def first_difference(table: str, stored: pa.Table, derived: pa.Table) -> str | None:
    """Return how stored rows differ from derived rows, in the first column that differs; None if they are equal.

    Both tables are in the declared schema, sorted by key. Columns of doubles may differ by ``ROUNDING`` of their value.
    """
    if stored.num_rows != derived.num_rows:
        return f"there are {stored.num_rows} rows, must be {derived.num_rows} as its events give"
    for name in TABLES[table].columns:
        if stored[name].equals(derived[name]):
            continue
        differ = _differ(stored[name], derived[name])
        if not differ.any():
            continue
        row = int(np.argmax(differ))
        within = TABLES[table].key[len((*GROUP_KEY, "action_revision")) :]
        key = [f"{part} {derived[part][row]}" for part in within]
        return (
            f"{name} is {_text(stored[name][row])} at {', '.join(key)}{and_more(int(differ.sum()) - 1)}, "
            f"must be {_text(derived[name][row])} as its events give"
        )
    return None


def _differ(stored: pa.ChunkedArray, derived: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    if pa.types.is_float64(stored.type):
        values, wanted = stored.to_numpy(), derived.to_numpy()  # null is NaN
        close = np.abs(values - wanted) <= ROUNDING * np.abs(wanted)
        differ: npt.NDArray[np.bool_] = ~(close | (np.isnan(values) & np.isnan(wanted)))
        return differ
    pairs = zip(stored.to_pylist(), derived.to_pylist(), strict=True)
    return np.array([value != wanted for value, wanted in pairs])


def _text(value: pa.Scalar) -> str:
    found = value.as_py()
    return "null" if found is None else repr(found)


def and_more(others: int) -> str:
    """Return text such as ``" and 3 more"``; empty if there are no others."""
    return f" and {others:,} more" if others else ""
