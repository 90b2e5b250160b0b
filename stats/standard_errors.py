"""Standard errors of quantities, of the documents themselves or of draws of them (definitions, "Intervals").

A quantity is theta = g(M) of pooled moments M. Linearized at M, a cluster c adds u_c, the sum of w_d grad g . x_d over
its documents, and SE^2 is the sum over strata of n / (n - 1) times the squared deviations of u_c, n clusters in a
stratum. That is a quadratic form of the gradient in second moments of the clusters' totals. A draw has them from its
counts by a matrix product, as it has its moments: nothing here runs over draws or over clusters.

Strata that share clusters are one set: the pooled row adds a cluster's documents over all of them, with each stratum's
weight. A stratum's own row takes the clusters that have documents in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stats.clusters import linked_strata
from stats.gradients import constant_gradient, derivative, features_read
from stats.pooling import TILE_COLUMNS, TILE_WORK, Pooling
from stats.registry import Feature, Pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stats.moments import DocumentMoments, Float
    from stats.registry import Quantity

_ROUNDING = 1e-13  # of the terms that a squared deviation is the difference of: less is 0 but for rounding

_Covariances = dict[tuple[int, int], "Float"]


@dataclass(frozen=True, eq=False)
class Block:
    """Clusters that are drawn from each other, and the rows whose variance they are part of.

    Attributes:
        rows: the numbers of the rows: 0 is ``pooled``, and a stratum's own is one more than its number.
        strata: the numbers of the strata that the clusters have documents in, or those that the rows take.
        representatives: one document of each cluster, int [C]; all documents of a cluster have its count.
        cluster_of: for each of the strata, the cluster of each of its documents.

    """

    rows: tuple[int, ...]
    strata: tuple[int, ...]
    representatives: NDArray[np.intp]
    cluster_of: tuple[NDArray[np.intp], ...]

    @property
    def clusters(self) -> int:
        """How many clusters there are."""
        return len(self.representatives)


class ClusterBlocks:
    """The clusters behind every row of a pooling.

    Attributes:
        pooling: the pooling.
        blocks: each set of strata that share clusters, and where those are several, each stratum for itself.

    """

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        moments = pooling.moments
        _, cluster_of = np.unique(moments.clusters, return_inverse=True)
        set_of = linked_strata(moments.strata, cluster_of)
        sets = [set_of[documents[0]] for documents in pooling.members]
        blocks = []
        for one in dict.fromkeys(sets):
            strata = tuple(number for number, other in enumerate(sets) if other == one)
            if len(strata) == 1:
                blocks.append(self._block((0, strata[0] + 1), strata, cluster_of))
            else:
                blocks.append(self._block((0,), strata, cluster_of))
                blocks += [self._block((number + 1,), (number,), cluster_of) for number in strata]
        self.blocks = tuple(blocks)

    def _block(self, rows: tuple[int, ...], strata: tuple[int, ...], cluster_of: NDArray[np.intp]) -> Block:
        members = [self.pooling.members[number] for number in strata]
        documents = np.concatenate(members)
        _, first, own = np.unique(cluster_of[documents], return_index=True, return_inverse=True)
        ends = np.cumsum([len(one) for one in members])[:-1]
        return Block(rows, strata, documents[first], tuple(np.split(own, ends)))

    def members(self, block: Block, supports: Sequence[int]) -> NDArray[np.bool_]:
        """Which clusters have documents of each support, bool [C, subjects]."""
        has = np.zeros((block.clusters, len(supports)), dtype=np.bool_)
        for number, cluster_of in zip(block.strata, block.cluster_of, strict=True):
            np.logical_or.at(has, cluster_of, self.pooling.masks[self.pooling.members[number]][:, supports])
        return has

    def counts_of(self, quantity: Quantity) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count the clusters behind a quantity, and the sets of strata they are drawn in: int64 [rows, subjects]."""
        supports = list(self.pooling.sides(quantity)[0])
        clusters, sets = (np.zeros((len(self.pooling.rows), len(supports)), dtype=np.int64) for _ in range(2))
        for block in self.blocks:
            count = self.members(block, supports).sum(axis=0)
            for row in block.rows:
                clusters[row] += count
                sets[row] += count > 0
        return clusters, sets


