"""Simultaneous intervals for all pairs of actions in R, and for all members of sweeps (``docs/intervals.md``).

The intervals of pairs decide which actions are ruled out or recommended, and their ranks. The intervals of members are
the bands of curves. With c the quantile of the largest |t*| of any pair or member in a draw (its distance from the
estimate in its own standard errors), all intervals theta +- c SE hold together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.special import stdtrit

from kvdrift.schema.study import POOLED
from kvdrift.stats.alike import alike_documents
from kvdrift.stats.bootstrap import COLUMNS, EXPLORATORY, Estimates, nullable, resampled, whole_clusters
from kvdrift.stats.clusters import ClusterBlocks
from kvdrift.stats.ends import at_least, distance_quantiles, document_intervals
from kvdrift.stats.moments import DocumentMoments, Float
from kvdrift.stats.pooling import Pooling
from kvdrift.stats.quantities import SIMULTANEOUS_GAP, SIMULTANEOUS_OF, quantity_named

SIMULTANEOUS = "simultaneous"

_FARTHEST = 1.5  # times Student's quantile for as many independent pairs: over a few clusters a draw may have any t*


def simultaneous_gaps(moments: DocumentMoments, *, draws: int, seed: int, level: float = 0.95) -> Estimates:
    """Estimate the difference in R of every pair of actions, pooled over strata, with simultaneous intervals.

    The intervals hold together at ``level``. If the bootstrap's t* of a pair is undefined, the pair gets an interval of
    its own, of level 1 - (1 - level) / m with m pairs in all. If most documents of a pair have nearly equal
    differences, its interval also covers what such documents leave open at that level. Actions without a common
    document form no pair. Each pair has two rows, one for each action as the baseline. All rows are exploratory.
    """
    moments = moments.in_canonical_order()
    has = dict(zip(moments.actions, moments.present.T, strict=True))
    pairs = [(a, b) for a, b in combinations(moments.actions, 2) if (has[a] & has[b]).any()]
    if not pairs:
        return Estimates()
    together = _together(moments, "gap", pairs, len(pairs), draws, seed, level)
    rows = []
    for place, (a, b) in enumerate(pairs):
        row = together.row(place)
        turned = [None if row[name] is None else -row[name] for name in ("estimate", "high", "low")]
        names = {"quantity": SIMULTANEOUS_GAP, "level": level, "draws": draws}
        rows.append(row | names | {"baseline": a, "action": b})
        rows.append(row | names | dict(zip(_ENDS, turned, strict=True)) | {"baseline": b, "action": a})
    return _as_estimates(rows)


def simultaneous_members(
    moments: DocumentMoments, name: str, members: Sequence[str], *, draws: int, seed: int, level: float = 0.95
) -> Estimates:
    """Estimate a quantity of the actions ``members``, pooled over strata, with simultaneous intervals.

    The intervals hold together at ``level``. If the bootstrap's t* of an action is undefined, the action gets an
    interval of its own, of level 1 - (1 - level) / m with m actions in all. The quantity's ``name`` is a key of
    ``SIMULTANEOUS_OF``. All rows are exploratory.
    """
    chosen = moments.of_actions(members).in_canonical_order()
    together = _together(chosen, name, [], len(chosen.actions), draws, seed, level)
    names = {"quantity": SIMULTANEOUS_OF[name], "level": level, "draws": draws}
    return _as_estimates(
        [together.row(place) | names | {"action": action} for place, action in enumerate(chosen.actions)]
    )


_ENDS = ("estimate", "low", "high")


@dataclass(frozen=True, eq=False)
class _Together:
    """The estimates of all pairs or actions, arrays [m]."""

    estimates: Float
    low: Float
    high: Float
    methods: np.ndarray
    documents: np.ndarray
    clusters: Float

    def row(self, place: int) -> dict[str, Any]:
        """Return the columns of ``results`` for one pair or action."""
        numbers = (nullable(column)[place] for column in (self.estimates, self.low, self.high))
        return dict.fromkeys(COLUMNS) | dict(zip(_ENDS, numbers, strict=True)) | {
            "stratum": POOLED, "documents": int(self.documents[place]), "status": EXPLORATORY,
            "clusters": whole_clusters(self.clusters).tolist()[place], "interval": str(self.methods[place]),
        }  # fmt: skip


def _together(
    moments: DocumentMoments, name: str, pairs: Sequence[tuple[str, str]], count: int, draws: int, seed: int,
    level: float,
) -> _Together:  # fmt: skip
    """Estimate a quantity of each pair, or of each action if ``pairs`` is empty, with simultaneous intervals.

    ``count`` is the number of pairs or actions. The moments are in canonical order.
    """
    quantity, pooling = quantity_named(name), Pooling.of(moments, pairs)
    at = (0, slice(None), 0)
    sample = resampled(moments, [name], seed=seed, draws=draws, pairs=pairs)[name].of(at)
    (clusters, sets), documents = ClusterBlocks(pooling).counts_of(quantity), pooling.counts_of(quantity)[0]
    traits = clusters[0], sets[0], quantity.range.between(moments.windows.horizon)
    likeness = alike_documents(pooling, quantity).of(at)
    levels = np.full(count, 1 - (1 - level) / count)
    low, high, methods = document_intervals(sample, levels, *traits, likeness)
    *_, together = distance_quantiles(sample, np.full(count, level), clusters[0], traits[-1])
    if together.any():
        student = stdtrit(np.maximum(clusters[0] - sets[0], 1), np.stack([np.full(count, level), levels]) / 2 + 0.5)
        largest = np.nanmax(np.abs(sample.distances[:, together]), axis=1, initial=0.0)
        reach = np.clip(np.quantile(largest, level), student[0], _FARTHEST * student[1]) * sample.errors
        ends = [np.clip(sample.estimates + sign * reach, traits[-1].low, traits[-1].high) for sign in (-1, 1)]
        low, high = np.where(together, ends[0], low), np.where(together, ends[1], high)
        methods = np.where(together, SIMULTANEOUS, methods)
        low, high, methods = at_least(low, high, methods, sample.estimates, levels, *traits, likeness)
    return _Together(sample.estimates, low, high, methods, documents, clusters[0])


def _as_estimates(rows: Sequence[dict[str, Any]]) -> Estimates:
    return Estimates({name: [row[name] for row in rows] for name in COLUMNS})
