"""Buffers for the keys and values of generated tokens in every layer, and copies from slot to slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CPU_BYTES, _OTHER_BYTES = 2**20, 2**28  # of suffixes copied at once

Suffixes = list[Tensor]  # keys and values of one layer


def suffix_buffers(layers: Sequence[Sequence[Tensor]], slots: int, horizon: int) -> tuple[list[Tensor], list[Suffixes]]:
    """Allocate buffers for suffixes; parts of one device and shape share a buffer, [parts, slots, KV heads, H, size].

    Args:
        layers: For each layer a prompt's keys and values, [KV heads, m, size].
        slots: The number of streams for which there is room.
        horizon: H.

    Returns:
        The buffers, and for each layer its keys and values in them, [slots, KV heads, H, size] each.
    """
    kinds = [(part.device, part.dtype, part.shape[0], part.shape[2]) for layer in layers for part in layer]
    rooms, buffers = {}, []
    for kind in dict.fromkeys(kinds):
        device, dtype, heads, size = kind
        shape = (kinds.count(kind), slots, heads, horizon, size)
        buffers.append(torch.empty(shape, dtype=dtype, device=device))
        rooms[kind] = iter(buffers[-1].unbind())
    own = [next(rooms[kind]) for kind in kinds]
    return buffers, [own[first : first + 2] for first in range(0, len(own), 2)]


def copy_suffixes(buffer: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots ``source`` to slots ``target``, all at once, in every part of a buffer, [parts, slots, ...]."""
    room = _CPU_BYTES if buffer.device.type == "cpu" else _OTHER_BYTES
    moved = len(source) * buffer[0, 0].numel() * buffer.itemsize
    for parts in torch.split(buffer, max(room // max(moved, 1), 1)):
        parts.index_copy_(1, target, parts[:, source])
