"""Coupled pairs of a finite-state system, enumerated: every pair of paths with its probability, and what follows.

The overlap-residual coupling (paper, eq. coupling-kernel) is written out position by position; pairs of histories that
cannot occur are dropped on the way. Nothing here is sampled, and all of it is float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from generator.finite.system import FiniteSystem
from schema.errors import InputError

Array = NDArray[np.float64]

# Pairs of histories that one position may have: all of V = 4, H = 5 or V = 2, H = 10; some 200 MB.
LARGEST_ENUMERATION = 2**20


@dataclass(frozen=True, eq=False)
class PairPaths:
    """Every pair of paths that an action can take with the reference, all arrays [paths, H] or [paths].

    ``probability`` sums to 1. ``x`` and ``y`` (int64) are the tokens, ``delta`` and ``f`` the distances delta_t and f_t
    of their histories, ``x_ended`` and ``y_ended`` say that a side has emitted EOS up to and including t. Any
    trajectory functional's mean and variance are those of an array [paths] under ``probability``.
    """

    probability: Array
    x: NDArray[np.int64]
    y: NDArray[np.int64]
    delta: Array
    f: Array
    x_ended: NDArray[np.bool_]
    y_ended: NDArray[np.bool_]

    @property
    def mismatch(self) -> NDArray[np.bool_]:
        """I_t."""
        return np.asarray(self.x != self.y)

    @property
    def entry(self) -> NDArray[np.int64]:
        """tau; H + 1 without divergence."""
        mismatch = self.mismatch
        first = np.where(mismatch.any(axis=1), mismatch.argmax(axis=1), mismatch.shape[1])
        return np.asarray(first + 1)

    @property
    def evaluated(self) -> NDArray[np.bool_]:
        """Whether a pair of laws is evaluated at t: unless both sides have ended before t."""
        before = self.x_ended[:, :-1] & self.y_ended[:, :-1]
        return ~np.column_stack([np.zeros(len(before), dtype=np.bool_), before])

    def mean(self, values: NDArray[np.generic]) -> Array:
        """The expectation of ``values`` [paths, ...]; an array [...]."""
        return np.asarray(np.tensordot(self.probability, values.astype(np.float64), axes=1))

    def variance(self, values: Array) -> float:
        """The variance of ``values`` [paths]."""
        return float(self.mean((values - self.mean(values)) ** 2))


def pair_paths(system: FiniteSystem, action: str) -> PairPaths:
    """All pairs of paths of the coupling of the reference and ``action`` to the system's horizon.

    InputError for an unknown action, and where there are more pairs of histories than can be enumerated.
    """
    reference, compressed = system.absorbing_laws(None), system.absorbing_laws(action)
    size = system.alphabet
    x = y = np.zeros(1, dtype=np.int64)  # codes of the histories
    probability = np.ones(1)
    delta, f = np.empty((1, 0)), np.empty((1, 0))
    for p_laws, q_laws in zip(reference, compressed, strict=True):
        if len(x) * size**2 > LARGEST_ENUMERATION:
            raise InputError(
                f"system '{system.name}', action '{action}': more than {LARGEST_ENUMERATION} pairs of histories, too "
                "many to enumerate; a smaller alphabet or a shorter horizon would do"
            )
        p, q = p_laws[x], q_laws[y]
        forced = total_variation(p, q_laws[x])
        distance, step = coupling_kernel(p, q)
        step *= probability[:, None, None]
        row, u, v = step.nonzero()
        probability = step[row, u, v]
        x, y = x[row] * size + u, y[row] * size + v
        delta = np.column_stack([delta[row], distance[row]])
        f = np.column_stack([f[row], forced[row]])
    return PairPaths(
        probability=probability,
        x=_tokens(x, system),
        y=_tokens(y, system),
        delta=delta,
        f=f,
        x_ended=_ended(x, system),
        y_ended=_ended(y, system),
    )


def total_variation(p: Array, q: Array) -> Array:
    """TV of laws [..., V], as [...]; 0 for equal laws, and where rounding leaves an excess on one side only."""
    differ = np.logical_and((p > q).any(axis=-1), (q > p).any(axis=-1))
    return np.where(differ, 0.5 * np.abs(p - q).sum(axis=-1), 0.0)


def coupling_kernel(p: Array, q: Array) -> tuple[Array, Array]:
    """e = TV(p, q) [B] and the joint transition kernel [B, V, V] of laws [B, V] (paper, eq. coupling-kernel).

    Residuals are normalized by their own sums, which rounding may make differ from e: so all rows sum to 1 as nearly as
    p and q do.
    """
    distance = total_variation(p, q)
    residual_x, residual_y = np.maximum(p - q, 0.0), np.maximum(q - p, 0.0)
    apart = distance > 0.0
    for residual in (residual_x, residual_y):
        np.divide(residual, residual.sum(axis=1, keepdims=True), out=residual, where=apart[:, None])
    kernel = residual_x[:, :, None] * (residual_y * distance[:, None])[:, None, :]
    token = np.arange(p.shape[1])
    kernel[:, token, token] = np.minimum(p, q)
    return distance, kernel


def _tokens(codes: NDArray[np.int64], system: FiniteSystem) -> NDArray[np.int64]:
    places = system.alphabet ** np.arange(system.horizon - 1, -1, -1)
    return codes[:, None] // places % system.alphabet


def _ended(codes: NDArray[np.int64], system: FiniteSystem) -> NDArray[np.bool_]:
    ended = system.ended()
    horizon = system.horizon
    return np.column_stack([ended[t][codes // system.alphabet ** (horizon - t)] for t in range(1, horizon + 1)])
