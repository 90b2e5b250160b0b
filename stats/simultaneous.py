"""Simultaneous intervals for all pairs of actions in R, and for all members of sweeps (``docs/intervals.md``).

The intervals of pairs decide which actions are ruled out or recommended, and their ranks. The intervals of members are
the bands of curves. With c the quantile of the largest |t*| of any pair or member in a draw (its distance from the
estimate in its own standard errors), all intervals theta +- c SE hold together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy.special import stdtrit

from kvdrift.schema.study import POOLED
from kvdrift.stats.alike import alike_documents
from kvdrift.stats.bootstrap import COLUMNS, EXPLORATORY, Estimates, nullable, resample, whole_clusters
from kvdrift.stats.clusters import ClusterBlocks
from kvdrift.stats.ends import at_least, distance_quantiles, document_intervals
from kvdrift.stats.moments import DocumentMoments
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
    for row, (a, b) in zip(together, pairs, strict=True):
        turned = [None if row[name] is None else -row[name] for name in ("estimate", "high", "low")]
        names = {"quantity": SIMULTANEOUS_GAP, "baseline": a, "action": b}
        rows.append(row | names)
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
    names = {"quantity": SIMULTANEOUS_OF[name]}
    return _as_estimates(
        [row | names | {"action": action} for row, action in zip(together, chosen.actions, strict=True)]
    )


_ENDS = ("estimate", "low", "high")


def _together(
    moments: DocumentMoments, name: str, pairs: Sequence[tuple[str, str]], count: int, draws: int, seed: int,
    level: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Estimate a quantity of each pair, or of each action if ``pairs`` is empty, with simultaneous intervals.

    Returns the columns of ``results`` for each, without names. ``count`` is the number of pairs or actions. The moments
    are in canonical order.
    """
    quantity, pooling = quantity_named(name), Pooling.of(moments, pairs)
    at = (0, slice(None), 0)
    sample = resample(moments, [name], seed=seed, draws=draws, pairs=pairs, studentized=True)[name].of(at)
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
    common = dict.fromkeys(COLUMNS) | {"stratum": POOLED, "status": EXPLORATORY, "level": level, "draws": draws}
    columns = {"estimate": nullable(sample.estimates), "low": nullable(low), "high": nullable(high)} | {
        "documents": documents.tolist(), "clusters": whole_clusters(clusters[0]).tolist(), "interval": methods.tolist(),
    }  # fmt: skip
    return [common | dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _as_estimates(rows: Sequence[dict[str, Any]]) -> Estimates:
    return Estimates({name: [row[name] for row in rows] for name in COLUMNS})
