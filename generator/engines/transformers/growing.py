"""Layers of a cache in rows that grow in place: transformers' own copy all of their entries at every step.

Attention reads the same numbers as from ``DynamicLayer``, of which a step then copies a row's new entry alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_ROOM = 64  # entries that a layer has room for beyond those that it holds


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """A layer whose keys and values are the first entries of tensors with room for more."""

    _stored: tuple[Tensor, Tensor] | None = None  # keys and values with their room
    _seen: Tensor | None = None  # the keys as this layer left them; others may have been put in their place

    @classmethod
    def of(cls, layer: Any, rows: Sequence[int]) -> GrowingLayer:
        """Return a layer whose row i has the entries of row ``rows[i]`` of another layer."""
        grown = cls()
        grown.is_initialized, grown.dtype, grown.device = layer.is_initialized, layer.dtype, layer.device
        grown._hold([layer.keys[row] for row in rows], [layer.values[row] for row in rows])
        return grown

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append entries, [rows, heads, new, size], and return all keys and values."""
        keys: Any = self.keys
        values: Any = self.values
        held, new = keys.shape[-2], key_states.shape[-2]
        if self._stored is None or keys is not self._seen or held + new > self._stored[0].shape[-2]:
            self._hold([*keys], [*values], new)
        stored: Any = self._stored
        for whole, states in zip(stored, (key_states, value_states), strict=True):
            whole[:, :, held : held + new] = states
        return self._show(held + new)

    def _hold(self, keys: Sequence[Tensor], values: Sequence[Tensor], new: int = 0) -> None:
        """Store the entries of rows, each [heads, entries, size], with room for more."""
        stored = []
        for rows in (keys, values):
            heads, held, size = rows[0].shape
            whole = torch.empty(
                (len(rows), heads, held + max(new, _ROOM), size), dtype=rows[0].dtype, device=rows[0].device
            )
            for row, entries in enumerate(rows):
                whole[row, :, :held] = entries
            stored.append(whole)
        self._stored = (stored[0], stored[1])
        self._show(keys[0].shape[1])

    def _show(self, entries: int) -> tuple[Tensor, Tensor]:
        stored: Any = self._stored
        keys, values = (whole[:, :, :entries] for whole in stored)
        self.keys, self.values, self._seen = keys, values, keys
        return keys, values


def grown(cache: DynamicCache, rows: Sequence[int]) -> None:
    """Replace the layers of a cache by layers that grow in place, with row ``rows[i]`` as row i."""
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        if type(layer) in (DynamicLayer, GrowingLayer):
            layers[number] = GrowingLayer.of(layer, rows)
        else:
            layer.reorder_cache(torch.tensor(rows))
