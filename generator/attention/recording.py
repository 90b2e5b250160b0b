"""Causal attention over one prompt that records the data that selectors and caches need of every layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvdrift.generator.attention.layer_terms import PLAIN, LayerTerms, attend_causally_by
from kvdrift.generator.attention.parts import attend_causally
from kvdrift.generator.attention.statistics import Gathered, Gathering, Statistic


@dataclass(frozen=True)
class PromptLayer:
    """The recorded data of one layer's prompt of n entries.

    A layer whose attention has a window keeps only the entries that later positions may see.

    Attributes:
        key: [KV heads, n, size], rotated.
        value: [KV heads, n, size].
        window_query: The last W queries, [heads, W, size], rotated.
        scaling: The factor of products of queries and keys.
        number: The layer's number among layers without a window, from 0.
        prompt: SHA-256 of the prompt's tokens, for selectors that draw at random.
        statistics: The values gathered over all queries, by statistic.
        terms: Terms of the layer's attention besides a softmax over all earlier positions.
    """

    key: Tensor
    value: Tensor
    window_query: Tensor
    scaling: float
    number: int = 0
    prompt: bytes = b""
    statistics: Mapping[Statistic[Any], Any] = field(default_factory=dict)
    terms: LayerTerms = PLAIN

    def gathered(self, statistic: Statistic[Gathered]) -> Gathered:
        """Return the value that ``statistic`` gathered over the layer's queries; a selector must have asked for it."""
        found: Gathered = self.statistics[statistic]
        return found


class PromptRecording:
    """``LayerAttention`` over one prompt of n entries, chunk by chunk, with the SHA-256 of its tokens.

    ``window`` is W, the number of last queries to keep; ``statistics`` are gathered over all queries.
    """

    def __init__(
        self, entries: int, window: int, statistics: Iterable[Statistic[Any]] = (), prompt: bytes = b""
    ) -> None:
        self.entries, self.window, self.prompt = entries, window, prompt
        self.gathering = Gathering(statistics)
        self.layers: list[PromptLayer] = []  # complete once all n positions have been seen
        self._seen: list[int] = []  # positions, per layer

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: LayerTerms = PLAIN
    ) -> Tensor:
        """Attend from the next T positions, all heads [1, heads, T, size], to the positions up to their own."""
        if layer == len(self.layers):
            self._begin(layer, query, key, scaling, terms)
        if terms.window is not None:
            return self._attend_in_window(layer, query, key[0], value[0], terms)
        record, first = self.layers[layer], self._seen[layer]
        last = first + query.shape[2]
        record.key[:, first:last], record.value[:, first:last] = key[0], value[0]
        self._seen[layer] = last
        so_far = record.key[:, :last], record.value[:, :last]
        self.gathering.observe(layer, query[0], *so_far, scaling, terms.softcap)
        # What of the window lies in this chunk; its first query is at n - W.
        start = self.entries - record.window_query.shape[1]
        if last > start:
            record.window_query[:, max(first - start, 0) : last - start] = query[0, :, max(start - first, 0) :]
        return (
            attend_causally(query, *so_far, scaling)
            if terms.plain
            else attend_causally_by(query, *so_far, scaling, terms)
        )

    def _attend_in_window(self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: LayerTerms) -> Tensor:
        record = self.layers[layer]
        key, value = torch.cat([record.key, key], 1), torch.cat([record.value, value], 1)
        output = attend_causally_by(query, key, value, record.scaling, terms)
        left = key.shape[1] - terms.held(key.shape[1])
        self.layers[layer] = replace(record, key=key[:, left:].clone(), value=value[:, left:].clone())
        return output

    def _begin(self, layer: int, query: Tensor, key: Tensor, scaling: float, terms: LayerTerms) -> None:
        heads, size, kv_heads = query.shape[1], query.shape[3], key.shape[1]
        self._seen.append(0)
        if terms.window is not None:
            none = key.new_empty((kv_heads, 0, size))
            self.layers.append(PromptLayer(none, none, query[0, :, :0], scaling, -1, self.prompt, terms=terms))
            return
        number = sum(one.terms.window is None for one in self.layers)
        self.layers.append(
            PromptLayer(
                key.new_empty((kv_heads, self.entries, size)), key.new_empty((kv_heads, self.entries, size)),
                query.new_empty((heads, min(self.window, self.entries), size)), scaling, number, self.prompt,
                self.gathering.of(layer), terms,
            )
        )  # fmt: skip
