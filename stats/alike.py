"""Bounds on unseen documents if the sampled documents are all alike (definitions, "Intervals", alike documents).

Every resample of documents with one value has that value, so a bootstrap knows nothing of documents that the sample
lacks. But the sample bounds the share of such documents: if j of n clusters are unlike the others, the share is at most
the Clopper-Pearson bound. A mean then lies between the value of the alike documents and the value with that share of
unlike documents.

A ratio of moments is a mean over documents too, with their denominators as weights; ``Quantity.per`` names these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, stdtrit

from kvdrift.stats.linearization.cluster_blocks import effective
from kvdrift.stats.linearization.ordered_sums import ordered_sum
from kvdrift.stats.moments import Float
from kvdrift.stats.pooling import Pooling, evaluate
from kvdrift.stats.quantities import quantity_named
from kvdrift.stats.registry import Between, Pooled, Quantity

MOST_UNLIKE = 4
"""Clusters that may differ from all others; where more do, resamples show how much documents vary."""


@dataclass(frozen=True, eq=False)
class Alike:
    """The likeness of the documents behind some numbers; arrays of one shape."""

    value: Float  # the number over the alike documents alone; NaN if no documents are alike
    spread: Float  # the standard error of ``value``; 0 if the alike documents are equal
    unlike: Float  # j, how many clusters have unlike documents; above ``MOST_UNLIKE`` the rule does not apply
    clusters: Float  # n, the effective clusters, by the weights of their documents
    farthest: Float  # the largest distance of an unlike document from the others of its stratum
    # whether a ratio's denominator may be 0, so that the number may be anything in its range
    unbounded: NDArray[np.bool_]

    def of(self, where: tuple[Any, ...]) -> Alike:
        """Return some of the numbers, chosen by an index of arrays."""
        return Alike(
            self.value[where], self.spread[where], self.unlike[where], self.clusters[where], self.farthest[where],
            self.unbounded[where],
        )  # fmt: skip

    @property
    def turned(self) -> Alike:
        """Return the likeness for the negated numbers."""
        return replace(self, value=-self.value)

    def ends(self, levels: Float, between: Between) -> tuple[Float, Float]:
        """Return the interval by the rule, for levels in the numbers' shape; NaN if the rule does not apply."""
        if not between.bounded:
            return np.full(levels.shape, np.nan), np.full(levels.shape, np.nan)
        low, high = _ends(self, levels, between)
        says = (self.unlike <= MOST_UNLIKE) & ~np.isnan(low)
        low = np.where(self.unbounded, between.low, np.where(says, low, np.nan))
        high = np.where(self.unbounded, between.high, np.where(says, high, np.nan))
        return low, high


def _ends(alike: Alike, levels: Float, between: Between) -> tuple[Float, Float]:
    """Return the interval for any number of unlike clusters."""
    share = most_unlike(alike.unlike, alike.clusters, levels)
    seen = alike.unlike > 0
    lowest = np.where(seen, np.maximum(alike.value - alike.farthest, between.low), between.low)
    highest = np.where(seen, np.minimum(alike.value + alike.farthest, between.high), between.high)
    with np.errstate(invalid="ignore"):
        student = -stdtrit(np.maximum(alike.clusters - 1, 1), (1 - levels) / 2)
        noise = np.where(alike.spread > 0, student * alike.spread, 0.0)
        low = alike.value - share * (alike.value - lowest) - noise
        high = alike.value + share * (highest - alike.value) + noise
    return np.maximum(low, between.low), np.minimum(high, between.high)


def most_unlike(unlike: Float, clusters: Float, levels: Float) -> Float:
    """Return pi: the Clopper-Pearson upper bound, at (1 + level) / 2, of a share seen in ``unlike`` of n clusters."""
    rest = clusters - unlike
    with np.errstate(invalid="ignore"):
        share = betaincinv(unlike + 1.0, np.where(rest > 0, rest, np.nan), (1 + levels) / 2)
    found: Float = np.where(rest > 0, share, 1.0)
    return found


def _grown(alike: Alike, factor: float) -> Alike:
    return replace(alike, unlike=alike.unlike * factor, clusters=alike.clusters * factor)


def reach_of(alike: Alike, level: float, between: Between, factor: float) -> float:
    """Return the distance to an interval's farther end with ``factor`` times as many documents of the same likeness."""
    low, high = _ends(_grown(alike, factor), np.array([level]), between)
    return float(max(high[0] - alike.value[0], alike.value[0] - low[0]))


def settling_factor(alike: Alike, level: float, between: Between, allowed: float) -> float | None:
    """Return how many times as many documents would settle an open question, with the same share unlike.

    It is settled if the upper end of the number's interval is below ``allowed``; None if even a thousand times as many
    would not do. The arrays of ``alike`` have one element.
    """
    levels = np.array([level])

    def settles(factor: float) -> bool:
        return bool(_ends(_grown(alike, factor), levels, between)[1][0] < allowed)

    low, high = 1.0, 1000.0
    if not settles(high):
        return None
    while high - low > 0.01 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if settles(middle) else (middle, high)
    return high


def alike_documents(pooling: Pooling, quantity: Quantity, within: float = 0.0) -> Alike:
    """Measure how alike the documents behind a quantity are, in arrays [rows, subjects, X].

    The documents are in their canonical order. A document is alike if it is no more than ``within``, in the quantity's
    unit, from the middle document of its stratum; 0 stands for 1e-12 of the range.
    """
    sides = pooling.sides(quantity)
    found = _Values(pooling, quantity, sides).alike(within)
    base = None if quantity.difference_of is None else quantity_named(quantity.difference_of)
    if base is None or base.per is None:
        return found
    one, other = (_Values(pooling, base, (side,)).alike(within) for side in sides)
    return _either(found, one, other)


