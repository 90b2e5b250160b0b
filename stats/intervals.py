"""Intervals of bootstrap draws, at pointwise or family-adjusted levels, as columns of ``results``.

Three methods (definitions, "Intervals"): studentized, the default; expanded percentiles where that is not defined;
percentiles, where a plan asks for the paper's method.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from schema.errors import InputError, nearest
from stats.endpoints import Endpoint, Family
from stats.pooling import Pooling
from stats.quantities import quantity_named
from stats.standard_errors import ClusterBlocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from stats.moments import DocumentMoments, Float
    from stats.registry import Between

_COLUMNS_AT_ONCE = 128  # draws of so many numbers are sorted at once: 10 MB at 10,000 draws
_DRAWS_AT_ONCE = 256  # and transposed in tiles of so many draws, which fit the cache (measured: 3 times faster)

# What an estimate is: named by a plan before its documents' outcomes were known, or after, or by none.
PRESPECIFIED, SEEN, EXPLORATORY = "prespecified", "seen", "exploratory"

STUDENTIZED: Final = "studentized"
EXPANDED: Final = "expanded"
PERCENTILE: Final = "percentile"

_FEWEST_CLUSTERS = 5  # that an interval is studentized over
_VANISHING = 0.01  # share of the draws whose standard error may vanish

REDUCED_COLUMNS = ("estimate_reduced", "low_reduced", "high_reduced")  # what ``Estimates.with_reduced`` fills
COLUMNS = (
    "stratum", "action", "baseline", "quantity", "x", "estimate", "low", "high", "level", "draws", "documents",
    "family", "status", "interval", "clusters", *REDUCED_COLUMNS,
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What intervals are wanted.

    Members of a family get its level 1 - alpha / m, its name and the status ``prespecified``; all other rows get the
    pointwise ``level`` and are ``exploratory``.
    ``prespecified`` are the actions fixed before the first evaluation event, None for all: no other action can be in
    a family. Members with an action among ``seen``, whose outcomes were known before, have the status ``seen`` instead.
    ``interval`` is how they are made: studentized, or by percentiles.
    """

    level: float = 0.95
    families: tuple[Family, ...] = ()
    prespecified: tuple[str, ...] | None = None
    seen: tuple[str, ...] = ()
    interval: str = STUDENTIZED

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise InputError(f"level {self.level} is not between 0 and 1")
        if self.interval not in (STUDENTIZED, PERCENTILE):
            raise InputError(f"interval '{self.interval}' is neither '{STUDENTIZED}' nor '{PERCENTILE}'")
        members = [endpoint for family in self.families for endpoint in family.endpoints]
        for endpoint in members:
            if members.count(endpoint) > 1:
                raise InputError(f"endpoint {endpoint} is in two families: its interval can have one level only")
            if not (self.is_prespecified(endpoint.action) and self.is_prespecified(endpoint.baseline)):
                raise InputError(f"endpoint {endpoint} is in a prespecified family but its action is exploratory")

    def of(self, actions: Collection[str], contrasts: Collection[tuple[str, str]]) -> Request:
        """Return what is wanted of some actions and contrasts (baseline, action); families keep their levels."""
        families = []
        for family in self.families:
            own = tuple(
                one for one in family.endpoints
                if (one.action in actions if one.baseline is None else (one.baseline, one.action) in contrasts)
            )  # fmt: skip
            if own:
                families.append(replace(family, endpoints=own, size=family.size or len(family.endpoints)))
        return replace(self, families=tuple(families))

    def check(self, moments: DocumentMoments, contrasts: Collection[tuple[str, str]]) -> None:
        """Check that every member of a family can be estimated.

        Raises:
            InputError: a member does not exist, or its contrast (baseline, action) is not among those given.

        """
        for family in self.families:
            for endpoint in family.endpoints:
                endpoint.check(moments.actions, moments.stratum_names, moments.windows)
                if endpoint.baseline is not None and (endpoint.baseline, endpoint.action) not in contrasts:
                    where = f"endpoint {endpoint} is in family '{family.name}'"
                    raise InputError(f"{where} but its contrast is not asked for")

    def is_prespecified(self, action: str | None) -> bool:
        """Whether an action was fixed before the first evaluation event; no action (None) always was."""
        return self.prespecified is None or action is None or action in self.prespecified


