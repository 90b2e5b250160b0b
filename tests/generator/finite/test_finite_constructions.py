"""The systems that the theorems construct have the profile and the risk that the theorems say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from oracles.constructed_systems import fixed_reference_system, sharp_system

from kvdrift.generator.finite.enumeration import exact_quantities
from kvdrift.generator.finite.study_systems import read_system_file

# A few hundred paths, whose probabilities are products of up to 8 factors: some 1e-15.
ROUNDING = 1e-12


def random_profile(random: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """An admissible (p, rho), H 1..7: with and without unused positions, survivors to the end, and rates 0 and 1."""
    horizon = int(random.integers(1, 8))
    depth = int(random.integers(1, horizon + 1))
    p = random.gamma(0.5, size=horizon) * (random.random(horizon) < 0.7)
    if p.sum() > 0:
        p *= random.choice([1.0, random.random()]) / p.sum()
    s, j = np.arange(1, horizon + 1)[:, None], np.arange(depth)
    rho = np.clip(random.uniform(-0.3, 1.3, (horizon, depth)), 0.0, 1.0)
    rho[:, 0] = 1.0
    return p, np.where((s + j <= horizon) & (p[:, None] > 0), rho, 0.0)


@pytest.mark.parametrize("seed", range(10))
def test_every_risk_of_the_interval_is_attained(seed: int) -> None:
    random = np.random.default_rng(seed)
    p, rho = random_profile(random)
    horizon, depth = rho.shape
    observed = (p[:, None] * rho).sum() / horizon
    capacity = sum(mass * max(horizon - s - depth + 1, 0) for s, mass in enumerate(p, start=1)) / horizon
    alphabet = int(random.integers(2, 4))
    for alpha in (0.0, 1.0, random.random()):
        found = exact_quantities(sharp_system(p, rho, alpha, alphabet=alphabet), "constructed")
        assert found.mismatch == pytest.approx(observed + alpha * capacity, abs=ROUNDING)
        assert found.p == pytest.approx(p, abs=ROUNDING)
        # A rate is a quotient by p_s, whose rounding a small p_s magnifies.
        assert found.p[:, None] * found.rho[:, :depth] == pytest.approx(p[:, None] * rho, abs=ROUNDING)
        assert found.observed[depth - 1] == pytest.approx(observed, abs=ROUNDING)
        assert found.capacity[depth - 1] == pytest.approx(capacity, abs=ROUNDING)


def test_the_systems_of_the_study_sharp_interval() -> None:
    rho = np.zeros((6, 3))
    rho[0] = [1, 0, 1]
    stored = read_system_file(Path(__file__).parents[3] / "studies" / "sharp_interval.json")
    assert list(stored) == [f"alpha-{alpha}" for alpha in (0.25, 0.75, 0.0, 0.5, 1.0)]
    for name, system in stored.items():
        made = sharp_system(np.eye(6)[0], rho, float(name.removeprefix("alpha-")))
        for action in (None, "constructed"):
            assert all(map(np.array_equal, system.distributions(action), made.distributions(action)))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 0.4999])
def test_fixed_reference(epsilon: float, sign: int) -> None:
    """The risk is the interval's lower end: strictly inside all that the profile alone allows."""
    found = exact_quantities(fixed_reference_system(epsilon, sign), "tilted")
    assert found.p == pytest.approx([epsilon, 0.0], abs=ROUNDING)
    assert found.mismatch == pytest.approx(epsilon / 2, abs=ROUNDING)
    assert found.observed[0] == pytest.approx(epsilon / 2, abs=ROUNDING)
    assert found.observed[0] + found.capacity[0] == pytest.approx(epsilon, abs=ROUNDING)
    # What the theorem's own kernels attain at this profile, with a reference of their choosing.
    free = exact_quantities(sharp_system([epsilon, 0.0], [[1.0], [0.0]], 1.0), "constructed")
    assert free.mismatch == pytest.approx(epsilon, abs=ROUNDING)
