"""Derivatives of quantities by pooled moments, and standard errors that follow from them (``docs/intervals.md``).

A quantity is theta = g(M) of pooled moments M. Linearized at M, a cluster c adds u_c, the sum over its documents d of
w_d grad g . (x_d - M_s), with x_d and w_d the document's moments and weight, and M_s the mean of its stratum. SE^2 is
the sum over strata of n / (n - 1) times the squared deviations of u_c, with n clusters in a stratum. That is a
quadratic form of the gradient in second moments of the clusters' totals and sizes. A matrix product gives these second
moments of all draws from their counts, as it gives the moments: nothing here loops over draws or clusters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, pairwise

import numpy as np
from numpy.typing import NDArray

from kvdrift.stats.clusters import Block, ClusterBlocks, over_clusters
from kvdrift.stats.moments import DocumentMoments, Float
from kvdrift.stats.pooling import TILE_COLUMNS, TILE_WORK, Pooling, evaluate
from kvdrift.stats.registry import Array, Feature, Pooled, Quantity

# Complex-step differentiation: f(m + ih) has imaginary part h f'(m) + O(h^3), without cancellation. Quantities are
# rational functions of their moments, so any h whose cube underflows against h gives the derivative to rounding.
STEP = 1e-30


@dataclass(frozen=True)
class _Recorded(Pooled):
    """Pooled moments that record which features are read."""

    seen: dict[Feature, None] = field(default_factory=dict)

    def read(self, feature: Feature) -> Array:
        self.seen[feature] = None
        return super().read(feature)


@dataclass(frozen=True)
class _Stepped(Pooled):
    """Pooled moments with ``STEP`` i added to the feature ``at``, for a derivative by a complex step."""

    at: Feature | None = None

    def read(self, feature: Feature) -> Array:
        value = super().read(feature)
        return value + 1j * STEP if feature == self.at else value


def features_read(quantity: Quantity, moments: DocumentMoments) -> tuple[tuple[int, Feature], ...]:
    """Return the features that a quantity reads, each after the number of its side.

    A contrast has the side 0 for the baseline and 1 for the action; any other quantity has the side 0 alone.
    """
    ones = {name: np.ones(()) for name in moments.scalars}
    profiles = {name: np.ones(value.shape[2:]) for name, value in moments.profiles.items()}
    sides = [_Recorded(ones, profiles, moments.windows) for _ in range(1 if quantity.kind == "action" else 2)]
    quantity.function(*sides)
    return tuple((number, feature) for number, side in enumerate(sides) for feature in side.seen)


def constant_gradient(
    quantity: Quantity, moments: DocumentMoments, read: Sequence[tuple[int, Feature]]
) -> list[Float] | None:
    """Return a linear quantity's derivative by each feature, [1 or X]; None if the quantity is not linear.

    Quantities are rational functions, so a gradient that is equal at two generic points is constant.
    """
    random = np.random.default_rng(0)
    profiles = moments.profiles
    gradients = []
    for _ in range(2):
        scalars = {name: random.uniform(0.1, 0.9) * np.ones(()) for name in moments.scalars}
        longs = {name: random.uniform(0.1, 0.9, size=value.shape[2:]) for name, value in profiles.items()}
        sides = [Pooled(scalars, longs, moments.windows), Pooled(_halved(scalars), _halved(longs), moments.windows)]
        used_sides = sides[: 1 if quantity.kind == "action" else 2]
        gradients.append([derivative(quantity, used_sides, side, feature) for side, feature in read])
    same = all(np.array_equal(first, second) for first, second in zip(*gradients, strict=True))
    return gradients[0] if same else None


def _halved(values: Mapping[str, Array]) -> dict[str, Array]:
    return {name: value / 2 for name, value in values.items()}


def derivative(quantity: Quantity, pooled: Sequence[Pooled], side: int, feature: Feature) -> Float:
    """Return the derivative of a quantity by one feature of one side, at pooled moments, in the shape of the values."""
    stepped = [
        _Stepped(moments.scalars, moments.profiles, moments.windows, moments.sums, feature)
        if number == side
        else moments
        for number, moments in enumerate(pooled)
    ]
    slope: Float = evaluate(quantity, stepped).imag / STEP
    return slope


_ROUNDING = 1e-13  # a variance is 0 if it is below this fraction of the terms whose difference it is

_Covariances = dict[tuple[int, int], "Float"]


class StandardErrors:
    """The standard errors of one quantity for every row and subject, under any weighting.

    The products of the clusters' totals in every block do not depend on the weighting and are computed once. If the
    gradient does not depend on the weighting either, the quantity is linear: each cluster then has one total, u_c
    itself.
    """

    def __init__(self, clusters: ClusterBlocks, quantity: Quantity) -> None:
        self._quantity, pooling = quantity, clusters.pooling
        moments = pooling.moments
        sides = pooling.sides(quantity)
        read = features_read(quantity, moments)
        constant = constant_gradient(quantity, moments, read)
        values = [_values(moments, feature)[:, pooling.supports[list(sides[side])]] for side, feature in read]
        # A moment that is null over an empty window plays no part in a defined quantity.
        values = [np.where(np.isnan(value), 0.0, value) for value in values]  # [D, subjects, 1 or X]
        if constant is not None:
            values = [np.asarray(sum(slope * value for slope, value in zip(constant, values, strict=True)))]
        self._read = read if constant is None else ()
        masks = pooling.masks[:, list(sides[0])]
        self._strata = np.stack([masks[documents].any(axis=0) for documents in pooling.members]).sum(axis=0)
        self._parts = [_Part(block, pooling, masks, values) for block in clusters.blocks]
        self._cells = (len(pooling.rows), len(sides[0]), len(quantity.x(moments.windows)))

    def __call__(self, pooled: Sequence[Pooled], counts: Float) -> Float:
        """Compute the standard errors under weightings.

        Args:
            pooled: the moments of the quantity, pooled under these weightings.
            counts: the weightings [B, D]; all documents of a cluster have the same count.

        Returns:
            float64 [B, rows, subjects, X]. NaN if a stratum is left with fewer than two clusters; arbitrary if the
            quantity itself is undefined.
        """
        with np.errstate(all="ignore"):
            # By feature, for every row: [rows, subjects, B, X]
            gradient = [
                derivative(self._quantity, pooled, side, feature).transpose(1, 2, 0, 3) for side, feature in self._read
            ]
            variance = np.zeros((len(counts), *self._cells))
            over_strata: _Covariances = {}
            for part in self._parts:
                covariances = part.covariances(counts)
                if 0 in part.block.rows:
                    _add(over_strata, covariances, part.present)
                for row in part.block.rows:
                    if row:
                        variance[:, row] = _quadratic_form([slope[row] for slope in gradient], covariances).swapaxes(
                            0, 1
                        )
            share = 1.0 / self._strata[:, None]  # equal weight of strata
            pooled_variance = _quadratic_form([slope[0] for slope in gradient], over_strata)
            np.multiply(pooled_variance.swapaxes(0, 1), share**2, out=variance[:, 0])
            # A variance below 0 is rounding; see _Part.covariances.
            np.maximum(variance, 0.0, out=variance)
            return np.sqrt(variance, out=variance)


class _Part:
    """The contribution of one block to a quantity's variances.

    ``masks`` are the documents of every subject, bool [D, subjects], ``values`` their features, each [D, subjects, 1 or
    X].
    """

    def __init__(self, block: Block, pooling: Pooling, masks: NDArray[np.bool_], values: Sequence[Float]) -> None:
        self.block = block
        members = [pooling.members[number] for number in block.strata]
        inside = [masks[documents].astype(np.float64)[..., None] for documents in members]
        sizes = [
            over_clusters(mask, cluster_of, block.clusters)
            for mask, cluster_of in zip(inside, block.cluster_of, strict=True)
        ]  # documents of each cluster by stratum, [C, subjects, 1]
        self._has = np.any(sizes, axis=0)[..., 0]
        self.present = self._has.any(axis=0)
        self._features = len(values)
        # Documents' deviations from the mean of their stratum: their sums lose less to rounding.
        totals = [
            [
                over_clusters(_centred(value[documents], mask), cluster_of, block.clusters)
                for value in values
            ]
            for documents, mask, cluster_of in zip(members, inside, block.cluster_of, strict=True)
        ]  # fmt: skip
        # If every cluster has equally many documents, the number of documents is the same in every draw, and resampling
        # changes the mean M_s by the mean of the totals.
        size = sizes[0][0]
        self._fixed = len(block.strata) == 1 and len(block.rows) == 2 and bool((sizes[0] == size).all() and size.all())
        clusters = float(block.clusters)
        slots = [total for own_totals in totals for total in own_totals]
        if self._fixed and block.clusters > 1:
            scale = np.sqrt(clusters / (clusters - 1)) / (clusters * size)
            slots = [total * scale for total in slots]
        rounding = 1 - _ROUNDING * len(slots)
        if not self._fixed:
            slots = [slot for own_totals, of in zip(totals, sizes, strict=True) for slot in (*own_totals, of)]
        self._pairs = list(combinations_with_replacement(range(len(slots)), 2))
        self._slots = len(slots)
        first = 1 / np.sqrt(clusters) if self._fixed else 1.0
        is_size = [not self._fixed and self._split(i)[1] == self._features for i in range(len(slots))]
        products = [slots[i] * slots[j] * (rounding if i == j and not is_size[i] else 1.0) for i, j in self._pairs]
        columns = [*(slot * first for slot in slots), *products]  # each [C, subjects, 1 or X]
        ends = np.cumsum([0, *(column.shape[2] for column in columns)]).tolist()
        self._slices = [slice(*span) for span in pairwise(ends)]
        self._columns = _tiles(np.concatenate(columns, axis=2).swapaxes(0, 1))  # [subjects, C, V]

    def covariances(self, counts: Float) -> _Covariances:
        """Return n / (n - 1) times the sums of products of deviations of the clusters' sums of w_d (x_d - M_s).

        The result has an array [subjects, B, 1 or X] for every two features, under their numbers. The weight w_d is 1
        over the number of documents in the stratum.

        By rounding, the difference of two equal sums is a small number, which would make a vanishing standard error
        positive. With |2 g_i g_j s_ij| <= g_i^2 s_ii + g_j^2 s_jj the sums of i = j bound all terms of a variance: the
        share of these sums that rounding may make is subtracted, so that a vanishing variance is below 0.
        """
        weights = np.ascontiguousarray(counts[:, self.block.representatives])
        moments = _products(weights, self._columns)
        if self.block.clusters < 2:
            moments = np.full_like(moments, np.nan)
        firsts = [moments[..., columns] for columns in self._slices[: self._slots]]
        seconds = {
            pair: moments[..., columns] for pair, columns in zip(self._pairs, self._slices[self._slots :], strict=True)
        }
        if self._fixed:
            return {(i, j): second - firsts[i] * firsts[j] for (i, j), second in seconds.items()}
        n = (weights @ self._has.astype(np.float64)).T[..., None]
        return self._of_residuals(firsts, seconds, np.where(n > 1, n / (n - 1), np.nan))

    def _of_residuals(self, firsts: list[Float], seconds: _Covariances, scale: Float) -> _Covariances:
        """Return covariances of residuals T - D m, with T a cluster's total and m its size.

        D is the draw's mean M_s less that of the sample. ``firsts`` are sums over clusters of every T and m,
        ``seconds`` those of their products; ``scale`` is n / (n - 1). The mean of residuals over the clusters of a
        draw is 0, so that their squares are squared deviations.
        """
        result: _Covariances = {}
        for i, j in self._pairs:
            (stratum, feature), (other_stratum, other_feature) = self._split(i), self._split(j)
            if self._features in (feature, other_feature):
                continue
            size, other_size = (number * (self._features + 1) + self._features for number in (stratum, other_stratum))
            mean, other_mean = firsts[i] / firsts[size], firsts[j] / firsts[other_size]
            product = seconds[i, j] - mean * seconds[_ordered(size, j)] - other_mean * seconds[_ordered(i, other_size)]
            product += mean * other_mean * seconds[_ordered(size, other_size)]
            product *= scale / (firsts[size] * firsts[other_size])
            if stratum != other_stratum and feature == other_feature:
                product *= 2  # both orders of the two strata
            key = _ordered(feature, other_feature)
            result[key] = result[key] + product if key in result else product
        return result

    def _split(self, slot: int) -> tuple[int, int]:
        """Return the stratum and the feature of the cluster totals at the index ``slot``.

        The last slot of each stratum may be for the sizes of clusters, in place of a feature.
        """
        return divmod(slot, self._features + (not self._fixed))


def _ordered(first: int, second: int) -> tuple[int, int]:
    return (first, second) if first <= second else (second, first)


def _centred(values: Float, mask: Float) -> Float:
    """Subtract the mean from documents' values [n, subjects, 1 or X]; 0 for documents outside ``mask``."""
    mean = (values * mask).sum(axis=0) / np.maximum(mask.sum(axis=0), 1)
    return np.where(mask > 0, values - mean, 0.0)


