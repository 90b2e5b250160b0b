"""Sorted rows cut into runs: neighbours that are equal in some columns, such as the rows of one replicate."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def run_begins(*columns: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether each row begins a run.

    Args:
        columns: one or more arrays [N] whose values, taken together, are equal within a run.

    Returns:
        [N] true in the first row and in every row that differs from the row before it in at least one column.

    """
    begins = np.ones(len(columns[0]), dtype=np.bool_)
    begins[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return begins
