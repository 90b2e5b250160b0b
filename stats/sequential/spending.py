"""Critical constants of looks at a growing study, by Lan-DeMets spending (definitions, "Sequential studies").

Estimates at growing shares t_1 < ... < t_K of the information move like a Brownian motion S at these times, and
Z_k = S(t_k) / sqrt(t_k) is the estimate's distance from the truth in its standard errors. By look k the probability of
having been outside |Z_j| <= c_j at any j <= k may be alpha*(t_k), which decides c_k from those before. It is an
integral over S at all looks, taken one look at a time (Armitage, McPherson and Rowe 1969; Jennison and Turnbull 2000,
ch. 19).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from kvdrift.schema.errors import InputError
from kvdrift.stats.moments import Float

_LARGEST = 38.0  # standard errors beyond which the normal tail is 0 in double precision
_TINY = 1e-320
_INSIDE = 9.0  # standard errors beyond which the mass of S, 2e-19, is neglected in an integral
_POINTS = 16  # of an integral, for each two standard deviations of the next step
_PARTS = 200  # most parts; looks closer than 1/2,000 of the documents get a constant with fewer digits


def spent(shares: Float, alpha: float) -> Float:
    """Return alpha*(t) = 4 - 4 Phi(z_{1 - alpha/4} / sqrt t), the probability that may be spent by shares t."""
    result: Float = 4 * ndtr(ndtri(alpha / 4) / np.sqrt(shares))
    return result


def critical_constants(shares: Sequence[float], alpha: float) -> tuple[float, ...]:
    """Compute the constants c_k of looks at shares of the information, two-sided and together at the level 1 - alpha.

    The shares rise to 1. The constants are in standard errors, and alpha is the probability that the truth is outside
    the interval of any look.
    """
    times = np.asarray(shares, dtype=np.float64)
    if not len(times) or times[-1] != 1 or not (np.diff(times, prepend=0.0) > 0).all():
        raise InputError(f"looks at {', '.join(f'{one:g}' for one in times)} of the documents: they must grow to 1")
    if not 0 < alpha < 1:
        raise InputError(f"alpha {alpha} is not between 0 and 1")
    spending = np.diff(spent(times, alpha), prepend=0.0)
    steps = np.sqrt(np.diff(times, prepend=0.0))  # standard deviations of S between looks
    # Points of S at the look before, with its density if no look was outside, times the weights of the integral.
    points, mass = np.zeros(1), np.ones(1)
    constants = []
    for k, time in enumerate(times):
        root = math.sqrt(time)
        constants.append(_constant(float(spending[k]), _leaving(points, mass, float(steps[k]), root)))
        if k + 1 < len(times):
            reach = min(constants[k], _INSIDE) * root
            following, weights = integration_points(-reach, reach, float(steps[k + 1]))
            points, mass = following, weights * density_after(following, points, mass, float(steps[k]))
    return tuple(constants)


def _leaving(points: Float, mass: Float, step: float, root: float) -> Callable[[float], float]:
    """Return, as a function of c_k, the probability that S is outside at this look and inside at all looks before."""

    def probability(constant: float) -> float:
        reach = constant * root
        return float(mass @ (ndtr((points - reach) / step) + ndtr((-points - reach) / step)))

    return probability


def _constant(spending: float, probability: Callable[[float], float]) -> float:
    """Find the c_k whose probability equals the look's share of alpha."""
    if spending <= probability(_LARGEST) or spending <= _TINY:
        return _LARGEST

    def excess(constant: float) -> float:  # in logarithms, since tails may be tiny
        return math.log(max(probability(constant), _TINY)) - math.log(spending)

    return float(brentq(excess, 0.0, _LARGEST, xtol=1e-12))


def integration_points(low: float, high: float, step: float) -> tuple[Float, Float]:
    """Return points and weights to integrate a function that varies over steps of S: Gauss's rule in equal parts."""
    parts = min(max(4, math.ceil((high - low) / (2 * step))), _PARTS)
    points, weights = np.polynomial.legendre.leggauss(_POINTS)
    half = (high - low) / (2 * parts)
    middles = low + half * np.arange(1, 2 * parts, 2)
    return (middles[:, None] + half * points).ravel(), np.tile(half * weights, parts)


def density_after(at: Float, points: Float, mass: Float, step: float) -> Float:
    """Return the density of S at ``at``, one step after the points."""
    result: Float = np.exp(-0.5 * ((at[:, None] - points) / step) ** 2) @ mass / (step * math.sqrt(2 * math.pi))
    return result
