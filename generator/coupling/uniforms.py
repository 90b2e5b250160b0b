"""Counter-based uniforms: a replicate's randomness is a function of (seed, document, action, replicate, position)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schema.keyed_random import keyed_generator


def uniform_table(
    seed: int,
    document: str,
    action: str | None,
    replicates: Sequence[int],
    horizon: int,
    purposes: int,
    estimator: str | None = None,
) -> NDArray[np.float64]:
    """Uniforms in [0, 1) with 53 random bits, float64 [replicates, horizon, purposes].

    The generator is numpy's Philox4x64-10 keyed by BLAKE2b of (seed, document, action) with the replicate in the second
    counter word, so a row depends neither on which other replicates are asked for nor on the horizon. ``action`` None
    is the reference's own table: every action then meets the same reference continuation (common random numbers). A
    named ``estimator`` joins the key: its replicates are independent of the plain ones.
    """
    named = [seed, document, action] if estimator is None else [seed, document, action, estimator]
    name = json.dumps(named)
    table = np.empty((len(replicates), horizon, purposes))
    for row, replicate in enumerate(replicates):
        table[row] = keyed_generator(name, counter=replicate << 64).random((horizon, purposes))
    return table
