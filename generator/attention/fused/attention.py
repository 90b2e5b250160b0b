"""Decoding attention by two operations, each of which is one launch on CUDA: the prompt's chunks, then suffixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kvdrift.generator.attention.fused import prompt_attention, suffix_attention
from kvdrift.generator.attention.fused.tables import cache_table, chunks_of, tables, tile_queries
from kvdrift.generator.attention.parts import PartialAttention


def attention_fault(device: torch.device) -> str | None:
    """Return why fused operations cannot compute attention of decoding streams on a CUDA device; None if they can."""
    return prompt_attention.fault(device) or suffix_attention.fault(device)


def are_fused(devices: Iterable[torch.device], wanted: bool | None) -> bool:  # noqa: FBT001 - as ``Savings.fused`` is
    """Tell whether fused operations are used on some devices, if ``Savings.fused`` is ``wanted``."""
    if wanted is False:
        return False
    return all(attention_fault(device) is None if device.type == "cuda" else wanted is True for device in devices)


class FusedAttention:
    """Attention of open streams by the two fused operations, with tables of caches and streams.

    ``layers`` has for each layer the keys and the values of all caches, [KV heads, m, size] each; ``group`` is the
    number of query heads of a KV head.
    """

    def __init__(self, layers: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]], group: int) -> None:
        self._layers, self._group = layers, group
        self._caches = [cache_table(*layer) for layer in layers]
        lengths = torch.tensor([[key.shape[1] for key in keys] for keys, _ in layers])  # [layers, caches]
        self._chunks = chunks_of(lengths.amax(0))
        self._queries = tile_queries(layers[0][0][0].dtype)
        self.partials = 0  # partial results of the open streams

    def pack(self, stream_cache: Tensor, slots: Tensor, rows: int) -> dict[str, Tensor]:
        """Take over the open streams; return the vectors that ``attend`` needs on the layers' devices, by name.

        The cache of each stream, ascending, and its slot among the model's ``rows`` are int64 [streams] on the CPU.
        """
        packed, tiles, places, self.partials = tables(
            stream_cache, slots, rows, self._chunks, self._group, self._queries
        )
        return {"packed": packed, "tiles": tiles, "places": places}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, suffix: Sequence[Tensor],
        indices: Mapping[str, Tensor], scaling: float,
    ) -> Tensor:  # fmt: skip
        """Attend from one new token per row and write its key and value.

        Queries are [rows, heads, 1, size], keys and values [rows, KV heads, 1, size]. ``suffix`` has the keys and
        values of this layer's suffixes, [slots, KV heads, H, size] each. ``indices`` are the vectors that ``pack``
        returned, on the layer's device; and "length", the entries of every suffix including the new one, int64 [1]. The
        result is [rows, heads, 1, size]; zeros in rows without a stream.
        """
        caches, new = self._caches[layer], query[:, :, 0]
        chunks: PartialAttention = prompt_attention.prompt_attention(
            new, *self._layers[layer], caches, indices["packed"], indices["tiles"], self.partials, scaling
        )
        output: Tensor = suffix_attention.suffix_attention(
            new, key[:, :, 0], value[:, :, 0], *suffix, indices["length"], *chunks, indices["places"], caches, scaling
        )
        return output[:, :, None]
