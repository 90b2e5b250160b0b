"""Sums whose bits do not depend on how many numbers are summed side by side."""

from __future__ import annotations

import numpy as np

from kvdrift.stats.moments import Float


def ordered_sum(values: Float) -> Float:
    """Return the sum over the first axis, term after term; 0 without terms.

    ``values.sum(axis=0)`` adds in another order if all other axes have length 1, so that a single action would have
    other last bits than the same action among others.
    """
    if not len(values):
        return np.zeros(values.shape[1:])
    total: Float = np.add.accumulate(values, axis=0)[-1]
    return total
