"""The ends of intervals, from an estimate, its standard error and its draws (``docs/intervals.md``).

If all documents have the same value, every resample has it too, so a bootstrap knows nothing of documents that the
sample lacks. But the sample bounds the share of such documents: if j of n clusters are unlike the others, the share is
at most the Clopper-Pearson bound. A mean then lies between the value of the alike documents and the value with that
share of unlike documents. Alike documents leave this range open, and no interval is narrower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, expit, logit, ndtr, ndtri, stdtrit

from kvdrift.stats.moments import Float
from kvdrift.stats.registry import Between

STUDENTIZED: Final = "studentized"
SKEWED: Final = "skewed"
EXPANDED: Final = "expanded"
ALIKE: Final = "alike"
PERCENTILE: Final = "percentile"

_COLUMNS_AT_ONCE = 128  # numbers whose draws are sorted at once: 10 MB at 10,000 draws
_DRAWS_AT_ONCE = 256  # draws in a tile of the transposition, which fits the cache (measured: 3 times faster)
_FEWEST_CLUSTERS = 5  # fewest clusters of a studentized interval
_VANISHING = 0.01  # most draws, as a share, whose standard error may vanish
_FARTHEST = 1.5  # times Student's quantile: over a few clusters a draw may have any t*


@dataclass(frozen=True, eq=False)
class Studentized:
    """Estimates [...], their standard errors [...], and the value and distance of every draw, [draws, ...].

    A distance is t*, the draw less the estimate in the draw's standard errors. Errors and distances are empty if only
    percentiles of the draws are requested.
    """

    estimates: Float
    errors: Float
    draws: Float
    distances: Float

    def of(self, where: tuple[Any, ...]) -> Studentized:
        """Return the numbers at ``where``, an index into the axes of ``estimates``."""
        estimates, all_of_them = self.estimates[where], isinstance(where[0], np.ndarray)
        all_of_them &= estimates.size == self.estimates.size  # in their order: no copy of the draws is needed
        draws, distances = (
            values if not values.size else values.reshape(len(values), -1) if all_of_them else values[:, *where]
            for values in (self.draws, self.distances)
        )
        return Studentized(estimates, self.errors[where] if self.errors.size else self.errors, draws, distances)


def document_intervals(
    sample: Studentized, levels: Float, clusters: Float, strata: NDArray[np.int64], between: Between, likeness: Likeness
) -> tuple[Float, Float, NDArray[np.str_]]:
    """Make the intervals of many numbers: studentized, or expanded percentiles if a standard error is unusable.

    An end lies at the bootstrap's quantile of the draws' distances t*, but no nearer than Student's quantile over the
    clusters, and no farther than 1.5 times that quantile. If the bootstrap's quantile lies farther, the interval is
    ``skewed``: a few documents decide the number, and the interval may hold the truth less often than its level.
    Fractions have their ends on the logit scale.

    Expanded percentiles are used if there are fewer than five clusters, if the standard error of the estimate or of
    more than 1% of the draws vanishes, or if so many t* are undefined that they could move an end. They are also used
    for unbounded numbers, which are ratios whose denominator can be 0: such ratios have no variance, so a linearized
    standard error is meaningless. Quantities that are not smooth have no standard error. An interval contains the range
    that alike documents leave open. Ends are cut to the range of the numbers.

    Args:
        sample: the numbers and their draws.
        levels: the level of each interval, [N].
        clusters: how many effective clusters are behind each number, [N].
        strata: in how many strata the clusters are drawn, [N]; strata that share clusters count once.
        between: the range of the numbers.
        likeness: how alike the documents behind each number are, [N].

    Returns:
        The lower and the upper ends, [N], NaN without an interval; and the method.
    """
    low, high, methods = _resampled(sample, levels, clusters, strata, between)
    return at_least(low, high, methods, sample.estimates, levels, clusters, strata, between, likeness)


def at_least(
    low: Float,
    high: Float,
    methods: NDArray[np.str_],
    estimates: Float,
    levels: Float,
    clusters: Float,
    strata: NDArray[np.int64],
    between: Between,
    likeness: Likeness,
) -> tuple[Float, Float, NDArray[np.str_]]:
    """Widen intervals, with ends ``low`` and ``high``, so that they contain the range that alike documents leave open.

    ``methods`` are the intervals' methods, and ``estimates`` the numbers that the intervals are of; the other arguments
    and the results are those of ``document_intervals``.
    """
    least, most = likeness.ends(levels, between)
    some = clusters > strata
    wider = some & ~np.isnan(least) & ~((low <= least) & (high >= most))
    low, high = np.where(wider, np.fmin(low, least), low), np.where(wider, np.fmax(high, most), high)
    methods = np.where(wider, ALIKE, methods)
    empty = some & ~(high - low > between.resolution) & ~np.isnan(estimates)
    low[empty], high[empty] = _unseen(estimates[empty], levels[empty], clusters[empty], between)
    return np.where(some, low, np.nan), np.where(some, high, np.nan), np.where(empty, ALIKE, methods)


def _resampled(
    sample: Studentized, levels: Float, clusters: Float, strata: NDArray[np.int64], between: Between
) -> tuple[Float, Float, NDArray[np.str_]]:
    """Return the intervals that draws give, before alike documents widen them: lower ends, upper ends, and methods."""
    student = -stdtrit(np.maximum(clusters - strata, 1), (1 - levels) / 2)
    low, high, defined = distance_quantiles(sample, levels, clusters, between)
    farthest = _FARTHEST * student
    with np.errstate(invalid="ignore"):
        skewed = (high > farthest) | (-low > farthest)
        below, above = (np.clip(distance, student, farthest) for distance in (high, -low))
        low, high = at_distances(sample, below, above, between)
    expanded = ~defined
    if expanded.any():
        draws = sample.draws if expanded.all() else sample.draws[:, expanded]
        low[expanded], high[expanded] = expanded_intervals(
            draws, levels[expanded], clusters[expanded], strata[expanded]
        )
    methods = np.where(expanded, EXPANDED, np.where(skewed, SKEWED, STUDENTIZED))
    return np.clip(low, between.low, between.high), np.clip(high, between.low, between.high), methods


def distance_quantiles(
    sample: Studentized, levels: Float, clusters: Float, between: Between
) -> tuple[Float, Float, NDArray[np.bool_]]:
    """Return the (1 -+ level) / 2 quantiles of the draws' distances t*, [N] each, and whether they are usable, [N].

    The arguments are those of ``document_intervals``, which says when the quantiles are not usable.
    """
    low, high = percentile_intervals(sample.distances, levels)
    vanishing = np.isnan(sample.distances).sum(axis=0) - np.isnan(sample.draws).sum(axis=0)
    defined = (
        (sample.errors > between.resolution)
        & between.bounded
        & (vanishing <= _VANISHING * len(sample.draws))
        & (clusters >= _FEWEST_CLUSTERS)
        & ~np.isnan(low)
    )
    return low, high, defined


def at_distances(sample: Studentized, below: Float, above: Float, between: Between) -> tuple[Float, Float]:
    """Return the lower ends, ``below`` standard errors under the estimates, and the upper ends, ``above`` over them.

    Fractions inside their range have their ends on the logit scale, where eta = logit theta has the standard error
    SE / (theta (1 - theta)).
    """
    low, high = sample.estimates - below * sample.errors, sample.estimates + above * sample.errors
    if not between.is_fraction:
        return low, high
    with np.errstate(divide="ignore", invalid="ignore"):
        share = sample.estimates / between.high
        error = sample.errors / (between.high * share * (1 - share))
        ends = expit(logit(share) - below * error), expit(logit(share) + above * error)
    inside = (share > 0) & (share < 1)
    return np.where(inside, between.high * ends[0], low), np.where(inside, between.high * ends[1], high)


def _unseen(estimates: Float, levels: Float, clusters: Float, between: Between) -> tuple[Float, Float]:
    """Return the intervals of numbers whose draws all agree, lower and upper ends; NaN if the range has no end.

    The n clusters may have missed a share of the documents, and these could have values at an end of the range.
    """
    if not between.finite:
        return np.full(len(levels), np.nan), np.full(len(levels), np.nan)
    share = 1 - ((1 - levels) / 2) ** (1 / np.maximum(clusters, 1))
    return estimates - share * (estimates - between.low), estimates + share * (between.high - estimates)


def expanded_intervals(sample: Float, levels: Float, clusters: Float, strata: NDArray[np.int64]) -> tuple[Float, Float]:
    """Compute percentile intervals of many numbers, at wider percentiles for few clusters (Hesterberg 2015).

    ``sample`` has the draws, [draws, N]. With n clusters in S strata and t the (1 - level) / 2 quantile of Student's t
    with n - S degrees of freedom, the lower percentile is Phi(sqrt(n / (n - 1)) t). There is no interval without a
    degree of freedom.
    """
    low, high = percentile_intervals(sample, 1 - 2 * expanded_tails(levels, clusters, strata))
    return np.where(clusters > strata, low, np.nan), np.where(clusters > strata, high, np.nan)


def expanded_tails(levels: Float, clusters: Float, strata: NDArray[np.int64]) -> Float:
    """Return the lower percentiles of ``expanded_intervals``, as fractions, [N]; the arguments are the same."""
    free = np.maximum(clusters - strata, 1)
    tails: Float = ndtr(np.sqrt(clusters / np.maximum(clusters - 1, 1)) * stdtrit(free, (1 - levels) / 2))
    return tails


def percentile_intervals(sample: Float, levels: Float) -> tuple[Float, Float]:
    """Compute percentile intervals of many numbers: ``sample`` [draws, N], ``levels`` [N]; return low and high, [N].

    Ends are the (1 - level) / 2 and (1 + level) / 2 quantiles of the defined draws, linearly interpolated between order
    statistics (numpy's default, and scipy.stats.bootstrap's method='percentile'). Undefined draws could lie anywhere:
    if their share exceeds (1 - level) / 2, that of one tail, they could move an end without bound, and both ends are
    NaN.
    """
    low, high = np.full(levels.shape, np.nan), np.full(levels.shape, np.nan)
    for first in range(0, len(levels), _COLUMNS_AT_ONCE):
        part = slice(first, first + _COLUMNS_AT_ONCE)
        columns = sample[:, part]
        ordered = np.empty(columns.shape[::-1])
        for draw in range(0, len(columns), _DRAWS_AT_ONCE):
            ordered[:, draw : draw + _DRAWS_AT_ONCE] = columns[draw : draw + _DRAWS_AT_ONCE].T
        ordered.sort(axis=1)  # NaN is sorted last
        defined = len(sample) - np.isnan(ordered).sum(axis=1)
        tail = (1 - levels[part]) / 2
        enough = (len(sample) - defined <= tail * len(sample)) & (defined > 0)
        low[part] = np.where(enough, _quantile(ordered, defined, tail), np.nan)
        high[part] = np.where(enough, _quantile(ordered, defined, 1 - tail), np.nan)
    return low, high


def error_of_ends(width: float, level: float, draws: int) -> float:
    """Estimate the Monte Carlo standard error of an interval's end: how far another seed moves the end.

    The p quantile of draws from a density f has the standard error sqrt(p (1 - p) / draws) / f; here f is normal. On
    the quickstart, the true error of studentized ends is .8 to 1.1 times this estimate in the median, and 1.4 times in
    one case of twenty.
    """
    tail = (1 - level) / 2
    reach = -float(ndtri(tail))
    density = math.exp(-(reach**2) / 2) / math.sqrt(2 * math.pi)
    return width / (2 * reach) * math.sqrt(tail * (1 - tail) / draws) / density


def _quantile(ordered: Float, defined: Any, probability: Float) -> Float:
    position = probability * np.maximum(defined - 1, 0)
    below = np.floor(position).astype(np.intp)
    above = np.minimum(below + 1, np.maximum(defined - 1, 0))
    rows = np.arange(len(ordered))
    left, right, fraction = ordered[rows, below], ordered[rows, above], position - below
    # Interpolated from the nearer end, so that equal neighbours give exactly their common value.
    inner: Float = np.where(fraction < 0.5, left + (right - left) * fraction, right - (right - left) * (1 - fraction))
    return inner


MOST_UNLIKE = 4
"""The most clusters that may be unlike for this rule to apply; if more are, resamples show how values vary."""


@dataclass(frozen=True, eq=False)
class Likeness:
    """How alike the documents behind some numbers are; all arrays have the shape of these numbers."""

    value: Float  # the number over the alike documents alone; NaN if no documents are alike
    spread: Float  # the standard error of ``value``; 0 if the alike documents are equal
    unlike: Float  # j, how many clusters have unlike documents; above ``MOST_UNLIKE`` the rule does not apply
    clusters: Float  # n, the effective clusters, by the weights of their documents
    farthest: Float  # the largest distance of a document from the median of its stratum
    # whether a ratio's denominator may be 0, so that the number may be anything in its range
    unbounded: NDArray[np.bool_]

    def of(self, where: tuple[Any, ...]) -> Likeness:
        """Return the likeness of the numbers at ``where``, an index into the axes of the arrays."""
        return Likeness(
            self.value[where], self.spread[where], self.unlike[where], self.clusters[where], self.farthest[where],
            self.unbounded[where],
        )  # fmt: skip

    @property
    def turned(self) -> Likeness:
        """Return the likeness for the negated numbers."""
        return replace(self, value=-self.value)

    def ends(self, levels: Float, between: Between) -> tuple[Float, Float]:
        """Return the range that alike documents leave open, low and high, at each number's level in ``levels``.

        NaN if too many clusters are unlike, or if the numbers lack a bound; the whole range ``between`` if a
        denominator may be 0.
        """
        if not between.finite:
            return np.full(levels.shape, np.nan), np.full(levels.shape, np.nan)
        low, high = _ends(self, levels, between)
        says = (self.unlike <= MOST_UNLIKE) & ~np.isnan(low)
        low = np.where(self.unbounded, between.low, np.where(says, low, np.nan))
        high = np.where(self.unbounded, between.high, np.where(says, high, np.nan))
        return low, high


def _ends(likeness: Likeness, levels: Float, between: Between) -> tuple[Float, Float]:
    """Return the range that alike documents leave open, low and high, however many clusters are unlike.

    The field ``unbounded`` is not read.
    """
    share = most_unlike(likeness.unlike, likeness.clusters, levels)
    seen = likeness.unlike > 0
    lowest = np.where(seen, np.maximum(likeness.value - likeness.farthest, between.low), between.low)
    highest = np.where(seen, np.minimum(likeness.value + likeness.farthest, between.high), between.high)
    with np.errstate(invalid="ignore"):
        student = -stdtrit(np.maximum(likeness.clusters - 1, 1), (1 - levels) / 2)
        noise = np.where(likeness.spread > 0, student * likeness.spread, 0.0)
        low = likeness.value - share * (likeness.value - lowest) - noise
        high = likeness.value + share * (highest - likeness.value) + noise
    return np.maximum(low, between.low), np.minimum(high, between.high)


def most_unlike(unlike: Float, clusters: Float, levels: Float) -> Float:
    """Return the Clopper-Pearson upper bounds, at (1 + level) / 2, of a share seen in ``unlike`` of n ``clusters``."""
    rest = clusters - unlike
    with np.errstate(invalid="ignore"):
        share = betaincinv(unlike + 1.0, np.where(rest > 0, rest, np.nan), (1 + levels) / 2)
    bound: Float = np.where(rest > 0, share, 1.0)
    return bound


def _grown(likeness: Likeness, factor: float) -> Likeness:
    return replace(likeness, unlike=likeness.unlike * factor, clusters=likeness.clusters * factor)


def reach_of(likeness: Likeness, level: float, between: Between, factor: float) -> float:
    """Return how far the range that alike documents leave open reaches from the value of these documents.

    The range is the one for ``factor`` times as many documents as ``likeness`` describes, with the same share of unlike
    documents. The result is the distance to its farther end. The arrays of ``likeness`` have one element.
    """
    low, high = _ends(_grown(likeness, factor), np.array([level]), between)
    return float(max(high[0] - likeness.value[0], likeness.value[0] - low[0]))


def settling_factor(likeness: Likeness, level: float, between: Between, allowed: float) -> float | None:
    """Return how many times as many documents are needed for an upper end below ``allowed``.

    The upper end is that of the range that alike documents leave open, with the same share of unlike documents. The
    factor is at least 1; None if even a thousand times as many documents are too few. The arrays of ``likeness`` have
    one element.
    """
    levels = np.array([level])

    def settles(factor: float) -> bool:
        return bool(_ends(_grown(likeness, factor), levels, between)[1][0] < allowed)

    low, high = 1.0, 1000.0
    if not settles(high):
        return None
    while high - low > 0.01 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if settles(middle) else (middle, high)
    return high
