"""Attention through transformers' public extension point, and prompt attention that records.

The function registered as ``kvdrift`` is called by every attention layer of the model with rotated queries, keys and
values; the extra keyword ``kvdrift_attention`` of the model's forward call reaches it and decides what happens:

- ``PromptRecording`` attends causally over the prompt and keeps each layer's keys, values and last W queries;
- ``generator.attention.shared_prefix`` lets every open stream attend to its cache's prompt entries and to its own
  suffix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from generator.attention.parts import attend_causally
from generator.attention.recording import Gathered, Gathering, Statistic

IMPLEMENTATION = "kvdrift"


class LayerAttention(Protocol):
    """One way to attend: queries [B, heads, T, size], keys and values [B, KV heads, T, size] -> [B, heads, T, size]."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention output of one layer."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - part of transformers' calling convention
    dropout: float = 0.0,  # noqa: ARG001 - likewise, and sixth in its order
    scaling: float = 1.0,
    *,
    kvdrift_attention: LayerAttention,
    **_: Any,
) -> tuple[Tensor, None]:
    layer = module.layer_idx
    assert isinstance(layer, int)  # noqa: S101 - narrows nn.Module's attribute type
    output = kvdrift_attention.attend(layer, query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _attend)


@dataclass(frozen=True)
class PromptLayer:
    """One layer's prompt: keys and values [KV heads, n, size], last W queries [heads, W, size], and the scaling.

    ``number`` counts layers from 0; ``prompt`` is the SHA-256 of the prompt's tokens, for selectors that draw.
    """

    key: Tensor
    value: Tensor
    window_query: Tensor
    scaling: float
    number: int = 0
    prompt: bytes = b""
    statistics: Mapping[Statistic[Any], Any] = field(default_factory=dict)

    def gathered(self, statistic: Statistic[Gathered]) -> Gathered:
        """What ``statistic`` gathered over the layer's queries; a selector must have asked for it."""
        found: Gathered = self.statistics[statistic]
        return found


class PromptRecording:
    """Causal attention over one prompt, chunk by chunk, that records what selectors and caches need."""

    def __init__(
        self, entries: int, window: int, statistics: Iterable[Statistic[Any]] = (), prompt: bytes = b""
    ) -> None:
        self.entries = entries
        self.window = window
        self.prompt = prompt
        self.gathering = Gathering(statistics)
        self.layers: list[PromptLayer] = []  # complete once all n positions have been seen
        self._seen: list[int] = []  # positions, per layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Causal attention of the next T positions to all up to their own; layers attend in order."""
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
                key.new_empty((kv_heads, self.entries, size)),
                key.new_empty((kv_heads, self.entries, size)),
                query.new_empty((heads, min(self.window, self.entries), size)),
                scaling,
                layer,
                self.prompt,
                self.gathering.of(layer),
            )
        )


@dataclass(frozen=True)
class PrefixLayer:
    """One layer of one cache: kept prompt keys and values, [KV heads, m, size] each."""

    key: Tensor
    value: Tensor
