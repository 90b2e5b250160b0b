"""Systems that the paper's theorems construct, with the risk that the theorem gives."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvdrift.generator.finite.system import FiniteSystem


def sharp_system(
    p: ArrayLike, rho: ArrayLike, alpha: float, *, alphabet: int = 2, name: str = "sharp", action: str = "constructed"
) -> FiniteSystem:
    """Make the kernels of theorem "sharp-frontier": a depth-L profile whose risk is R_L + alpha B_L exactly.

    The reference always emits 0. The action emits 1 with the profile's hazard; after its first 1, at s, it emits 1 with
    probability rho_{s,j} while j < L and ``alpha`` from then on. Other tokens are never emitted.

    Args:
        p: P(tau = s), [H].
        rho: rho_{s,j} for j = 0..L-1, [H, L], admissible in the sense of the paper's definition "depth-profile".
        alpha: Where the risk lies in the identified interval, in [0, 1].
        alphabet: Number of tokens.
        name: The system's name.
        action: The action's name.
    """
    masses, rates = np.asarray(p, dtype=np.float64), np.asarray(rho, dtype=np.float64)
    horizon, depth = rates.shape
    hazard = _hazard(masses)

    reference, compressed = [], []
    entry = np.zeros(1, dtype=np.int64)  # the position of a history's first 1, 0 where it has none
    binary = np.ones(1, dtype=np.bool_)  # no token but 0 and 1
    for t in range(1, horizon + 1):
        lag = t - entry
        inside = rates[entry - 1, np.minimum(lag, depth - 1)]
        one = np.where(entry == 0, hazard[t - 1], np.where(lag < depth, inside, alpha)) * binary
        reference.append(_laws_over(alphabet, np.zeros(len(one))))
        compressed.append(_laws_over(alphabet, one))
        token = np.arange(alphabet)
        entry = np.where((entry[:, None] == 0) & (token == 1), t, entry[:, None]).ravel()
        binary = (binary[:, None] & (token <= 1)).ravel()
    return FiniteSystem(name, alphabet, horizon, tuple(reference), {action: tuple(compressed)})


def fixed_reference_system(
    epsilon: float, sign: int, *, name: str = "fixed-reference", action: str = "tilted"
) -> FiniteSystem:
    """Make the counterexample of section "fixed-reference": H = 2, a fair reference, Q_1(1) = 1/2 + sign * epsilon.

    The second step is fair on both sides. At depth 1 its profile is p_1 = epsilon, p_2 = 0. Every action with that
    profile and this reference has risk epsilon / 2, though [R_1, R_1 + B_1] = [epsilon / 2, epsilon].
    """
    fair = tuple(_laws_over(2, np.full(2**t, 0.5)) for t in range(2))
    first = _laws_over(2, np.array([0.5 + sign * epsilon]))
    return FiniteSystem(name, 2, 2, fair, {action: (first, fair[1])})


def _hazard(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """eta_t = p_t / S_t, 0 where nothing survives."""
    survival = np.maximum(1.0 - np.concatenate([[0.0], p.cumsum()[:-1]]), 0.0)
    return np.minimum(np.divide(p, survival, out=np.zeros_like(p), where=survival > 0.0), 1.0)


def _laws_over(alphabet: int, one: NDArray[np.float64]) -> NDArray[np.float64]:
    """Laws [histories, V] with probability ``one`` [histories] of token 1, the rest on token 0."""
    laws = np.zeros((len(one), alphabet))
    laws[:, 0], laws[:, 1] = 1.0 - one, one
    return laws
