"""A pooled mean with a plain interval, quickly: for a study that still grows, where nothing is resampled yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.95


def preliminary_mean(
    values: Sequence[float], strata: Sequence[str], clusters: Sequence[str]
) -> tuple[float, float | None]:
    """Pool a document mean as the estimates do, with Student's t for the clusters in place of a bootstrap.

    M = sum of w_d x_d with w_d = 1 / (S n_stratum(d)) and V = sum over strata of n_s / (n_s - 1) times the squared
    deviations of the clusters' u_c = sum of w_d x_d (definitions, "Pooling" and "Intervals"). The strata are taken for
    independent, and the interval as it would be if the study ended now: looks are not corrected for.

    Args:
        values: x_d of D > 0 documents, [D].
        strata: The stratum of each, [D].
        clusters: The cluster of each, [D].

    Returns:
        M, and half the width of its 95% interval; None where a stratum has one cluster.

    """
    x = np.asarray(values, dtype=np.float64)
    names, stratum = np.unique(np.asarray(strata, dtype=object).astype(str), return_inverse=True)
    weights = 1.0 / (len(names) * np.bincount(stratum)[stratum])
    mean = float(weights @ x)
    variance, count = 0.0, 0
    for s in range(len(names)):
        own = stratum == s
        _, cluster = np.unique(np.asarray(clusters, dtype=object).astype(str)[own], return_inverse=True)
        u = np.bincount(cluster, weights=(weights * x)[own])
        if len(u) < 2:
            return mean, None
        variance += len(u) / (len(u) - 1) * float(np.sum((u - u.mean()) ** 2))
        count += len(u)
    return mean, float(stats.t.ppf((1 + LEVEL) / 2, count - len(names)) * np.sqrt(variance))
