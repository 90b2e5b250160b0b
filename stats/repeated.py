"""Repeated confidence intervals: those of all interim looks hold together (``docs/sequential.md``).

The normal tail beyond the interim look's critical constant takes the place of alpha / 2. An end is Student's, over the
clusters, or the studentized bootstrap's if that is farther out and enough draws lie in the tail to locate its end. If
documents are skewed, Student's end is too near on one side; over a few clusters the bootstrap's end is too near on the
other side. Of 20,000 studies of 24 documents with skewness 2, 5.4% exclude the truth at an interim look; with
Student's ends alone 9.7% do, with the bootstrap's alone 6.5%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import ndtr, stdtrit

from kvdrift.stats.alike import alike_documents
from kvdrift.stats.bootstrap import observed, observed_errors, resample, whole_clusters
from kvdrift.stats.clusters import ClusterBlocks
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.ends import (
    ALIKE,
    STUDENTIZED,
    Likeness,
    Studentized,
    distance_quantiles,
    document_intervals,
    expanded_tails,
)
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.pooling import Pooling
from kvdrift.stats.quantities import quantity_named
from kvdrift.stats.registry import Between

STUDENT: Final = "student"

LEAST_BEYOND = 50  # draws beyond a quantile that locate it
MOST_DRAWS = 40_000  # most draws that are made to locate it


@dataclass(frozen=True)
class RepeatedInterval:
    """The estimate and interval of one endpoint at an interim look."""

    endpoint: Endpoint
    estimate: float  # NaN if undefined
    low: float  # the lower end; NaN without an interval
    high: float  # the upper end; NaN without an interval
    method: str | None  # how the ends were made: studentized, student, alike or expanded; None without an interval
    draws: int  # how many bootstrap draws were made; 0 if the tail needs more than ``MOST_DRAWS``
    documents: int  # how many documents are behind the estimate
    clusters: int  # how many clusters of documents


def repeated_intervals(
    moments: DocumentMoments,
    endpoints: Sequence[Endpoint],
    *,
    constant: float,
    draws: int,
    seed: int,
    last: bool,
    alike_within: float = 0.0,
) -> list[RepeatedInterval]:
    """Estimate endpoints at an interim look, with their repeated confidence intervals.

    At every interim look an interval contains the range that alike documents leave open (``kvdrift.stats.ends``).
    Unbounded numbers, which are ratios whose denominator can be 0, have an interval only if the draws resolve the tail;
    at the last interim look they have expanded percentiles, as in a study without interim looks.

    Args:
        moments: the moments of the interim look's documents.
        endpoints: the endpoints to estimate.
        constant: the interim look's critical constant, in standard errors.
        draws: the least number of bootstrap draws. If the tail needs more than ``MOST_DRAWS``, none are made before the
            last interim look.
        seed: the seed of the draws.
        last: whether this is the last interim look of the plan.
        alike_within: how far documents that count as alike may be from the median of their stratum. In a study that
            resolves equivalence it is the margin: documents within it do not show how many others are outside.
    """
    moments = moments.in_canonical_order()
    names = list(dict.fromkeys(endpoint.quantity for endpoint in endpoints))
    pairs = list(
        dict.fromkeys((endpoint.baseline, endpoint.action) for endpoint in endpoints if endpoint.baseline is not None)
    )
    tail = float(ndtr(-constant))
    made = draws_of(tail, draws, last=last)
    sample = resample(moments, names, seed=seed, draws=made, pairs=pairs, studentized=True) if made else {}
    estimates, errors = observed(moments, names, pairs), observed_errors(moments, names, pairs)
    pooling = Pooling.of(moments, pairs)
    blocks = ClusterBlocks(pooling)
    intervals = []
    for endpoint in endpoints:
        quantity = quantity_named(endpoint.quantity)
        row = pooling.rows.index(endpoint.stratum)
        subject = pooling.subjects(quantity).index((endpoint.baseline, endpoint.action))
        cell = (row, subject, quantity.x(moments.windows).index(endpoint.x))
        (clusters, sets), documents = blocks.counts_of(quantity), pooling.counts_of(quantity)[row, subject]
        number = _Number(
            float(estimates[quantity.name][cell]), float(errors[quantity.name][cell]), float(clusters[row, subject]),
            int(sets[row, subject]), quantity.range.between(moments.windows.horizon),
            alike_documents(pooling, quantity, alike_within).of(tuple(np.array([place]) for place in cell)),
        )  # fmt: skip
        quantity_sample = sample.get(quantity.name)
        low, high, method = _ends(number, quantity_sample and quantity_sample.of((*cell, None)), tail, last=last)
        intervals.append(
            RepeatedInterval(
                endpoint, number.estimate, low, high, method, made, int(documents),
                int(whole_clusters(np.array(number.clusters))),
            )
        )  # fmt: skip
    return intervals


@dataclass(frozen=True)
class _Number:
    """One estimate, its standard error, its effective clusters, and in how many sets of strata these are drawn."""

    estimate: float
    error: float
    clusters: float
    sets: int
    between: Between
    likeness: Likeness

    @property
    def free(self) -> float:
        """The degrees of freedom."""
        return self.clusters - self.sets

    @property
    def has_error(self) -> bool:
        """Whether the standard error is usable."""
        return self.between.bounded and self.error > self.between.resolution


def draws_of(tail: float, least: int, *, last: bool) -> int:
    """Return how many draws locate the quantile of a tail, at least ``least``.

    If more than both ``MOST_DRAWS`` and ``least`` are needed, the result is 0, or ``least`` if ``last``.
    """
    needed = max(least, math.ceil(LEAST_BEYOND / max(tail, LEAST_BEYOND / 2**31)))
    return needed if needed <= max(least, MOST_DRAWS) else least * last


def _resolves(tail: float, draws: int) -> bool:
    return tail * draws >= LEAST_BEYOND


def _ends(number: _Number, sample: Studentized | None, tail: float, *, last: bool) -> tuple[float, float, str | None]:
    """Return the interval of one number with ``tail`` on either side, and its method."""
    nothing = (np.nan, np.nan, None)
    if np.isnan(number.estimate) or number.free <= 0:
        return nothing
    levels, clusters, between = np.array([1 - 2 * tail]), np.array([number.clusters]), number.between
    ends, method_name = [], ""
    if number.has_error:
        reach, method_name = -float(stdtrit(number.free, tail)) * number.error, STUDENT
        ends.append((number.estimate - reach, number.estimate + reach))
    if sample is not None and _resolves(tail, len(sample.draws)):
        low, high, defined = distance_quantiles(sample, levels, clusters, between)
        if defined[0]:
            above, below = (float(quantile[0]) * number.error for quantile in (low, high))
            ends.append((number.estimate - below, number.estimate - above))
            method_name = STUDENTIZED
    if not ends and sample is not None:
        percentile = float(expanded_tails(levels, clusters, np.array([number.sets]))[0])
        if last or (not between.bounded and _resolves(percentile, len(sample.draws))):
            low, high, method = document_intervals(
                sample, levels, clusters, np.array([number.sets]), between, number.likeness
            )
            return nothing if np.isnan(low[0]) else (float(low[0]), float(high[0]), str(method[0]))
    least, most = (float(end[0]) for end in number.likeness.ends(levels, between))
    if not math.isnan(least) and not any(below <= least and above >= most for below, above in ends):
        ends.append((least, most))
        method_name = ALIKE
    if not ends:
        return nothing
    lowest, highest = min(below for below, _ in ends), max(above for _, above in ends)
    return max(lowest, between.low), min(highest, between.high), method_name