class StandardErrors:
    """The standard error of one quantity for every row and subject, under any weighting.

    What does not depend on weightings is computed once: the products of the clusters' totals in every block. Where the
    gradient does not depend on them either, the quantity is linear: its clusters then have one total, u_c itself.
    """

    def __init__(self, clusters: ClusterBlocks, quantity: Quantity) -> None:
        self._quantity, pooling = quantity, clusters.pooling
        moments = pooling.moments
        sides = pooling.sides(quantity)
        read = features_read(quantity, moments)
        constant = constant_gradient(quantity, moments, read)
        values = [_values(moments, feature)[:, pooling.supports[list(sides[side])]] for side, feature in read]
        # A moment that is null over an empty window has no part in a defined quantity.
        values = [np.where(np.isnan(value), 0.0, value) for value in values]  # [D, subjects, 1 or X]
        if constant is not None:
            values = [np.asarray(sum(one * value for one, value in zip(constant, values, strict=True)))]
        self._read = read if constant is None else ()
        masks = pooling.masks[:, list(sides[0])]
        self._strata = np.stack([masks[documents].any(axis=0) for documents in pooling.members]).sum(axis=0)
        self._parts = [_Part(block, pooling, masks, values) for block in clusters.blocks]
        self._cells = (len(pooling.rows), len(sides[0]), len(quantity.x(moments.windows)))

    def __call__(self, pooled: Sequence[Pooled], counts: Float) -> Float:
        """Compute the standard errors under weightings.

        Args:
            pooled: what the quantity is a function of, pooled under these weightings.
            counts: the weightings [B, D]; all documents of a cluster have the same.

        Returns:
            float64 [B, rows, subjects, X]. NaN where a stratum is left with fewer than two clusters; anything where the
            quantity itself is undefined.

        """
        with np.errstate(all="ignore"):
            # By what is read, of every row: [rows, subjects, B, X]
            gradient = [derivative(self._quantity, pooled, *one).transpose(1, 2, 0, 3) for one in self._read]
            variance = np.zeros((len(counts), *self._cells))
            over_strata: _Covariances = {}
            for part in self._parts:
                covariances = part.covariances(counts)
                if 0 in part.block.rows:
                    _add(over_strata, covariances, part.present)
                for row in part.block.rows:
                    if row:
                        variance[:, row] = _quadratic_form([one[row] for one in gradient], covariances).swapaxes(0, 1)
            share = 1.0 / self._strata[:, None]  # equal weight of strata
            own = _quadratic_form([one[0] for one in gradient], over_strata)
            np.multiply(own.swapaxes(0, 1), share**2, out=variance[:, 0])
            # A variance below 0 is rounding: see _Part.covariances.
            np.maximum(variance, 0.0, out=variance)
            return np.sqrt(variance, out=variance)


class _Part:
    """What one block adds to a quantity's variances.

    ``masks`` are the documents of every subject, bool [D, subjects], ``values`` what is read of them, each
    [D, subjects, 1 or X].
    """

    def __init__(self, block: Block, pooling: Pooling, masks: NDArray[np.bool_], values: Sequence[Float]) -> None:
        self.block = block
        self._members = [pooling.members[number] for number in block.strata]
        self._masks = [masks[documents].astype(np.float64) for documents in self._members]
        sizes = [
            _totals(mask[..., None], cluster_of, block.clusters)[..., 0]
            for mask, cluster_of in zip(self._masks, block.cluster_of, strict=True)
        ]  # documents of each cluster by stratum, [C, subjects]
        self._has = np.any(sizes, axis=0)
        self.present = self._has.any(axis=0)
        self._features = len(values)
        totals = [
            self._centred(_totals(value[documents] * mask[..., None], cluster_of, block.clusters))
            for documents, mask, cluster_of in zip(self._members, self._masks, block.cluster_of, strict=True)
            for value in values
        ]
        # Where every cluster counts as many documents as every other, all of a draw's numbers are those of the block.
        size = sizes[0][0]
        self._fixed = len(block.strata) == 1 and len(block.rows) == 2 and bool((sizes[0] == size).all() and size.all())
        self._clusters = float(block.clusters)
        if self._fixed and block.clusters > 1:
            documents = block.clusters * size[:, None]
            scale = np.sqrt(self._clusters / (self._clusters - 1)) / documents
            totals = [total * scale for total in totals]
        self._pairs = list(combinations_with_replacement(range(len(totals)), 2))
        self._slots = len(totals)
        rounding = 1 - _ROUNDING * len(totals)
        products = [totals[i] * totals[j] * (rounding if i == j else 1.0) for i, j in self._pairs]
        columns = [*(total / np.sqrt(self._clusters) for total in totals), *products]  # each [C, subjects, 1 or X]
        ends = np.cumsum([0, *(column.shape[2] for column in columns)]).tolist()
        self._slices = [slice(*span) for span in pairwise(ends)]
        self._columns = _tiles(np.concatenate(columns, axis=2).swapaxes(0, 1))  # [subjects, C, V]

    def covariances(self, counts: Float) -> _Covariances:
        """Return n / (n - 1) times the sums of products of deviations of what w_d x_d adds up to in clusters.

        They are of every two things that are read, by their numbers, and of a weight w_d that is one over the documents
        of the stratum: [subjects, B, 1 or X].

        Rounding makes a small number of what is a difference of two equal sums, and so a standard error of one that
        vanishes. With |2 g_i g_j s_ij| <= g_i^2 s_ii + g_j^2 s_jj the sums of i = j bound all terms of a variance:
        these are taken less the share that rounding may have of them, and such a variance is then below 0.
        """
        weights = np.ascontiguousarray(counts[:, self.block.representatives])
        moments = _products(weights, self._columns)
        if self.block.clusters < 2:
            moments = np.full_like(moments, np.nan)
        firsts, seconds = (self._slices[: self._slots], self._slices[self._slots :])
        result: _Covariances = {}
        scale = None if self._fixed else self._scales(weights, counts)
        for (i, j), part in zip(self._pairs, seconds, strict=True):
            deviations = moments[..., firsts[i]] * moments[..., firsts[j]]
            if scale is not None:
                deviations *= scale[0]
            np.subtract(moments[..., part], deviations, out=deviations)
            (one, feature), (other, also) = divmod(i, self._features), divmod(j, self._features)
            if scale is not None:
                deviations *= scale[1] * scale[2][one] * scale[2][other]
            if one != other and feature == also:
                deviations *= 2  # both orders of the two strata
            key = (feature, also) if feature <= also else (also, feature)
            result[key] = result[key] + deviations if key in result else deviations
        return result

    def _scales(self, weights: Float, counts: Float) -> tuple[Float, Float, list[Float]]:
        """Return C / n, n / (n - 1) and one over the documents of every stratum, [subjects, B, 1], in each draw."""
        n = (weights @ self._has.astype(np.float64)).T[..., None]
        each = [
            1 / (counts[:, documents] @ mask).T[..., None]
            for documents, mask in zip(self._members, self._masks, strict=True)
        ]
        return self._clusters / n, np.where(n > 1, n / (n - 1), np.nan), each

    def _centred(self, totals: Float) -> Float:
        """Take their mean off clusters' totals [C, subjects, 1 or X]; 0 for clusters that are not there.

        Deviations do not change by it, and lose less to rounding.
        """
        has = self._has[..., None]
        mean = totals.sum(axis=0) / np.maximum(has.sum(axis=0), 1)
        return np.where(has, totals - mean, 0.0)