def planned_status(seen: tuple[str, ...], action: str, baseline: str | None) -> str:
    """The status of what was planned of an action, or of its contrast with a baseline."""
    return SEEN if action in seen or baseline in seen else PRESPECIFIED


@dataclass(frozen=True, eq=False)
class Estimates:
    """Estimates as columns of equal length, in the ``results`` table's names and types, null as None.

    Columns: stratum, action, baseline, quantity, x, estimate, low, high, level, draws, documents, family, status,
    interval, clusters, estimate_reduced, low_reduced, high_reduced. The caller adds the study, the model, the split and
    the versions.
    """

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    @classmethod
    def join(cls, parts: Sequence[Estimates]) -> Estimates:
        """Put estimates below each other."""
        return cls({name: [value for part in parts for value in part.columns[name]] for name in COLUMNS})

    def __len__(self) -> int:
        return len(self.columns["quantity"])

    def with_reduced(self, reduced: Estimates) -> Estimates:
        """Put reduced estimates, given as estimates, beside those of the same numbers that are defined themselves."""
        numbers = zip(*(reduced.columns[name] for name in ("estimate", "low", "high")), strict=True)
        found, none = dict(zip(reduced._keys(), numbers, strict=True)), (None, None, None)
        own = zip(self._keys(), self.columns["estimate"], strict=True)
        beside = [none if estimate is None else found.get(key, none) for key, estimate in own]
        columns = {name: [row[place] for row in beside] for place, name in enumerate(REDUCED_COLUMNS)}
        return Estimates({**self.columns, **columns})

    def _keys(self) -> Iterator[tuple[Any, ...]]:
        names = ("quantity", "action", "baseline", "stratum", "x")
        return zip(*(self.columns[name] for name in names), strict=True)

    def row(self, endpoint: Endpoint) -> dict[str, Any]:
        """Return one row by its endpoint.

        Raises:
            InputError: there is no such row; the message names the nearest quantity.

        """
        columns = self.columns
        for i, key in enumerate(self._keys()):
            if Endpoint(*key) == endpoint:
                return {name: values[i] for name, values in columns.items()}
        raise InputError(f"no estimate of {endpoint}; {nearest(endpoint.quantity, set(columns['quantity']))}")


@dataclass(frozen=True, eq=False)
class Resampled:
    """What the intervals of one quantity are made from.

    Attributes:
        estimates: float64 [rows, subjects, X].
        draws: the quantity of every draw, [draws, rows, subjects, X].
        errors: standard errors of the estimates; None for percentiles.
        distances: t* of every draw; None for percentiles.

    """

    estimates: Float
    draws: Float
    errors: Float | None = None
    distances: Float | None = None


