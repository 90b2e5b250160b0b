"""Attention of decoding streams to prompt entries: streams that read the same entries are multiplied with them at once.

Caches with equal entries, as the reference's and a control's are, have the same tensors: their streams read together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from generator.attention.layer_terms import PLAIN, LayerTerms
from generator.attention.parts import PartialAttention, attend_prompt, by_onednn, packed_keys
from generator.attention.streams.rows import Tile, pack_tiles


@dataclass(frozen=True)
class PrefixLayer:
    """One layer of one cache: its prompt keys and values, [KV heads, m, size] each, and the layer's terms.

    If its attention has a window, the entries are the prompt's last ones, in every cache of the prompt.
    """

    key: Tensor
    value: Tensor
    terms: LayerTerms = PLAIN


@dataclass(frozen=True)
class PackedLayer(PrefixLayer):
    """A layer whose keys are also there as ``packed_keys`` returns them: nothing changes its entries."""

    keys: Sequence[Sequence[Tensor]] | None = None


def with_packed_keys(layers: Sequence[PrefixLayer]) -> tuple[PrefixLayer, ...]:
    """Pack the keys of layers from which oneDNN multiplies all at once; others stay as they are."""
    return tuple(
        PackedLayer(layer.key, layer.value, layer.terms, packed_keys(layer.key))
        if layer.terms.window is None and layer.terms.softcap is None and by_onednn(layer.key, layer.key)
        else layer
        for layer in layers
    )


def same_entries(one: Sequence[PrefixLayer], other: Sequence[PrefixLayer]) -> bool:
    """Whether two caches have equal keys and values in all layers."""
    pairs = list(zip(one, other, strict=True))
    return all(torch.equal(own.key, its.key) and torch.equal(own.value, its.value) for own, its in pairs)


class PromptReads:
    """Which streams read which entries together, and their attention to these.

    Args:
        caches: Per cache, its layers.
        at_once: Of each cache, how many streams read its entries together, at most.
        multiple: What the streams of a tile are filled up to a multiple of.
        few: The same for products of oneDNN, which need less of it.
    """

    def __init__(
        self, caches: Sequence[Sequence[PrefixLayer]], at_once: Sequence[int], multiple: int, few: int
    ) -> None:
        self._caches, self._at_once, self._multiple, self._few = caches, at_once, multiple, few
        kinds = [(tile, *_tensors(cache)) for tile, cache in zip(at_once, caches, strict=True)]
        self._read = torch.tensor(_first_alike(kinds))  # of each cache, the first one that has its entries
        self._tiles: list[Tile] = []

    def alike(self, stream_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Put streams that read the same entries side by side.

        Args:
            stream_cache: The cache of each stream, ascending, int64 [streams].
            slots: The slot of each, int64 [streams].

        Returns:
            Of each stream, in their new order, the cache whose entries it reads, ascending, and its slot.
        """
        read, order = self._read[stream_cache].sort(stable=True)
        return read, slots[order]

    def pack(self, stream_cache: Tensor, slots: Tensor) -> dict[str, Tensor]:
        """Take up the open streams; returns what ``attend`` needs on the layers' devices, by name.

        Args:
            stream_cache: The cache of each stream, ascending, int64 [streams].
            slots: The slot of each, int64 [streams].
        """
        self._tiles, indices = pack_tiles(*self.alike(stream_cache, slots), self._at_once, self._multiple)
        return indices

    def attend(
        self, layer: int, grouped: Tensor, indices: Mapping[str, Tensor], scaling: float, length: int,
        replaced: Callable[[int], bool],
    ) -> PartialAttention:  # fmt: skip
        """Attend from one new token per row to what its cache has of the prompt.

        Args:
            layer: The layer's number.
            grouped: Queries, [rows, KV heads, query heads of it, size].
            indices: What ``pack`` has returned, on the layer's device.
            scaling: What products of queries and keys are multiplied by.
            length: The entries of every suffix.
            replaced: Whether a cache's attention is computed elsewhere, except in layers with windows.

        Returns:
            Of each stream, by its slot: the output, [streams, KV heads, query heads of it, size], and the logarithm of
            the sum of exponentials, float32; minus infinity if a window has left all of its prompt entries.
        """
        _, kv_heads, group, size = grouped.shape
        terms = self._caches[0][layer].terms
        # [KV heads, packed rows x group, size]
        packed = grouped[indices["packed"]].transpose(0, 1).reshape(kv_heads, -1, size)
        output = torch.empty_like(packed, dtype=packed.dtype if terms.softcap is None else torch.float32)
        mass = torch.empty_like(packed[..., 0], dtype=torch.float32)
        for tile in self._tiles:
            prompt = self._caches[tile.cache][layer]
            keys = prompt.keys if isinstance(prompt, PackedLayer) else None
            key, value = prompt.key, prompt.value
            first = terms.first_seen(key.shape[1] + length)
            key, value = key[:, first:], value[:, first:]
            rows = tile.rows(self._few if by_onednn(packed, key) else self._multiple)
            queries = slice(rows.start * group, rows.stop * group)
            if not key.shape[1] or (terms.window is None and replaced(tile.cache)):
                output[:, queries], mass[:, queries] = 0.0, 0.0 if terms.window is None else -torch.inf
                continue
            found = attend_prompt(packed[:, queries], key, value, scaling, terms.softcap, keys)
            output[:, queries], mass[:, queries] = found
        unpacked = indices["unpacked"]
        return (
            output.view(kv_heads, -1, group, size).transpose(0, 1)[unpacked],
            mass.view(kv_heads, -1, group).transpose(0, 1)[unpacked],
        )


def _tensors(cache: Sequence[PrefixLayer]) -> list[int]:
    """Which tensors a cache reads."""
    return [id(part) for layer in cache for part in (layer.key, layer.value)]


def _first_alike(kinds: Sequence[tuple[int, ...]]) -> list[int]:
    """Of each of some things, the place of the first one that is equal to it."""
    places = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
    return [places[kind] for kind in kinds]
