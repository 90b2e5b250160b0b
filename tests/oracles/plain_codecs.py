"""Codecs by plain loops over numbers: the numbers read back, and the stored bits, packed one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import hadamard
from scipy.optimize import root
from scipy.stats import norm

Numbers = NDArray[np.float32]


@dataclass
class Stored:
    """The bits of codes, and the bytes of exact numbers and of scales and zero points.

    Every list of bits is packed by itself.
    """

    bits: list[list[int]] = field(default_factory=list)
    exact_bytes: int = 0
    scale_bytes: int = 0

    @property
    def payload(self) -> int:
        """Bytes of codes and exact numbers."""
        return self.exact_bytes + sum(len(np.packbits(np.array(part, dtype=np.uint8))) for part in self.bits)

    def code(self, code: int, bits: int) -> None:
        """Add a code to the last list of bits."""
        self.bits[-1] += [int(bit) for bit in f"{code:0{bits}b}"]


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
    stored.scale_bytes += 4
    read = []
    for number in group:
        step = int(np.rint((number - zero) / scale)) if scale > 0 else 0
        step = min(max(step, 0), levels)
        stored.code(step, bits)
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


# --- Floating point in 8 and 4 bits ------------------------------------------------------------------------------------


@cache
def known_numbers(exponent_bits: int, mantissa_bits: int) -> NDArray[np.float64]:
    """Return all numbers of a format that are not negative, in the order of their codes.

    They are those of OCP's specifications: of e4m3, the last code is no number; of e5m2, the last exponent has none;
    e2m1 has neither infinities nor codes that are no number.
    """
    steps, bias = 2**mantissa_bits, 2 ** (exponent_bits - 1) - 1
    codes = {(4, 3): 127, (5, 2): 124, (2, 1): 8}[exponent_bits, mantissa_bits]
    numbers = []
    for code in range(codes):
        exponent, mantissa = divmod(code, steps)
        whole = 1 if exponent else 0  # subnormal numbers have the exponent of the least others
        numbers.append((whole + mantissa / steps) * 2.0 ** (max(exponent, 1) - bias))
    return np.array(numbers)


E4M3, E5M2, E2M1 = (4, 3), (5, 2), (2, 1)


def nearest(number: Any, form: tuple[int, int], stored: Stored) -> np.float32:
    """Store the nearest number of a format; of two equally near ones, that with the even code."""
    apart = np.abs(known_numbers(*form) - abs(float(number)))
    codes = [int(code) for code in np.flatnonzero(apart == apart.min())]
    code = next(code for code in codes if code % 2 == 0 or len(codes) == 1)
    sign = 1 if np.signbit(number) else 0
    stored.code(sign * 2 ** sum(form) + code, 1 + sum(form))
    return np.float32((-1) ** sign * known_numbers(*form)[code])


def by_blocks(numbers: Numbers, block: int, back: Callable[[Numbers], Any]) -> Numbers:
    """Return [KV heads, m, size], each block of channels as ``back`` returns it."""
    read = np.empty_like(numbers)
    for head, entry in np.ndindex(numbers.shape[:2]):
        for first in range(0, numbers.shape[2], block):
            read[head, entry, first : first + block] = back(numbers[head, entry, first : first + block])
    return read


FORMATS = {"e4m3": (E4M3, 448), "e5m2": (E5M2, 57344)}


def fp8_scale(numbers: Numbers, form: str) -> np.float32:
    """Return the least float16 at which the largest of some numbers is in the format."""
    return -float16_not_above(-np.abs(numbers).max() / np.float32(FORMATS[form][1]))


def fp8_back(numbers: Numbers, scale: np.float32, form: str, stored: Stored) -> Numbers:
    """Return numbers, each the nearest number of a format at a scale."""
    read = np.empty_like(numbers)
    for place, number in np.ndenumerate(numbers):
        stored.bits.append([])
        read[place] = nearest(number / scale if scale > 0 else number * 0, FORMATS[form][0], stored) * scale
    return read


def fp8(
    key: Numbers,
    value: Numbers,
    format: str = "e4m3",  # noqa: A002 - the parameter of a study file
    scale: int | str = "head",
) -> tuple[Numbers, Numbers, Stored]:
    """Numbers of 8 bits, with scales in float16 for each head or each layer, or without a scale."""
    stored, back = Stored(), []
    for part in (key, value):
        if scale == "head":
            heads = [fp8_back(numbers, fp8_scale(numbers, format), format, stored) for numbers in part]
            stored.scale_bytes += 2 * len(heads)
            back.append(np.stack(heads))
        else:
            back.append(fp8_back(part, fp8_scale(part, format) if scale == "tensor" else np.float32(1), format, stored))
            stored.scale_bytes += 2 if scale == "tensor" else 0
    return back[0], back[1], stored


def nvfp4_scale(numbers: Numbers) -> np.float32:
    """Return the scale at which the largest of a layer's numbers is the largest e2m1 times the largest e4m3."""
    return np.float32(np.abs(numbers).max() / np.float32(6 * 448))


