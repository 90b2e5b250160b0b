"""Compare stored derived rows with the rows that their events give."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schema.tables import GROUP_KEY, TABLES, UNIT_MOMENTS

# A derivation on another machine may add up in another order. A sum of n terms of one sign then differs by at most
# n 2^-53 of its value; the longest sums here have 2 H terms. EOS gaps have terms of both signs of at most 1 / H each:
# their sums differ by at most n 2^-53.
ROUNDING = 1e-12
_OF_THE_UNIT = (*GROUP_KEY, "action_revision", "unit")


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
