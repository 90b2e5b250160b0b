"""Codecs by plain loops over numbers: the numbers read back, and the stored bits, packed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import hadamard

Numbers = NDArray[np.float32]


@dataclass
class Stored:
    """The bits of integers, the bytes of exact numbers, and how many 16-bit scales and zero points there are.

    Every list of bits is packed by itself.
    """

    bits: list[list[int]] = field(default_factory=list)
    exact_bytes: int = 0
    scales: int = 0

    @property
    def payload(self) -> int:
        """Bytes of integers and exact numbers."""
        return self.exact_bytes + sum(len(np.packbits(np.array(part, dtype=np.uint8))) for part in self.bits)

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales and zero points."""
        return 2 * self.scales


def float16_not_above(number: Any) -> np.float32:
    """The largest float16 that is not above a number."""
    near = np.float16(number)
    if float(near) > float(number):
        near = np.nextafter(near, np.float16(-np.inf))
    return np.float32(near)


def group_back(group: Sequence[np.float32], bits: int, stored: Stored) -> list[np.float32]:
    """Store a group of numbers and read it back; the bits join the last list."""
    levels = 2**bits - 1
    zero = float16_not_above(min(group))
    scale = -float16_not_above(-(max(group) - zero) / np.float32(levels))
    stored.scales += 2
    read = []
    for number in group:
        step = int(np.rint((number - zero) / scale)) if scale > 0 else 0
        step = min(max(step, 0), levels)
        stored.bits[-1] += [int(bit) for bit in f"{step:0{bits}b}"]
        read.append(zero + np.float32(step) * scale)
    return read


def per_entry(numbers: Numbers, coded: int, bits: int, group: int, item_bytes: int, stored: Stored) -> Numbers:
    """The first ``coded`` entries of each head in groups of channels, the others exact: [KV heads, m, size]."""
    read = numbers.copy()
    stored.bits.append([])
    heads, entries, size = numbers.shape
    for head in range(heads):
        for entry in range(coded):
            for first in range(0, size, group):
                read[head, entry, first : first + group] = group_back(
                    list(numbers[head, entry, first : first + group]), bits, stored
                )
        stored.exact_bytes += (entries - coded) * size * item_bytes
    return read


def per_channel(numbers: Numbers, coded: int, bits: int, group: int, item_bytes: int, stored: Stored) -> Numbers:
    """The first ``coded`` entries of each head in groups of entries for each channel, the others exact."""
    read = numbers.copy()
    stored.bits.append([])
    heads, entries, size = numbers.shape
    for head in range(heads):
        for channel in range(size):
            for first in range(0, coded, group):
                read[head, first : first + group, channel] = group_back(
                    list(numbers[head, first : first + group, channel]), bits, stored
                )
        stored.exact_bytes += (entries - coded) * size * item_bytes
    return read


def kivi(
    key: Numbers, value: Numbers, item_bytes: int, bits: int, group: int = 32, residual: int = 128
) -> tuple[Numbers, Numbers, Stored]:
    """KIVI: entries that leave the window are coded, keys when their group is full."""
    stored = Stored()
    values = keys = 0
    for entry in range(key.shape[1]):
        if entry + residual < key.shape[1]:
            values = entry + 1
            if values % group == 0:
                keys = values
    key = per_channel(key, keys, bits, group, item_bytes, stored)
    return key, per_entry(value, values, bits, group, item_bytes, stored), stored


def rotated(
    key: Numbers, value: Numbers, item_bytes: int, bits: int, group: int = 32, residual: int = 0
) -> tuple[Numbers, Numbers, Stored]:
    """Each head vector times the normalized Hadamard matrix, coded per entry, times the matrix again."""
    stored, (heads, entries, size) = Stored(), key.shape
    matrix = hadamard(size) / np.sqrt(size)
    coded = max(entries - residual, 0)
    back = []
    for part in (key, value):
        turned = (part[:, :coded].astype(np.float64) @ matrix).astype(np.float32)
        read = per_entry(turned, coded, bits, group, item_bytes, stored).astype(np.float64) @ matrix
        stored.exact_bytes += heads * (entries - coded) * size * item_bytes
        back.append(np.concatenate([read, part[:, coded:]], axis=1).astype(np.float32))
    return back[0], back[1], stored


def e4m3_numbers() -> list[float]:
    """Return all numbers of e4m3 that are not negative, in order: exponents 1 to 15 with bias 7, and subnormal ones."""
    below = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    return below + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]


def fp8(key: Numbers, value: Numbers) -> tuple[Numbers, Numbers, Stored]:
    """Return the nearest number of e4m3 at each head's scale; of two equally near ones, that with an even mantissa."""
    stored, known, back = Stored(), e4m3_numbers(), []
    for part in (key, value):
        read = np.empty_like(part)
        for head, numbers in enumerate(part):
            scale = -float16_not_above(-np.abs(numbers).max() / np.float32(448))
            stored.scales += 1
            for place, number in np.ndenumerate(numbers):
                wanted = abs(float(number / scale)) if scale > 0 else 0.0
                nearest = min(range(len(known)), key=lambda at: (abs(known[at] - wanted), at % 2))
                read[(head, *place)] = np.sign(number) * np.float32(known[nearest]) * scale
                stored.bits.append([0] * 8)
        back.append(read)
    return back[0], back[1], stored
