"""Clusters of documents: bootstrap draws, the clusters behind each row of a pooling, and their effective number.

Strata that share a cluster (one question at two prompt lengths) form a set, whose clusters are resampled together, so
that the versions of a document move together and the pooled interval keeps their dependence. The number of documents of
such a stratum then varies from draw to draw, and its mean is taken over the documents of the draw. Strata without a
shared cluster keep their number of clusters in every draw. In the pooled row a cluster counts with its documents in all
strata of the set, each with its stratum's weight; in a stratum's own row, with its documents in that stratum alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.keyed_random import keyed_generator
from kvdrift.schema.rows import run_begins
from kvdrift.stats.moments import Float, Text
from kvdrift.stats.pooling import Pooling
from kvdrift.stats.registry import Quantity

_PHILOX_WORDS = 4  # 64-bit words per Philox counter value


class ClusterDraws:
    """Bootstrap draws of clusters of documents; each document's stratum and cluster are str [D].

    Draw i is a function of (seed, i) and of the set of (stratum, cluster) pairs alone.
    """

    def __init__(self, strata: Text, clusters: Text) -> None:
        names, cluster_of = np.unique(clusters, return_inverse=True)
        linked = linked_strata(strata, cluster_of)
        # Clusters are ordered by (set, name): a set is a contiguous range of them.
        set_of_cluster = np.zeros(len(names), dtype=np.intp)
        set_of_cluster[cluster_of] = linked
        order = np.lexsort((names, set_of_cluster))
        place = np.empty(len(names), dtype=np.intp)
        place[order] = np.arange(len(names))
        sizes = np.unique_counts(set_of_cluster).counts
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self._cluster_of_document = place[cluster_of]
        self._size = np.repeat(sizes, sizes).astype(np.float64)
        self._start = np.repeat(starts, sizes)

    def counts(self, seed: int, first: int, last: int) -> Float:
        """Count how often each of the draws ``first``..``last`` - 1 takes each document: float64 [draws, D]."""
        total, draws = len(self._size), last - first
        stride = -(-total // _PHILOX_WORDS)
        # Counter-based: draw i reads the counter values from i * stride on, independent of earlier draws.
        generator = keyed_generator(f"bootstrap {seed}", counter=first * stride)
        uniform = generator.random((draws, stride * _PHILOX_WORDS))[:, :total]
        # u < 1 has 53 bits, so floor(u * size) stays below size and is uneven by at most size * 2**-53.
        chosen = self._start + (uniform * self._size).astype(np.intp)
        flat = chosen + total * np.arange(draws)[:, None]
        counts = np.bincount(flat.ravel(), minlength=draws * total).reshape(draws, total)
        return counts[:, self._cluster_of_document].astype(np.float64)


def linked_strata(strata: Text, cluster_of: NDArray[np.intp]) -> NDArray[np.intp]:
    """Number the sets of strata that share clusters, directly or through other strata.

    ``strata`` and ``cluster_of`` have each document's stratum and cluster, [D]; the result has the number of the set to
    which the document's stratum belongs, int [D].
    """
    _, stratum_of = np.unique(strata, return_inverse=True)
    linked: NDArray[np.intp] = stratum_of.copy()
    order = np.argsort(cluster_of, kind="stable")
    for documents in np.split(order, np.flatnonzero(run_begins(cluster_of[order]))[1:]):
        first = linked[documents].min()
        for other in np.unique(linked[documents]):
            linked[linked == other] = first
    return np.unique(linked, return_inverse=True)[1]


def over_clusters(values: Float, cluster_of: NDArray[np.intp], clusters: int) -> Float:
    """Sum values of documents, [n, ...], over each cluster: [C, ...]; ``cluster_of`` [n] is each document's cluster."""
    totals = np.zeros((clusters, *values.shape[1:]))
    np.add.at(totals, cluster_of, values)
    return totals


