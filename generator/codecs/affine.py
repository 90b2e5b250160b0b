"""Asymmetric rounding to nearest: groups of numbers become integers, with one scale and one zero point each.

Of a group of numbers from a to b, the zero point is z = a and the scale s = (b - a) / (2^bits - 1); x is stored as the
integer q = round((x - z) / s) and read as z + q s. Scale and zero point are stored in float16, rounded so that z <= a
and z + (2^bits - 1) s >= b: nothing is clipped, and |x - (z + q s)| <= s / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_BYTES = 2 * torch.float16.itemsize  # of a group's scale and zero point


def read_back(numbers: Tensor, bits: int) -> Tensor:
    """Store numbers in groups and read them back, float32 [..., groups, numbers of a group]."""
    least, most = numbers.aminmax(dim=-1, keepdim=True)
    zero, largest = float16_below(least), 2**bits - 1
    scale = float16_above((most - zero) / largest)
    steps = (numbers - zero) / scale.where(scale > 0, 1)  # a scale of 0: all numbers are the zero point
    return zero + steps.round().clamp(0, largest) * scale


def entries_back(numbers: Tensor, bits: int, group: int) -> Tensor:
    """Store numbers per entry in groups of channels, and read them back, float32 [KV heads, entries, size].

    If ``group`` does not divide ``size``, the last group of an entry is smaller.
    """
    return torch.cat([read_back(part, bits) for part in torch.split(numbers, group, dim=-1)], dim=-1)


def channels_back(numbers: Tensor, bits: int, group: int) -> Tensor:
    """Store numbers per channel in groups of successive entries, and read them back, float32 [KV heads, entries, size].

    ``group`` divides the number of entries.
    """
    heads, _, size = numbers.shape
    groups = numbers.reshape(heads, -1, group, size).transpose(-1, -2)  # [KV heads, groups, size, entries of a group]
    return read_back(groups, bits).transpose(-1, -2).flatten(1, 2)


def packed_bytes(numbers: int, bits: int) -> int:
    """The bytes of ``numbers`` integers of ``bits`` bits each, packed without gaps."""
    return -(-numbers * bits // 8)


def float16_above(numbers: Tensor) -> Tensor:
    """The smallest float16 that is not below each number, as float32."""
    return -float16_below(-numbers)


def float16_below(numbers: Tensor) -> Tensor:
    """The largest float16 that is not above each number, as float32."""
    near = numbers.half()
    below = torch.nextafter(near, torch.full_like(near, -torch.inf))
    return near.where(near.float() <= numbers, below).float()
