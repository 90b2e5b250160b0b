"""Percentile intervals of bootstrap draws, at pointwise or family-adjusted levels, as columns of ``results``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from schema.errors import InputError, nearest
from stats.endpoints import Endpoint, Family
from stats.pooling import Pooling
from stats.quantities import quantity_named

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from stats.moments import DocumentMoments, Float

_COLUMNS_AT_ONCE = 128  # draws of so many numbers are sorted at once: 10 MB at 10,000 draws
_DRAWS_AT_ONCE = 256  # and transposed in tiles of so many draws, which fit the cache (measured: 3 times faster)

# What an estimate is: named by a plan before its documents' outcomes were known, or after, or by none.
PRESPECIFIED, SEEN, EXPLORATORY = "prespecified", "seen", "exploratory"

COLUMNS = (
    "stratum", "action", "baseline", "quantity", "x", "estimate", "low", "high", "level", "draws", "documents",
    "family", "status",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What intervals are wanted.

    Members of a family get its level 1 - alpha / m, its name and the status ``prespecified``; all other rows get the
    pointwise ``level`` and are ``exploratory``.
    ``prespecified`` are the actions fixed before the first evaluation event, None for all: no other action can be in
    a family. Members with an action among ``seen``, whose outcomes were known before, have the status ``seen`` instead.
    """

    level: float = 0.95
    families: tuple[Family, ...] = ()
    prespecified: tuple[str, ...] | None = None
    seen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise InputError(f"level {self.level} is not between 0 and 1")
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

    Columns: stratum, action, baseline, quantity, x, estimate, low, high, level, draws, documents, family, status. The
    caller adds the study, the model, the split and the versions.
    """

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    @classmethod
    def join(cls, parts: Sequence[Estimates]) -> Estimates:
        """Put estimates below each other."""
        return cls({name: [value for part in parts for value in part.columns[name]] for name in COLUMNS})

    def __len__(self) -> int:
        return len(self.columns["quantity"])

    def row(self, endpoint: Endpoint) -> dict[str, Any]:
        """Return one row by its endpoint.

        Raises:
            InputError: there is no such row; the message names the nearest quantity.

        """
        columns = self.columns
        keys = zip(*(columns[name] for name in ("quantity", "action", "baseline", "stratum", "x")), strict=True)
        for i, key in enumerate(keys):
            if Endpoint(*key) == endpoint:
                return {name: values[i] for name, values in columns.items()}
        raise InputError(f"no estimate of {endpoint}; {nearest(endpoint.quantity, set(columns['quantity']))}")


def summarize(
    moments: DocumentMoments,
    draws: Mapping[str, Float],
    estimates: Mapping[str, Float],
    request: Request,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> Estimates:
    """Turn draws and point estimates into rows with intervals; rows over no document at all are left out.

    ``draws`` are quantities by name, float64 [draws, rows, subjects, X], ``estimates`` the same quantities' point
    estimates, float64 [rows, subjects, X]. ``pairs`` are the (baseline, action) of each contrast; None for all.

    Raises:
        InputError: a member of a family does not exist.

    """
    pooling = Pooling.of(moments, pairs)
    request.check(moments, pooling.pairs)
    families = {endpoint: family for family in request.families for endpoint in family.endpoints}
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for name, sample in draws.items():
        quantity = quantity_named(name)
        documents = pooling.counts_of(quantity)
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
        estimate = estimates[name][where]
        # Where every cell has documents, which is the rule, the cells are all of the sample, in its order.
        chosen = sample.reshape(len(sample), -1) if documents.all() else sample[:, *where]
        low, high = percentile_intervals(chosen, levels)
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
        columns["draws"] += [len(sample)] * len(keys)
        columns["documents"] += documents[where[:2]].tolist()
        columns["family"] += [families[key].name if key in families else None for key in keys]
        columns["status"] += [
            planned_status(request.seen, key.action, key.baseline) if key in families else EXPLORATORY for key in keys
        ]
    return Estimates(columns)


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
