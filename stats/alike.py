"""How many documents have nearly equal values of a quantity, and how far off the others are (``docs/intervals.md``).

``kvdrift.stats.ends`` makes intervals from this. A ratio of moments counts as the mean of the documents' own ratios,
weighted by their denominators, which ``Quantity.per`` returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvdrift.stats.clusters import effective, ordered_sum, over_clusters
from kvdrift.stats.ends import MOST_UNLIKE, Likeness
from kvdrift.stats.moments import Float
from kvdrift.stats.pooling import Pooling, evaluate
from kvdrift.stats.quantities import quantity_named
from kvdrift.stats.registry import Pooled, Quantity


def alike_documents(pooling: Pooling, quantity: Quantity, within: float = 0.0) -> Likeness:
    """Measure how alike the documents of a pooling are in a quantity, in arrays [rows, subjects, X].

    Rows are ``pooled`` and the strata; subjects are the actions or pairs; X is 1 for a scalar quantity. The documents
    of the pooling must be in canonical order. A document is alike if its value differs by at most ``within`` from the
    median of its stratum, in the quantity's unit; 0 stands for 1e-12 of the quantity's range.
    """
    sides = pooling.sides(quantity)
    direct = _Values(pooling, quantity, sides).likeness(within)
    base = None if quantity.difference_of is None else quantity_named(quantity.difference_of)
    if base is None or base.per is None:
        return direct
    first, second = (_Values(pooling, base, (side,)).likeness(within) for side in sides)
    return _either(direct, first, second)


def _either(direct: Likeness, first: Likeness, second: Likeness) -> Likeness:
    """Return the likeness of a difference of ratios.

    ``direct`` is the likeness of the documents' differences, ``first`` and ``second`` are those of the two ratios. The
    result is ``direct``, or is made from ``first`` and ``second`` where ``direct`` has more than ``MOST_UNLIKE`` unlike
    clusters and the two together do not.
    """
    use = (direct.unlike > MOST_UNLIKE) & (first.unlike + second.unlike <= MOST_UNLIKE)

    def chosen(both: Float, apart: Float) -> Float:
        value: Float = np.where(use, apart, both)
        return value

    return Likeness(
        chosen(direct.value, second.value - first.value),
        chosen(direct.spread, np.hypot(first.spread, second.spread)),
        chosen(direct.unlike, first.unlike + second.unlike),
        chosen(direct.clusters, np.minimum(first.clusters, second.clusters)),
        chosen(direct.farthest, np.maximum(first.farthest, second.farthest)),
        first.unbounded | second.unbounded,
    )


class _Values:
    """The value and the weight of each document for a quantity, [D, subjects, X]; the weight is 0 without a value."""

    def __init__(self, pooling: Pooling, quantity: Quantity, sides: Sequence[tuple[int, ...]]) -> None:
        moments = pooling.moments
        self._pooling = pooling
        self._range = quantity.range.between(moments.windows.horizon)
        profiles = moments.profiles
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

    def likeness(self, within: float) -> Likeness:
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
        return Likeness(*(np.stack(parts) for parts in zip(*rows, strict=True)))

    def _row(
        self, documents: NDArray[np.intp], middle: Float, distance: Float, within: float, *, exact: bool
    ) -> tuple[Float | NDArray[np.bool_], ...]:
        """Return the fields of ``Likeness`` for one row, [subjects, X] each.

        ``documents`` are the row's documents. ``middle`` and ``distance`` have, for every document of the pooling,
        the median of its stratum and how far its value is from that. With ``exact`` the value of an alike document
        counts as the median of its stratum.
        """
        _, cluster_of = np.unique(self._pooling.moments.clusters[documents], return_inverse=True)
        weights, away = self.weights[documents], distance[documents]
        unlike = away > within
        sums = _over_clusters(weights, cluster_of)
        differing = (_over_clusters(unlike.astype(np.float64), cluster_of) > 0).sum(axis=0)
        known = (sums > 0).sum(axis=0)
        alike_weights = np.where(unlike, 0.0, weights)
        total = ordered_sum(alike_weights)
        values = np.nan_to_num(middle[documents] if exact else self.values[documents])
        with np.errstate(invalid="ignore", divide="ignore"):
            value = ordered_sum(alike_weights * values) / total
            spread = np.sqrt(ordered_sum(alike_weights**2 * (values - value) ** 2)) / total
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
    middle: Float = np.take_along_axis(ordered, place[None], axis=0)[0]
    return middle


def _over_clusters(values: Float, cluster_of: NDArray[np.intp]) -> Float:
    clusters = int(cluster_of.max(initial=-1)) + 1
    return values if clusters == len(values) else over_clusters(values, cluster_of, clusters)
