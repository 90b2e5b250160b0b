"""A joint comparison of estimates with exact values: their distances, and the probability of such distances.

**The test.** An estimate is a mean over independent replicates, or a smooth function of such means. Around the exact
moments its linear part is a sum of independent terms of mean 0, exact variance V and size at most b, which deviates by
d or more with probability at most 2 exp(-d^2 / (2 V + 2 b d / 3)) (Bernstein's inequality): no normal approximation, so
rare events need no rule of their own, they only bound less. What is beyond the linear part (only of functions that are
neither means nor ratios of means) is computed at the moments of the replicates at hand and taken off first.

**Jointly.** The family is at most ``FAMILY`` comparisons. It agrees if the least of these probabilities, times
``FAMILY``, is at least that of 4 standard errors of a single normal comparison, ``LEVEL`` = 6.3e-5. By Boole's
inequality a right program fails with probability at most ``LEVEL``, below 1e-4. ``standard_errors`` gives what the
family's worst comparison amounts to as a single one. Where the exact variance is 0, rounding is all that is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracles.exact_moments import NUDGE, Array, Pool
from oracles.exact_views import Column, Moments

VIEWS_FAMILY, SWRB_FAMILY = 45_000, 8_000  # random comparisons of test_exact_truth and test_exact_swrb, at most
FAMILY = VIEWS_FAMILY + SWRB_FAMILY
LEVEL = 2 * NormalDist().cdf(-4.0)
ROUNDING = 1e-7  # distances are stored in float32, off by up to 6e-8
NOTHING = 1e-12  # standard errors and denominators that would be 0 but for rounding; those that count are above 1e-6


@dataclass(frozen=True)
class Comparison:
    """One estimate: its distance from the exact value, that distance's variance, and the largest share of a replicate."""

    what: str
    distance: float
    variance: float
    largest: float

    @property
    def random(self) -> bool:
        """Whether the two may differ by more than rounding."""
        return self.variance > NOTHING**2

    @property
    def z(self) -> float:
        """Return the distance in exact standard errors."""
        return self.distance / math.sqrt(self.variance) if self.random else 0.0

    @property
    def chance(self) -> float:
        """Return a bound on the probability of such a distance."""
        distance = max(abs(self.distance) - ROUNDING, 0.0)
        if not self.random:
            return float(distance == 0.0)
        return min(2.0 * math.exp(-(distance**2) / (2.0 * self.variance + 2.0 * self.largest * distance / 3.0)), 1.0)


@dataclass(frozen=True)
class Joint:
    """A set of comparisons, which is part of the family."""

    comparisons: tuple[Comparison, ...]

    @property
    def random(self) -> int:
        """Return how many comparisons can fail by chance."""
        return sum(one.random for one in self.comparisons)

    @property
    def worst(self) -> Comparison:
        """Return the least likely comparison."""
        return min(self.comparisons, key=lambda one: one.chance)

    @property
    def standard_errors(self) -> float:
        """Return the family's worst comparison as a distance of a single one, in standard errors."""
        chance = min(self.worst.chance * FAMILY, 1.0)
        return abs(NormalDist().inv_cdf(chance / 2)) if chance > 0.0 else math.inf

    @property
    def agrees(self) -> bool:
        """Return whether the worst comparison is within 4 standard errors."""
        return self.worst.chance * FAMILY >= LEVEL

    def of(self, *views: str) -> Joint:
        """Return the comparisons of some views."""
        return Joint(tuple(one for one in self.comparisons if one.what.split()[0] in views))


@dataclass(frozen=True)
class Estimate:
    """A view's value of a column; None for null."""

    what: str
    column: Column
    value: float | None


def compare(pool: Pool, actions: Sequence[str], estimates: Iterable[Estimate]) -> Iterator[Comparison]:
    """Compare every estimate with its exact value; formulas take the moments of ``actions``, in their order.

    An estimate that is null must be null by its definition: at the exact moments, or at the sampled ones by chance.
    """
    kept, gradients, distances = [], [], []
    for one in estimates:
        exact = _evaluate(one.column, *(_moments(pool, pool.mean, action) for action in actions))
        if exact is None or one.value is None:
            drawn = _evaluate(one.column, *(_moments(pool, pool.sampled, action) for action in actions))
            assert one.value is None, f"{one.what}: {one.value}, exactly null"
            assert drawn is None, f"{one.what}: null, {drawn} by its definition"
            continue
        gradient, distance = _linear_part(pool, actions, one, exact)
        kept.append(one.what)
        gradients.append(gradient)
        distances.append(distance)
    if not kept:
        return
    gradient = np.column_stack(gradients)
    used = gradient.any(axis=1)
    own = gradient[used]
    variance = np.einsum("ij,ij->j", own, pool.covariance[np.ix_(used, used)] @ own)
    yield from map(Comparison, kept, distances, variance.tolist(), pool.largest(gradient).tolist())


def _linear_part(pool: Pool, actions: Sequence[str], one: Estimate, exact: float) -> tuple[Array, float]:
    """Return the linear part of (value - exact) times the denominator: the gradient at the exact moments, and the rest.

    For a mean or a ratio of means the linear part is everything.
    """
    column, value = one.column, float(one.value or 0.0)

    def excess(vector: NDArray[Any]) -> Any:
        moments = [_moments(pool, vector, action) for action in actions]
        return column.numerator(*moments) - exact * column.denominator(*moments)

    gradient = np.broadcast_to(np.imag(excess(pool.nudged)) / NUDGE, pool.mean.shape)
    if column.bounds != (-math.inf, math.inf):  # clips a mean, which only brings the two nearer
        return gradient, value - exact
    beyond = excess(pool.sampled) - excess(pool.mean) - gradient @ (pool.sampled - pool.mean)
    scale = column.denominator(*(_moments(pool, pool.sampled, action) for action in actions))
    return gradient, float((value - exact) * scale - beyond)


def _evaluate(column: Column, *moments: Moments) -> float | None:
    """Return the column at these moments; None if it is null."""
    try:
        above, below = column.numerator(*moments), column.denominator(*moments)
    except KeyError:
        return None
    if abs(below) < NOTHING:
        return column.undefined
    low, high = column.bounds
    return float(min(max(above / below, low), high))


def _moments(pool: Pool, vector: NDArray[Any], action: str) -> Moments:
    """Return access by name to a vector of moments, or to a batch [n, moments]."""
    return lambda name: vector[..., pool.place[action, name]]