def _either(direct: Alike, one: Alike, other: Alike) -> Alike:
    """Return the likeness of a difference of ratios, from documents' differences or, failing that, from both ratios."""
    use = (direct.unlike > MOST_UNLIKE) & (one.unlike + other.unlike <= MOST_UNLIKE)

    def chosen(both: Float, apart: Float) -> Float:
        value: Float = np.where(use, apart, both)
        return value

    return Alike(
        chosen(direct.value, other.value - one.value),
        chosen(direct.spread, np.hypot(one.spread, other.spread)),
        chosen(direct.unlike, one.unlike + other.unlike),
        chosen(direct.clusters, np.minimum(one.clusters, other.clusters)),
        chosen(direct.farthest, np.maximum(one.farthest, other.farthest)),
        one.unbounded | other.unbounded,
    )


class _Values:
    """The documents' own values of a quantity and their weights, [D, subjects, X]; the weight is 0 without a value."""

    def __init__(self, pooling: Pooling, quantity: Quantity, sides: Sequence[tuple[int, ...]]) -> None:
        moments = pooling.moments
        self._pooling = pooling
        self._range = quantity.range.between(moments.windows.horizon)
        profiles = {**moments.positions, **moments.lags}
        read = []
        for side in sides:
            actions = pooling.supports[list(side)]
            scalars = {name: value[:, actions] for name, value in moments.scalars.items()}
            longs = {name: profiles[name][:, actions] for name in quantity.profile}
            read.append(Pooled(scalars, longs, moments.windows))
        with np.errstate(all="ignore"):
            self.values = evaluate(quantity, read)
        masks = pooling.masks[:, list(sides[0])]
        weights = np.zeros(masks.shape)
        for documents in pooling.members:
            count = masks[documents].sum(axis=0)
            weights[documents] = masks[documents] / np.maximum(count, 1)
        self._has = masks[..., None]
        per = quantity.per if quantity.difference_of is None else quantity_named(quantity.difference_of).per
        self._ratio = per is not None
        self.weights = np.broadcast_to(weights[..., None], self.values.shape)
        if per is not None:
            denominators = np.mean([per(side) for side in read], axis=0)
            tail = denominators if denominators.ndim == self.values.ndim else denominators[..., None]
            self.weights = self.weights * np.nan_to_num(tail)
        self.values = np.where(self.weights > 0, self.values, np.nan)
        # A document with an undefined ratio on one side still has the other side's ratio: it is unlike all others.
        self._undefined = np.isnan(self.values) & (self.weights > 0)

    def alike(self, within: float) -> Alike:
        """Measure the likeness of every row: of the strata together, and of each stratum."""
        middle = np.full(self.values.shape, np.nan)
        for documents in self._pooling.members:
            middle[documents] = _middle(self.values[documents])
        distance = np.nan_to_num(np.abs(self.values - middle))
        distance[self._undefined] = self._range.high - self._range.low
        everything = np.arange(len(self.values))
        rows = [
            self._row(documents, middle, distance, within or self._range.resolution, exact=not within)
            for documents in (everything, *self._pooling.members)
        ]
        return Alike(*(np.stack(parts) for parts in zip(*rows, strict=True)))

    def _row(
        self, documents: NDArray[np.intp], middle: Float, distance: Float, within: float, *, exact: bool
    ) -> tuple[Float | NDArray[np.bool_], ...]:
        """Return the fields of ``Alike`` for one row, [subjects, X] each."""
        _, cluster_of = np.unique(self._pooling.moments.clusters[documents], return_inverse=True)
        weights, away = self.weights[documents], distance[documents]
        unlike = away > within
        sums = _over_clusters(weights, cluster_of)
        differing = (_over_clusters(unlike.astype(np.float64), cluster_of) > 0).sum(axis=0)
        known = (sums > 0).sum(axis=0)
        own = np.where(unlike, 0.0, weights)
        total = ordered_sum(own)
        values = np.nan_to_num(middle[documents] if exact else self.values[documents])
        with np.errstate(invalid="ignore", divide="ignore"):
            value = ordered_sum(own * values) / total
            spread = np.sqrt(ordered_sum(own**2 * (values - value) ** 2)) / total
        present = (_over_clusters(np.where(self._has[documents], 1.0, 0.0), cluster_of) > 0).sum(axis=0)
        unbounded = self._ratio & (known <= MOST_UNLIKE) & (known < present)
        says = (2 * differing < known) & (known > 0) & (total > 0)
        return (
            value,
            np.zeros(value.shape) if exact else spread,
            np.where(says, differing, np.inf),
            effective(sums),
            away.max(axis=0, initial=0.0),
            unbounded,
        )


def _middle(values: Float) -> Float:
    """Return the median of the defined values over the first axis; of two middle values the lower."""
    ordered = np.sort(values, axis=0)  # NaN is sorted last
    place = np.maximum((~np.isnan(values)).sum(axis=0) - 1, 0) // 2
    found: Float = np.take_along_axis(ordered, place[None], axis=0)[0]
    return found


def _over_clusters(values: Float, cluster_of: NDArray[np.intp]) -> Float:
    clusters = int(cluster_of.max(initial=-1)) + 1
    if clusters == len(values):
        return values
    total = np.zeros((clusters, *values.shape[1:]))
    np.add.at(total, cluster_of, values)
    return total
