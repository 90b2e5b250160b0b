"""Errors of codecs against closed bounds, which are sharp, and Lloyd-Max centroids against Max's tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.plain_codecs import E4M3, FORMATS, known_numbers, normal_centroids, vllm_centroids
from scipy.stats import norm
from torch import Tensor

from kvdrift.generator.codecs import CODECS
from kvdrift.generator.codecs.fp8 import FP8
from kvdrift.generator.codecs.turboquant import TurboQuant, lloyd_max_centroids

HALF, TINY = 2.0**-11, 2.0**-25  # the largest error of rounding to float16, of a normal number and of a small one


def numbers_of(entries: int, size: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Return random numbers, float32 [2, entries, size]."""
    return torch.randn(2, entries, size, generator=torch.Generator().manual_seed(seed)) * scale


def float16_error(numbers: Tensor) -> Tensor:
    """Return the largest possible error of rounding each number to float16."""
    return (numbers.abs() * HALF).clamp(min=TINY)


def assert_sharp(error: Tensor, bound: Tensor, share: float) -> None:
    """Check that errors are within a bound, but for roundings in float32, and that one reaches a share of it."""
    assert bool((error <= bound * (1 + 1e-5) + 1e-12).all())
    assert float((error / bound).max()) > share


# --- Floating point ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["head", "tensor", 1])
@pytest.mark.parametrize(("form", "relative", "step"), [("e4m3", 1 / 17, 2.0**-9), ("e5m2", 1 / 9, 2.0**-16)])
def test_fp8_is_within_half_a_step(form: str, relative: float, step: float, scale: int | str) -> None:
    """With m bits of mantissa the relative error is 1 / (2^(m+1) + 1) at most, in the middle above a power of two.

    Subnormal numbers have steps of one size. No magnitude is beyond the format at a scale that comes from the numbers.
    """
    codec, largest = FP8(format=form, scale=scale), FORMATS[form][1]
    spread = 10.0 ** torch.linspace(-13 if form == "e5m2" else -6, 0, 8000).repeat(10).view(2, 40, 1000)
    numbers = numbers_of(40, 1000).sign() * spread * torch.tensor([100.0, 3.0]).view(2, 1, 1)
    axes = {"head": (1, 2), "tensor": (0, 1, 2)}
    amax = numbers.abs().amax(axes[scale], keepdim=True) if isinstance(scale, str) else torch.tensor(float(largest))
    own = codec.scale_of(numbers)
    assert bool(((own >= amax / largest) & (own <= amax / largest * (1 + 2**-10) + 2**-24)).all())
    error = (codec.round_trip(numbers, "keys") - numbers).abs()
    assert_sharp(error, torch.maximum(numbers.abs() * relative, own * step / 2), 0.99)
    normal = numbers.abs() > own * step * 2 ** (3 if form == "e4m3" else 2)
    assert float((error / numbers.abs())[normal].max()) > 0.99 * relative
    assert float((error / own)[~normal].max()) > 0.99 * step / 2


def e2m1_error(steps: Tensor) -> Tensor:
    """Return the largest error of magnitudes in e2m1: half the distance of its numbers, and all that is above 6."""
    half = torch.where(steps < 2, 0.25, torch.where(steps < 4, 0.5, 1.0))
    return torch.where(steps > 6, steps - 6, half)


def test_nvfp4_is_within_half_a_step_of_its_block() -> None:
    """A block's scale is the nearest e4m3 of a sixth of its largest magnitude, so that is at most 6 (1 + 1/16) steps."""
    numbers = numbers_of(400, 64, scale=3)
    blocks, known = numbers.unflatten(-1, (-1, 16)), torch.from_numpy(known_numbers(*E4M3)).float()
    of_layer = numbers.abs().max() / (6 * 448)
    wanted = blocks.abs().amax(-1, keepdim=True) / 6 / of_layer
    scale = known[(known - wanted).abs().argmin(-1, keepdim=True)] * of_layer
    steps = blocks.abs() / scale
    assert 6.2 < float(steps.max()) < 6 * (1 + 1 / 16) + 1e-4
    error = (CODECS["nvfp4"]().round_trip(numbers, "keys").unflatten(-1, (-1, 16)) - blocks).abs()
    assert_sharp(error, e2m1_error(steps) * scale + 1e-6 * blocks.abs(), 0.999)


