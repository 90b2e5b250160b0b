"""Counter-based uniforms: a function of (seed, document, action, replicate, position, purpose)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.keyed_random import keyed_generator


def uniform_table(
    seed: int, document: str, action: str | None, replicates: Sequence[int], horizon: int, purposes: int,
    estimator: str | None = None,
) -> NDArray[np.float64]:  # fmt: skip
    """Return the uniforms of some replicates of an action.

    A row depends neither on the other replicates nor on the horizon. The reference has no action (None), so that every
    action meets the same reference continuation (common random numbers). Uniforms with an ``estimator`` are independent
    of those without; ``purposes`` is the number of uniforms at each position.

    Returns:
        Uniforms in [0, 1) with 53 random bits, float64 [replicates, horizon, purposes].
    """
    named = [seed, document, action] if estimator is None else [seed, document, action, estimator]
    name = json.dumps(named)
    table = np.empty((len(replicates), horizon, purposes))
    generator = keyed_generator(name)
    state: Any = generator.bit_generator.state  # set again and again: a new generator takes five times as long
    counter = state["state"]["counter"]
    for row, replicate in enumerate(replicates):
        counter[:] = (0, replicate, 0, 0)  # replicate * 2**64, in words of 64 bits
        generator.bit_generator.state = state
        generator.random(out=table[row])
    return table
