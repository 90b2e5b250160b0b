"""Eight-bit floating-point numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.attention.shared_prefix import PrefixLayer
from kvdrift.generator.codecs.affine import float16_above
from kvdrift.generator.codecs.codec import Codec

_LARGEST = 448.0  # of e4m3


@dataclass(frozen=True)
class FP8(Codec):
    """Numbers in e4m3 (4 bits of exponent, 3 of mantissa); the keys of a KV head have one scale, its values another.

    A scale is the largest magnitude divided by 448, in float16, rounded up.
    """

    summary: ClassVar[str] = "8-bit floating point (e4m3), a scale for each layer and KV head"
    paper: ClassVar[str | None] = "Micikevicius et al. 2022, arXiv:2209.05433"

    def round_trip(self, layer: PrefixLayer) -> PrefixLayer:
        """Return the numbers, each rounded to e4m3 at its head's scale."""
        return PrefixLayer(_read_back(layer.key), _read_back(layer.value))

    def stored_bytes(self, layer: PrefixLayer) -> StoredBytes:
        """Return the bytes as stored: one for each number, and those of two float16 scales for each KV head."""
        numbers = layer.key.numel() + layer.value.numel()
        return StoredBytes(numbers, 2 * layer.key.shape[0] * torch.float16.itemsize)


def _read_back(numbers: Tensor) -> Tensor:
    return at_scale(numbers, scale_of(numbers.abs().amax(dim=(1, 2), keepdim=True)))  # a scale for each KV head


def scale_of(largest: Tensor) -> Tensor:
    """Return the scales of groups whose largest magnitudes are ``largest``, float32 of the same shape."""
    return float16_above(largest / _LARGEST)


def at_scale(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return float32 numbers, each rounded to e4m3 at a scale; magnitudes are cut off at 448 times the scale."""
    scaled = (numbers / scale.where(scale > 0, 1)).clamp(-_LARGEST, _LARGEST)
    return scaled.to(torch.float8_e4m3fn).float() * scale
