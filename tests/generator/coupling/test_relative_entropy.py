"""KL and most probable tokens: closed forms, another library, small differences, zeros, and ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fixtures.distributions import kl_divergence, large_distributions
from fixtures.pretend_device import SECOND, TwoDevices
from scipy.special import rel_entr

from kvdrift.generator.coupling.distributions import BLOCK_TOKENS, most_probable, total_variation
from kvdrift.generator.coupling.sampling import deployed
from kvdrift.schema.sampling import Sampling

SIZES = pytest.mark.parametrize("size", [2, BLOCK_TOKENS, 7 * BLOCK_TOKENS, 10_007])
INFINITE = torch.inf


@pytest.mark.parametrize(
    ("p", "q", "nats"),
    [
        ([0.5, 0.5], [0.25, 0.75], 0.5 * math.log(4 / 3)),
        ([0.25, 0.75], [0.25, 0.75], 0.0),
        ([1.0, 0.0], [0.25, 0.75], math.log(4)),
        ([0.25, 0.75], [1.0, 0.0], INFINITE),
        ([0.0, 1.0], [0.0, 1.0], 0.0),
        ([0.0, 1.0], [1.0, 0.0], INFINITE),
        ([1e-300, 1.0], [1e-200, 1.0], 1e-200),
        ([1.0, 0.0], [1e-300, 1.0], 300 * math.log(10)),
        ([5e-324, 1.0], [0.0, 1.0], 0.0),  # below the normal numbers is rounding
    ],
    ids=str,
)
def test_closed_forms(p: list[float], q: list[float], nats: float) -> None:
    found = kl_divergence(*(torch.tensor(one, dtype=torch.float64) for one in (p, q)))
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(nats, rel=1e-14, abs=1e-320)


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_divergence_of_scipy(size: int, dtype: torch.dtype) -> None:
    """Rounded sums of float32 distributions differ from 1, and from each other, by some 1e-7."""
    p, q = large_distributions(size, 40, dtype).view(2, 20, size)
    wanted = rel_entr(p.double().numpy(), q.double().numpy()).sum(-1)
    found = kl_divergence(p, q)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6 if dtype == torch.float32 else 1e-13)
    assert not kl_divergence(p, p.clone()).any()
    for row in range(20):
        assert torch.equal(kl_divergence(p[row : row + 1], q[row : row + 1])[0], found[row])
    assert bool((total_variation(p, q) <= (found / 2).sqrt() * (1 + 1e-6)).all()), "Pinsker"


@pytest.mark.parametrize("exponent", [-4, -8, -12, -16, -20])
@pytest.mark.parametrize("size", [50, 10_007])
def test_small_divergences_are_not_lost_in_rounding(size: int, exponent: int) -> None:
    """With q = p (1 +- x), equally often, KL is x^2 / 2 (1 + O(x^2)); float32 holds x to 2^-24 of 1."""
    x, random = 2.0**exponent, np.random.default_rng(size)
    p = np.repeat(random.dirichlet(np.ones(size // 2)) / 2, 2).astype(np.float32)
    q = (p * (1 + x * np.tile([1.0, -1.0], len(p) // 2))).astype(np.float32)
    wide_p, wide_q = p.astype(np.float64), q.astype(np.float64)
    ratio = (wide_q - wide_p) / wide_p
    wanted = (wide_p * (ratio - np.log1p(ratio))).sum()
    assert wanted == pytest.approx(x**2 / 2, rel=0.02)
    assert float(kl_divergence(torch.from_numpy(p), torch.from_numpy(q))) == pytest.approx(wanted, rel=1e-6 / x)


def test_truncated_distributions_are_infinitely_far_from_tokens_that_they_lack() -> None:
    """At temperature 0 KL is 0 where both tokens are equal, and infinite where they differ."""
    p, q = 2 * torch.randn((2, 200, 60), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for sampling in (Sampling(temperature=0.0), Sampling(top_k=5), Sampling(top_p=0.6)):
        one, other = torch.empty_like(p), torch.empty_like(q)
        deployed(p, sampling, one)
        deployed(q, sampling, other)
        lacking = ((one > 0) & (other == 0)).any(-1)
        found = kl_divergence(one, other)
        assert torch.equal(found.isinf(), lacking)
        assert lacking.any()
        if sampling.greedy:
            assert torch.equal(found == 0, p.argmax(-1) == q.argmax(-1))


@SIZES
def test_most_probable_tokens(size: int) -> None:
    """Of equal probabilities the lowest id, within a block and across blocks, whatever stands beside a row."""
    distributions = large_distributions(size, 6, torch.float32)
    assert torch.equal(most_probable(distributions), distributions.argmax(-1))
    random = np.random.default_rng(size)
    for count in (2, 3, 40):
        tied = torch.zeros(30, size)
        places = torch.from_numpy(random.integers(0, size, (30, count)))
        tied.scatter_(-1, places, 0.25)
        assert torch.equal(most_probable(tied), places.amin(-1))
    assert not most_probable(torch.full((3, size), 1 / size)).any()
    with TwoDevices():
        assert torch.equal(most_probable(tied.to(SECOND)).cpu(), places.amin(-1))
