"""TurboQuant as vLLM 0.32 stores it: rotated keys by the nearest of a few centroids, values in uniform steps.

vLLM's variant has no second stage (QJL) and no random signs before the Hadamard transform.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.codecs.affine import packed_bytes
from kvdrift.generator.codecs.codec import EntryCodec, Part
from kvdrift.generator.codecs.fp8 import rounded_to
from kvdrift.generator.codecs.rotated import check_rotation, hadamard

_IN_E4M3 = 8  # bits of keys that are stored as numbers in e4m3, without a scale
_TINY = 1e-8  # vLLM's least step of values; it also adds it to norms


@dataclass(frozen=True)
class TurboQuant(EntryCodec):
    """Each head vector by itself: ``keys`` and ``values`` are bits a number.

    A key x is stored as its norm s in float16, and each coordinate of u = Hx/s as the nearest of 2^keys centroids, the
    Lloyd-Max quantizer of N(0, 1/d). It is read as s H c, c being the centroids, divided by their norm if
    ``norm_correction``. With 8 bits keys are numbers in e4m3. Values are steps from the vector's least number on, with
    scale and least number in float16. Codes are computed before norm, scale and least number are rounded. The first two
    and last two layers are exact by default.
    """

    summary: ClassVar[str] = "rotated keys by Lloyd-Max centroids, values in uniform steps, per entry (as in vLLM)"
    paper: ClassVar[str | None] = "Zandieh et al. 2025, arXiv:2504.19874"
    choices: ClassVar[Mapping[str, tuple[int | str, ...]]] = {"keys": (2, 3, 4, 8), "values": (2, 3, 4, 8)}
    exact_ends: ClassVar[int] = 2
    keys: int = 4
    values: int = 4
    norm_correction: bool = True

    def check(self, size: int, part: Part) -> None:
        """Refuse heads whose keys cannot be rotated."""
        if part == "keys" and self.keys != _IN_E4M3:
            check_rotation(size)

    def round_trip(self, numbers: Tensor, part: Part) -> Tensor:
        """Return the numbers as read from each head vector's codes."""
        if part == "values":
            return self._values_back(numbers)
        if self.keys == _IN_E4M3:
            return rounded_to(numbers, torch.float8_e4m3fn)
        self.check(numbers.shape[-1], part)
        return self._keys_back(numbers)

    def stored_bytes(self, numbers: Tensor, part: Part) -> StoredBytes:
        """Return the bytes of packed codes, and those of norms, or of scales and least numbers, in float16."""
        size, vectors = numbers.shape[-1], numbers.shape[0] * numbers.shape[1]
        bits = self.keys if part == "keys" else self.values
        scales = 2 if part == "values" else int(self.keys != _IN_E4M3)
        return StoredBytes(vectors * packed_bytes(size, bits), vectors * scales * torch.float16.itemsize)

    def _keys_back(self, numbers: Tensor) -> Tensor:
        size, norm = numbers.shape[-1], numbers.norm(dim=-1, keepdim=True)
        turned = hadamard(numbers / (norm + _TINY))
        unit = torch.tensor([centroid / math.sqrt(size) for centroid in lloyd_max_centroids(self.keys)])
        centroids = unit.to(turned.device)
        read = centroids[torch.bucketize(turned, (centroids[1:] + centroids[:-1]) / 2, right=True)]
        if self.norm_correction:
            read = read / read.norm(dim=-1, keepdim=True)
        back: Tensor = hadamard(read) * norm.half().float()
        return back

    def _values_back(self, numbers: Tensor) -> Tensor:
        least, most = numbers.aminmax(dim=-1, keepdim=True)
        largest = 2**self.values - 1
        step = ((most - least) / largest).clamp(min=_TINY)
        steps = ((numbers - least) / step + 0.5).trunc().clamp(0, largest)
        back: Tensor = steps * step.half().float() + least.half().float()
        return back


@functools.cache
def lloyd_max_centroids(bits: int) -> tuple[float, ...]:
    """Return 2^bits centroids, ascending, that nearly have the least mean square error for numbers from N(0, 1).

    Each is the mean of the distribution between the middles of its neighbours (Max 1960; Lloyd 1982). As in vLLM 0.32,
    whose caches are read with them, the integrals are sums of 200 trapezoids up to 10.5, and there are at most 200
    rounds. They are off by up to 0.0017.
    """
    levels = 2**bits
    centroids = -_FIRST + 2 * _FIRST * (np.arange(levels) + 0.5) / levels
    for _ in range(_ROUNDS):
        edges = np.concatenate([[-3 * _FIRST], (centroids[1:] + centroids[:-1]) / 2, [3 * _FIRST]])
        points = np.linspace(edges[:-1], edges[1:], _TRAPEZOIDS + 1)  # [points, levels]
        density = np.exp(-(points**2) / 2)
        means = np.trapezoid(points * density, points, axis=0) / np.trapezoid(density, points, axis=0)
        moved, centroids = np.abs(means - centroids).max(), means
        if moved < _STILL:
            break
    return tuple(centroids.tolist())


_FIRST, _ROUNDS, _TRAPEZOIDS, _STILL = 3.5, 200, 200, 1e-9


@dataclass(frozen=True)
class TurboQuantK8V4(TurboQuant):
    """vLLM's ``turboquant_k8v4``."""

    summary: ClassVar[str] = "vLLM's turboquant_k8v4: keys in e4m3, values in 4 bits"
    keys: int = 8
    norm_correction: bool = False


@dataclass(frozen=True)
class TurboQuant4Bit(TurboQuant):
    """vLLM's ``turboquant_4bit_nc``."""

    summary: ClassVar[str] = "vLLM's turboquant_4bit_nc: keys and values in 4 bits"


@dataclass(frozen=True)
class TurboQuantK3V4(TurboQuant):
    """vLLM's ``turboquant_k3v4_nc``."""

    summary: ClassVar[str] = "vLLM's turboquant_k3v4_nc: keys in 3 bits, values in 4"
    keys: int = 3


@dataclass(frozen=True)
class TurboQuant3Bit(TurboQuant):
    """vLLM's ``turboquant_3bit_nc``."""

    summary: ClassVar[str] = "vLLM's turboquant_3bit_nc: keys and values in 3 bits"
    keys: int = 3
    values: int = 3