def _values(moments: DocumentMoments, feature: Feature) -> Float:
    """Return a feature of every document and action, [D, A, 1 or X]; a sum over x is taken within each document."""
    if feature.kind == "scalar":
        return moments.scalars[feature.name][..., None]
    documents = Pooled({}, moments.profiles, moments.windows)
    return documents.read(feature)


def _add(total: _Covariances, covariances: _Covariances, present: NDArray[np.bool_]) -> None:
    """Add the covariances of one block to ``total``; ``present`` marks the subjects with documents in the block."""
    for pair, value in covariances.items():
        kept = value if present.all() else np.where(present[:, None, None], value, 0.0)
        if pair in total:
            total[pair] += kept
        else:
            total[pair] = kept.copy()


def _quadratic_form(gradient: Sequence[Float], covariances: _Covariances) -> Float:
    """Return the variance of a quantity, [subjects, B, X].

    For a linear quantity ``gradient`` is empty, and its only covariance is the variance.
    """
    if not gradient:
        return covariances[0, 0]
    variance: Float = np.zeros(1)
    for i, slope in enumerate(gradient):
        inner = slope * covariances[i, i]
        for j in range(i + 1, len(gradient)):
            crossed = gradient[j] * covariances[i, j]
            crossed *= 2
            inner = _plus(inner, crossed)
        inner *= slope
        variance = _plus(variance, inner) if i else inner
    return variance


