"""The clusters behind every row of a pooling, and their effective number (definitions, "Intervals").

Strata that share clusters are one set: the pooled row adds a cluster's documents over all of them, with each stratum's
weight. A stratum's own row takes the clusters that have documents in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdrift.stats.clusters import linked_strata
from kvdrift.stats.linearization.ordered_sums import ordered_sum
from kvdrift.stats.moments import Float
from kvdrift.stats.pooling import Pooling
from kvdrift.stats.registry import Quantity


@dataclass(frozen=True, eq=False)
class Block:
    """Clusters that are drawn together, and the rows whose variance they enter."""

    # the numbers of the rows: 0 is ``pooled``, and a stratum's row is one more than the stratum's number
    rows: tuple[int, ...]
    strata: tuple[int, ...]  # the numbers of the strata in which the clusters have documents, or of the rows' strata
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
        blocks: a block for each set of strata that share clusters, and one for each stratum of a set of several.
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

    def sizes(self, block: Block, supports: Sequence[int]) -> Float:
        """Count the documents of each support in each cluster, float64 [C, subjects]."""
        sizes = np.zeros((block.clusters, len(supports)))
        for number, cluster_of in zip(block.strata, block.cluster_of, strict=True):
            np.add.at(sizes, cluster_of, self.pooling.masks[self.pooling.members[number]][:, supports])
        return sizes

    def counts_of(self, quantity: Quantity) -> tuple[Float, NDArray[np.int64]]:
        """Count the effective clusters behind a quantity, and the sets of strata that they are drawn in.

        The effective clusters of a set are (sum m)^2 / sum m^2 with m the documents of each cluster: the number of
        clusters if they are equally large, else fewer (definitions, "Intervals").

        Returns:
            float64 and int64, each [rows, subjects].
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
    """Return (sum m)^2 / sum m^2 over the first axis; 0 if all m are 0."""
    squares = ordered_sum(sizes**2)
    found: Float = np.divide(ordered_sum(sizes) ** 2, squares, out=np.zeros(squares.shape), where=squares > 0)
    return found
