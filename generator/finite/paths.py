"""Every coupled pair of paths of a finite-state system, with its probability.

The overlap-residual coupling (paper, eq. coupling-kernel) is applied position by position; pairs of histories that
cannot occur are dropped on the way. All numbers are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvdrift.generator.finite.system import FiniteSystem, FloatArray
from kvdrift.schema.errors import InputError

LARGEST_ENUMERATION = 2**20
"""Most pairs of histories at one position, about 200 MB: enough for V = 4, H = 5 and for V = 2, H = 10."""


@dataclass(frozen=True, eq=False)
class PairPaths:
    """Every pair of paths that the reference and an action can take under the coupling."""

    probability: FloatArray  # probability of each pair, float64 [paths]; the sum is 1
    x: NDArray[np.int64]  # the reference's tokens, int64 [paths, H]
    y: NDArray[np.int64]  # the action's tokens, int64 [paths, H]
    delta: FloatArray  # the distances delta_t, float64 [paths, H]
    f: FloatArray  # the distances f_t, float64 [paths, H]
    x_ended: NDArray[np.bool_]  # whether the reference has emitted EOS at or before t, bool [paths, H]
    y_ended: NDArray[np.bool_]  # whether the action has emitted EOS at or before t, bool [paths, H]

    @property
    def mismatch(self) -> NDArray[np.bool_]:
        """The mismatches I_t, bool [paths, H]."""
        return np.asarray(self.x != self.y)

    @property
    def entry(self) -> NDArray[np.int64]:
        """The first mismatch tau, or H + 1 without one, int64 [paths]."""
        mismatch = self.mismatch
        first = np.where(mismatch.any(axis=1), mismatch.argmax(axis=1), mismatch.shape[1])
        return np.asarray(first + 1)

    @property
    def evaluated(self) -> NDArray[np.bool_]:
        """Whether a pair of laws is evaluated at t, bool [paths, H]: not once both sides have ended before t."""
        before = self.x_ended[:, :-1] & self.y_ended[:, :-1]
        return ~np.column_stack([np.zeros(len(before), dtype=np.bool_), before])

    def mean(self, values: NDArray[np.generic]) -> FloatArray:
        """Return the expectation of ``values`` [paths, ...], an array [...]."""
        return np.asarray(np.tensordot(self.probability, values.astype(np.float64), axes=1))

    def variance(self, values: FloatArray) -> float:
        """Return the variance of ``values`` [paths]."""
        return float(self.mean((values - self.mean(values)) ** 2))


def pair_paths(system: FiniteSystem, action: str) -> PairPaths:
    """Enumerate the pairs of paths of the coupled reference and ``action``, to the system's horizon."""
    reference, compressed = system.absorbing_laws(None), system.absorbing_laws(action)
    size = system.alphabet
    x = y = np.zeros(1, dtype=np.int64)  # codes of the histories
    probability = np.ones(1)
    delta, f = np.empty((1, 0)), np.empty((1, 0))
    for p_laws, q_laws in zip(reference, compressed, strict=True):
        if len(x) * size**2 > LARGEST_ENUMERATION:
            raise InputError(
                f"system '{system.name}', action '{action}': more than {LARGEST_ENUMERATION} pairs of histories are "
                "too many to enumerate; use a smaller alphabet or a shorter horizon"
            )
        p, q = p_laws[x], q_laws[y]
        forced = law_distance(p, q_laws[x])
        distance, step = coupling_kernel(p, q)
        step *= probability[:, None, None]
        row, u, v = step.nonzero()
        probability = step[row, u, v]
        x, y = x[row] * size + u, y[row] * size + v
        delta = np.column_stack([delta[row], distance[row]])
        f = np.column_stack([f[row], forced[row]])
    return PairPaths(
        probability=probability, x=_tokens(x, system), y=_tokens(y, system), delta=delta, f=f,
        x_ended=_ended(x, system), y_ended=_ended(y, system),
    )  # fmt: skip


def law_distance(p: FloatArray, q: FloatArray) -> FloatArray:
    """Compute the total variation of laws [..., V], as [...].

    It is exactly 0 for equal laws and where rounding leaves an excess on one side only.
    """
    differ = np.logical_and((p > q).any(axis=-1), (q > p).any(axis=-1))
    return np.where(differ, 0.5 * np.abs(p - q).sum(axis=-1), 0.0)


def coupling_kernel(p: FloatArray, q: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Compute e = TV(p, q) [B] and the joint transition kernel [B, V, V] of laws [B, V] (paper, eq. coupling-kernel).

    Each residual is normalized by its own sum, which rounding may make differ from e, so that the kernel of a row sums
    to 1 as nearly as p and q do.
    """
    distance = law_distance(p, q)
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