# --- Uniform steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_turboquants_values_are_within_half_a_step_and_the_rounding_of_the_scale(bits: int) -> None:
    numbers = numbers_of(400, 64)
    least, most = numbers.aminmax(dim=-1, keepdim=True)
    step = (most - least) / (2**bits - 1)
    error = (TurboQuant(values=bits).round_trip(numbers, "values") - numbers).abs()
    level = ((numbers - least) / step).round()
    assert_sharp(error, step / 2 + level * float16_error(step) + float16_error(least) + 1e-6, 0.9)


# --- Lloyd-Max quantizers ----------------------------------------------------------------------------------------------

# Max 1960 (Quantizing for minimum distortion, IRE Transactions on Information Theory 6), table I: the positive output
# levels in four digits, and the mean square error.
MAX_1960 = {
    2: ((0.4528, 1.510), 0.1175),
    3: ((0.2451, 0.7560, 1.344, 2.152), 0.03454),
    4: ((0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733), 0.009497),
}
BITS = pytest.mark.parametrize("bits", MAX_1960)


def distortion(centroids: np.ndarray) -> float:
    """Return the mean square error of N(0, 1) by the nearest centroid: the sum of integrals in closed form."""
    edges = np.concatenate([[-np.inf], (centroids[1:] + centroids[:-1]) / 2, [np.inf]])
    mass = np.diff(norm.cdf(edges))
    mean = norm.pdf(edges[:-1]) - norm.pdf(edges[1:])  # the integral of x
    ends = np.nan_to_num(edges) * norm.pdf(edges)
    square = mass + ends[:-1] - ends[1:]  # the integral of x^2
    return float((square - 2 * centroids * mean + centroids**2 * mass).sum())


@BITS
def test_centroids_are_those_of_max(bits: int) -> None:
    """They are vLLM's, which are off by up to 0.0017 from the solution of Max's conditions; its error is theirs.

    The exact mean square errors are 0.11748, 0.034548 and 0.0095010; Max's last digit is up to 4 units off.
    """
    centroids, (levels, error) = np.array(lloyd_max_centroids(bits)), MAX_1960[bits]
    np.testing.assert_allclose(centroids, vllm_centroids(bits), atol=1e-9)
    exact = normal_centroids(bits)
    assert np.abs(centroids - exact).max() < 1.7e-3
    for centroid, level in zip(exact[2 ** (bits - 1) :], levels, strict=True):
        assert abs(centroid - level) < (1e-4 if level < 1 else 1e-3)
    for found in (centroids, exact):
        assert abs(distortion(found) / error - 1) < 5e-4


@BITS
@pytest.mark.parametrize("norm_correction", [False, True])
def test_turboquants_keys_have_the_error_of_the_quantizer(bits: int, *, norm_correction: bool) -> None:
    """The mean square error of a coordinate is D |x|^2 / d, or with corrected norms (2 - 2 sqrt(1 - D)) |x|^2 / d.

    By Max's conditions the read vector c is orthogonal to its error, so that |c|^2 = 1 - D and the cosine of both is
    sqrt(1 - D). Vectors of one length are nearly normal in many dimensions: with d = 1024 the fourth moment of a
    coordinate is 3 d / (d + 2), 0.2% below the normal one, and D moves by less. Squares of errors have a
    standard deviation of 2.1 D (2 bits) to 3.3 D (4 bits), so that the mean of 400 x 1024 squares has a standard error
    of 0.5% at most: the tolerance is 2%.
    """
    numbers = numbers_of(200, 1024, scale=7.0, seed=bits)
    codec = TurboQuant(keys=bits, norm_correction=norm_correction)
    error = (codec.round_trip(numbers, "keys") - numbers).square().sum(-1) / numbers.square().sum(-1)
    expected = MAX_1960[bits][1]
    if norm_correction:
        expected = 2 - 2 * (1 - expected) ** 0.5
    assert abs(float(error.mean()) / expected - 1) < 0.02
