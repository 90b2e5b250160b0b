"""The expected-attention selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvdrift.generator.attention.parts import capped
from kvdrift.generator.attention.recording import PromptLayer, QueryChunk, Rotary, Statistic
from kvdrift.generator.selectors.parameters import at_least
from kvdrift.generator.selectors.selector import ScoringSelector

_BLOCK = 1024  # queries widened to float64 at once
_NODES = 32  # of the quadrature of an expectation


@dataclass(frozen=True)
class Moments:
    """The number of a layer's queries q, and the sums of q and of q q' over them, before rotation."""

    count: int  # of queries
    total: Tensor  # the sum of q, float64 [heads, size]
    outer: Tensor  # the sum of q q', float64 [heads, size, size]
    rotary: Rotary  # a copy of the model's rotary embedding


@dataclass(frozen=True)
class QueryMoments:
    """Statistic: first and second moments of the queries before rotation, from position ``first`` on."""

    first: int

    def update(self, gathered: Moments | None, chunk: QueryChunk) -> Moments:
        """Add the moments of a chunk's queries."""
        skip = max(self.first - chunk.first, 0)
        heads, _, size = chunk.query.shape
        total = chunk.query.new_zeros((heads, size), dtype=torch.float64)
        outer = chunk.query.new_zeros((heads, size, size), dtype=torch.float64)
        parts = [torch.split(part[..., skip:, :], _BLOCK, dim=-2) for part in (chunk.query, chunk.cos, chunk.sin)]
        count = 0
        for query, cos, sin in zip(*parts, strict=True):
            query, cos, sin = query.double(), cos.double(), sin.double()  # noqa: PLW2901 - the same, wider
            # Rotated back; the squares sum to the squared factor by which the embedding scales lengths: mostly 1.
            plain = (query * cos - _quarter_turn(query) * sin) / (cos**2 + sin**2)
            count += plain.shape[1]
            total += plain.sum(1)
            outer += plain.transpose(-1, -2) @ plain
        if gathered is not None:
            count, total, outer = count + gathered.count, total + gathered.total, outer + gathered.outer
        return Moments(count, total, outer, chunk.rotary)


@dataclass(frozen=True)
class ExpectedAttention(ScoringSelector):
    """Keeps the positions with the highest expected attention of future queries, times the L2 norm of their value.

    Before rotation, future queries are taken to be normally distributed, with the mean m and covariance C of the
    prompt's queries after the sinks. They are rotated by R, the mean rotation of the next ``future_positions``
    positions. With the attention's scaling s, the expected score of a key k is exp(k'Rm s + k'RCR'k s^2 / 2); with a
    soft cap, it is the expectation of the exponential of the capped product. Scores are normalized over the positions
    after the sinks, averaged over the query heads of a KV head, increased by ``epsilon`` and multiplied by the value's
    norm.
    """

    summary: ClassVar[str] = "the highest attention expected of future queries, times the value's norm"
    paper: ClassVar[str | None] = "Devoto et al. 2025, arXiv:2510.00636"
    head_reduction: ClassVar[str | None] = "mean over query heads, after normalization"
    applies_softcap: ClassVar[bool] = True
    sinks: int = 4
    future_positions: int = 512
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        at_least(0, sinks=self.sinks, epsilon=self.epsilon)
        at_least(1, future_positions=self.future_positions)

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """Mean and covariance of the queries after the sinks."""
        return (QueryMoments(self.sinks),)

    def score(self, layer: PromptLayer) -> Tensor:
        """(expected attention + epsilon) ||v||, float32 [KV heads, n]; 0 at the sinks."""
        mean, covariance = self._future_queries(layer)
        scores = []
        for head, key in enumerate(layer.key[:, self.sinks :].float()):
            center = key @ mean[head].transpose(-1, -2) * layer.scaling  # [positions, query heads of the KV head]
            half = torch.einsum("nj,gnj->ng", key, key @ covariance[head]) * (layer.scaling**2 / 2)
            cap = layer.terms.softcap
            logits = center + half if cap is None else _capped_expectation(center, half, cap)
            scores.append(logits.softmax(0).mean(-1))
        length = layer.value[:, self.sinks :].float().norm(dim=-1)
        return pad((torch.stack(scores) + self.epsilon) * length, (self.sinks, 0))

    def _future_queries(self, layer: PromptLayer) -> tuple[Tensor, Tensor]:
        """Mean [KV heads, query heads of each, size] and covariance [..., size, size] of future queries, float32."""
        kv_heads, entries, size = layer.key.shape
        moments = layer.gathered(QueryMoments(self.sinks))
        mean = moments.total / moments.count
        covariance = moments.outer / moments.count - mean[:, :, None] * mean[:, None, :]
        future = torch.arange(entries, entries + self.future_positions, device=mean.device)
        cos, sin = (part[0].mean(0) for part in moments.rotary(mean, future[None]))
        mean = mean * cos + _quarter_turn(mean) * sin
        for _ in range(2):  # R C R', one side at a time
            covariance = (covariance * cos + _quarter_turn(covariance) * sin).transpose(-1, -2)
        return mean.float().view(kv_heads, -1, size), covariance.float().view(kv_heads, -1, size, size)


def _capped_expectation(center: Tensor, half: Tensor, softcap: float) -> Tensor:
    """Return log E exp(softcap tanh(x / softcap)) of normal x with mean ``center`` and variance 2 ``half``.

    It is computed by Gauss-Hermite quadrature. Without a cap it would be ``center + half``.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    deviation = (2 * half).clamp(min=0).sqrt()
    logarithms = np.log(weights / weights.sum()).tolist()
    parts = [
        capped(center + deviation * node, softcap) + own for node, own in zip(nodes.tolist(), logarithms, strict=True)
    ]
    return torch.stack(parts).logsumexp(0)


def _quarter_turn(x: Tensor) -> Tensor:
    """Return (-x2, x1) for the halves x1, x2 of the last dimension; RoPE rotates pairs of a channel from each half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
