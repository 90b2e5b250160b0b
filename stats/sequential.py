"""Critical constants of interim looks, the rule that settles an endpoint, and estimates after an early stop.

``docs/sequential.md`` says what a study does with them. Estimates at growing shares t_1 < ... < t_K of the information
move like a Brownian motion S at these times, and Z_k = S(t_k) / sqrt(t_k) is the estimate's distance from the truth in
its standard errors. By interim look k the probability of having been outside |Z_j| <= c_j at any j <= k may be
alpha*(t_k), which decides c_k once c_1..c_{k-1} are known (Lan-DeMets spending). The probability is an integral over S
at all interim looks, taken step by step (Armitage, McPherson and Rowe 1969; Jennison and Turnbull 2000, ch. 19).

An estimate that ends a study because it was large is too large on average. Outcomes of a sequential study are ordered:
an outcome that stops above at an interim look is higher than all outcomes that go on, an outcome that stops below is
lower, and at the same interim look the larger estimate is higher (Jennison and Turnbull 2000, ch. 8). The
median-unbiased estimate is the truth under which outcomes at least as high as the observed outcome have the probability
1/2. Studies that stop inside a margin are ordered among later studies by their estimates. Estimates at growing shares
of the information are taken for normal, with the standard error of the last interim look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from kvdrift.schema.errors import InputError
from kvdrift.stats.moments import Float

HALF_WIDTH: Final = "half_width"
SIGN: Final = "sign"
EQUIVALENCE: Final = "equivalence"


@dataclass(frozen=True)
class Resolution:
    """The rule that resolves an endpoint (``docs/sequential.md``)."""

    # ``half_width``: half the interval's width is at most the bound; ``sign``: the interval excludes 0;
    # ``equivalence``: the interval lies inside +-bound, or wholly outside
    rule: str
    bound: float = 0.0  # the target half width or the margin, in the endpoint's unit; 0 for the sign

    def __str__(self) -> str:
        if self.rule == HALF_WIDTH:
            return f"the interval's half width is at most {self.bound:g}"
        if self.rule == EQUIVALENCE:
            return f"the interval lies inside ±{self.bound:g}, or wholly outside"
        return "the interval excludes 0"

    def holds(self, low: float, high: float) -> bool:
        """Tell whether an interval resolves its endpoint; NaN ends do not."""
        if self.rule == HALF_WIDTH:
            return (high - low) / 2 <= self.bound
        outside = low > self.bound or high < -self.bound
        return outside or (self.rule == EQUIVALENCE and -self.bound < low and high < self.bound)


_LARGEST = 38.0  # standard errors beyond which the normal tail is 0 in double precision
_TINY = 1e-320
_INSIDE = 9.0  # standard errors beyond which the mass of S, 2e-19, is neglected in an integral
_POINTS = 16  # of an integral, for each two standard deviations of the next step
_PARTS = 200  # most parts; interim looks closer than 1/2,000 of the documents have constants of fewer digits


def spent(shares: Float, alpha: float) -> Float:
    """Return alpha*(t) = 4 - 4 Phi(z_{1 - alpha/4} / sqrt t), the part of alpha that may be spent up to the share t."""
    result: Float = 4 * ndtr(ndtri(alpha / 4) / np.sqrt(shares))
    return result


def critical_constants(shares: Sequence[float], alpha: float) -> tuple[float, ...]:
    """Compute the constants c_k of interim looks, two-sided and together at the level 1 - alpha.

    The shares of the information rise to 1. The constants are in standard errors, and alpha is the probability that the
    truth is outside the interval of at least one interim look.
    """
    times = np.asarray(shares, dtype=np.float64)
    if not len(times) or times[-1] != 1 or not (np.diff(times, prepend=0.0) > 0).all():
        raise InputError(
            f"interim looks at {', '.join(f'{share:g}' for share in times)} of the documents: these shares must "
            "increase, from above 0 to 1"
        )
    if not 0 < alpha < 1:
        raise InputError(f"alpha {alpha} is not between 0 and 1")
    spending = np.diff(spent(times, alpha), prepend=0.0)
    steps = np.sqrt(np.diff(times, prepend=0.0))  # standard deviations of S between interim looks
    # Points of S at the interim look before, with its density if none was outside, times the weights of the integral.
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
    """Return the function from c_k to the probability that |Z_k| exceeds c_k and no earlier |Z_j| exceeded its c_j.

    ``mass`` are probabilities of the values ``points`` of S at the interim look before; from there S moves by a normal
    step of standard deviation ``step``. ``root`` is sqrt(t_k).
    """

    def probability(constant: float) -> float:
        reach = constant * root
        return float(mass @ (ndtr((points - reach) / step) + ndtr((-points - reach) / step)))

    return probability


def _constant(spending: float, probability: Callable[[float], float]) -> float:
    """Find the c_k whose probability equals the interim look's share of alpha."""
    if spending <= probability(_LARGEST) or spending <= _TINY:
        return _LARGEST

    def excess(constant: float) -> float:  # in logarithms, since tails may be tiny
        return math.log(max(probability(constant), _TINY)) - math.log(spending)

    return float(brentq(excess, 0.0, _LARGEST, xtol=1e-12))


