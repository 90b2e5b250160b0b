"""Rotated entries: a Hadamard transform spreads large channels over all of them before they are rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.codecs.affine import GROUP_BYTES, entries_back, packed_bytes
from kvdrift.generator.codecs.codec import GroupedCodec, Part, beside_exact
from kvdrift.schema.errors import InputError

_BITS = 4


@dataclass(frozen=True)
class RotatedInt4(GroupedCodec):
    """Each head vector is rotated, rounded to 4 bits a number in groups of channels, and rotated back when it is read.

    The rotation is the normalized Hadamard transform, which is its own inverse. An engine would rotate queries instead
    of the entries that it reads, with the same products. By default no entry stays exact (``residual`` = 0).
    """

    summary: ClassVar[str] = "4-bit integers per entry, after a Hadamard transform of each head vector"
    paper: ClassVar[str | None] = "Ashkboos et al. 2024, arXiv:2404.00456"
    residual: int = 0

    def check(self, size: int, part: Part) -> None:  # noqa: ARG002
        """Refuse heads whose size is no power of two."""
        check_rotation(size)

    def round_trip(self, numbers: Tensor, part: Part) -> Tensor:
        """Return entries as read back from their codes, but the last ``residual`` entries unchanged."""
        self.check(numbers.shape[-1], part)
        coded = self.before_window(numbers.shape[1])
        if not coded:
            return numbers
        return beside_exact(hadamard(entries_back(hadamard(numbers[:, :coded]), _BITS, self.group)), numbers)

    def stored_bytes(self, numbers: Tensor, part: Part) -> StoredBytes:  # noqa: ARG002
        """Return the bytes of packed integers and exact numbers, and those of scales and zero points."""
        heads, entries, size = numbers.shape
        coded = self.before_window(entries)
        exact = heads * (entries - coded) * size * numbers.itemsize
        groups = heads * coded * -(-size // self.group)
        return StoredBytes(packed_bytes(heads * coded * size, _BITS) + exact, groups * GROUP_BYTES)


def check_rotation(size: int) -> None:
    """Refuse heads whose vectors have no Hadamard transform here."""
    if size & (size - 1):
        line = f"heads of {size} channels have no Hadamard transform here, only powers of two have"
        raise InputError(f"{line}; use another codec")


def hadamard(vectors: Tensor) -> Tensor:
    """Transform vectors of 2^k numbers by the normalized Hadamard matrix, float32 [..., 2^k]; it is its own inverse."""
    *others, size = vectors.shape
    step = 1
    while step < size:
        first, second = vectors.reshape(*others, -1, 2, step).unbind(-2)
        vectors = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        step *= 2
    return vectors * float(size**-0.5)
