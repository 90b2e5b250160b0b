"""Four-bit floating-point numbers, e2m1, in blocks of channels that share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.codecs.codec import EntryCodec, Part, ScaledCodec, check_blocks, in_blocks
from kvdrift.generator.codecs.fp8 import rounded_to

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1
_LARGEST = _MAGNITUDES[-1]
_LARGEST_EXPONENT = 2  # of 4 = 2^2, the largest power of two in e2m1
_LEAST_SCALE, _LARGEST_SCALE = -127, 127  # exponents of e8m0


@dataclass(frozen=True)
class MXFP4(EntryCodec):
    """Blocks of 32 channels of an entry, whose scale is a power of two (e8m0).

    The scale of a block is 2^(floor(log2 a) - 2), a being the largest magnitude. Scaled magnitudes above 6, which are
    below 8, become 6.
    """

    summary: ClassVar[str] = "4-bit floating point (e2m1) in blocks of 32 channels, with a power of two as scale"
    paper: ClassVar[str | None] = "Rouhani et al. 2023, arXiv:2310.10537"
    block: ClassVar[int] = 32

    def check(self, size: int, part: Part) -> None:  # noqa: ARG002
        """Refuse heads that do not fill whole blocks."""
        check_blocks(size, self.block, "mxfp4")

    def round_trip(self, numbers: Tensor, part: Part) -> Tensor:
        """Return the numbers as read from their blocks."""
        self.check(numbers.shape[-1], part)
        blocks = in_blocks(numbers, self.block)
        _, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))  # of a magnitude in [0.5, 1)
        power = (exponent - 1 - _LARGEST_EXPONENT).clamp(_LEAST_SCALE, _LARGEST_SCALE)
        scale = torch.ldexp(torch.ones_like(blocks[..., :1]), power)
        return (_rounded(blocks / scale) * scale).flatten(-2)

    def stored_bytes(self, numbers: Tensor, part: Part) -> StoredBytes:  # noqa: ARG002
        """Return half a byte for each number, and one for the scale of each block."""
        return StoredBytes(numbers.numel() // 2, numbers.numel() // self.block)


@dataclass(frozen=True)
class NVFP4(ScaledCodec):
    """Blocks of 16 channels of an entry, with a scale in e4m3, and one float32 scale for a layer's keys or values.

    The layer's scale is its largest magnitude divided by 6 x 448. The scale of a block is its largest magnitude divided
    by 6 and by the layer's scale.
    """

    summary: ClassVar[str] = "4-bit floating point (e2m1) in blocks of 16 channels, with a scale in e4m3"
    paper: ClassVar[str | None] = "NVIDIA 2025, arXiv:2509.25149"
    block: ClassVar[int] = 16

    def check(self, size: int, part: Part) -> None:  # noqa: ARG002
        """Refuse heads that do not fill whole blocks."""
        check_blocks(size, self.block, "nvfp4")

    @property
    def heads_together(self) -> bool:
        """Return true: all KV heads share a scale."""
        return True

    def scale_of(self, numbers: Tensor) -> Tensor:
        """Return the layer's scale, float32 [1, 1, 1]."""
        return numbers.abs().amax().view(1, 1, 1) / (_LARGEST * torch.finfo(torch.float8_e4m3fn).max)

    def at_scale(self, numbers: Tensor, scale: Tensor) -> Tensor:
        """Return the numbers as read from their blocks."""
        check_blocks(numbers.shape[-1], self.block, "nvfp4")
        blocks, of_layer = in_blocks(numbers, self.block), scale.where(scale > 0, 1)[..., None]
        largest = blocks.abs().amax(-1, keepdim=True)
        own = rounded_to(largest / _LARGEST / of_layer, torch.float8_e4m3fn) * of_layer
        return (_rounded(blocks / own.where(own > 0, 1)) * own).flatten(-2)

    def stored_bytes(self, numbers: Tensor, part: Part) -> StoredBytes:  # noqa: ARG002
        """Return half a byte for each number, one for the scale of each block, and those of the layer's scale."""
        return StoredBytes(numbers.numel() // 2, numbers.numel() // self.block + torch.float32.itemsize)


def _rounded(numbers: Tensor) -> Tensor:
    """Return float32 numbers rounded to e2m1, ties to even; magnitudes above 6 become 6."""
    magnitudes = torch.tensor(_MAGNITUDES)
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    # A number in the middle goes to the even code: up, past a bound just below the middle, from codes 1, 3 and 5.
    middle[1::2] = torch.nextafter(middle[1::2], torch.tensor(0.0))
    codes = torch.bucketize(numbers.abs(), middle.to(numbers.device))
    return magnitudes.to(numbers.device)[codes].copysign(numbers)
