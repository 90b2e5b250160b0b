"""Decode-time policies with real removal: every stream has a ``DynamicCache`` that loses entries.

Attention and its weights are transformers' own eager ones. Entries are dropped one by one, per layer and KV head, in
loops over positions; nothing is shared between streams, and nothing is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from oracles.plain_generator import PlainSteps, plain_streams_rollout, softmax
from transformers import DynamicCache

Kind = Literal["sliding", "tova", "h2o"]


@dataclass(frozen=True)
class PlainPolicy:
    """A policy's name, m, and its sinks."""

    kind: Kind
    budget: int
    sinks: int = 4

    def victim(self, positions: Sequence[int], scores: Sequence[float], joining: int) -> int:
        """The place of the entry that is dropped; the recent half ends with position ``joining``."""
        if self.kind == "sliding":
            return next(place for place, position in enumerate(positions) if position >= self.sinks)
        recent = self.budget // 2 if self.kind == "h2o" else 0
        candidates = [place for place, position in enumerate(positions) if position <= joining - recent]
        return min(candidates, key=lambda place: (scores[place], -place))


@dataclass
class PlainHead:
    """One KV head of one layer: the positions of its entries, and their scores."""

    positions: list[int]
    scores: list[float] = field(default_factory=list)


class PlainStream:
    """One cache followed along one history; without a policy it keeps everything."""

    def __init__(self, network: Any, tokens: Sequence[int], policy: PlainPolicy | None) -> None:
        self._network, self._policy, self._cache = network, policy, DynamicCache()
        self._next = len(tokens)
        with torch.no_grad():
            output = network(torch.tensor([list(tokens)]), past_key_values=self._cache, output_attentions=True)
        self.first_distribution = softmax(output.logits[0, -1])
        self.heads: list[list[PlainHead]] = []
        for attention, layer in zip(output.attentions, self._cache.layers, strict=True):
            received = self._received(attention[0].double().numpy(), layer.keys.shape[1])
            self.heads.append([PlainHead(list(range(len(tokens))), list(scores)) for scores in received])
        if policy is not None:
            while len(self.heads[0][0].positions) > policy.budget:
                self._drop(self._next - 1)  # the recent half ends with the prompt

    def advance(self, token: int) -> NDArray[np.float64]:
        """Feed a token and return the next distribution."""
        policy = self._policy
        if policy is not None and len(self.heads[0][0].positions) + 1 > policy.budget:
            self._drop(self._next)
        ids = torch.tensor([[token]])
        with torch.no_grad():
            output = self._network(
                ids, past_key_values=self._cache, position_ids=torch.full_like(ids, self._next), output_attentions=True
            )
        for attention, heads in zip(output.attentions, self.heads, strict=True):
            received = self._received(attention[0].double().numpy(), len(heads))
            for head, scores in zip(heads, received, strict=True):
                head.positions.append(self._next)
                before = [*head.scores, 0.0]
                adds = policy is not None and policy.kind == "h2o"
                head.scores = [a + b if adds else b for a, b in zip(before, scores, strict=True)]
        self._next += 1
        return softmax(output.logits[0, -1])

    def _received(self, attention: NDArray[np.float64], kv_heads: int) -> NDArray[np.float64]:
        """Return the attention that entries receive, [heads, queries, entries] -> [KV heads, entries]."""
        if self._policy is not None and self._policy.kind == "h2o":
            return attention.reshape(kv_heads, -1, *attention.shape[1:]).mean(1).sum(1)
        return np.tile(attention[:, -1].mean(0), (kv_heads, 1))

    def _drop(self, joining: int) -> None:
        assert self._policy is not None
        for heads, layer in zip(self.heads, self._cache.layers, strict=True):
            left = []
            for head in heads:
                place = self._policy.victim(head.positions, head.scores, joining)
                del head.positions[place], head.scores[place]
                left.append([other for other in range(layer.keys.shape[2]) if other != place])
            layer.keys, layer.values = (
                torch.stack([part[0, number, rows] for number, rows in enumerate(left)])[None]
                for part in (layer.keys, layer.values)
            )


def plain_policy_rollout(network: Any, tokens: Sequence[int], policy: PlainPolicy, **options: Any) -> PlainSteps:
    """Generate one policy's coupled rollout of one document."""
    return plain_streams_rollout(
        lambda: PlainStream(network, tokens, None), lambda: PlainStream(network, tokens, policy), **options
    )