def summarize(
    moments: DocumentMoments,
    resampled: Mapping[str, Resampled],
    request: Request,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> Estimates:
    """Turn draws and point estimates into rows with intervals; rows over no document at all are left out.

    ``resampled`` is by quantity. ``pairs`` are the (baseline, action) of each contrast; None for all.

    Raises:
        InputError: a member of a family does not exist.

    """
    moments = moments.in_canonical_order()
    pooling = Pooling.of(moments, pairs)
    request.check(moments, pooling.pairs)
    families = {endpoint: family for family in request.families for endpoint in family.endpoints}
    blocks = ClusterBlocks(pooling)
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for name, own in resampled.items():
        quantity = quantity_named(name)
        documents, (clusters, sets) = pooling.counts_of(quantity), blocks.counts_of(quantity)
        cells, keys = [], []
        for row, stratum in enumerate(pooling.rows):
            for subject, (baseline, action) in enumerate(pooling.subjects(quantity)):
                for place, x in enumerate(quantity.x(moments.windows)):
                    if documents[row, subject]:
                        cells.append((row, subject, place))
                        keys.append(Endpoint(name, action, baseline, stratum, x))
        if not cells:
            continue
        where = tuple(np.array(cells).T)
        levels = np.array([families[key].level if key in families else request.level for key in keys])
        estimate = own.estimates[where]
        # Where every cell has documents, which is the rule, the cells are all of the sample, in its order.
        chosen = (slice(None), *where)
        draws = own.draws.reshape(len(own.draws), -1) if documents.all() else own.draws[chosen]
        counted = clusters[where[:2]]
        if own.errors is None or own.distances is None:
            low, high = percentile_intervals(draws, levels)
            methods = np.full(len(keys), PERCENTILE)
        else:
            distances = own.distances.reshape(draws.shape) if documents.all() else own.distances[chosen]
            given = Studentized(estimate, own.errors[where], draws, distances)
            between = quantity.range.between(moments.windows.horizon)
            low, high, methods = studentized_intervals(given, levels, counted, sets[where[:2]], between)
        # No interval around an estimate that is itself undefined.
        low, high = np.where(np.isnan(estimate), np.nan, low), np.where(np.isnan(estimate), np.nan, high)
        columns["stratum"] += [key.stratum for key in keys]
        columns["action"] += [key.action for key in keys]
        columns["baseline"] += [key.baseline for key in keys]
        columns["quantity"] += [name] * len(keys)
        columns["x"] += [key.x for key in keys]
        columns["estimate"] += nullable(estimate)
        columns["low"] += nullable(low)
        columns["high"] += nullable(high)
        columns["level"] += levels.tolist()
        columns["draws"] += [len(own.draws)] * len(keys)
        columns["documents"] += documents[where[:2]].tolist()
        columns["family"] += [families[key].name if key in families else None for key in keys]
        columns["status"] += [
            planned_status(request.seen, key.action, key.baseline) if key in families else EXPLORATORY for key in keys
        ]
        columns["interval"] += methods.tolist()
        columns["clusters"] += counted.tolist()
        for column in REDUCED_COLUMNS:
            columns[column] += [None] * len(keys)
    return Estimates(columns)


@dataclass(frozen=True, eq=False)
class Studentized:
    """Estimates [N], their standard errors [N], and the value and t* of every draw, [draws, N]."""

    estimates: Float
    errors: Float
    draws: Float
    distances: Float


def studentized_intervals(
    given: Studentized, levels: Float, clusters: NDArray[np.int64], strata: NDArray[np.int64], between: Between
) -> tuple[Float, Float, NDArray[np.str_]]:
    """Studentized intervals of many numbers, or expanded percentiles where those are not defined.

    They are not defined where the standard error of the estimate, or of more than 1% of the draws, vanishes, where so
    many t* are undefined that they could move an end, and over fewer than five clusters. Nor are they of numbers that
    may lie anywhere: these are ratios whose denominator can be 0, which have no variance, and a standard error that is
    linear in the moments says little of them. Ends are cut to the range.

    Args:
        given: the numbers and their draws.
        levels: the level of each, [N].
        clusters: how many clusters are behind each, [N].
        strata: in how many strata these are drawn, sets of strata that share clusters counted once, [N].
        between: which ends the numbers lie.

    Returns:
        The lower and the upper ends, [N], NaN where draws are undefined as in ``percentile_intervals``; and the method.

    """
    low, high = percentile_intervals(given.distances, levels)
    with np.errstate(invalid="ignore"):
        low, high = given.estimates - high * given.errors, given.estimates - low * given.errors
    vanishing = np.isnan(given.distances).sum(axis=0) - np.isnan(given.draws).sum(axis=0)
    expanded = (
        ~((given.errors > between.resolution) & between.bounded)
        | (vanishing > _VANISHING * len(given.draws))
        | (clusters < _FEWEST_CLUSTERS)
        | np.isnan(low)
    )
    if expanded.any():
        own = given.draws if expanded.all() else given.draws[:, expanded]
        low[expanded], high[expanded] = expanded_intervals(own, levels[expanded], clusters[expanded], strata[expanded])
    methods = np.where(expanded, EXPANDED, STUDENTIZED)
    return np.clip(low, between.low, between.high), np.clip(high, between.low, between.high), methods


def expanded_intervals(
    sample: Float, levels: Float, clusters: NDArray[np.int64], strata: NDArray[np.int64]
) -> tuple[Float, Float]:
    """Percentile intervals of many numbers, at wider percentiles for few clusters (Hesterberg 2015).

    With n clusters in S strata and t the (1 - level) / 2 quantile of Student's law with n - S degrees of freedom, the
    lower percentile is Phi(sqrt(n / (n - 1)) t). There is no interval without a degree of freedom.

    Args:
        sample: the draws, [draws, N].
        levels: [N].
        clusters: n, [N].
        strata: S, [N].

    """
    low, high = percentile_intervals(sample, 1 - 2 * expanded_tails(levels, clusters, strata))
    return np.where(clusters > strata, low, np.nan), np.where(clusters > strata, high, np.nan)


def expanded_tails(levels: Float, clusters: NDArray[np.int64], strata: NDArray[np.int64]) -> Float:
    """The lower percentiles of ``expanded_intervals``, as fractions, [N]; arguments are those that it takes."""
    free = np.maximum(clusters - strata, 1)
    tails: Float = ndtr(np.sqrt(clusters / np.maximum(clusters - 1, 1)) * stdtrit(free, (1 - levels) / 2))
    return tails


def percentile_intervals(sample: Float, levels: Float) -> tuple[Float, Float]:
    """Percentile intervals of many numbers: ``sample`` [draws, N], ``levels`` [N]; returns low and high, [N].

    Ends are the (1 - level) / 2 and (1 + level) / 2 quantiles of the defined draws, linearly interpolated between order
    statistics (numpy's default, and scipy.stats.bootstrap's method='percentile'). Undefined draws could lie anywhere:
    once they are more than the (1 - level) / 2 of one tail they could move an end without bound, and both ends are NaN.
    """
    low, high = np.full(levels.shape, np.nan), np.full(levels.shape, np.nan)
    for first in range(0, len(levels), _COLUMNS_AT_ONCE):
        part = slice(first, first + _COLUMNS_AT_ONCE)
        columns = sample[:, part]
        ordered = np.empty(columns.shape[::-1])
        for draw in range(0, len(columns), _DRAWS_AT_ONCE):
            ordered[:, draw : draw + _DRAWS_AT_ONCE] = columns[draw : draw + _DRAWS_AT_ONCE].T
        ordered.sort(axis=1)  # NaN comes last
        defined = len(sample) - np.isnan(ordered).sum(axis=1)
        tail = (1 - levels[part]) / 2
        enough = (len(sample) - defined <= tail * len(sample)) & (defined > 0)
        low[part] = np.where(enough, _quantile(ordered, defined, tail), np.nan)
        high[part] = np.where(enough, _quantile(ordered, defined, 1 - tail), np.nan)
    return low, high


def _quantile(ordered: Float, defined: Any, probability: Float) -> Float:
    position = probability * np.maximum(defined - 1, 0)
    below = np.floor(position).astype(np.intp)
    above = np.minimum(below + 1, np.maximum(defined - 1, 0))
    rows = np.arange(len(ordered))
    left, right, fraction = ordered[rows, below], ordered[rows, above], position - below
    # Interpolated from the nearer end, so that equal neighbours give exactly their value.
    inner: Float = np.where(fraction < 0.5, left + (right - left) * fraction, right - (right - left) * (1 - fraction))
    return inner


def nullable(values: Float) -> list[float | None]:
    """NaN as None: undefined is null in the store."""
    return [None if np.isnan(value) else value for value in values.tolist()]
