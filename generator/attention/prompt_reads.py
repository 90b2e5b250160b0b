"""Attention of decoding streams to prompt entries; queries to the same entries are multiplied together.

Caches with equal entries (the reference's and a control's) hold the same tensors, so their streams read together. The
streams that read the same entries are cut into tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvdrift.generator.attention.cpu_products import fits_onednn
from kvdrift.generator.attention.parts import (
    PLAIN,
    Chunks,
    LayerTerms,
    PartialAttention,
    attend_prompt,
    by_onednn,
    packed_chunks,
)

TILE = 64  # streams whose queries are multiplied with a prompt's keys at once, at most; by oneDNN, twice as many


@dataclass(frozen=True)
class Tile:
    """Packed rows ``first .. last - 1``: one for each of ``streams`` streams of a cache, then copies of a stream."""

    cache: int
    first: int
    last: int
    streams: int

    def rows(self, multiple: int) -> slice:
        """Return the rows of the streams, padded to a multiple of ``multiple``; at most all rows of the tile."""
        return slice(self.first, min(self.first + rounded(self.streams, multiple), self.last))


def pack_tiles(
    stream_cache: Tensor, slots: Tensor, at_once: Sequence[int], multiple: int
) -> tuple[list[Tile], dict[str, Tensor]]:
    """Pack the streams of each cache into tiles of at most ``at_once[cache]`` streams.

    Tiles are padded to a multiple of ``multiple`` rows. ``stream_cache``, ascending, and ``slots`` give each stream's
    cache and slot, int64 [streams]. Returns the tiles; "packed", the slot of each packed row; and "unpacked", the row
    into which each slot is packed.
    """
    tiles, rows, unpacked = [], [], torch.empty_like(slots)
    caches, counts = torch.unique_consecutive(stream_cache, return_counts=True)
    first = 0
    for cache, cache_slots in zip(caches.tolist(), torch.split(slots, counts.tolist()), strict=True):
        for part in torch.split(cache_slots, at_once[cache]):
            last = first + rounded(len(part), multiple)
            tiles.append(Tile(cache, first, last, len(part)))
            rows += [part, part[:1].expand(last - first - len(part))]
            unpacked[part] = torch.arange(first, first + len(part))
            first = last
    return tiles, {"packed": torch.cat(rows) if rows else slots[:0], "unpacked": unpacked}


def tile_of(key: Tensor, multiple: int) -> int:
    """Return the most streams whose queries are multiplied with a prompt's keys at once.

    It is twice ``TILE`` if oneDNN can multiply and rows are padded to a ``multiple`` below ``TILE``, else ``TILE``.
    """
    return 2 * TILE if multiple < TILE and fits_onednn(key) else TILE


def rounded(count: int, multiple: int) -> int:
    """Return ``count`` rounded up to a multiple of ``multiple``."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class PrefixLayer:
    """One layer of one cache: its prompt keys and values, [KV heads, m, size] each, and the layer's terms.

    If the layer's attention has a window, the entries are the prompt's last entries, in every cache of the prompt. If
    nothing changes the entries, ``chunks`` may have them in the form that ``packed_chunks`` returns. If KV heads keep
    different numbers of entries, ``lengths`` has these numbers; m is the largest of them, and what lies behind a
    head's entries is padding.
    """

    key: Tensor
    value: Tensor
    terms: LayerTerms = PLAIN
    chunks: Chunks | None = None
    lengths: tuple[int, ...] | None = None


def with_packed_keys(layers: Sequence[PrefixLayer]) -> tuple[PrefixLayer, ...]:
    """Return the layers, with packed keys in those that oneDNN multiplies and that have no window and no soft cap."""
    return tuple(
        replace(layer, chunks=packed_chunks(layer.key, layer.value, layer.lengths))
        if layer.terms.window is None and layer.terms.softcap is None and by_onednn(layer.key, layer.key)
        else layer
        for layer in layers
    )


