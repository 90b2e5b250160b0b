"""The resampling of a bootstrap: clusters of documents within strata, with replacement (definitions, "Bootstrap").

Strata that share a cluster (one question at two prompt lengths) are resampled as one set of clusters, so that the
versions of a document move together and the pooled interval keeps their dependence; their sizes then vary from draw to
draw, which ratios of counts absorb. Strata without a shared cluster keep their number of clusters in every draw.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvdrift.schema.keyed_random import keyed_generator
from kvdrift.schema.rows import run_begins
from kvdrift.stats.moments import Float, Text

_PHILOX_WORDS = 4  # 64-bit words per Philox counter value


class ClusterDraws:
    """Draws over documents that lie in ``strata`` and belong to ``clusters``, both str [D].

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
        """Count how often each document is in the draws first..last - 1: float64 [draws, D]."""
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
    """Number the sets of strata that share clusters, directly or through others.

    From each document's stratum and cluster, [D], it gives each document's set, from 0.
    """
    _, stratum_of = np.unique(strata, return_inverse=True)
    linked: NDArray[np.intp] = stratum_of.copy()
    for documents in _by_cluster(cluster_of):
        first = linked[documents].min()
        for other in np.unique(linked[documents]):
            linked[linked == other] = first
    return np.unique(linked, return_inverse=True)[1]


def _by_cluster(cluster_of: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    order = np.argsort(cluster_of, kind="stable")
    yield from np.split(order, np.flatnonzero(run_begins(cluster_of[order]))[1:])
