"""Eight-bit floating-point numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.codecs.affine import float16_above
from kvdrift.generator.codecs.codec import Part, ScaledCodec

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_AXES = {"head": (1, 2), "tensor": (0, 1, 2)}  # over which a scale's numbers extend


@dataclass(frozen=True)
class FP8(ScaledCodec):
    """Numbers in e4m3 (4 bits of exponent, 3 of mantissa) or e5m2, at a scale.

    ``scale`` is "head" (one of a layer's keys and one of its values for each KV head), "tensor" (one for all heads), or
    1 (numbers are stored as they are). Other scales are the largest magnitude divided by that of the format, in
    float16, rounded up. Magnitudes beyond the format's largest, times the scale, are cut off there.
    """

    summary: ClassVar[str] = (
        "8-bit floating point, e4m3 or e5m2, with a scale for each KV head, for each layer, or none"
    )
    paper: ClassVar[str | None] = "Micikevicius et al. 2022, arXiv:2209.05433"
    choices: ClassVar[Mapping[str, tuple[int | str, ...]]] = {"format": tuple(_DTYPES), "scale": (*_AXES, 1)}
    format: str = "e4m3"
    scale: int | str = "head"

    @property
    def heads_together(self) -> bool:
        """Whether all KV heads share a scale."""
        return self.scale == "tensor"

    def scale_of(self, numbers: Tensor) -> Tensor:
        """Return the scales, float32 [KV heads or 1, 1, 1]."""
        if isinstance(self.scale, int):
            return numbers.new_ones((1, 1, 1))
        largest = numbers.abs().amax(dim=_AXES[self.scale], keepdim=True)
        return float16_above(largest / torch.finfo(_DTYPES[self.format]).max)

    def at_scale(self, numbers: Tensor, scale: Tensor) -> Tensor:
        """Return the numbers, each rounded to the format at its scale."""
        return rounded_to(numbers / scale.where(scale > 0, 1), _DTYPES[self.format]) * scale

    def stored_bytes(self, numbers: Tensor, part: Part) -> StoredBytes:  # noqa: ARG002
        """Return the bytes as stored: one for each number, and those of float16 scales."""
        scales = {"head": numbers.shape[0], "tensor": 1}.get(str(self.scale), 0)
        return StoredBytes(numbers.numel(), scales * torch.float16.itemsize)


def rounded_to(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 numbers, each rounded to a format of 8 bits, ties to even; magnitudes beyond it are cut off."""
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest).to(dtype).float()