def ordered_sum(values: Float) -> Float:
    """Return the sum over the first axis, term after term; 0 without terms.

    ``values.sum(axis=0)`` adds in another order if all other axes have length 1, so that a single action would have
    other last bits than the same action among others.
    """
    if not len(values):
        return np.zeros(values.shape[1:])
    total: Float = np.add.accumulate(values, axis=0)[-1]
    return total


@dataclass(frozen=True, eq=False)
class Block:
    """Clusters that are drawn together, and the rows whose variance they enter."""

    # the numbers of the rows: 0 is ``pooled``, and a stratum's row is one more than the stratum's number
    rows: tuple[int, ...]
    strata: tuple[int, ...]  # the numbers of the strata whose documents enter these rows
    # one document of each cluster, int [C]; all documents of a cluster have its count
    representatives: NDArray[np.intp]
    cluster_of: tuple[NDArray[np.intp], ...]  # for each of the strata, the cluster of each of its documents

    @property
    def clusters(self) -> int:
        """The number of clusters."""
        return len(self.representatives)


class ClusterBlocks:
    """The clusters behind every row of a pooling.

    Attributes:
        pooling: the pooling.
        blocks: a block for each set of strata that share clusters; if a set has several strata, also a block for each
            of these strata.
    """

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        moments = pooling.moments
        _, cluster_of = np.unique(moments.clusters, return_inverse=True)
        set_of = linked_strata(moments.strata, cluster_of)
        sets = [set_of[documents[0]] for documents in pooling.members]
        blocks = []
        for set_number in dict.fromkeys(sets):
            strata = tuple(stratum for stratum, other in enumerate(sets) if other == set_number)
            if len(strata) == 1:
                blocks.append(self._block((0, strata[0] + 1), strata, cluster_of))
            else:
                blocks.append(self._block((0,), strata, cluster_of))
                blocks += [self._block((stratum + 1,), (stratum,), cluster_of) for stratum in strata]
        self.blocks = tuple(blocks)

    def _block(self, rows: tuple[int, ...], strata: tuple[int, ...], cluster_of: NDArray[np.intp]) -> Block:
        members = [self.pooling.members[number] for number in strata]
        documents = np.concatenate(members)
        _, first, cluster_numbers = np.unique(cluster_of[documents], return_index=True, return_inverse=True)
        ends = np.cumsum([len(in_stratum) for in_stratum in members])[:-1]
        return Block(rows, strata, documents[first], tuple(np.split(cluster_numbers, ends)))

    def sizes(self, block: Block, supports: Sequence[int]) -> Float:
        """Count the documents of some supports in each cluster of a block, float64 [C, len(supports)].

        ``supports`` are indices into ``pooling.supports``: each is an action with the documents it is pooled over.
        """
        sizes = np.zeros((block.clusters, len(supports)))
        for number, cluster_of in zip(block.strata, block.cluster_of, strict=True):
            np.add.at(sizes, cluster_of, self.pooling.masks[self.pooling.members[number]][:, supports])
        return sizes

    def counts_of(self, quantity: Quantity) -> tuple[Float, NDArray[np.int64]]:
        """Count the effective clusters behind a quantity, and the sets of strata that they are drawn in.

        A set has (sum m)^2 / sum m^2 effective clusters, where m is the number of documents in each cluster. That is
        the number of clusters if these are equally large, else less (``docs/intervals.md``). Both counts are [rows,
        subjects].
        """
        supports = list(self.pooling.sides(quantity)[0])
        shape = (len(self.pooling.rows), len(supports))
        clusters, sets = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        for block in self.blocks:
            sizes = self.sizes(block, supports)
            count = effective(sizes)
            for row in block.rows:
                clusters[row] += count
                sets[row] += count > 0
        return clusters, sets


def effective(sizes: Float) -> Float:
    """Return the effective number of clusters: (sum m)^2 / sum m^2 of sizes m over the first axis; 0 if all are 0."""
    squares = ordered_sum(sizes**2)
    count: Float = np.divide(ordered_sum(sizes) ** 2, squares, out=np.zeros(squares.shape), where=squares > 0)
    return count
