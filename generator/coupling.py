"""The overlap-residual maximal coupling of two next-token laws (definitions, "Coupling"; paper eq. coupling-kernel).

Knows nothing of models, histories or caches: laws and uniforms in, tokens out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """TV(p, q) of laws [..., V], float64 [...], in [0, 1]; exactly 0 for bitwise equal laws.

    Half the absolute difference, not 1 minus the overlap: the latter rounds away from 0 on equal laws.
    """
    return (0.5 * (p - q).abs().sum(-1)).clamp_(max=1.0)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """One token per row by inverse distribution function: weights [B, V] (nonnegative, any sum > 0), u [B] in [0, 1).

    Returns int64 [B]. A token of weight 0 is never drawn: the first position whose cumulative weight exceeds u times
    the total has positive weight, and u times the total is kept below the total where rounding would reach it.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def couple(p: Tensor, q: Tensor, x: Tensor, accept: Tensor, residual: Tensor) -> Tensor:
    """The compressed side's token given the reference's, so that (x, y) has the coupling's law.

    p, q: laws [B, V]; x: int64 [B], drawn from p; accept, residual: uniforms [B] in [0, 1). Returns y, int64 [B].
    y = x with probability min(1, q(x)/p(x)), otherwise y is drawn from (q - min(p, q))/e; mismatch has probability
    e = TV(p, q). The comparison is strict, so that equal laws never part and a token with q(x) = 0 is never kept.
    """
    column = x[:, None]
    keep = accept * p.gather(-1, column).squeeze(-1) < q.gather(-1, column).squeeze(-1)
    excess = (q - p).clamp_(min=0.0)
    # Where rounding leaves no excess mass the laws are equal but for the last bit: keep x.
    keep |= excess.sum(-1) <= 0.0
    y = x.clone()
    rows = (~keep).nonzero().squeeze(-1)
    if rows.numel():
        y[rows] = draw(excess[rows], residual[rows])
    return y


def point_mass(size: int, token: int, like: Tensor) -> Tensor:
    """The law [V] of an absorbed side: all mass on ``token``."""
    law = torch.zeros(size, dtype=like.dtype, device=like.device)
    law[token] = 1.0
    return law
