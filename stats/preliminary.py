"""A quick pooled mean with a plain interval, for a study that is still running and not resampled yet."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from kvdrift.stats.clusters import effective
from kvdrift.stats.ends import STUDENTIZED, Likeness, Studentized, at_distances, at_least
from kvdrift.stats.registry import Between

LEVEL = 0.95
_FRACTION = Between(0.0, 1.0)


def preliminary_mean(
    values: Sequence[float], strata: Sequence[str], clusters: Sequence[str]
) -> tuple[float, float | None, float | None]:
    """Pool documents' fractions as the estimates do, with an interval from Student's t in place of a bootstrap.

    M = sum of w_d x_d with w_d = 1 / (S n), for S strata and n documents in the stratum of document d. The variance is
    the sum over strata of k / (k - 1) times the squared deviations of u_c, the sum of w_d (x_d - M_s) over the
    documents of a cluster, with k clusters in the stratum and M_s its mean. Ends are on the logit scale. If nearly all
    documents have equal values, ends may be farther out, as in ``kvdrift.stats.ends``. The strata are taken as
    independent, and the interval is that of a study that ends now: it is not corrected for interim looks.

    Returns:
        M and the ends of its 95% interval; None for both ends if a stratum has one cluster.
    """
    x = np.asarray(values, dtype=np.float64)
    names, stratum = np.unique(np.asarray(strata, dtype=object).astype(str), return_inverse=True)
    weights = 1.0 / (len(names) * np.bincount(stratum)[stratum])
    mean = float(weights @ x)
    variance, count, middle, everything = 0.0, 0.0, np.zeros(len(x)), []
    for s in range(len(names)):
        members = np.flatnonzero(stratum == s)
        _, cluster = np.unique(np.asarray(clusters, dtype=object).astype(str)[members], return_inverse=True)
        residual = weights[members] * (x[members] - x[members].mean())
        u = np.bincount(cluster, weights=residual)
        if len(u) < 2:
            return mean, None, None
        variance += len(u) / (len(u) - 1) * float(np.sum((u - u.mean()) ** 2))
        count += float(effective(np.bincount(cluster).astype(np.float64)))
        middle[members] = np.sort(x[members])[(len(members) - 1) // 2]
        everything += [(s, number) for number in cluster.tolist()]
    distance = np.abs(x - middle)
    order = np.argsort(stratum, kind="stable")
    unlike = len(
        {cluster for cluster, away in zip(everything, distance[order], strict=True) if away > _FRACTION.resolution}
    )
    says = 2 * unlike < count
    value, spread, differing, effective_clusters, farthest = (
        np.array([float(number)])
        for number in (weights @ middle, 0.0, unlike if says else np.inf, count, distance.max())
    )
    likeness = Likeness(value, spread, differing, effective_clusters, farthest, np.array([False]))
    estimate, errors = np.array([mean]), np.array([math.sqrt(variance)])
    reach = -stdtrit(np.array([count - len(names)]), (1 - LEVEL) / 2)
    ends = at_distances(Studentized(estimate, errors, np.empty((0, 1)), np.empty((0, 1))), reach, reach, _FRACTION)
    low, high = (np.clip(end, 0.0, 1.0) for end in ends)
    traits = (np.array([LEVEL]), np.array([count]), np.array([len(names)]), _FRACTION)
    low, high, _ = at_least(low, high, np.array([STUDENTIZED]), estimate, *traits, likeness)
    return (mean, None, None) if np.isnan(low[0]) else (mean, float(low[0]), float(high[0]))
