"""Document bootstrap (``docs/intervals.md``): quantities of resampled documents, and estimates with their intervals.

Documents are drawn by ``kvdrift.stats.clusters``, one draw for all actions, strata and quantities: draw i is a function
of (seed, i) and of the set of documents alone, not of their order, nor of the number of draws. On one machine and build
of BLAS, the first draws are the same to the last bit when more draws are made, because matrix products are taken over
the same blocks of draws.

Intervals are at pointwise or family-adjusted levels; ``kvdrift.stats.ends`` computes their ends. If a plan chooses the
paper's method, they are percentiles of the draws.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.errors import InputError, nearest
from kvdrift.stats.alike import alike_documents
from kvdrift.stats.clusters import ClusterBlocks, ClusterDraws
from kvdrift.stats.endpoints import Endpoint, Family
from kvdrift.stats.ends import (
    PERCENTILE,
    STUDENTIZED,
    Likeness,
    Studentized,
    at_least,
    document_intervals,
    percentile_intervals,
)
from kvdrift.stats.moments import DocumentMoments, Float
from kvdrift.stats.pooling import Pooling, evaluate
from kvdrift.stats.quantities import QUANTITIES, quantity_named
from kvdrift.stats.registry import Between, Range
from kvdrift.stats.standard_errors import StandardErrors

# The status of an estimate: planned before its documents' outcomes were known, or after, or not planned.
PRESPECIFIED, SEEN, EXPLORATORY = "prespecified", "seen", "exploratory"

REDUCED_COLUMNS = ("estimate_reduced", "low_reduced", "high_reduced")  # filled by ``Estimates.with_reduced``
COLUMNS = (
    "stratum", "action", "baseline", "quantity", "x", "estimate", "low", "high", "level", "draws", "documents",
    "family", "status", "interval", "clusters", *REDUCED_COLUMNS,
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """The intervals that an analysis requests.

    The m members of a family get its level 1 - alpha / m, its name and the status ``prespecified``; all other rows get
    the pointwise ``level`` and the status ``exploratory``.
    ``prespecified`` are the actions fixed before the first evaluation event; None stands for all actions. Only these
    actions can be in a family. ``seen`` are the actions whose outcomes were known when they were planned: members of a
    family with such an action have the status ``seen`` instead.
    ``interval`` is the method: studentized, or percentiles. ``alike_within`` is the largest distance of documents that
    count as alike, in the quantity's unit; if given, percentile intervals are widened for alike documents too.
    """

    level: float = 0.95
    families: tuple[Family, ...] = ()
    prespecified: tuple[str, ...] | None = None
    seen: tuple[str, ...] = ()
    interval: str = STUDENTIZED
    alike_within: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise InputError(f"level {self.level} is not between 0 and 1; 0.95 is usual")
        if self.interval not in (STUDENTIZED, PERCENTILE):
            raise InputError(f"interval '{self.interval}' is neither '{STUDENTIZED}' nor '{PERCENTILE}'")
        members = [endpoint for family in self.families for endpoint in family.endpoints]
        for endpoint in members:
            if members.count(endpoint) > 1:
                raise InputError(f"endpoint {endpoint} is in two families: its interval can have one level only")
            if not (self.is_prespecified(endpoint.action) and self.is_prespecified(endpoint.baseline)):
                raise InputError(
                    f"endpoint {endpoint} is in a prespecified family, but its action or its baseline is exploratory"
                )

    def of(self, actions: Collection[str], contrasts: Collection[tuple[str, str]]) -> Request:
        """Restrict the request to some actions and contrasts (baseline, action); families keep their levels."""
        families = []
        for family in self.families:
            members = tuple(
                endpoint for endpoint in family.endpoints
                if (
                    endpoint.action in actions if endpoint.baseline is None
                    else (endpoint.baseline, endpoint.action) in contrasts
                )
            )  # fmt: skip
            if members:
                families.append(replace(family, endpoints=members, size=family.size or len(family.endpoints)))
        return replace(self, families=tuple(families))

    def check(self, moments: DocumentMoments, contrasts: Collection[tuple[str, str]]) -> None:
        """Check that every member of a family can be estimated."""
        for family in self.families:
            for endpoint in family.endpoints:
                endpoint.check(moments.actions, moments.stratum_names, moments.windows)
                if endpoint.baseline is not None and (endpoint.baseline, endpoint.action) not in contrasts:
                    where = f"endpoint {endpoint} is in family '{family.name}'"
                    raise InputError(f"{where} but its contrast is not requested: add (baseline, action) to pairs")

    def is_prespecified(self, action: str | None) -> bool:
        """Tell whether an action was fixed before the first evaluation event; True for None (no baseline)."""
        return self.prespecified is None or action is None or action in self.prespecified


def planned_status(seen: tuple[str, ...], action: str, baseline: str | None) -> str:
    """Return the status of a planned estimate of an action, or of its contrast with a baseline.

    It is ``seen`` if the action or the baseline is among ``seen``, whose outcomes were known before, else
    ``prespecified``.
    """
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
        """Concatenate estimates."""
        return cls({name: [value for part in parts for value in part.columns[name]] for name in COLUMNS})

    def __len__(self) -> int:
        return len(self.columns["quantity"])

    def with_reduced(self, reduced: Estimates) -> Estimates:
        """Return these estimates, with the reduced estimate of each row in the columns ``REDUCED_COLUMNS``.

        A row's reduced estimate is the row of ``reduced`` with the same quantity, action, baseline, stratum and x. The
        columns are null where the estimate itself is undefined, or where ``reduced`` has no such row.
        """
        numbers = zip(*(reduced.columns[name] for name in ("estimate", "low", "high")), strict=True)
        reduced_of, none = dict(zip(reduced._keys(), numbers, strict=True)), (None, None, None)
        estimates = zip(self._keys(), self.columns["estimate"], strict=True)
        beside = [none if estimate is None else reduced_of.get(key, none) for key, estimate in estimates]
        columns = {name: [row[place] for row in beside] for place, name in enumerate(REDUCED_COLUMNS)}
        return Estimates({**self.columns, **columns})

    def _keys(self) -> Iterator[tuple[Any, ...]]:
        names = ("quantity", "action", "baseline", "stratum", "x")
        return zip(*(self.columns[name] for name in names), strict=True)

    def row(self, endpoint: Endpoint) -> dict[str, Any]:
        """Return the row of an endpoint, values by column."""
        columns = self.columns
        for i, key in enumerate(self._keys()):
            if Endpoint(*key) == endpoint:
                return {name: values[i] for name, values in columns.items()}
        raise InputError(f"no estimate of {endpoint}; {nearest(endpoint.quantity, set(columns['quantity']))}")


def summarize(
    moments: DocumentMoments,
    resampled: Mapping[str, Studentized],
    request: Request,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> Estimates:
    """Turn draws and point estimates into rows with intervals; rows without documents are left out.

    ``resampled`` has each quantity's estimates and draws by its name. ``pairs`` are the (baseline, action) of each
    contrast; None for all ordered pairs of actions.
    """
    moments = moments.in_canonical_order()
    pooling = Pooling.of(moments, pairs)
    request.check(moments, pooling.pairs)
    families = {endpoint: family for family in request.families for endpoint in family.endpoints}
    blocks = ClusterBlocks(pooling)
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for name, sample in resampled.items():
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
        estimate = sample.estimates[where]
        between = quantity.range.between(moments.windows.horizon)
        counted = clusters[where[:2]]
        likeness = None
        if sample.errors.size or request.alike_within is not None:
            likeness = alike_documents(pooling, quantity, request.alike_within or 0.0).of(where)
        low, high, methods = _intervals(sample.of(where), levels, counted, sets[where[:2]], between, likeness)
        # An undefined estimate has no interval.
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
        columns["draws"] += [len(sample.draws)] * len(keys)
        columns["documents"] += documents[where[:2]].tolist()
        columns["family"] += [families[key].name if key in families else None for key in keys]
        columns["status"] += [
            planned_status(request.seen, key.action, key.baseline) if key in families else EXPLORATORY for key in keys
        ]
        columns["interval"] += methods.tolist()
        columns["clusters"] += whole_clusters(counted).tolist()
        for column in REDUCED_COLUMNS:
            columns[column] += [None] * len(keys)
    return Estimates(columns)


def _intervals(
    sample: Studentized,
    levels: Float,
    clusters: Float,
    strata: NDArray[np.int64],
    between: Between,
    likeness: Likeness | None,
) -> tuple[Float, Float, NDArray[np.str_]]:
    """Return the intervals of many numbers: lower ends, upper ends, and methods.

    The arguments are those of ``document_intervals``; without ``likeness`` the intervals are plain percentiles.
    """
    if sample.errors.size and likeness is not None:
        return document_intervals(sample, levels, clusters, strata, between, likeness)
    low, high = percentile_intervals(sample.draws, levels)
    methods = np.full(len(levels), PERCENTILE)
    if likeness is None:
        return low, high, methods
    return at_least(low, high, methods, sample.estimates, levels, clusters, strata, between, likeness)


def whole_clusters(effective: Float) -> NDArray[np.int64]:
    """Round effective numbers of clusters down to whole numbers.

    A number that is less than 1e-9 below a whole number counts as that number, since it may have rounding errors.
    """
    return np.floor(effective + 1e-9).astype(np.int64)


def nullable(values: Float) -> list[float | None]:
    """Replace NaN by None, since an undefined number is null in the store."""
    return [None if np.isnan(value) else value for value in values.tolist()]


BLOCK = 256  # draws per matrix product; it decides the last bits of results, so it is no tuning knob
_GROUP_BYTES = 400 * 2**20  # bytes of the draws of one group of quantities that `estimate` holds at once


def resample(
    moments: DocumentMoments, quantities: Sequence[str], *, seed: int, draws: int,
    pairs: Sequence[tuple[str, str]] | None = None, studentized: bool = False,
) -> dict[str, Studentized]:  # fmt: skip
    """Compute quantities' estimates, and their values in the bootstrap draws 0 to ``draws`` - 1, by name.

    Estimates are float64 [rows, subjects, X], draws [draws, rows, subjects, X]. Rows are ``pooled`` and the strata in
    sorted order; subjects are the actions, or the (baseline, action) pairs; X is 1 for a scalar. A draw is NaN where it
    leaves the quantity undefined. With ``studentized`` there are also standard errors, and each draw's distance t*
    from the estimate, which is NaN also if the draw's standard error vanishes (``docs/intervals.md``). ``pairs`` are
    the (baseline, action) of each contrast; None for all ordered pairs of actions.
    """
    moments = moments.in_canonical_order()
    pooling = Pooling.of(moments, pairs)
    chosen = [quantity_named(name) for name in quantities]
    clusters, blocks = ClusterDraws(moments.strata, moments.clusters), ClusterBlocks(pooling)
    estimates = observed(moments, quantities, pairs)
    errors = observed_errors(moments, quantities, pairs) if studentized else {}
    errors_of = {quantity.name: StandardErrors(blocks, quantity) for quantity in chosen if quantity.smooth and errors}
    sample = {}
    for name, estimate in estimates.items():  # filled in place, since concatenating blocks would hold everything twice
        made = np.empty((draws, *estimate.shape))
        distances = np.full_like(made, np.nan) if studentized else np.empty((0, 0))
        sample[name] = Studentized(estimate, errors.get(name, np.empty((0, 0))), made, distances)
    for first in range(0, draws, BLOCK):
        # A block is computed whole even if only a part is needed: for another number of rows BLAS may round a product's
        # last bit otherwise.
        counts = clusters.counts(seed, first, first + BLOCK)
        place, kept = slice(first, first + BLOCK), slice(min(BLOCK, draws - first))
        pooled = pooling.pool(chosen, counts)
        for quantity in chosen:
            own = sample[quantity.name]
            value = evaluate(quantity, pooled[quantity.name])
            if not quantity.smooth and quantity.range is Range.POSITION:  # a position beyond H: not reached in the draw
                value = np.where(np.isnan(value), moments.windows.horizon, value)
            own.draws[place] = value[kept]
            if quantity.name in errors_of:
                error = errors_of[quantity.name](pooled[quantity.name], counts)[kept]
                error[error <= quantity.range.between(moments.windows.horizon).resolution] = np.nan
                np.subtract(value[kept], own.estimates, out=own.distances[place])
                own.distances[place] /= error
    return sample


def groups(
    moments: DocumentMoments,
    draws: int,
    quantities: Sequence[str] | None = None,
    pairs: Sequence[tuple[str, str]] | None = None,
    *,
    studentized: bool = False,
) -> tuple[tuple[str, ...], ...]:
    """Split quantities into groups that are computed separately, so that the draws of a group fit into memory.

    ``quantities`` None stands for every quantity whose moments are given. With ``studentized`` the groups leave room
    for the distance t* of every draw. A profile whose draws do not fit is a group by itself.
    """
    if quantities is None:
        known = set(moments.profiles)
        quantities = [name for name, quantity in QUANTITIES.items() if known.issuperset(quantity.profile)]
    pooling = Pooling.of(moments, pairs)
    result: list[tuple[str, ...]] = []
    held = 0
    for name in quantities:
        quantity = quantity_named(name)
        cells = len(pooling.rows) * len(pooling.subjects(quantity)) * len(quantity.x(moments.windows))
        size = draws * cells * np.dtype(np.float64).itemsize * (2 if studentized else 1)
        if result and held + size <= _GROUP_BYTES:
            result[-1] = (*result[-1], name)
            held += size
        else:
            result.append((name,))
            held = size
    return tuple(result)


def observed(
    moments: DocumentMoments, quantities: Sequence[str], pairs: Sequence[tuple[str, str]] | None = None
) -> dict[str, Float]:
    """Compute point estimates by name, each document counted once: float64 [rows, subjects, X].

    The axes are those of ``resample``.
    """
    moments = moments.in_canonical_order()
    chosen = [quantity_named(name) for name in quantities]
    values = Pooling.of(moments, pairs).evaluate(chosen, np.ones((1, len(moments.documents))))
    return {name: value[0] for name, value in values.items()}


def observed_errors(
    moments: DocumentMoments, quantities: Sequence[str], pairs: Sequence[tuple[str, str]] | None = None
) -> dict[str, Float]:
    """Compute the standard errors of the estimates: by name, in the shapes of ``observed``.

    A quantity that is not smooth has no standard error; its values are 0.
    """
    moments = moments.in_canonical_order()
    chosen = [quantity_named(name) for name in quantities]
    pooling, counts = Pooling.of(moments, pairs), np.ones((1, len(moments.documents)))
    pooled, blocks = pooling.pool(chosen, counts), ClusterBlocks(pooling)
    return {
        quantity.name: StandardErrors(blocks, quantity)(pooled[quantity.name], counts)[0]
        if quantity.smooth
        else np.zeros(evaluate(quantity, pooled[quantity.name]).shape[1:])
        for quantity in chosen
    }


def estimate(
    moments: DocumentMoments,
    *,
    draws: int,
    seed: int,
    request: Request | None = None,
    quantities: Sequence[str] | None = None,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> Estimates:
    """Estimate quantities with intervals, as columns of the ``results`` table.

    Quantities (None: every quantity whose moments are given) are taken group by group, so that only one group's draws
    are held at once. By default all estimates are exploratory. ``pairs`` are the (baseline, action) of each contrast;
    None for all ordered pairs of actions.
    """
    request = request or Request()
    parts = []
    studentized = request.interval == STUDENTIZED
    for names in groups(moments, draws, quantities, pairs, studentized=studentized):
        samples = resample(moments, names, seed=seed, draws=draws, pairs=pairs, studentized=studentized)
        parts.append(summarize(moments, samples, request, pairs))
    return Estimates.join(parts)
