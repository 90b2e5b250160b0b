"""Compute the exact quantities of a finite-state system, by enumeration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from generator.finite.exact_branching import ExactBranchingMoments, exact_branching_moments
from generator.finite.paths import PairPaths, pair_paths
from generator.finite.system import FiniteSystem, FloatArray


@dataclass(frozen=True, eq=False)
class ExactQuantities:
    """The decomposition, the depth profile and the moments of both estimators, for one action of one system.

    The scalars up to ``mean_entry`` are the quantities of these names in the decomposition.
    """

    mismatch: float
    rollout_tv: float
    fixed_history_tv: float
    occurrence: float
    exposure: float
    occupation: float
    mismatch_rate: float
    divergence_probability: float
    mean_entry: float | None  # None if nothing diverges
    p: FloatArray  # P(tau = s), float64 [H]
    rho: FloatArray  # rho_{s,j} in row s - 1 and column j, float64 [H, H]; 0 beyond the horizon and if p_s = 0
    observed: FloatArray  # R_L for L = 1..H, float64 [H]
    capacity: FloatArray  # B_L for L = 1..H, float64 [H]
    plain_variance: float  # variance of D_H of one coupled replicate
    plain_evaluations: float  # expected kernel-pair evaluations of one coupled replicate
    branching: ExactBranchingMoments  # moments of one replicate of residual branching


def exact_quantities(system: FiniteSystem, action: str) -> ExactQuantities:
    """Compute every quantity of ``action`` from all pairs of paths and all common prefixes."""
    paths = pair_paths(system, action)
    horizon = system.horizon
    entry, mismatch = paths.entry, paths.mismatch
    diverges, loss = entry <= horizon, mismatch.mean(axis=1)
    divergence = float(paths.mean(diverges))
    exposure = float(paths.mean((horizon - entry) * diverges)) / horizon
    occupation = float(paths.mean(mismatch.sum(axis=1) - diverges)) / horizon
    p, rho = _profile(paths)
    return ExactQuantities(
        mismatch=float(paths.mean(loss)),
        rollout_tv=float(paths.mean(paths.delta).sum()) / horizon,
        fixed_history_tv=float(paths.mean(paths.f).sum()) / horizon,
        occurrence=divergence / horizon,
        exposure=exposure,
        occupation=occupation,
        mismatch_rate=occupation / exposure if exposure > 0.0 else 0.0,
        divergence_probability=divergence,
        mean_entry=float(paths.mean(entry * diverges)) / divergence if divergence > 0.0 else None,
        p=p,
        rho=rho,
        observed=(p @ rho).cumsum() / horizon,  # rho is 0 beyond the horizon: the first L columns are all j < l_s
        capacity=np.array([p @ _beyond(horizon, depth) for depth in range(1, horizon + 1)]) / horizon,
        plain_variance=paths.variance(loss),
        plain_evaluations=float(paths.mean(paths.evaluated).sum()),
        branching=exact_branching_moments(system, action, paths),
    )


def exact_rows(system: FiniteSystem, action: str) -> list[dict[str, Any]]:
    """Make the rows of table ``exact_values`` for ``action``: action, quantity, x and value.

    x is the position of ``p``, the depth L of ``observed`` and ``capacity``, and None for a scalar. Undefined values
    have no row.
    """
    exact = exact_quantities(system, action)
    scalars = {name: getattr(exact, name) for name in _SCALARS}
    scalars["swrb_variance"] = exact.branching.variance
    scalars["swrb_evaluations"] = exact.branching.evaluations
    profiles = {"p": exact.p, "observed": exact.observed, "capacity": exact.capacity}
    return [
        *({"action": action, "quantity": name, "x": None, "value": v} for name, v in scalars.items() if v is not None),
        *(
            {"action": action, "quantity": name, "x": x, "value": value}
            for name, profile in profiles.items()
            for x, value in enumerate(profile.tolist(), start=1)
        ),
    ]


_SCALARS = (
    "mismatch", "rollout_tv", "fixed_history_tv", "occurrence", "exposure", "occupation", "mismatch_rate",
    "divergence_probability", "mean_entry", "plain_variance", "plain_evaluations",
)  # fmt: skip


def _profile(paths: PairPaths) -> tuple[FloatArray, FloatArray]:
    """Compute p_s [H] and rho_{s,j} [H, H] (paper, sec. "finite-branch-window")."""
    entry, mismatch = paths.entry, paths.mismatch
    horizon = mismatch.shape[1]
    p, rho = np.zeros(horizon), np.zeros((horizon, horizon))
    for s in range(1, horizon + 1):
        here = paths.probability * (entry == s)
        p[s - 1] = here.sum()
        if p[s - 1] > 0.0:
            rho[s - 1, : horizon - s + 1] = here @ mismatch[:, s - 1 :] / p[s - 1]
    return p, rho


def _beyond(horizon: int, depth: int) -> FloatArray:
    """Compute (H - s - L + 1)_+ for s = 1..H, with L = ``depth``."""
    return np.maximum(horizon - depth - np.arange(horizon), 0).astype(np.float64)
