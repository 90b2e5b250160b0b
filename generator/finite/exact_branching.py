"""Exact moments of survival-weighted residual branching in a finite-state system, by enumeration.

Every common prefix U is followed to the horizon with its probability and weights (paper, sec. "residual-conditioning").
The moments of a branch at s are those of the coupled pairs with tau = s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from generator.finite.paths import PairPaths, law_distance
from generator.finite.system import FiniteSystem, FloatArray


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
    probability = survival = np.ones(
        1
    )  # of all common prefixes u of t tokens, in the order of their codes: P(U = u), S
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