def nvfp4_back(numbers: Numbers, scale: np.float32, stored: Stored) -> Numbers:
    """Return numbers from blocks of 16 channels, whose scales are numbers of e4m3 times that of the layer."""
    scale = scale or np.float32(1)

    def block_back(block: Numbers) -> list[np.float32]:
        own = nearest(np.abs(block).max() / np.float32(6) / scale, E4M3, Stored(bits=[[]])) * scale
        stored.scale_bytes += 1
        stored.bits.append([])
        return [nearest(number / own if own else number * 0, E2M1, stored) * own for number in block]

    return by_blocks(numbers, 16, block_back)


def nvfp4(key: Numbers, value: Numbers) -> tuple[Numbers, Numbers, Stored]:
    """Blocks of 16 channels in e2m1, with a scale in e4m3; a layer's keys and its values have a float32 scale each."""
    stored = Stored(scale_bytes=2 * 4)
    return nvfp4_back(key, nvfp4_scale(key), stored), nvfp4_back(value, nvfp4_scale(value), stored), stored


def mxfp4_block(block: Numbers, stored: Stored) -> list[np.float32]:
    """Return a block in e2m1, whose scale is the largest power of two not above its largest magnitude, over four."""
    largest, scale = float(np.abs(block).max()), 2.0**-127
    while scale * 2 * 4 <= largest:
        scale *= 2
    stored.scale_bytes += 1
    return [nearest(float(number) / scale, E2M1, stored) * np.float32(scale) for number in block]


# --- llama.cpp's blocks, as quantize_row_*_ref and dequantize_row_* of ggml-quants.c have them -------------------------


def inverse(scale: np.float32) -> np.float32:
    """Return 1 / scale in float32, and 0 of 0."""
    return np.float32(1) / scale if scale else np.float32(0)


def in_float16(number: np.float32) -> np.float32:
    """Return a number rounded to float16."""
    return np.float32(np.float16(number))


def q8_0_block(block: Numbers, stored: Stored) -> list[np.float32]:
    """Return a block from integers of 8 bits; halves are rounded away from 0, as C's roundf does."""
    scale = np.abs(block).max() / np.float32(127)
    stored.scale_bytes += 2
    read = []
    for number in block:
        steps = number * inverse(scale)
        whole = np.trunc(steps)
        whole += np.sign(steps) if abs(steps - whole) >= 0.5 else 0
        stored.code(int(whole) + 128, 8)
        read.append(np.float32(whole) * in_float16(scale))
    return read


def q5_1_block(block: Numbers, stored: Stored) -> list[np.float32]:
    """Return a block from 32 levels, from the least number to the largest."""
    least = block.min()
    scale = (block.max() - least) / np.float32(31)
    stored.scale_bytes += 4
    read = []
    for number in block:
        level = min(int((number - least) * inverse(scale) + np.float32(0.5)), 31)
        stored.code(level, 5)
        read.append(np.float32(level) * in_float16(scale) + in_float16(least))
    return read


def q4_0_block(block: Numbers, stored: Stored) -> list[np.float32]:
    """Return a block from 16 levels, of which level 0 is the number with the largest magnitude, the first of several."""
    first = block[0]
    for number in block:
        first = number if abs(number) > abs(first) else first
    scale = first / np.float32(-8)
    stored.scale_bytes += 2
    read = []
    for number in block:
        level = min(int(number * inverse(scale) + np.float32(8.5)), 15)
        stored.code(level, 4)
        read.append(np.float32(level - 8) * in_float16(scale))
    return read


BLOCKS = {"q8_0": q8_0_block, "q5_1": q5_1_block, "q4_0": q4_0_block, "mxfp4": mxfp4_block}


def blocks(key: Numbers, value: Numbers, kind: str) -> tuple[Numbers, Numbers, Stored]:
    """Blocks of 32 channels of an entry, packed one by one."""
    stored = Stored()
    return blocks_back(key, kind, stored), blocks_back(value, kind, stored), stored


def blocks_back(numbers: Numbers, kind: str, stored: Stored) -> Numbers:
    """Return numbers from blocks of 32 channels."""

    def block_back(block: Numbers) -> list[np.float32]:
        stored.bits.append([])
        return BLOCKS[kind](block, stored)

    return by_blocks(numbers, 32, block_back)


# --- TurboQuant --------------------------------------------------------------------------------------------------------


