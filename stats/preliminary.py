"""A pooled mean with a plain interval, quickly: for a study that still grows, where nothing is resampled yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from stats.alike import MOST_UNLIKE, most_unlike
from stats.linearization.cluster_blocks import effective

LEVEL = 0.95


def preliminary_mean(
    values: Sequence[float], strata: Sequence[str], clusters: Sequence[str]
) -> tuple[float, float | None, float | None]:
    """Pool a document mean of fractions as the estimates do, with Student's t for the clusters in place of a bootstrap.

    M = sum of w_d x_d with w_d = 1 / (S n_stratum(d)) and V = sum over strata of n_s / (n_s - 1) times the squared
    deviations of the clusters' u_c = sum of w_d (x_d - M_s) (definitions, "Pooling" and "Intervals"). The interval
    is at least what documents that are alike leave open. The strata are taken for independent, and the interval as it
    would be if the study ended now: looks are not corrected for.

    Args:
        values: x_d of D > 0 documents, in [0, 1], [D].
        strata: The stratum of each, [D].
        clusters: The cluster of each, [D].

    Returns:
        M and the ends of its 95% interval; None where a stratum has one cluster.

    """
    x = np.asarray(values, dtype=np.float64)
    names, stratum = np.unique(np.asarray(strata, dtype=object).astype(str), return_inverse=True)
    weights = 1.0 / (len(names) * np.bincount(stratum)[stratum])
    mean = float(weights @ x)
    variance, count, middle, everything = 0.0, 0.0, np.zeros(len(x)), []
    for s in range(len(names)):
        own = np.flatnonzero(stratum == s)
        _, cluster = np.unique(np.asarray(clusters, dtype=object).astype(str)[own], return_inverse=True)
        residual = weights[own] * (x[own] - x[own].mean())
        u = np.bincount(cluster, weights=residual)
        if len(u) < 2:
            return mean, None, None
        variance += len(u) / (len(u) - 1) * float(np.sum((u - u.mean()) ** 2))
        count += float(effective(np.bincount(cluster).astype(np.float64)))
        middle[own] = np.sort(x[own])[(len(own) - 1) // 2]
        everything += [(s, one) for one in cluster.tolist()]
    reach = float(stats.t.ppf((1 + LEVEL) / 2, count - len(names)) * np.sqrt(variance))
    distance = np.abs(x - middle)
    order = np.argsort(stratum, kind="stable")
    unlike = len({one for one, away in zip(everything, distance[order], strict=True) if away > 1e-12})
    low, high = mean - reach, mean + reach
    if unlike <= MOST_UNLIKE and 2 * unlike < count:
        share = float(most_unlike(np.array(float(unlike)), np.array(count), np.array(LEVEL)))
        value, farthest = float(weights @ middle), float(distance.max()) if unlike else 1.0
        low = min(low, value - share * min(farthest, value))
        high = max(high, value + share * min(farthest, 1 - value))
    return mean, max(low, 0.0), min(high, 1.0)
