"""llama.cpp's cache types: blocks of 32 channels of an entry, with a scale in float16.

A block is coded with the scale before its rounding to float16, and read with the rounded scale, as ``ggml-quants.c``
does. A number that is read can therefore be off by more than half a step.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.codecs.codec import EntryCodec, Part, check_blocks, in_blocks
from kvdrift.generator.codecs.rotated import hadamard
from kvdrift.schema.errors import InputError

_BLOCK = 32
_ROTATED = 64  # channels


@dataclass(frozen=True)
class LlamaCppBlocks(EntryCodec):
    """A cache type of llama.cpp.

    With ``rotated``, parts of each head vector are multiplied by the normalized Hadamard matrix before they are coded,
    and again when they are read: 64 channels of values, and of keys the largest power of two that divides the head
    size. llama.cpp does so, since 2026, if 64 divides the head size.
    """

    bits: ClassVar[int]  # of a number
    scales: ClassVar[int]  # float16 numbers of a block
    rotated: bool = False

    def check(self, size: int, part: Part) -> None:  # noqa: ARG002
        """Refuse heads that do not fill whole blocks, as llama.cpp does, and heads that it does not rotate."""
        name = type(self).__name__.lower()
        check_blocks(size, _BLOCK, name)
        if self.rotated and size % _ROTATED:
            raise InputError(f"{name}: llama.cpp rotates no heads of {size} channels, but multiples of {_ROTATED}")

    def round_trip(self, numbers: Tensor, part: Part) -> Tensor:
        """Return the numbers as read from their blocks."""
        size = numbers.shape[-1]
        self.check(size, part)
        if not self.rotated:
            return self.blocks_back(in_blocks(numbers, _BLOCK)).flatten(-2)
        together = size & -size if part == "keys" else _ROTATED  # the largest power of two that divides the size
        turned = hadamard(in_blocks(numbers, together))
        back = self.blocks_back(in_blocks(turned, _BLOCK)).flatten(-2)
        return hadamard(back).flatten(-2)

    @abstractmethod
    def blocks_back(self, blocks: Tensor) -> Tensor:
        """Return what is read of blocks, float32 [..., 32]."""

    def stored_bytes(self, numbers: Tensor, part: Part) -> StoredBytes:  # noqa: ARG002
        """Return the bytes of packed integers, and of float16 scales and least values."""
        blocks = numbers.numel() // _BLOCK
        return StoredBytes(numbers.numel() * self.bits // 8, blocks * self.scales * torch.float16.itemsize)


@dataclass(frozen=True)
class Q8_0(LlamaCppBlocks):  # noqa: N801 - llama.cpp's name
    """Integers from -127 to 127; the scale is the largest magnitude divided by 127."""

    summary: ClassVar[str] = "llama.cpp's q8_0: 8-bit integers in blocks of 32 channels"
    bits: ClassVar[int] = 8
    scales: ClassVar[int] = 1

    def blocks_back(self, blocks: Tensor) -> Tensor:
        """Return what is read of blocks; halves are rounded away from 0."""
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        steps = blocks * _inverse(scale)
        rounded = (steps.abs().floor() + (2 * steps.abs().frac()).floor()).copysign(steps)
        return rounded * _in_float16(scale)


@dataclass(frozen=True)
class Q5_1(LlamaCppBlocks):  # noqa: N801
    """Integers from 0 to 31, of steps above the block's least number."""

    summary: ClassVar[str] = "llama.cpp's q5_1: 5-bit integers in blocks of 32 channels, from the least number on"
    bits: ClassVar[int] = 5
    scales: ClassVar[int] = 2

    def blocks_back(self, blocks: Tensor) -> Tensor:
        """Return what is read of blocks."""
        least, most = blocks.aminmax(dim=-1, keepdim=True)
        scale = (most - least) / 31
        steps = ((blocks - least) * _inverse(scale) + 0.5).trunc().clamp(0, 31)
        return steps * _in_float16(scale) + _in_float16(least)


@dataclass(frozen=True)
class Q4_0(LlamaCppBlocks):  # noqa: N801
    """Integers from -8 to 7; -8 is the number of the largest magnitude, the first of several."""

    summary: ClassVar[str] = "llama.cpp's q4_0: 4-bit integers in blocks of 32 channels"
    bits: ClassVar[int] = 4
    scales: ClassVar[int] = 1

    def blocks_back(self, blocks: Tensor) -> Tensor:
        """Return what is read of blocks."""
        first = blocks.abs().argmax(-1, keepdim=True)  # torch documents that it is the first of equal magnitudes
        scale = blocks.gather(-1, first) / -8
        steps = (blocks * _inverse(scale) + 8.5).trunc().clamp(0, 15) - 8
        return steps * _in_float16(scale)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _in_float16(numbers: Tensor) -> Tensor:
    return numbers.half().float()
