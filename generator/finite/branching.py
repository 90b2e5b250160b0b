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
    """Exact moments of one replicate of residual branching.

    Attributes:
        risk: Mean of Z^R = M D_J.
        variance: Variance of Z^R.
        variance_gap: E[(1 - M) sum_s w_s nu_s], by which plain coupling has more variance (paper, eq. swrb-gap).
        evaluations: Expected number of kernel-pair evaluations of scan and branch.
    """

    risk: float
    variance: float
    variance_gap: float
    evaluations: float


def exact_branching_moments(system: FiniteSystem, action: str, paths: PairPaths) -> ExactBranchingMoments:
    """Compute the moments of one replicate of ``action``, whose pairs of paths are ``paths``."""
    size = system.alphabet
    branches = _branches(paths, size)
    prefix = _Prefix.start()
    # Along U, sums over s of w_s, of w_s m_s and w_s nu_s, and of w_s times the branch's expected evaluations.
    mass = risk = second = later = np.zeros(1)
    scanned = 0.0
    ended = system.ended()
    for t, (p, q) in enumerate(zip(system.absorbing_laws(None), system.absorbing_laws(action), strict=True)):
        deficit, overlap = _overlap(p, q)
        scanned += float(prefix.probability @ ((prefix.survival > 0.0) & ~ended[t]))
        weight = prefix.survival * deficit
        mass = np.repeat(mass + weight, size)
        risk = np.repeat(risk + weight * branches[t].first, size)
        second = np.repeat(second + weight * branches[t].second, size)
        later = np.repeat(later + weight * branches[t].evaluations, size)
        prefix = prefix.longer(deficit, overlap)
    probability = prefix.probability
    # J is s with probability w_s / M: Z^R has mean sum_s w_s m_s and second moment M sum_s w_s nu_s given U.
    mean = float(probability @ risk)
    branched = np.divide(later, mass, out=np.zeros_like(later), where=mass > 0.0)
    return ExactBranchingMoments(
        risk=mean,
        variance=max(float(probability @ (mass * second)) - mean**2, 0.0),
        variance_gap=float(probability @ ((1.0 - mass) * second)),
        evaluations=scanned + float(probability @ branched),
    )


@dataclass(frozen=True)
class _Prefix:
    """All common prefixes of one length, in the order of their codes.

    Attributes:
        probability: P(U = u), float64 [V**t].
        survival: The survival S along u, float64 [V**t].
    """

    probability: FloatArray
    survival: FloatArray

    @classmethod
    def start(cls) -> _Prefix:
        return cls(np.ones(1), np.ones(1))

    def longer(self, deficit: FloatArray, overlap: FloatArray) -> _Prefix:
        probability = (self.probability[:, None] * overlap).ravel()
        return _Prefix(probability, np.repeat(self.survival * (1.0 - deficit), overlap.shape[1]))


def _overlap(p: FloatArray, q: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Compute e_s [B] and the normalized overlap [B, V] of laws [B, V]; where there is no overlap, e_s is 1."""
    common = np.minimum(p, q)
    total = common.sum(axis=1, keepdims=True)
    deficit = np.where(total[:, 0] > 0.0, law_distance(p, q), 1.0)
    return deficit, np.divide(common, total, out=p.copy(), where=total > 0.0)


@dataclass(frozen=True)
class _Branch:
    """What follows tau = s after each common prefix of s - 1 tokens; 0 where no pair has tau = s.

    Attributes:
        first: Mean of D_H, float64 [V**(s - 1)].
        second: Second moment of D_H, float64 [V**(s - 1)].
        evaluations: Expected number of evaluated positions after s, float64 [V**(s - 1)].
    """

    first: FloatArray
    second: FloatArray
    evaluations: FloatArray


def _branches(paths: PairPaths, size: int) -> list[_Branch]:
    horizon = paths.x.shape[1]
    entry, loss = paths.entry, paths.mismatch.mean(axis=1)
    evaluated = paths.evaluated
    branches = []
    code = np.zeros(len(loss), dtype=np.int64)  # of X_<s, which is Y_<s where tau = s
    for s in range(1, horizon + 1):
        chosen = entry == s
        values = np.stack([np.ones_like(loss), loss, loss**2, evaluated[:, s:].sum(axis=1)])
        total, *sums = (
            np.bincount(code[chosen], weights=row[chosen] * paths.probability[chosen], minlength=size ** (s - 1))
            for row in values
        )
        none = np.zeros(len(total))
        branches.append(_Branch(*(np.divide(part, total, out=none.copy(), where=total > 0.0) for part in sums)))
        code = code * size + paths.x[:, s - 1]
    return branches