def same_entries(first: Sequence[PrefixLayer], second: Sequence[PrefixLayer]) -> bool:
    """Return whether two caches have equal keys and values in all layers."""
    pairs = list(zip(first, second, strict=True))
    return all(
        layer.lengths == its.lengths and torch.equal(layer.key, its.key) and torch.equal(layer.value, its.value)
        for layer, its in pairs
    )


class PromptReads:
    """The groups of streams that read the same prompt entries, and the attention of these groups.

    At most ``at_once[i]`` streams of cache i read together. Their number is padded to a multiple of ``multiple``; in
    products of oneDNN, which need less padding, to a multiple of ``prompt_read_rows``.
    """

    def __init__(
        self, caches: Sequence[Sequence[PrefixLayer]], at_once: Sequence[int], multiple: int, prompt_read_rows: int
    ) -> None:
        self._caches, self._at_once = caches, at_once
        self._multiple, self._prompt_read_rows = multiple, prompt_read_rows
        kinds = [
            (tile, *(id(part) for layer in cache for part in (layer.key, layer.value)))
            for tile, cache in zip(at_once, caches, strict=True)
        ]
        self._read = torch.tensor([kinds.index(kind) for kind in kinds])  # the first cache that has a cache's entries
        self._tiles: list[Tile] = []

    def grouped(self, stream_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Put streams that read the same entries side by side; caches, ascending, and slots are int64 [streams].

        Returns for each stream, in the new order, the cache whose entries it reads, ascending, and its slot.
        """
        read, order = self._read[stream_cache].sort(stable=True)
        return read, slots[order]

    def pack(self, stream_cache: Tensor, slots: Tensor) -> dict[str, Tensor]:
        """Pack the open streams; return the indices that ``attend`` needs on the layers' devices, by name.

        The cache of each stream, ascending, and its slot are int64 [streams].
        """
        self._tiles, indices = pack_tiles(*self.grouped(stream_cache, slots), self._at_once, self._multiple)
        return indices

    def attend(
        self, layer: int, grouped: Tensor, indices: Mapping[str, Tensor], scaling: float, length: int,
        replaced: Callable[[int], bool],
    ) -> PartialAttention:  # fmt: skip
        """Attend from one new token per row to the prompt entries of the row's cache.

        ``grouped`` are queries, [rows, KV heads, query heads per KV head, size]; ``indices`` are those of ``pack``, on
        the layer's device; ``length`` is the length of every suffix. ``replaced`` tells whether a cache's
        attention is computed elsewhere; it is not used in layers with windows. Returns each stream's output, in the
        order of slots, [streams, KV heads, query heads per KV head, size], and the logarithm of its sum of
        exponentials, float32; that is minus infinity if a layer's window has moved past all prompt entries of the
        cache.
        """
        _, kv_heads, group, size = grouped.shape
        terms = self._caches[0][layer].terms
        # [KV heads, packed rows x group, size]
        packed = grouped[indices["packed"]].transpose(0, 1).reshape(kv_heads, -1, size)
        output = torch.empty_like(packed, dtype=packed.dtype if terms.softcap is None else torch.float32)
        mass = torch.empty_like(packed[..., 0], dtype=torch.float32)
        for tile in self._tiles:
            prompt = self._caches[tile.cache][layer]
            key, value = prompt.key, prompt.value
            first = terms.first_seen(key.shape[1] + length)
            if first:
                key, value = key[:, first:], value[:, first:]
            rows = tile.rows(self._prompt_read_rows if by_onednn(packed, key) else self._multiple)
            queries = slice(rows.start * group, rows.stop * group)
            if not key.shape[1] or (terms.window is None and replaced(tile.cache)):
                output[:, queries], mass[:, queries] = 0.0, 0.0 if terms.window is None else -torch.inf
                continue
            output[:, queries], mass[:, queries] = attend_prompt(
                packed[:, queries], key, value, scaling, terms.softcap, prompt.chunks, prompt.lengths
            )
        unpacked = indices["unpacked"]
        return (
            output.view(kv_heads, -1, group, size).transpose(0, 1)[unpacked],
            mass.view(kv_heads, -1, group).transpose(0, 1)[unpacked],
        )
