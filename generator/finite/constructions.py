"""Systems that the paper's theorems construct: any risk in the identified interval, and one fixed by its reference."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from generator.finite.system import FiniteSystem, check_shape
from schema.errors import InputError

# Sums of up to H masses of a profile round by no more than this.
_ROUNDING = 1e-12


def sharp_system(
    p: ArrayLike, rho: ArrayLike, alpha: float, *, alphabet: int = 2, name: str = "sharp", action: str = "constructed"
) -> FiniteSystem:
    """The kernels of theorem "sharp-frontier": a depth-L profile whose risk is R_L + alpha B_L exactly.

    ``p`` [H] is P(tau = s); ``rho`` [H, L] is rho_{s,j}, j = 0..L-1, with L <= H, and holds 0 where s + j > H. The
    reference emits 0 always; the action emits 1 with the profile's hazard, and after its first 1, at s, with
    probability rho_{s,j} while j < L and ``alpha`` from then on. Other tokens are never emitted. InputError unless the
    profile is admissible (paper, def. "depth-profile") and 0 <= alpha <= 1.
    """
    masses, rates = np.asarray(p, dtype=np.float64), np.asarray(rho, dtype=np.float64)
    _check_profile(name, masses, rates)
    if not 0.0 <= alpha <= 1.0:
        raise InputError(f"system '{name}': alpha = {alpha!r} is not in [0, 1]")
    horizon, depth = rates.shape
    check_shape(name, alphabet, horizon)
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
    """The counterexample of the section "fixed-reference": H = 2, a fair reference, Q_1(1) = 1/2 + sign * epsilon.

    The second step is fair on both sides. At depth 1 its profile is p_1 = epsilon, p_2 = 0, and of all actions with
    that profile and this reference each has risk epsilon / 2, though [R_1, R_1 + B_1] = [epsilon / 2, epsilon].
    InputError unless 0 < epsilon < 1/2 and sign is 1 or -1.
    """
    if not 0.0 < epsilon < 0.5:
        raise InputError(f"system '{name}': epsilon = {epsilon!r} is not inside (0, 1/2)")
    if sign not in {-1, 1}:
        raise InputError(f"system '{name}': sign = {sign!r} is neither 1 nor -1")
    fair = tuple(_laws_over(2, np.full(2**t, 0.5)) for t in range(2))
    first = _laws_over(2, np.array([0.5 + sign * epsilon]))
    return FiniteSystem(name, 2, 2, fair, {action: (first, fair[1])})


def _check_profile(name: str, p: NDArray[np.float64], rho: NDArray[np.float64]) -> None:
    where = f"system '{name}'"
    shaped = p.ndim == 1 and rho.ndim == 2 and len(rho) == len(p) and 1 <= rho.shape[1] <= len(p)
    if not shaped:
        raise InputError(
            f"{where}: p {list(p.shape)} and rho {list(rho.shape)} are not [H] and [H, L] with 1 <= L <= H"
        )
    for s, mass in enumerate(p.tolist(), start=1):
        if not mass >= 0.0:
            raise InputError(f"{where}: p_{s} = {mass!r}; a probability is at least 0")
    if math.fsum(p) > 1.0 + _ROUNDING:
        raise InputError(f"{where}: p sums to {math.fsum(p)!r}, more than 1")
    for (row, j), rate in np.ndenumerate(rho):
        s, value = row + 1, float(rate)
        low, high, why = 0.0, 1.0, "not in [0, 1]"
        if s + j > len(p):
            high, why = 0.0, "not 0, beyond the horizon"
        elif p[row] == 0.0:
            high, why = 0.0, f"not 0, where p_{s} = 0"
        elif j == 0:
            low, why = 1.0, "not 1: the first mismatch counts"
        if not low <= value <= high:
            raise InputError(f"{where}: rho_{{{s},{j}}} = {value!r} is {why}")


def _hazard(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """eta_t = p_t / S_t, 0 where nothing survives."""
    survival = np.maximum(1.0 - np.concatenate([[0.0], p.cumsum()[:-1]]), 0.0)
    return np.minimum(np.divide(p, survival, out=np.zeros_like(p), where=survival > 0.0), 1.0)


def _laws_over(alphabet: int, one: NDArray[np.float64]) -> NDArray[np.float64]:
    """Laws [histories, V] with probability ``one`` [histories] of token 1, the rest on token 0."""
    laws = np.zeros((len(one), alphabet))
    laws[:, 0], laws[:, 1] = 1.0 - one, one
    return laws
