"""Control variates and their coefficients from the definitions: loops over positions, regressions fitted as such.

Nothing is shared with ``kvdrift.stats.reduction``: weights are written out, ridge regressions are least squares of rows with
penalty rows below them, and each cluster is really left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weight = Callable[[int, int], float]  # of t and tau, H + 1 without divergence


def weights(horizon: int, blocks: Sequence[tuple[int, int]]) -> dict[str, Weight]:
    """Every weight a_t of the definitions by its name; at t, whether tau < t is known."""

    def inside(first: int, last: int) -> Weight:
        return lambda t, _: float(first <= t <= last) / horizon

    return {
        "all": inside(1, horizon),
        **{f"block {number}": inside(*block) for number, block in enumerate(blocks, start=1)},
        "after divergence": lambda t, tau: float(t > tau) / horizon,
        "divergence": lambda t, tau: float(tau >= t),
        "exposure": lambda t, tau: float(tau >= t) * (horizon - t) / horizon,
    }


def control_variate(weight: Weight, apart: Sequence[bool], delta: Sequence[float]) -> float:
    """D = sum_t a_t (I_t - delta_t) of one pair."""
    tau = next((t for t, one in enumerate(apart, start=1) if one), len(apart) + 1)
    terms = enumerate(zip(apart, delta, strict=True), start=1)
    return sum(weight(t, tau) * (float(one) - distance) for t, (one, distance) in terms)


def ridge(controls: Array, moments: Array, penalty: float) -> Array:
    """Coefficients [controls, moments] of rows of deviations; the penalty is one of columns of length 1."""
    if penalty == np.inf:
        return np.zeros((controls.shape[1], moments.shape[1]))
    lengths = np.array([np.linalg.norm(column) or 1.0 for column in controls.T])
    rows = np.vstack([controls / lengths, np.sqrt(penalty) * np.eye(len(lengths))])
    wanted = np.vstack([moments, np.zeros((len(lengths), moments.shape[1]))])
    return np.linalg.lstsq(rows, wanted, rcond=None)[0] / lengths[:, None]


def coefficients(
    controls: Sequence[Array], moments: Sequence[Array], clusters: Sequence[str], penalties: Sequence[float]
) -> tuple[Array, dict[str, Array]]:
    """Return the coefficients, and those without each cluster, under the penalty that predicts left-out clusters best.

    ``controls`` [K, controls] and ``moments`` [K, moments] belong to the replicates of each document.
    """
    d = [own - own.mean(axis=0) for own in controls]
    g = [own - own.mean(axis=0) for own in moments]

    def fitted(penalty: float, without: str | None) -> Array:
        kept = [place for place, cluster in enumerate(clusters) if cluster != without]
        return ridge(np.vstack([d[i] for i in kept]), np.vstack([g[i] for i in kept]), penalty)

    def error(penalty: float) -> float:
        total = sum((own**2).sum(axis=0) for own in g)
        left = sum(((g[i] - d[i] @ fitted(penalty, cluster)) ** 2).sum(axis=0) for i, cluster in enumerate(clusters))
        return float(np.mean([one / other for one, other in zip(left, total, strict=True) if other > 0]))

    best = min(penalties, key=error)
    return fitted(best, None), {cluster: fitted(best, cluster) for cluster in set(clusters)}
