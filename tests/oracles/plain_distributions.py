"""Decoding laws as ``docs/quantities.md`` defines them, token by token in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.sampling import Sampling


def plain_distribution(logits: Sequence[float], sampling: Sampling) -> NDArray[np.float64]:
    """Return the law that tokens are drawn by, float64 [V]; logarithms of probabilities are logits too."""
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.temperature == 0:
        return np.eye(len(logits))[best[0]]
    weights = [math.exp((logit - max(logits)) / sampling.temperature) for logit in logits]
    if sampling.top_k is not None:
        best = best[: sampling.top_k]
    if sampling.top_p is not None:
        kept, reached, total = [], 0.0, math.fsum(weights[token] for token in best)
        for token in best:
            if reached < sampling.top_p * total:
                kept.append(token)
            reached += weights[token]
        best = kept
    made = np.zeros(len(logits))
    made[best] = np.array(weights)[best]
    return np.asarray(made / made.sum())
