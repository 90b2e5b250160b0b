"""The Kullback-Leibler divergence of two next-token distributions, token by token (``docs/quantities.md``).

Kullback and Leibler (1951), On information and sufficiency. The terms p log(p/q) - p + q add up to the divergence,
since distributions have equal sums. Unlike the terms p log(p/q), none is negative, so nothing cancels in their sum.
They are computed from q - p, not from two logarithms: a small difference is exact, so a small divergence is not lost in
rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor


def entropy_terms(p: Tensor, q: Tensor, difference: Tensor, apart: Tensor, out: Tensor | None = None) -> Tensor:
    """Return p log(p/q) - p + q of each token, in nats, in the shape and dtype of distributions ``p`` and ``q``.

    ``difference`` is q - p, and ``apart`` |q - p|; ``out`` may be given memory of this shape. Terms are exactly 0 where
    p = q. They are finite: in the logarithm, a probability below the least normal number of the dtype counts as this
    number, and ``unsupported`` marks the tokens whose term is infinite.
    """
    least = torch.minimum(p, q, out=out).clamp_(min=torch.finfo(p.dtype).tiny)
    logarithm = torch.div(apart, least, out=least).log1p_()  # |log(p/q)|
    return torch.addcmul(difference, p, logarithm.copysign_(difference), value=-1, out=logarithm)


def unsupported(p: Tensor, q: Tensor) -> Tensor:
    """Mark the tokens that p can draw and q cannot, bool in the shape of ``p`` and ``q``.

    A p below the least normal number of its dtype is rounding, and counts as 0.
    """
    return (q == 0) & (p >= torch.finfo(p.dtype).tiny)
