"""Turn logits into the laws by which tokens are drawn: temperature, top-k and top-p (definitions, "Decoding law").

The order is that of transformers' warpers: temperature, then top-k among its logits, then top-p among the remaining
probabilities. A row's law does not depend on other rows, nor on how a device adds numbers up.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from schema.sampling import SamplingLaw

_BYTES = 2**26  # of a law's intermediate results that are made at once
_UNITS = 2**52  # of probability: sums of whole ones are exact, in any order
_ITEM_BYTES = 48  # of intermediate results to a token, about


def deployed(logits: Tensor, law: SamplingLaw, out: Tensor) -> None:
    """Write the laws by which a study draws tokens, float32 or float64 [rows, V], into ``out``.

    Logits are [rows, V], minus infinity for ids that are no tokens; logarithms of probabilities are accepted, too. Ties
    are treated as follows. Greedy takes the token with the lowest id. Top-k keeps every token whose logit equals the
    k-th largest. Among equally probable tokens, top-p keeps those with the lowest ids.
    """
    at_once = max(_BYTES // (_ITEM_BYTES * max(logits.shape[-1], 1)), 1)
    for some, laws in zip(torch.split(logits, at_once), torch.split(out, at_once), strict=True):
        if law.greedy:
            best = some.argmax(-1, keepdim=True)
            largest = some.gather(-1, best).to(laws.dtype)
            laws.zero_().scatter_(-1, best, 1.0 + (largest - largest))  # 1, and no number where a logit is none
        else:
            torch.softmax(_scores(some, law, out.dtype), -1, out=laws)


def deployed_table(laws: NDArray[np.float64], law: SamplingLaw) -> NDArray[np.float64]:
    """Return ``deployed`` laws of tables, float64 [rows, V]: p^(1/T), normalized over the remaining tokens."""
    made = torch.from_numpy(laws).log()
    deployed(made, law, out := torch.empty_like(made))
    return out.numpy()


def _scores(logits: Tensor, law: SamplingLaw, dtype: torch.dtype) -> Tensor:
    """Return logits over T, [rows, V]: the largest is 0, and minus infinity marks tokens that are left out."""
    scores = logits.to(dtype, copy=True)
    scores -= scores.amax(-1, keepdim=True)
    scores /= max(law.temperature, torch.finfo(dtype).tiny)
    if law.top_k is not None:  # temperature keeps the order, but for what it rounds
        last = logits.topk(min(law.top_k, logits.shape[-1])).values[:, -1:]
        scores.masked_fill_(logits < last, -torch.inf)
    if law.top_p is not None:
        scores.masked_fill_(~_most_probable(torch.softmax(scores, -1), law.top_p), -torch.inf)
    return scores


def _most_probable(laws: Tensor, mass: float) -> Tensor:
    """Return the smallest set of most probable tokens whose total probability reaches ``mass``, bool [rows, V]."""
    ordered, token = laws.sort(dim=-1, descending=True, stable=True)
    units = (ordered.double() * _UNITS).round_().long()
    before = units.cumsum(-1) - units  # what more probable tokens have
    return torch.zeros_like(laws, dtype=torch.bool).scatter_(-1, token, before < math.ceil(mass * _UNITS))
