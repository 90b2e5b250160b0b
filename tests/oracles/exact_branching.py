"""The law of one residual-branching replicate, from its definition: all scans U are listed, all branches averaged.

A replicate's estimates have the form a + c phi: a and c are functions of the scan, phi of the branch, whose start J is
s with probability w_s / M. Their moments follow, scan by scan, from the moments of phi given J = s and U_<s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

import numpy as np
from fixtures.random_systems import History, deficit, side_distribution
from oracles.exact_comparison import Array, Law, law, law_of_values

from kvdrift.generator.finite.enumeration import PairPaths
from kvdrift.generator.finite.system import FiniteSystem

POWERS = 4


@dataclass(frozen=True)
class Scan:
    """One common prefix, up to survival 0 or the horizon, with w_s (0 beyond its end) and its evaluated positions."""

    tokens: History
    probability: float
    weights: list[float]
    evaluations: int

    @property
    def mass(self) -> float:
        """The mass M."""
        return sum(self.weights)


def scans(system: FiniteSystem, action: str) -> list[Scan]:
    """Return all scans of positive probability."""
    return list(_scans(system, action, Scan((), 1.0, [], 0), 1.0))


def _scans(system: FiniteSystem, action: str, scan: Scan, survival: float) -> Iterator[Scan]:
    left = system.horizon - len(scan.weights)
    if left == 0 or survival == 0.0:
        yield Scan(scan.tokens, scan.probability, scan.weights + [0.0] * left, scan.evaluations)
        return
    p, q = side_distribution(system, None, scan.tokens), side_distribution(system, action, scan.tokens)
    overlap = list(map(min, p, q))
    common = sum(overlap)
    weights = [*scan.weights, survival * (deficit(p, q) if common > 0.0 else 1.0)]
    evaluations = scan.evaluations + (not set(scan.tokens) & set(system.eos_tokens))
    if common == 0.0:
        yield from _scans(system, action, Scan(scan.tokens, scan.probability, weights, evaluations), 0.0)
    for token, mass in enumerate(overlap):
        if mass > 0.0:
            longer = Scan((*scan.tokens, token), scan.probability * mass / common, weights, evaluations)
            yield from _scans(system, action, longer, survival * (1.0 - deficit(p, q)))


def plain_laws(paths: PairPaths) -> dict[str, Law]:
    """Return the laws of one coupled replicate's columns of ``swrb``."""
    horizon = paths.x.shape[1]
    diverged = paths.mismatch.any(axis=1).astype(np.float64)
    risk = paths.mismatch.mean(axis=1)
    values = {
        "risk": risk,
        "occurrence": diverged / horizon,
        "occupation": risk - diverged / horizon,
        "divergence_probability": diverged,
        "evaluations": paths.evaluated.sum(axis=1).astype(np.float64),
    }
    return {name: law_of_values(value, paths.probability) for name, value in values.items()}


def branching_distributions(system: FiniteSystem, action: str, paths: PairPaths) -> dict[str, Law]:
    """Return the laws of one replicate's columns of ``swrb`` and ``swrb_windows``; depths L = 1..H follow an "@"."""
    horizon = system.horizon
    found = scans(system, action)
    probability = np.array([scan.probability for scan in found])
    weights = np.array([scan.weights for scan in found])
    mass = weights.sum(axis=1)
    phi = _branch_functionals(paths)
    powers = _powers(found, weights, phi, paths, system.alphabet)
    nothing, position = np.zeros_like(mass), np.arange(1, horizon + 1)

    def replicate(a: Array, c: Array, name: str) -> Law:
        """Return the law of a + c phi."""
        mean = float(probability @ (a + c * powers[name][:, 1]))
        second, fourth = (
            sum(
                float(probability @ (comb(k, i) * (a - mean) ** (k - i) * c**i * powers[name][:, i]))
                for i in range(k + 1)
            )
            for k in (2, 4)
        )
        highest, lowest = float((a + c * phi[name].max()).max()), float(a.min())
        return law(mean, second, fourth, max(highest - mean, mean - lowest))

    laws = {
        "risk": replicate(nothing, mass, f"observed@{horizon}"),
        "occurrence": replicate(mass / horizon, nothing, "tail@1"),
        "occupation": replicate(nothing, mass, "tail@1"),
        "divergence_probability": replicate(mass, nothing, "tail@1"),
        "evaluations": replicate(
            np.array([float(scan.evaluations) for scan in found]), np.ones_like(mass), "later evaluations"
        ),
    }
    for depth in range(1, horizon + 1):
        below, capacity = f"observed@{depth}", weights @ np.maximum(horizon - position - depth + 1, 0) / horizon
        laws |= {below: replicate(nothing, mass, below), f"capacity@{depth}": replicate(capacity, nothing, below)}
    return laws


def _branch_functionals(paths: PairPaths) -> dict[str, Array]:
    """Return phi of every path that branches at tau, [paths]: 1/H of the mismatches within depth L, and after the first."""
    mismatch = paths.mismatch
    horizon = mismatch.shape[1]
    lag = np.arange(1, horizon + 1) - paths.entry[:, None]
    found = {
        "later evaluations": (paths.evaluated & (lag > 0)).sum(axis=1).astype(np.float64),
        "tail@1": (mismatch & (lag >= 1)).sum(axis=1) / horizon,
    }
    for depth in range(1, horizon + 1):
        found[f"observed@{depth}"] = (mismatch & (lag < depth)).sum(axis=1) / horizon
    return found


def _powers(
    found: list[Scan], weights: Array, phi: dict[str, Array], paths: PairPaths, alphabet: int
) -> dict[str, Array]:
    """Return E[phi^k | U] for k = 0..4, [scans, 5], of every functional; without a branch it is 0 for k > 0."""
    horizon = weights.shape[1]
    mass = weights.sum(axis=1)
    share = np.divide(weights, mass[:, None], out=np.zeros_like(weights), where=mass[:, None] > 0.0)
    values = np.stack(list(phi.values()), axis=1)[..., None] ** np.arange(POWERS + 1)
    result = np.zeros((len(found), *values.shape[1:]))
    tokens = np.zeros((len(found), horizon), dtype=np.int64)
    for number, scan in enumerate(found):
        tokens[number, : len(scan.tokens)] = scan.tokens
    code = np.zeros(len(paths.probability), dtype=np.int64)  # of X_<s
    place = np.zeros(len(found), dtype=np.int64)  # of U_<s
    for s in range(1, horizon + 1):
        here = paths.entry == s
        chance = np.zeros(alphabet ** (s - 1))
        np.add.at(chance, code[here], paths.probability[here])
        sums = np.zeros((len(chance), *values.shape[1:]))
        np.add.at(sums, code[here], paths.probability[here, None, None] * values[here])
        some = share[:, s - 1] > 0.0
        at = place[some]
        result[some] += share[some, s - 1, None, None] * sums[at] / chance[at, None, None]
        code = code * alphabet + paths.x[:, s - 1]
        place = place * alphabet + tokens[:, s - 1]
    result[..., 0] = 1.0
    return {name: result[:, number] for number, name in enumerate(phi)}
