"""Decode-time policies with real removal: every stream has a ``DynamicCache`` that loses entries.

Attention and its weights are transformers' own eager ones. Entries are dropped one by one, per layer and KV head, in
loops over positions; nothing is shared between streams, and nothing is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from oracles.plain_generator import coupled_pair, inverse_cdf, softmax
from transformers import DynamicCache

from kvdrift.generator.coupling.uniforms import uniform_table

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
        self.first_law = softmax(output.logits[0, -1])
        self.heads: list[list[PlainHead]] = []
        for attention, layer in zip(output.attentions, self._cache.layers, strict=True):
            received = self._received(attention[0].double().numpy(), layer.keys.shape[1])
            self.heads.append([PlainHead(list(range(len(tokens))), list(scores)) for scores in received])
        if policy is not None:
            while len(self.heads[0][0].positions) > policy.budget:
                self._drop(self._next - 1)  # the recent half ends with the prompt

    def advance(self, token: int) -> NDArray[np.float64]:
        """Feed a token and return the next law."""
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


@dataclass(frozen=True)
class PlainPairs:
    """One action's steps, [replicates, H] each."""

    x_token: NDArray[np.int32]
    y_token: NDArray[np.int32]
    delta: NDArray[np.float64]
    f: NDArray[np.float64]
    x_eos: NDArray[np.bool_]
    y_eos: NDArray[np.bool_]


class Stream(Protocol):
    """One cache followed along one history."""

    first_law: NDArray[np.float64]

    def advance(self, token: int) -> NDArray[np.float64]:
        """Feed a token and return the next law."""


def plain_policy_rollout(
    network: Any, tokens: Sequence[int], policy: PlainPolicy, *, seed: int, document: str, action: str,
    replicates: Sequence[int], horizon: int, eos_tokens: Sequence[int],
) -> PlainPairs:  # fmt: skip
    """Generate one policy's coupled rollout of one document."""
    return plain_streams_rollout(
        lambda: PlainStream(network, tokens, None), lambda: PlainStream(network, tokens, policy), seed=seed,
        document=document, action=action, replicates=replicates, horizon=horizon, eos_tokens=eos_tokens,
    )  # fmt: skip


def plain_streams_rollout(
    whole: Callable[[], Stream], smaller: Callable[[], Stream], *, seed: int, document: str, action: str,
    replicates: Sequence[int], horizon: int, eos_tokens: Sequence[int],
) -> PlainPairs:  # fmt: skip
    """Generate one action's coupled rollout, with a stream of the whole cache and two of the smaller one for each pair."""
    count = len(replicates)
    u_x = uniform_table(seed, document, None, replicates, horizon, 1)
    u_y = uniform_table(seed, document, action, replicates, horizon, 2)
    x, y = np.zeros((2, count, horizon), dtype=np.int32)
    delta, f = np.zeros((2, count, horizon))
    x_eos, y_eos = np.zeros((2, count, horizon), dtype=bool)
    for k in range(count):
        reference, on_y, on_x = whole(), smaller(), smaller()
        x[k, 0] = y[k, 0] = inverse_cdf(reference.first_law, u_x[k, 0, 0])
        x_eos[k, 0] = y_eos[k, 0] = x[k, 0] in eos_tokens
        end = np.zeros(len(reference.first_law))
        end[eos_tokens[0]] = 1.0
        for column in range(1, horizon):
            x_over, y_over = x_eos[k, column - 1], y_eos[k, column - 1]
            p = end if x_over else reference.advance(int(x[k, column - 1]))
            q = end if y_over else on_y.advance(int(y[k, column - 1]))
            forced = end if x_over else on_x.advance(int(x[k, column - 1]))
            delta[k, column] = 1.0 - np.minimum(p, q).sum()
            f[k, column] = 1.0 - np.minimum(p, forced).sum()
            x[k, column], y[k, column] = coupled_pair(p, q, u_x[k, column, 0], *u_y[k, column])
            x_eos[k, column] = x_over or x[k, column] in eos_tokens
            y_eos[k, column] = y_over or y[k, column] in eos_tokens
    return PlainPairs(x, y, delta, f, x_eos, y_eos)
