"""Median-unbiased estimates after looks: two looks by a bivariate normal law, and simulated studies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import multivariate_normal, norm, t

from kvdrift.stats.sequential import (
    EQUIVALENCE,
    HALF_WIDTH,
    SIGN,
    InterimLook,
    Resolution,
    critical_constants,
    median_unbiased,
)

SHARES = (0.25, 0.5, 0.75, 1.0)
CONSTANTS = critical_constants(SHARES, 0.05)
MARGIN = Resolution(EQUIVALENCE, 3.0)


def interim_look(share: float, constant: float, estimate: float, error: float) -> InterimLook:
    return InterimLook(share, constant, estimate, estimate - constant * error, estimate + constant * error)


def both(upper: float, lower: float, correlation: float) -> float:
    """P(Z_1 <= upper, Z_2 > lower)."""
    below = multivariate_normal([0, 0], [[1, correlation], [correlation, 1]]).cdf([upper, lower])
    return float(norm.cdf(upper) - below)


def test_two_looks_are_a_bivariate_normal_law() -> None:
    """Errors of 2 and sqrt 2 at half and all of the information: higher is Z_1 above its bound, or Z_2 above the seen."""
    first, last = interim_look(0.5, 2.5, 1.0, 2.0), interim_look(1.0, 2.0, 3.4, math.sqrt(2))
    found = median_unbiased([first, last], Resolution(SIGN))

    def higher(truth: float) -> float:
        upper, lower = (5.0 - truth) / 2, (-5.0 - truth) / 2
        seen = (3.4 - truth) / math.sqrt(2)
        going_on = both(upper, seen, math.sqrt(0.5)) - both(lower, seen, math.sqrt(0.5))
        return float(norm.sf(upper)) + going_on

    assert found == pytest.approx(brentq(lambda truth: higher(truth) - 0.5, 0, 6), abs=1e-5)
    assert found < 3.4
    mirrored = [InterimLook(one.share, one.constant, -one.estimate, -one.high, -one.low) for one in (first, last)]
    assert median_unbiased(mirrored, Resolution(SIGN)) == pytest.approx(-found)


def test_the_first_look_widths_and_looks_that_others_passed_by_leave_the_estimate() -> None:
    first, last = interim_look(0.5, 2.5, 1.0, 2.0), interim_look(1.0, 2.0, 3.4, math.sqrt(2))
    assert median_unbiased([first], Resolution(SIGN)) == 1.0
    another = replace(first, alone=False)
    assert median_unbiased([another, last], Resolution(SIGN)) == 3.4, "another endpoint made the study go on"
    assert median_unbiased([first, last], Resolution(HALF_WIDTH, 0.1)) == 3.4


def looks_of(values: np.ndarray, resolutions: list[Resolution]) -> list[list[InterimLook]]:
    """Return looks at endpoints [endpoints, strata, documents] by Student's law, until all are resolved."""
    endpoints, strata, documents = values.shape
    found: list[list[InterimLook]] = [[] for _ in range(endpoints)]
    for share, constant in zip(SHARES, CONSTANTS, strict=True):
        own = values[:, :, : math.ceil(share * documents)]
        count = own.shape[2]
        reach = t.isf(norm.sf(constant), strata * (count - 1)) * np.sqrt(own.var(axis=2, ddof=1).sum(axis=1) / count)
        for place, (estimate, half) in enumerate(zip(own.mean(axis=(1, 2)), reach / strata, strict=True)):
            found[place].append(InterimLook(share, constant, estimate, estimate - half, estimate + half))
        settled = [one.holds(own[-1].low, own[-1].high) for one, own in zip(resolutions, found, strict=True)]
        for place, own_looks in enumerate(found):
            own_looks[-1] = replace(own_looks[-1], alone=all(settled[:place] + settled[place + 1 :]))
        if all(settled):
            break
    return found


def above(
    truths: tuple[float, ...], rule: Resolution, studies: int, draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
) -> tuple[float, float]:  # fmt: skip
    """Return the shares of plain and of median-unbiased estimates of the first endpoint that are above the truth.

    Studies have 6 x 12 documents; truths are in standard errors of all of them. Endpoints share half their variance.
    """
    random, error = np.random.default_rng([int(10 * truths[0]), len(truths)]), 1 / math.sqrt(72)
    rule = Resolution(rule.rule, rule.bound * error)
    plain, corrected = [], []
    for _ in range(studies):
        common = draw(random, (1, 6, 12))
        values = (common + draw(random, (len(truths), 6, 12))) / math.sqrt(2) + error * np.reshape(truths, (-1, 1, 1))
        looks = looks_of(values, [rule] * len(truths))[0]
        plain.append(looks[-1].estimate > truths[0] * error)
        corrected.append(median_unbiased(looks, rule) > truths[0] * error)
    return float(np.mean(plain)), float(np.mean(corrected))


def normal(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.standard_normal(shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truths", "rule", "most"),
    [
        ((0.0,), Resolution(SIGN), 0.04),
        ((2.5,), Resolution(SIGN), 0.04),
        ((4.0,), Resolution(SIGN), 0.04),
        ((1.0,), MARGIN, 0.04),
        ((5.0,), MARGIN, 0.04),
        ((6.5,), MARGIN, 0.04),
        ((4.0, 4.0), Resolution(SIGN), 0.05),
        ((3.0, 5.0), Resolution(SIGN), 0.05),
        ((5.0, 3.0), Resolution(SIGN), 0.05),
    ],
)
def test_half_of_the_estimates_are_above_whatever_the_truth(
    truths: tuple[float, ...], rule: Resolution, most: float
) -> None:
    """1,500 studies, 1 standard error 1.3%."""
    plain, corrected = above(truths, rule, 1500, normal)
    print(truths, rule.rule, round(plain, 3), round(corrected, 3))  # noqa: T201 - what is measured
    assert corrected == pytest.approx(0.5, abs=most)