def _plus(total: Float, more: Float) -> Float:
    """Return the sum, made in ``total`` itself if that has the sum's shape, since arrays of all draws are large."""
    if np.broadcast_shapes(total.shape, more.shape) == total.shape:
        total += more
        return total
    return total + more


def _tiles(columns: Float) -> list[Float]:
    """Cut [subjects, C, V] into contiguous arrays of at most ``TILE_COLUMNS`` columns each."""
    cuts = range(TILE_COLUMNS, columns.shape[2], TILE_COLUMNS)
    return [np.ascontiguousarray(tile) for tile in np.split(columns, list(cuts), axis=2)]


def _products(weights: Float, columns: Sequence[Float]) -> Float:
    """Multiply [B, C] by each of [subjects, C, V]: [subjects, B, V], in tiles that BLAS does not split over threads.

    Subjects are multiplied separately, so that a subject's bits do not depend on other subjects; see
    ``kvdrift.stats.pooling``.
    """
    draws, clusters = weights.shape
    subjects, _, width = columns[0].shape
    result = np.empty((subjects, draws, sum(tile.shape[2] for tile in columns)))
    most = max(TILE_WORK // max(width * clusters, 1), 8)  # a profile over an empty window has no columns
    rows = min(1 << (most.bit_length() - 1), draws)
    tiled = weights.reshape(-1, rows if draws % rows == 0 else draws, clusters)
    first = 0
    for tile in columns:
        part = slice(first, first := first + tile.shape[2])
        if draws == 1:  # BLAS would round a column of a single row by its place among the columns
            result[..., part] = (weights.T[None] * tile).sum(axis=1, keepdims=True)
        else:
            result[..., part] = (tiled @ tile[:, None]).reshape(subjects, draws, tile.shape[2])
    return result
