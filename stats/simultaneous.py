"""Differences in R between all pairs of actions, with intervals that hold together (definitions, "Intervals").

What is said of one action against any other rests on these: whether it is ruled out, recommended, or at which place.
With c the quantile of the largest |t*| of any pair in a draw, all intervals theta +- c SE hold together.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtrit

from schema.study import POOLED
from stats.alike import alike_documents
from stats.bootstrap import observed, observed_errors, resample
from stats.ends import Studentized, at_least, distance_quantiles, document_intervals
from stats.intervals import COLUMNS, EXPLORATORY, Estimates, nullable, whole_clusters
from stats.linearization.cluster_blocks import ClusterBlocks
from stats.pooling import Pooling
from stats.quantities import SIMULTANEOUS_GAP, quantity_named

if TYPE_CHECKING:
    from stats.moments import DocumentMoments, Float

SIMULTANEOUS = "simultaneous"

_FARTHEST = 1.5  # times what Student's law says of so many independent pairs: of a few clusters a draw may have any t*


def simultaneous_gaps(moments: DocumentMoments, *, draws: int, seed: int, level: float = 0.95) -> Estimates:
    """Estimate the difference in R of every pair of actions, pooled over strata, with intervals that hold together.

    A pair whose documents are alike, or whose t* are undefined, has an interval of level 1 - (1 - level) / m by itself,
    with m pairs in all.

    Args:
        moments: of documents; actions without a document in common are no pair.
        draws: bootstrap draws.
        seed: their seed.
        level: with which all intervals hold.

    Returns:
        Rows of ``results``, of each pair both ways round, all exploratory.

    """
    moments, name = moments.in_canonical_order(), "gap"
    has = dict(zip(moments.actions, moments.present.T, strict=True))
    pairs = [(a, b) for a, b in combinations(moments.actions, 2) if (has[a] & has[b]).any()]
    if not pairs:
        return Estimates()
    quantity, pooling = quantity_named(name), Pooling.of(moments, pairs)
    sample = resample(moments, [name], seed=seed, first=0, last=draws, pairs=pairs, studentized=True)
    at = (0, slice(None), 0)
    given = Studentized(
        observed(moments, [name], pairs)[name][at], observed_errors(moments, [name], pairs)[name][at],
        sample.values[name][:, *at], sample.distances[name][:, *at],
    )  # fmt: skip
    (clusters, sets), documents = ClusterBlocks(pooling).counts_of(quantity), pooling.counts_of(quantity)[0]
    traits = clusters[0], sets[0], quantity.range.between(moments.windows.horizon)
    alike = alike_documents(pooling, quantity).of(at)
    levels = np.full(len(pairs), 1 - (1 - level) / len(pairs))
    low, high, methods = document_intervals(given, levels, *traits, alike)
    *_, together = distance_quantiles(given, np.full(len(pairs), level), clusters[0], traits[-1])
    if together.any():
        student = stdtrit(
            np.maximum(clusters[0] - sets[0], 1), np.stack([np.full(len(pairs), level), levels]) / 2 + 0.5
        )
        largest = np.nanmax(np.abs(given.distances[:, together]), axis=1, initial=0.0)
        reach = np.clip(np.quantile(largest, level), student[0], _FARTHEST * student[1]) * given.errors
        own = [np.clip(given.estimates + sign * reach, traits[-1].low, traits[-1].high) for sign in (-1, 1)]
        low, high = np.where(together, own[0], low), np.where(together, own[1], high)
        methods = np.where(together, SIMULTANEOUS, methods)
        low, high, methods = at_least(low, high, methods, given.estimates, levels, *traits, alike)
    return _rows(pairs, (given.estimates, low, high), methods, documents, clusters[0], draws, level)


def _rows(
    pairs: list[tuple[str, str]], numbers: tuple[Float, Float, Float], methods: np.ndarray, documents: np.ndarray,
    clusters: Float, draws: int, level: float,
) -> Estimates:  # fmt: skip
    """Both orders of every pair as rows."""
    estimate, low, high = (nullable(one) for one in numbers)
    whole = whole_clusters(clusters).tolist()
    columns: dict[str, list[object]] = {name: [] for name in COLUMNS}
    for place, (a, b) in enumerate(pairs):
        turned = [None if one is None else -one for one in (estimate[place], high[place], low[place])]
        for (baseline, action), found in (((a, b), [estimate[place], low[place], high[place]]), ((b, a), turned)):
            row = dict.fromkeys(COLUMNS) | {
                "stratum": POOLED, "action": action, "baseline": baseline, "quantity": SIMULTANEOUS_GAP,
                "estimate": found[0], "low": found[1], "high": found[2], "level": level, "draws": draws,
                "documents": int(documents[place]), "clusters": whole[place], "status": EXPLORATORY,
                "interval": str(methods[place]),
            }  # fmt: skip
            for name in COLUMNS:
                columns[name].append(row[name])
    return Estimates(columns)
