"""A quick pooled mean with a plain interval, for a study that is still running and not resampled yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from kvdrift.schema.moments import SCALAR_MOMENTS
from kvdrift.schema.windows import Windows
from kvdrift.stats.alike import alike_documents
from kvdrift.stats.bootstrap import nullable, observed, observed_errors
from kvdrift.stats.clusters import ClusterBlocks
from kvdrift.stats.ends import STUDENTIZED, Studentized, at_distances, at_least
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.pooling import Pooling
from kvdrift.stats.quantities import QUANTITIES

LEVEL = 0.95
_FRACTION = QUANTITIES["mismatch"]  # any quantity that is the mean of documents' fractions


def preliminary_mean(
    values: Sequence[float], strata: Sequence[str], clusters: Sequence[str]
) -> tuple[float, float | None, float | None]:
    """Pool documents' fractions as the estimates do, with an interval from Student's t in place of a bootstrap.

    Ends are on the logit scale. If nearly all documents have equal values, ends may be farther out, as in
    ``kvdrift.stats.ends``. The interval is that of a study that ends now: it is not corrected for interim looks.

    Returns:
        M and the ends of its 95% interval; None for both ends if a stratum has one cluster.
    """
    names = [f"{place:09}" for place in range(len(values))]
    scalars = dict.fromkeys(SCALAR_MOMENTS, np.array(values, dtype=np.float64)[:, None])
    moments = DocumentMoments(names, strata, clusters, ("",), Windows.of(1), scalars, {}, {}).in_canonical_order()  # type: ignore[arg-type]
    pooling, at, name = Pooling.of(moments, ()), (0, slice(None), 0), _FRACTION.name
    estimate, error = (of(moments, [name], ())[name][at] for of in (observed, observed_errors))
    (counts, sets), nothing = ClusterBlocks(pooling).counts_of(_FRACTION), np.empty((0, 1))
    traits = (np.array([LEVEL]), counts[0], sets[0], _FRACTION.range.between(1))
    reach = -stdtrit(counts[0] - sets[0], (1 - LEVEL) / 2)
    ends = at_distances(Studentized(estimate, error, nothing, nothing), reach, reach, traits[-1])
    low, high = (np.clip(end, 0.0, 1.0) for end in ends)
    alike = alike_documents(pooling, _FRACTION).of(at)
    low, high, _ = at_least(low, high, np.array([STUDENTIZED]), estimate, *traits, alike)
    if np.isnan(error[0]):
        return float(estimate[0]), None, None
    return float(estimate[0]), nullable(low)[0], nullable(high)[0]