def integration_points(low: float, high: float, step: float) -> tuple[Float, Float]:
    """Return points and weights to integrate from ``low`` to ``high``: Gauss's rule in equal parts.

    The function to integrate may vary over distances of ``step``.
    """
    parts = min(max(4, math.ceil((high - low) / (2 * step))), _PARTS)
    points, weights = np.polynomial.legendre.leggauss(_POINTS)
    half = (high - low) / (2 * parts)
    middles = low + half * np.arange(1, 2 * parts, 2)
    return (middles[:, None] + half * points).ravel(), np.tile(half * weights, parts)


def density_after(at: Float, points: Float, mass: Float, step: float) -> Float:
    """Return the density of S at ``at``, a normal step of deviation ``step`` after ``points`` of weights ``mass``."""
    result: Float = np.exp(-0.5 * ((at[:, None] - points) / step) ** 2) @ mass / (step * math.sqrt(2 * math.pi))
    return result


_FARTHEST = 12.0  # range of the search for the truth on either side of the estimate, in standard errors

_Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class InterimLook:
    """The result of an interim look for one endpoint."""

    share: float  # the interim look's share of the information
    constant: float  # its critical constant, in standard errors
    estimate: float  # the endpoint's estimate
    low: float  # the lower end of its repeated interval
    high: float  # the upper end
    alone: bool = True  # whether this endpoint alone decided if the study stops: all others were resolved


def median_unbiased(interim_looks: Sequence[InterimLook], resolution: Resolution) -> float:
    """Return the median-unbiased estimate of an endpoint at the last interim look, where the study stopped.

    An earlier interim look at which another endpoint was unresolved is left out, since the study went on whatever this
    endpoint's estimate was. The plain estimate is returned if no earlier interim look is left, or if the rule that
    resolves endpoints is about the widths of intervals.
    """
    *before, last = interim_looks
    passed = [interim_look for interim_look in before if interim_look.alone]
    unit = (last.high - last.low) / (2 * last.constant)
    if resolution.rule == HALF_WIDTH or not passed or not unit > 0:
        return last.estimate
    stages = [_Stage.of(interim_look, last, unit, resolution) for interim_look in passed]

    def excess(distance: float) -> float:
        return _as_high(stages, last.estimate / unit, last.estimate / unit + distance) - 0.5

    return last.estimate + unit * float(brentq(excess, -_FARTHEST, _FARTHEST, xtol=1e-10))


@dataclass(frozen=True)
class _Stage:
    """An earlier interim look, in terms of the Brownian motion S.

    S(t) is t times the estimate at the share t, in standard errors of the last interim look.
    """

    time: float  # t, the share of the last interim look's information
    above: _Spans  # the values of S that stop the study with a higher outcome than the last interim look's
    between: _Spans  # the values of S with which the study goes on

    @classmethod
    def of(cls, interim_look: InterimLook, last: InterimLook, unit: float, resolution: Resolution) -> _Stage:
        time = interim_look.share / last.share
        below, over = interim_look.estimate - interim_look.low, interim_look.high - interim_look.estimate
        margin = resolution.bound if resolution.rule == EQUIVALENCE else 0.0
        lowest, highest = -margin - over, margin + below
        above, between = [(highest, math.inf)], [(lowest, highest)]
        inner = (below - margin, margin - over)
        if resolution.rule == EQUIVALENCE and inner[0] < inner[1]:
            between = [(lowest, inner[0]), (inner[1], highest)]
            above.append((min(max(inner[0], last.estimate), inner[1]), inner[1]))
        scale = time / unit
        return cls(time, [(low * scale, high * scale) for low, high in above], [
            (low * scale, high * scale) for low, high in between
        ])  # fmt: skip


def _as_high(stages: Sequence[_Stage], seen: float, truth: float) -> float:
    """Return the probability of outcomes at least as high as ``seen`` at the last interim look, under ``truth``.

    ``seen`` and ``truth`` are in standard errors of the last interim look.
    """
    points, mass, time, probability = np.zeros(1), np.ones(1), 0.0, 0.0
    for stage in stages:
        step, shift = math.sqrt(stage.time - time), truth * (stage.time - time)
        for low, high in stage.above:
            probability += float(mass @ (ndtr((high - shift - points) / step) - ndtr((low - shift - points) / step)))
        following = [integration_points(low, high, step) for low, high in stage.between]
        at, weights = (np.concatenate(parts) for parts in zip(*following, strict=True))
        points, mass, time = at, weights * density_after(at, points + shift, mass, step), stage.time
    step, shift = math.sqrt(1.0 - time), truth * (1.0 - time)
    return probability + float(mass @ ndtr((points + shift - seen) / step))
