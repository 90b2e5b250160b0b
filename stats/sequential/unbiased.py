"""The median-unbiased estimate after looks, by the stage-wise ordering (definitions, "Sequential studies").

An estimate that ends a study because it was large is too large on average. Outcomes of a sequential study are ordered:
an outcome that stops above at a look is higher than all outcomes that go on, an outcome that stops below is lower, and
at the same look the larger estimate is higher (Jennison and Turnbull 2000, ch. 8). The estimate is the truth under
which outcomes at least as high as the observed outcome have the probability 1/2. Studies that stop inside a margin are
ordered among later studies by their estimates.

Estimates at growing shares of the information are taken for normal, with the standard error of the last look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from kvdrift.stats.sequential.resolution import EQUIVALENCE, HALF_WIDTH, Resolution
from kvdrift.stats.sequential.spending import density_after, integration_points

_FARTHEST = 12.0  # range of the search for the truth on either side of the estimate, in standard errors

_Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class LookSaid:
    """The result of a look for one endpoint."""

    share: float  # the look's share of the information
    constant: float  # its critical constant, in standard errors
    estimate: float  # the endpoint's estimate
    low: float  # the lower end of its repeated interval
    high: float  # the upper end
    alone: bool = True  # whether this endpoint alone decided if the study stops: all others were resolved


def median_unbiased(looks: Sequence[LookSaid], resolution: Resolution) -> float:
    """Return the median-unbiased estimate of an endpoint at the last of some looks, where the study stopped.

    If another endpoint was unresolved at a look, the study went on whatever this endpoint's estimate was. If that holds
    for every earlier look, or if the width of intervals stops a study, the result is the plain estimate.
    """
    *before, last = looks
    passed = [look for look in before if look.alone]
    unit = (last.high - last.low) / (2 * last.constant)
    if resolution.rule == HALF_WIDTH or not passed or not unit > 0:
        return last.estimate
    stages = [_Stage.of(look, last, unit, resolution) for look in passed]

    def excess(distance: float) -> float:
        return _as_high(stages, last.estimate / unit, last.estimate / unit + distance) - 0.5

    return last.estimate + unit * float(brentq(excess, -_FARTHEST, _FARTHEST, xtol=1e-10))


@dataclass(frozen=True)
class _Stage:
    """An earlier look, in terms of the Brownian motion S of the estimate: S(t) is t times the estimate in errors."""

    time: float  # t, the look's share of the information of the last look
    above: _Spans  # the values of S that stop the study with a higher outcome than the last look's
    between: _Spans  # the values of S with which the study goes on

    @classmethod
    def of(cls, look: LookSaid, last: LookSaid, unit: float, resolution: Resolution) -> _Stage:
        time = look.share / last.share
        below, over = look.estimate - look.low, look.high - look.estimate
        margin = resolution.bound if resolution.rule == EQUIVALENCE else 0.0
        lowest, highest = -margin - over, margin + below
        above, between = [(highest, math.inf)], [(lowest, highest)]
        inner = (below - margin, margin - over)
        if resolution.rule == EQUIVALENCE and inner[0] < inner[1]:
            between = [(lowest, inner[0]), (inner[1], highest)]
            above.append((min(max(inner[0], last.estimate), inner[1]), inner[1]))
        scale = time / unit
        return cls(time, [(one * scale, two * scale) for one, two in above], [
            (one * scale, two * scale) for one, two in between
        ])  # fmt: skip


def _as_high(stages: Sequence[_Stage], seen: float, truth: float) -> float:
    """Return the probability of outcomes as high as ``seen`` at the last look, in that look's standard errors."""
    points, mass, time, found = np.zeros(1), np.ones(1), 0.0, 0.0
    for stage in stages:
        step, shift = math.sqrt(stage.time - time), truth * (stage.time - time)
        for low, high in stage.above:
            found += float(mass @ (ndtr((high - shift - points) / step) - ndtr((low - shift - points) / step)))
        following = [integration_points(low, high, step) for low, high in stage.between]
        at, weights = (np.concatenate(parts) for parts in zip(*following, strict=True))
        points, mass, time = at, weights * density_after(at, points + shift, mass, step), stage.time
    step, shift = math.sqrt(1.0 - time), truth * (1.0 - time)
    return found + float(mass @ ndtr((points + shift - seen) / step))
