"""Compute the exact quantities of a finite-state system, and exact moments of residual branching, by enumeration.

For the moments, every common prefix U is followed to the horizon with its probability and weights (paper, sec.
"residual-conditioning"). The moments of a branch at s are those of the coupled pairs with tau = s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdrift.generator.finite.paths import PairPaths, law_distance, pair_paths
from kvdrift.generator.finite.system import FiniteSystem, FloatArray

_SCALARS = (
    "mismatch", "rollout_tv", "fixed_history_tv", "occurrence", "exposure", "occupation", "mismatch_rate",
    "divergence_probability", "mean_entry", "plain_variance", "plain_evaluations",
)  # fmt: skip


@dataclass(frozen=True)
class ExactBranchingMoments:
    """Exact moments of one replicate of residual branching."""

    risk: float  # mean of Z^R = M D_J
    variance: float  # variance of Z^R
    variance_gap: float  # E[(1 - M) sum_s w_s nu_s], by which plain coupling has more variance (paper, eq. swrb-gap)
    evaluations: float  # expected number of kernel-pair evaluations of scan and branch


def exact_branching_moments(system: FiniteSystem, action: str, paths: PairPaths) -> ExactBranchingMoments:
    """Compute the moments of one replicate of ``action``, whose pairs of paths are ``paths``."""
    size = system.alphabet
    branches = _branches(paths, size)
    # Of all common prefixes u of t tokens, in the order of their codes: P(U = u), S.
    probability = survival = np.ones(1)
    # Along U, sums over s of w_s, of w_s m_s and w_s nu_s, and of w_s times the branch's expected evaluations.
    mass = risk = second = later = np.zeros(1)
    scanned = 0.0
    ended = system.ended()
    for t, (p, q) in enumerate(zip(system.absorbing_laws(None), system.absorbing_laws(action), strict=True)):
        deficit, overlap = _overlap(p, q)
        scanned += float(probability @ ((survival > 0.0) & ~ended[t]))
        weight = survival * deficit
        loss, square, evaluations = branches[t]
        mass = np.repeat(mass + weight, size)
        risk = np.repeat(risk + weight * loss, size)
        second = np.repeat(second + weight * square, size)
        later = np.repeat(later + weight * evaluations, size)
        probability = (probability[:, None] * overlap).ravel()
        survival = np.repeat(survival * (1.0 - deficit), size)
    # J is s with probability w_s / M: Z^R has mean sum_s w_s m_s and second moment M sum_s w_s nu_s given U.
    mean = float(probability @ risk)
    branched = np.divide(later, mass, out=np.zeros_like(later), where=mass > 0.0)
    return ExactBranchingMoments(
        risk=mean,
        variance=max(float(probability @ (mass * second)) - mean**2, 0.0),
        variance_gap=float(probability @ ((1.0 - mass) * second)),
        evaluations=scanned + float(probability @ branched),
    )


def _overlap(p: FloatArray, q: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return e_s [B] and the normalized overlap [B, V] of laws [B, V]; without an overlap, e_s is 1."""
    common = np.minimum(p, q)
    total = common.sum(axis=1, keepdims=True)
    deficit = np.where(total[:, 0] > 0.0, law_distance(p, q), 1.0)
    return deficit, np.divide(common, total, out=p.copy(), where=total > 0.0)


def _branches(paths: PairPaths, size: int) -> list[list[FloatArray]]:
    """Return for each s the means of D_H, of D_H^2 and of the number of evaluated positions after s if tau = s, else 0.

    They are float64 [V**(s - 1)] each, by the common prefix of s - 1 tokens.
    """
    horizon = paths.x.shape[1]
    entry, loss = paths.entry, paths.mismatch.mean(axis=1)
    evaluated = paths.evaluated
    branches: list[list[FloatArray]] = []
    code = np.zeros(len(loss), dtype=np.int64)  # of X_<s, which is Y_<s where tau = s
    for s in range(1, horizon + 1):
        chosen = entry == s
        values = np.stack([np.ones_like(loss), loss, loss**2, evaluated[:, s:].sum(axis=1)])
        total, *sums = (
            np.bincount(code[chosen], weights=row[chosen] * paths.probability[chosen], minlength=size ** (s - 1))
            for row in values
        )
        branches.append([np.divide(part, total, out=np.zeros(len(total)), where=total > 0.0) for part in sums])
        code = code * size + paths.x[:, s - 1]
    return branches


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