def _totals(values: Float, cluster_of: NDArray[np.intp], clusters: int) -> Float:
    """Sum values of documents [n, ...] over their clusters: [C, ...]."""
    totals = np.zeros((clusters, *values.shape[1:]))
    np.add.at(totals, cluster_of, values)
    return totals


def _values(moments: DocumentMoments, feature: Feature) -> Float:
    """What is read of every document and action, [D, A, 1 or X]: sums over x are sums of documents' sums."""
    if feature.kind == "scalar":
        return moments.scalars[feature.name][..., None]
    documents = Pooled({}, {**moments.positions, **moments.lags}, moments.windows)
    return documents.read(feature)


def _add(total: _Covariances, covariances: _Covariances, present: NDArray[np.bool_]) -> None:
    """Add a stratum's covariances to those over all strata, for the subjects that have documents in it."""
    for pair, value in covariances.items():
        kept = value if present.all() else np.where(present[:, None, None], value, 0.0)
        if pair in total:
            total[pair] += kept
        else:
            total[pair] = kept.copy()


def _quadratic_form(gradient: Sequence[Float], covariances: _Covariances) -> Float:
    """Return the variance, [subjects, B, X]; of a linear quantity, which has no gradient here, its one covariance."""
    if not gradient:
        return covariances[0, 0]
    variance: Float = np.zeros(1)
    for i, one in enumerate(gradient):
        inner = one * covariances[i, i]
        for j in range(i + 1, len(gradient)):
            crossed = gradient[j] * covariances[i, j]
            crossed *= 2
            inner = _plus(inner, crossed)
        inner *= one
        variance = _plus(variance, inner) if i else inner
    return variance


def _plus(total: Float, more: Float) -> Float:
    """Add in place where the sum has the shape of the first: arrays of all draws are large."""
    if np.broadcast_shapes(total.shape, more.shape) == total.shape:
        total += more
        return total
    return total + more


def _tiles(columns: Float) -> list[Float]:
    """Cut [subjects, C, V] into contiguous arrays of some columns each."""
    cuts = range(TILE_COLUMNS, columns.shape[2], TILE_COLUMNS)
    return [np.ascontiguousarray(tile) for tile in np.split(columns, list(cuts), axis=2)]


def _products(weights: Float, columns: Sequence[Float]) -> Float:
    """Multiply [B, C] by each of [subjects, C, V]: [subjects, B, V], in tiles that BLAS does not split over threads.

    Subjects are apart, so that the bits of one do not depend on the others; see ``stats.pooling``.
    """
    draws, clusters = weights.shape
    subjects, _, width = columns[0].shape
    result = np.empty((subjects, draws, sum(tile.shape[2] for tile in columns)))
    most = max(TILE_WORK // max(width * clusters, 1), 8)  # a profile over an empty window has no column
    rows = min(1 << (most.bit_length() - 1), draws)
    tiled = weights.reshape(-1, rows if draws % rows == 0 else draws, clusters)
    first = 0
    for tile in columns:
        part = slice(first, first := first + tile.shape[2])
        if draws == 1:  # BLAS would round a column of one row by its place among the others
            result[..., part] = (weights.T[None] * tile).sum(axis=1, keepdims=True)
        else:
            result[..., part] = (tiled @ tile[:, None]).reshape(subjects, draws, -1)
    return result
