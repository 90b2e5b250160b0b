"""Intervals of bootstrap draws, at pointwise or family-adjusted levels, as columns of ``results``.

``kvdrift.stats.ends`` computes the ends. If a plan asks for the paper's method, the intervals are percentiles of the
draws.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.errors import InputError, nearest
from kvdrift.stats.alike import alike_documents
from kvdrift.stats.clusters import ClusterBlocks
from kvdrift.stats.endpoints import Endpoint, Family
from kvdrift.stats.ends import (
    PERCENTILE,
    STUDENTIZED,
    Alike,
    Studentized,
    at_least,
    document_intervals,
    percentile_intervals,
)
from kvdrift.stats.moments import DocumentMoments, Float
from kvdrift.stats.pooling import Pooling
from kvdrift.stats.quantities import quantity_named
from kvdrift.stats.registry import Between

# The status of an estimate: planned before its documents' outcomes were known, or after, or not planned.
PRESPECIFIED, SEEN, EXPLORATORY = "prespecified", "seen", "exploratory"

REDUCED_COLUMNS = ("estimate_reduced", "low_reduced", "high_reduced")  # filled by ``Estimates.with_reduced``
COLUMNS = (
    "stratum", "action", "baseline", "quantity", "x", "estimate", "low", "high", "level", "draws", "documents",
    "family", "status", "interval", "clusters", *REDUCED_COLUMNS,
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """The intervals that an analysis asks for.

    Members of a family get its level 1 - alpha / m, its name and the status ``prespecified``; all other rows get the
    pointwise ``level`` and are ``exploratory``.
    ``prespecified`` are the actions fixed before the first evaluation event, None for all: no other action can be in
    a family. Members with an action among ``seen``, whose outcomes were known before, have the status ``seen`` instead.
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
        """Restrict the request to some actions and contrasts (baseline, action); families keep their levels."""
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
        """Check that every member of a family can be estimated."""
        for family in self.families:
            for endpoint in family.endpoints:
                endpoint.check(moments.actions, moments.stratum_names, moments.windows)
                if endpoint.baseline is not None and (endpoint.baseline, endpoint.action) not in contrasts:
                    where = f"endpoint {endpoint} is in family '{family.name}'"
                    raise InputError(f"{where} but its contrast is not asked for")

    def is_prespecified(self, action: str | None) -> bool:
        """Tell whether an action was fixed before the first evaluation event; None, no action, always was."""
        return self.prespecified is None or action is None or action in self.prespecified


def planned_status(seen: tuple[str, ...], action: str, baseline: str | None) -> str:
    """Return the status of a planned estimate of an action, or of its contrast with a baseline."""
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
        """Add reduced estimates to the estimates of the same numbers; undefined estimates get none."""
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
        """Return one row by its endpoint."""
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

    ``resampled`` is by quantity. ``pairs`` are the (baseline, action) of each contrast; None for all.
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
        between = quantity.range.between(moments.windows.horizon)
        counted = clusters[where[:2]]
        alike = None
        if own.errors.size or request.alike_within is not None:
            alike = alike_documents(pooling, quantity, request.alike_within or 0.0).of(where)
        low, high, methods = _intervals(own.of(where), levels, counted, sets[where[:2]], between, alike)
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
        columns["draws"] += [len(own.draws)] * len(keys)
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
    own: Studentized, levels: Float, clusters: Float, strata: NDArray[np.int64], between: Between, alike: Alike | None
) -> tuple[Float, Float, NDArray[np.str_]]:
    """Return the ends of many numbers, and the method of each; the arguments are those of ``document_intervals``."""
    if own.errors.size and alike is not None:
        return document_intervals(own, levels, clusters, strata, between, alike)
    low, high = percentile_intervals(own.draws, levels)
    methods = np.full(len(levels), PERCENTILE)
    if alike is None:
        return low, high, methods
    return at_least(low, high, methods, own.estimates, levels, clusters, strata, between, alike)


def whole_clusters(effective: Float) -> NDArray[np.int64]:
    """Return effective clusters as whole numbers, rounded down but for rounding errors."""
    return np.floor(effective + 1e-9).astype(np.int64)


def nullable(values: Float) -> list[float | None]:
    """Replace NaN by None, since an undefined number is null in the store."""
    return [None if np.isnan(value) else value for value in values.tolist()]
