"""Attention through transformers' public extension point: prompt attention that records, decoding that shares.

The function registered as ``kvdrift`` is called by every attention layer of the model with rotated queries, keys and
values; the extra keyword ``kvdrift_attention`` of the model's forward call reaches it and decides what happens:

- ``PromptRecording`` attends causally over the prompt and keeps each layer's keys, values and last W queries;
- ``SharedPrefix`` lets every open stream attend to its cache's prompt entries, stored once, and to its own suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

IMPLEMENTATION = "kvdrift"

# Matrix products over fewer rows take other code paths and round differently; from 8 rows on they do not depend on
# the number of rows (checked at start-up, see generator.models.rows_are_invariant).
ROW_MULTIPLE = 8


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
    """One layer's prompt: keys and values [KV heads, n, size], last W queries [heads, W, size], and the scaling."""

    key: Tensor
    value: Tensor
    window_query: Tensor
    scaling: float


class PromptRecording:
    """Causal attention over one prompt that records what selectors and caches need."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.layers: list[PromptLayer] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Causal attention over the whole prompt, T = n; layers attend in order, each once."""
        if layer != len(self.layers):
            message = f"layer {layer} attends out of order"
            raise RuntimeError(message)
        # Copies: views would keep the layer's whole query and projection buffers alive.
        self.layers.append(
            PromptLayer(key[0].contiguous(), value[0].contiguous(), query[0, :, -self.window :].clone(), scaling)
        )
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )


@dataclass(frozen=True)
class PrefixLayer:
    """One layer of one cache: kept prompt keys and values, [KV heads, m, size] each."""

    key: Tensor
    value: Tensor


class SharedPrefix:
    """Decoding attention: prompt entries stored once per cache, one suffix per stream.

    Streams lie in physical rows, grouped by cache; every group is padded to a multiple of ``ROW_MULTIPLE`` rows by
    repeating its first stream. Attention over the prompt entries and over the suffix is merged by their maxima and
    sums of exponentials.
    """

    def __init__(self, caches: Sequence[Sequence[PrefixLayer]], horizon: int) -> None:
        self._caches = caches
        self._horizon = horizon
        self._length = 0
        self._groups: list[tuple[int, int, int]] = []  # (cache, first row, last row + 1)
        self._suffix: list[tuple[Tensor, Tensor]] = []

    def open(self, caches: Sequence[int]) -> Tensor:
        """Start one stream per entry, grouped by ascending cache; returns each physical row's stream, int64 [rows]."""
        self._length = 0
        physical = self._lay_out(torch.tensor(caches))
        self._suffix = []
        for layer in self._caches[0]:
            heads, _, size = layer.key.shape
            shape = (len(physical), heads, self._horizon, size)
            self._suffix.append((layer.key.new_empty(shape), layer.key.new_empty(shape)))
        return physical

    def select(self, old_rows: Tensor, stream_cache: Tensor) -> Tensor:
        """Continue new stream i from old physical row ``old_rows[i]``; returns the new rows' streams."""
        physical = self._lay_out(stream_cache)
        source = old_rows[physical]
        for index, (key, value) in enumerate(self._suffix):
            self._suffix[index] = (self._gather(key, source), self._gather(value, source))
        return physical

    def next_position(self) -> None:
        """Make room for the token about to be fed."""
        self._length += 1

    @property
    def stream_bytes(self) -> int:
        """Bytes of one stream's suffix buffers, measured on those that lie open."""
        return sum(part[0].nbytes for pair in self._suffix for part in pair)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of one new token per physical row, T = 1, whose key and value join the row's suffix."""
        suffix_key, suffix_value = self._suffix[layer]
        suffix_key[:, :, self._length - 1] = key[:, :, 0]
        suffix_value[:, :, self._length - 1] = value[:, :, 0]
        rows, heads, _, size = query.shape
        kv_heads = key.shape[1]
        grouped = (query * scaling).view(rows, kv_heads, heads // kv_heads, size)

        scores = grouped @ suffix_key[:, :, : self._length].transpose(-1, -2)  # [rows, KV heads, group, length]
        top, mass, output = _exponentials(scores, suffix_value[:, :, : self._length])
        for cache, first, last in self._groups:
            prefix = self._caches[cache][layer]
            part = grouped[first:last].transpose(0, 1).reshape(kv_heads, -1, size)  # [KV heads, rows x group, size]
            prefix_parts = _exponentials(part @ prefix.key.transpose(-1, -2), prefix.value)
            prefix_top, prefix_mass, prefix_output = (
                p.view(kv_heads, last - first, heads // kv_heads, -1).transpose(0, 1) for p in prefix_parts
            )
            _merge(top[first:last], mass[first:last], output[first:last], prefix_top, prefix_mass, prefix_output)
        return (output / mass).to(query.dtype).view(rows, heads, 1, size)

    def _lay_out(self, stream_cache: Tensor) -> Tensor:
        """Each physical row's stream, for streams grouped by cache; padding repeats the first of a group."""
        self._groups, rows = [], []
        ids, counts = torch.unique_consecutive(stream_cache, return_counts=True)
        first_stream = first_row = 0
        for cache, count in zip(ids.tolist(), counts.tolist(), strict=True):
            padded = -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
            rows += [*range(first_stream, first_stream + count), *([first_stream] * (padded - count))]
            self._groups.append((cache, first_row, first_row + padded))
            first_stream += count
            first_row += padded
        return torch.tensor(rows, device=stream_cache.device)

    def _gather(self, part: Tensor, source: Tensor) -> Tensor:
        gathered = part.new_empty((len(source), *part.shape[1:]))
        gathered[:, :, : self._length] = part[source, :, : self._length]
        return gathered


def _exponentials(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exponentials and weighted values of each row of scores, in float32: the parts of a softmax."""
    scores = scores.float()
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    return top, weights.sum(-1, keepdim=True), (weights.to(value.dtype) @ value).float()


def _merge(top: Tensor, mass: Tensor, output: Tensor, other_top: Tensor, other_mass: Tensor, other: Tensor) -> None:
    """Fold a second part of the same softmax into the first, in place."""
    joint = torch.maximum(top, other_top)
    scale, other_scale = (top - joint).exp_(), (other_top - joint).exp_()
    output.mul_(scale).add_(other * other_scale)
    mass.mul_(scale).add_(other_mass * other_scale)