@cache
def normal_centroids(bits: int) -> NDArray[np.float64]:
    """Return the 2^bits centroids of N(0, 1), ascending: the solution of Max's conditions.

    Every centroid is the mean of the distribution between the middles of neighbours. The positive ones are enough, by
    symmetry: the least of them begins at 0.
    """

    def apart(positive: NDArray[np.float64]) -> NDArray[np.float64]:
        edges = np.concatenate([[0], (positive[1:] + positive[:-1]) / 2, [np.inf]])
        return positive - (norm.pdf(edges[:-1]) - norm.pdf(edges[1:])) / (norm.cdf(edges[1:]) - norm.cdf(edges[:-1]))

    half = 2 ** (bits - 1)
    solved = root(apart, norm.ppf(0.5 + (np.arange(half) + 0.5) / (2 * half)), tol=1e-13)
    assert np.abs(solved.fun).max() < 1e-12
    return np.concatenate([-solved.x[::-1], solved.x])


@cache
def vllm_centroids(bits: int) -> NDArray[np.float64]:
    """Return the centroids by which vLLM 0.32 reads keys: at most 200 rounds, and trapezoids in place of integrals."""
    centroids = [-3.5 + 7 * (place + 0.5) / 2**bits for place in range(2**bits)]
    for _ in range(200):
        middles = [(low + high) / 2 for low, high in itertools.pairwise(centroids)]
        means = []
        for low, high in itertools.pairwise([-10.5, *middles, 10.5]):
            points = [low + (high - low) * place / 200 for place in range(201)]
            weights = [(0.5 if place in (0, 200) else 1) * math.exp(-(x**2) / 2) for place, x in enumerate(points)]
            means.append(math.fsum(w * x for w, x in zip(weights, points, strict=True)) / math.fsum(weights))
        moved = max(abs(mean - centroid) for mean, centroid in zip(means, centroids, strict=True))
        centroids = means
        if moved < 8e-10:  # 1e-10 at a standard deviation of 1/8
            break
    return np.array(centroids)


TURBOQUANT = {  # bits of a key and of a value, and whether norms are corrected
    "turboquant": (4, 4, True), "turboquant-k8v4": (8, 4, False), "turboquant-4bit": (4, 4, True),
    "turboquant-k3v4": (3, 4, True), "turboquant-3bit": (3, 3, True),
}  # fmt: skip


def turboquant_key(vector: Numbers, bits: int, stored: Stored, *, norm_correction: bool) -> Any:
    """Return a key from its length and the nearest centroids of its rotated direction; 8 bits: from e4m3."""
    stored.bits.append([])
    if bits == 8:
        return [nearest(number, E4M3, stored) for number in vector]
    size, length = len(vector), np.sqrt((vector.astype(np.float64) ** 2).sum())
    matrix, centroids = hadamard(size) / np.sqrt(size), (vllm_centroids(bits) / np.sqrt(size)).astype(np.float32)
    middles, read = (centroids[1:] + centroids[:-1]) / 2, []
    for signs in hadamard(size):
        number = math.fsum(signs * vector) / np.sqrt(size) / (length or 1)  # exactly 0 where signs cancel
        code = sum(int(number >= middle) for middle in middles)  # of two equally near ones the larger, as in vLLM
        stored.code(code, bits)
        read.append(centroids[code])
    stored.scale_bytes += 2
    if norm_correction:
        norm_read = np.sqrt(sum(number**2 for number in read))
        read = [number / norm_read for number in read]
    return float(np.float16(length)) * (matrix.T @ read)


def turboquant_value(vector: Numbers, bits: int, stored: Stored) -> Any:
    """Return a value from 2^bits levels, from its least number to its largest."""
    stored.bits.append([])
    stored.scale_bytes += 4
    least, levels = vector.min(), 2**bits - 1
    step = (vector.max() - least) / np.float32(levels)
    read = []
    for number in vector:
        level = min(int((number - least) / step + np.float32(0.5)), levels) if step else 0
        stored.code(level, bits)
        read.append(np.float32(level) * in_float16(step) + in_float16(least))
    return read


def turboquant(
    key: Numbers, value: Numbers, name: str, keys: int | None = None, values: int | None = None,
    *, norm_correction: bool | None = None,
) -> tuple[Numbers, Numbers, Stored]:  # fmt: skip
    """Every head vector by itself; parameters differ from those of the preset ``name``."""
    stored, preset = Stored(), TURBOQUANT[name]
    corrected = preset[2] if norm_correction is None else norm_correction
    size = key.shape[-1]
    read = (
        by_blocks(key, size, lambda row: turboquant_key(row, keys or preset[0], stored, norm_correction=corrected)),
        by_blocks(value, size, lambda row: turboquant_value(row, values or preset[1], stored)),
    )
    return *read, stored
