"""TurboQuant as vLLM 0.32 stores it: rotated keys by the nearest of a few centroids, values in uniform steps.

vLLM's variant has no second stage (QJL) and no random signs before the Hadamard transform.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

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
        centroids = turned.new_tensor(lloyd_max_centroids(self.keys)) / math.sqrt(size)
        read = centroids[torch.bucketize(turned, (centroids[1:] + centroids[:-1]) / 2, right=True)]
        if self.norm_correction:
            read = read / read.norm(dim=-1, keepdim=True)
        return hadamard(read) * norm.half().float()

    def _values_back(self, numbers: Tensor) -> Tensor:
        least, most = numbers.aminmax(dim=-1, keepdim=True)
        largest = 2**self.values - 1
        step = ((most - least) / largest).clamp(min=_TINY)
        steps = ((numbers - least) / step + 0.5).trunc().clamp(0, largest)
        return steps * step.half().float() + least.half().float()


@functools.cache
def lloyd_max_centroids(bits: int) -> tuple[float, ...]:
    """Return the 2^bits centroids, ascending, with the least mean square error for numbers from N(0, 1).

    The centroids are the means of the distribution between the middles of neighbours (Max 1960; Lloyd 1982), found by
    iteration until they move by less than 1e-12.
    """
    normal, count = NormalDist(), 2**bits
    centroids = [normal.inv_cdf((place + 0.5) / count) for place in range(count)]
    moved = math.inf
    while moved > 1e-12:
        bounds = [-math.inf, *((first + second) / 2 for first, second in itertools.pairwise(centroids))]
        edges = list(zip(bounds, [*bounds[1:], math.inf], strict=True))
        means = [(normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low)) for low, high in edges]
        moved = max(abs(mean - old) for mean, old in zip(means, centroids, strict=True))
        centroids = means
    return tuple(centroids)


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
