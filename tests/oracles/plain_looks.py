"""Looks at a growing study (``docs/sequential.md``), another way than ``kvdrift.stats.sequential``."""

from __future__ import annotations

import numpy as np
from scipy.stats import multivariate_normal, norm, t


def spent(share: float, alpha: float) -> float:
    """Return alpha*(t), of O'Brien and Fleming's type (Lan and DeMets 1983)."""
    return float(4 - 4 * norm.cdf(norm.ppf(1 - alpha / 4) / np.sqrt(share)))


def ever_outside(shares: list[float], constants: list[float]) -> float:
    """The probability that Z is outside its constant at any look: of the normal law of all Z, with their correlations.

    The correlation of two looks' estimates is the root of the ratio of their shares. Genz's integration, to 1e-7 or so.
    """
    times, bounds = np.array(shares), np.array(constants)
    correlation = np.sqrt(np.minimum.outer(times, times) / np.maximum.outer(times, times))
    law = multivariate_normal(cov=correlation, allow_singular=True, seed=1)
    law.abseps, law.releps, law.maxpts = 1e-8, 1e-8, 200_000
    return 1 - float(law.cdf(bounds, lower_limit=-bounds))


def student_interval(values: list[float], constant: float) -> tuple[float, float]:
    """Return Student's interval of the mean of one stratum's documents, from the textbooks' mean and standard error."""
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    reach = t.ppf(norm.cdf(constant), len(values) - 1) * error
    return float(np.mean(values) - reach), float(np.mean(values) + reach)
