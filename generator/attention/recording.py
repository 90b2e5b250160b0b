"""Causal attention over one prompt that keeps what selectors and caches need of every layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from generator.attention.parts import attend_causally
from generator.attention.statistics import Gathered, Gathering, Statistic


@dataclass(frozen=True)
class PromptLayer:
    """What is kept of one layer's prompt of n entries.

    Attributes:
        key: [KV heads, n, size], rotated.
        value: [KV heads, n, size].
        window_query: The last W queries, [heads, W, size], rotated.
        scaling: What products of queries and keys are multiplied by.
        number: The layer's number, from 0.
        prompt: SHA-256 of the prompt's tokens, for selectors that draw.
        statistics: What was gathered over all queries, by statistic.
    """

    key: Tensor
    value: Tensor
    window_query: Tensor
    scaling: float
    number: int = 0
    prompt: bytes = b""
    statistics: Mapping[Statistic[Any], Any] = field(default_factory=dict)

    def gathered(self, statistic: Statistic[Gathered]) -> Gathered:
        """Return what ``statistic`` gathered over the layer's queries; a selector must have asked for it."""
        found: Gathered = self.statistics[statistic]
        return found


class PromptRecording:
    """``LayerAttention`` over one prompt, chunk by chunk.

    Args:
        entries: n, the prompt's tokens.
        window: W, the number of last queries to keep.
        statistics: What to gather over all queries.
        prompt: SHA-256 of the prompt's tokens.
    """

    def __init__(
        self, entries: int, window: int, statistics: Iterable[Statistic[Any]] = (), prompt: bytes = b""
    ) -> None:
        self.entries, self.window, self.prompt = entries, window, prompt
        self.gathering = Gathering(statistics)
        self.layers: list[PromptLayer] = []  # complete once all n positions have been seen
        self._seen: list[int] = []  # positions, per layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend from the next T positions, all heads [1, heads, T, size], to all positions up to their own."""
        if layer == len(self.layers):
            self._begin(layer, query, key, scaling)
        record, first = self.layers[layer], self._seen[layer]
        last = first + query.shape[2]
        record.key[:, first:last], record.value[:, first:last] = key[0], value[0]
        self._seen[layer] = last
        so_far = record.key[:, :last], record.value[:, :last]
        self.gathering.observe(layer, query[0], *so_far, scaling)
        # What of the window lies in this chunk; its first query is at n - W.
        start = self.entries - record.window_query.shape[1]
        if last > start:
            record.window_query[:, max(first - start, 0) : last - start] = query[0, :, max(start - first, 0) :]
        return attend_causally(query, *so_far, scaling)

    def _begin(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        heads, size, kv_heads = query.shape[1], query.shape[3], key.shape[1]
        self._seen.append(0)
        self.layers.append(
            PromptLayer(
                key.new_empty((kv_heads, self.entries, size)), key.new_empty((kv_heads, self.entries, size)),
                query.new_empty((heads, min(self.window, self.entries), size)), scaling, layer, self.prompt,
                self.gathering.of(layer),
            )
        )  # fmt: skip
