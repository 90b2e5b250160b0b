"""Turn logits into the distributions from which tokens are drawn (``docs/quantities.md``).

Temperature, top-k and top-p are applied in the order of transformers' warpers: temperature, then top-k by the logits,
then top-p among the remaining probabilities. Of tokens with equal logits those with the lowest ids are taken. A row's
distribution does not depend on other rows, nor on how a device adds numbers up or orders equal numbers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdrift.generator.coupling.distributions import softmax
from kvdrift.schema.sampling import Sampling

_BYTES = 2**26  # of a distribution's intermediate results that are made at once
_UNITS = 2**52  # of probability 1: sums of whole numbers of them are exact, in any order
_FIRST_COUNTS = (256, 4096)  # tokens that reach top-p most of the time, tried one after the other
_ITEM_BYTES = 48  # of intermediate results to a token, about


def deployed(logits: Tensor, sampling: Sampling, out: Tensor) -> None:
    """Write the distributions by which a study draws tokens, float32 or float64 [rows, V], into ``out``.

    Logits are [rows, V], minus infinity for ids that are no tokens; logarithms of probabilities are accepted, too.
    A greedy distribution leaves one token, top-k exactly k tokens, top-p the fewest tokens that reach its probability:
    those of the largest logits, and of equal logits those with the lowest ids.
    """
    at_once = max(_BYTES // (_ITEM_BYTES * max(logits.shape[-1], 1)), 1)
    for some, distributions in zip(torch.split(logits, at_once), torch.split(out, at_once), strict=True):
        if sampling.greedy:
            best = some.argmax(-1, keepdim=True)
            largest = some.gather(-1, best).to(distributions.dtype)
            distributions.zero_().scatter_(-1, best, 1.0 + (largest - largest))  # 1, and NaN if a logit is NaN
        else:
            softmax(_scores(some, sampling, out.dtype), distributions)


def deployed_table(distributions: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """Return the distributions that a study draws tokens by, for a table of distributions p, float64 [rows, V].

    They are p^(1/T), with the temperature T, normalized over the tokens that top-k and top-p leave.
    """
    made = torch.from_numpy(distributions).log()
    deployed(made, sampling, out := torch.empty_like(made))
    return out.numpy()


def _scores(logits: Tensor, sampling: Sampling, dtype: torch.dtype) -> Tensor:
    """Return logits, less their row's largest, over the temperature, [rows, V]; minus infinity for tokens left out."""
    scores = logits.to(dtype, copy=True)
    scores -= scores.amax(-1, keepdim=True)
    scores /= max(sampling.temperature, torch.finfo(dtype).tiny)
    number = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    if sampling.top_k is not None:  # by the logits; temperature keeps their order except for rounding
        largest = logits.topk(min(number + 1, logits.shape[-1])).values
        kept = torch.full((len(logits), 1), number, device=logits.device)
        scores.masked_fill_(~_first(logits, largest, kept), -torch.inf)
    if sampling.top_p is not None:
        scores.masked_fill_(~_first(scores, *_reaching(scores, sampling.top_p, number)), -torch.inf)
    return scores


def _first(values: Tensor, largest: Tensor, number: Tensor) -> Tensor:
    """Mark the largest values of each row, bool [rows, V], ``number`` [rows, 1] of them; of equal values the first.

    ``largest`` has the largest values in descending order, [rows, at least ``number``].
    """
    border = largest.gather(-1, number - 1)
    marked = values >= border
    rows: Tensor | slice = slice(None)
    if _host_may_read(values):  # only rows that may have equal values on both sides of the border
        next_value = largest.gather(-1, number.clamp(max=largest.shape[-1] - 1))
        rows = (next_value == border).view(-1).nonzero().view(-1)
    at_border = values[rows] == border[rows]
    left = (number - (largest > border).sum(-1, keepdim=True))[rows]
    marked[rows] &= ~at_border | (at_border.cumsum(-1, dtype=torch.int32) <= left)
    return marked


def _host_may_read(values: Tensor) -> bool:
    """Return whether the host may read intermediate results; not on a GPU, where it would have to wait for them."""
    return not values.is_cuda


def _reaching(scores: Tensor, mass: float, most: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores, descending, and the least number of them that reaches probability ``mass``, [rows, 1].

    At most ``most`` scores of a row are above minus infinity. Probabilities, computed in the scores' dtype, are
    rounded to multiples of 1 / ``_UNITS`` and summed exactly, largest first.
    """
    distributions, wanted = torch.softmax(scores, -1), math.ceil(mass * _UNITS)
    first_counts = (count for count in _FIRST_COUNTS if count < most) if _host_may_read(scores) else ()
    for count in (*first_counts, most):
        largest, tokens = scores.topk(count) if count < scores.shape[-1] else scores.sort(descending=True)
        units = (distributions.gather(-1, tokens).double() * _UNITS).round_().long()
        reached = units.cumsum(-1)
        if count == most or bool((reached[:, -1] >= wanted).all()):
            break
    return largest, (reached - units < wanted).sum(-1, keepdim=True)
