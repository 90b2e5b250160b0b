"""Intervals (``docs/intervals.md``) with loops over draws and clusters and difference quotients.

A study is a list of documents: stratum, cluster, and the moments that a quantity reads, one number each. Draws are given
as how often each document is in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats

Moments = Mapping[str, float]
Quantity = Callable[[Moments], float]  # NaN where it is undefined

_STEP = 1e-6


@dataclass(frozen=True)
class Document:
    """One document: its stratum, its cluster, and x_d by name."""

    stratum: str
    cluster: str
    moments: Moments


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval and the method that made it."""

    estimate: float
    low: float
    high: float
    method: str


def interval(
    quantity: Quantity,
    documents: Sequence[Document],
    draws: Sequence[Sequence[int]],
    level: float,
    between: tuple[float, float],
) -> Interval:
    """The studentized interval, of fractions on the logit scale, or the expanded percentile one."""
    estimate, error = _evaluate(quantity, documents, [1] * len(documents))
    values, distances, vanished = [], [], 0
    width = between[1] - between[0]
    least = 1e-12 * (width if math.isfinite(width) else 1.0)
    for counts in draws:
        value, own = _evaluate(quantity, documents, counts)
        values.append(value)
        defined = not math.isnan(value)
        vanished += defined and not own > least
        distances.append((value - estimate) / own if defined and own > least else math.nan)
    n, freedom = effective_clusters(documents)
    tail = (1 - level) / 2
    low, high = _quantiles(distances, tail)
    student = -float(scipy.stats.t.ppf(tail, freedom)) if freedom > 0 else math.nan
    # Ratios that may be anything have no variance: their ends are expanded percentiles.
    bounded = math.isfinite(width)
    if bounded and error > least and vanished <= 0.01 * len(draws) and n >= 5 and not math.isnan(low):
        below, above = (min(max(one, student), 1.5 * student) for one in (high, -low))
        ends = (estimate - below * error, estimate + above * error)
        share = estimate / between[1]
        if between[0] == 0 and between[1] <= 1 and 0 < share < 1:
            odds, scale = math.log(share / (1 - share)), error / between[1] / (share * (1 - share))
            ends = _fraction(odds - below * scale, between[1]), _fraction(odds + above * scale, between[1])
        method = "skewed" if max(high, -low) > 1.5 * student else "studentized"
    else:
        if freedom <= 0:
            return Interval(estimate, math.nan, math.nan, "expanded")
        ends = _quantiles(values, float(scipy.stats.norm.cdf(-math.sqrt(n / (n - 1)) * student)))
        method = "expanded"
    cut = [min(max(end, between[0]), between[1]) if not math.isnan(end) else end for end in ends]
    return Interval(estimate, cut[0], cut[1], method)


def _evaluate(quantity: Quantity, documents: Sequence[Document], counts: Sequence[int]) -> tuple[float, float]:
    """theta = g(M), and its standard error."""
    strata = sorted({document.stratum for document in documents})
    size = {
        stratum: sum(k for one, k in zip(documents, counts, strict=True) if one.stratum == stratum)
        for stratum in strata
    }
    if 0 in size.values():
        return math.nan, math.nan
    weight = {stratum: 1 / (len(strata) * size[stratum]) for stratum in strata}
    names = list(documents[0].moments)
    pooled = {
        name: sum(k * weight[one.stratum] * one.moments[name] for one, k in zip(documents, counts, strict=True))
        for name in names
    }
    value = quantity(pooled)
    gradient = {name: _slope(quantity, pooled, name) for name in names}
    mean = {
        (stratum, name): sum(k * one.moments[name] for one, k in zip(documents, counts, strict=True)
                             if one.stratum == stratum) / size[stratum]
        for stratum in strata for name in names
    }  # fmt: skip
    variance = 0.0
    for strata_of_set in _linked_sets(documents):
        totals: list[float] = []  # u_c, as often as the cluster is in the draw
        for cluster in sorted({one.cluster for one in documents if one.stratum in strata_of_set}):
            members = [place for place, one in enumerate(documents) if one.cluster == cluster]
            total = sum(
                weight[documents[place].stratum]
                * gradient[name]
                * (documents[place].moments[name] - mean[documents[place].stratum, name])
                for place in members
                for name in names
            )
            totals += [total] * counts[members[0]]
        n = len(totals)
        if n < 2:
            return value, math.nan
        middle = math.fsum(totals) / n
        variance += n / (n - 1) * math.fsum((total - middle) ** 2 for total in totals)
    return value, math.sqrt(variance)


def _slope(quantity: Quantity, pooled: Moments, name: str) -> float:
    above, below = ({**pooled, name: pooled[name] + sign * _STEP} for sign in (1, -1))
    return (quantity(above) - quantity(below)) / (2 * _STEP)


def _fraction(odds: float, whole: float) -> float:
    return whole / (1 + math.exp(-odds))


def effective_clusters(documents: Sequence[Document]) -> tuple[float, float]:
    """Return the effective number of clusters, and this number minus the number of sets of linked strata."""
    total, sets = 0.0, _linked_sets(documents)
    for strata in sets:
        sizes: dict[str, int] = {}
        for one in documents:
            if one.stratum in strata:
                sizes[one.cluster] = sizes.get(one.cluster, 0) + 1
        total += sum(sizes.values()) ** 2 / sum(size**2 for size in sizes.values())
    return total, total - len(sets)


def _clusters(documents: Sequence[Document]) -> set[str]:
    return {document.cluster for document in documents}


def _linked_sets(documents: Sequence[Document]) -> list[set[str]]:
    """Strata that share a cluster, directly or through others, are drawn as one."""
    sets: list[set[str]] = []
    for cluster in sorted(_clusters(documents)):
        own = {one.stratum for one in documents if one.cluster == cluster}
        joined = [one for one in sets if one & own]
        sets = [one for one in sets if not one & own] + [own.union(*joined)]
    return sets


def _quantiles(values: Sequence[float], tail: float) -> tuple[float, float]:
    """Return both quantiles of the defined values; None if undefined values could move an end."""
    defined = sorted(value for value in values if not math.isnan(value))
    if not defined or len(values) - len(defined) > tail * len(values):
        return math.nan, math.nan
    low, high = np.quantile(defined, [tail, 1 - tail])
    return float(low), float(high)
