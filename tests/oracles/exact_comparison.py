"""A joint comparison of estimates with exact values: their distances, and the probability of such distances.

**The test.** An estimate is a weighted sum of means over independent replicates. It deviates from its expectation by d
or more with probability at most 2 exp(-d^2 / (2 V + 2 b d / 3)), where V is its variance and b the largest share of a
replicate (Bernstein's inequality): no normal approximation, so rare events need no rule of their own, they only bound
less.

**Jointly.** The family is at most ``FAMILY`` comparisons. It agrees if the least of these probabilities, times
``FAMILY``, is at least that of 4 standard errors of a single normal comparison, ``LEVEL`` = 6.3e-5. By Boole's
inequality a right program fails with probability at most ``LEVEL``, below 1e-4. ``standard_errors`` gives what the
family's worst comparison amounts to as a single one. Where the exact variance is 0, rounding is all that is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

VIEWS_FAMILY, SWRB_FAMILY = 14_000, 8_000  # random comparisons of test_exact_truth and test_exact_swrb, at most
FAMILY = VIEWS_FAMILY + SWRB_FAMILY
LEVEL = 2 * NormalDist().cdf(-4.0)
ROUNDING = 1e-7  # distances are stored in float32, off by up to 6e-8
NOTHING = 1e-14  # variances that would be 0 but for rounding; those that count are above 1e-9

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Law:
    """One replicate's mean, variance, fourth central moment and largest deviation."""

    mean: float
    variance: float
    fourth: float
    largest: float

    @property
    def squared(self) -> Law:
        """Return the law of the squared deviation, without its fourth moment."""
        return Law(self.variance, max(self.fourth - self.variance**2, 0.0), np.nan, self.largest**2)


def law(mean: float, second: float, fourth: float, largest: float) -> Law:
    """Return a law from its central moments, of which rounding may leave something where they are 0."""
    return Law(mean, second if second > NOTHING else 0.0, max(fourth, 0.0), largest)


def law_of_values(values: Array, probability: Array) -> Law:
    """Return the law of a value that each path has."""
    mean = float(probability @ values)
    deviation = values - mean
    second, fourth = (float(probability @ deviation**power) for power in (2, 4))
    return law(mean, second, fourth, float(np.abs(deviation).max()))


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
        return self.variance > 0.0

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


def compare(what: str, distance: float, terms: Iterable[tuple[float, Law]], replicates: int) -> Comparison:
    """Compare a weighted sum of means over independent replicates; every replicate is part of one mean."""
    parts = list(terms)
    variance = math.fsum(weight**2 * one.variance for weight, one in parts) / replicates
    largest = max(abs(weight) * one.largest for weight, one in parts) / replicates
    return Comparison(what, distance, variance, largest)
