"""Random finite-state systems for tests, and the coupled process on them written out law by law.

The plain formulation shares nothing with ``generator.finite`` but the tables: it multiplies the definition's transition
probabilities along every pair of paths, in loops over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from generator.finite.system import FiniteSystem

History = tuple[int, ...]
Law = list[float]

ACTION = "action"
KINDS = ("near", "far", "sparse")


@cache
def random_system(alphabet: int, horizon: int, eos: History = (), kind: str = "near", seed: int = 0) -> FiniteSystem:
    """Laws near each other, independent of each other, or independent with zeros (now and then of disjoint support)."""
    random = np.random.default_rng([seed, alphabet, horizon, len(eos), KINDS.index(kind)])
    tables: list[list[NDArray[np.float64]]] = [[], []]
    for t in range(horizon):
        weights = random.gamma(0.7, size=(2, alphabet**t, alphabet)) + 0.02
        if kind == "sparse":
            weights *= random.random(weights.shape) < 0.6
            weights[..., 0] += weights.sum(-1) == 0.0  # never without mass
        laws = weights / weights.sum(-1, keepdims=True)
        if kind == "near":
            laws[1] = 0.8 * laws[0] + 0.2 * laws[1]
        for side in range(2):
            tables[side].append(laws[side])
    name = f"{kind}-{alphabet}-{horizon}"
    return FiniteSystem(name, alphabet, horizon, tuple(tables[0]), {ACTION: tuple(tables[1])}, eos)


def table_law(system: FiniteSystem, action: str | None, history: History) -> Law:
    """The law that stands in the table."""
    tables = system.reference if action is None else system.actions[action]
    code = 0
    for token in history:
        code = code * system.alphabet + token
    return [float(value) for value in tables[len(history)][code]]


def side_law(system: FiniteSystem, action: str | None, history: History) -> Law:
    """The law with EOS absorbing."""
    if set(history) & set(system.eos_tokens):
        return [float(token == system.eos_tokens[0]) for token in range(system.alphabet)]
    return table_law(system, action, history)


def deficit(p: Law, q: Law) -> float:
    """e = 1 - sum min(p, q), 0 for equal laws whatever rounding does."""
    return 0.0 if p == q else 1.0 - sum(map(min, p, q))


def transition(p: Law, q: Law, u: int, v: int) -> float:
    """Gamma(u, v) of the paper's eq. coupling-kernel."""
    overlap = min(p[u], q[u]) if u == v else 0.0
    return overlap + residual(p, q, u, v) * deficit(p, q)


def residual(p: Law, q: Law, u: int, v: int) -> float:
    """Probability of the residual pair (u, v)."""
    e = deficit(p, q)
    return (p[u] - min(p[u], q[u])) / e * ((q[v] - min(p[v], q[v])) / e) if e > 0 else 0.0


@dataclass(frozen=True)
class Path:
    """One pair of paths with its probability and its distances."""

    x: History
    y: History
    probability: float
    delta: Law
    f: Law

    @property
    def mismatch(self) -> list[bool]:
        """I_t."""
        return [u != v for u, v in zip(self.x, self.y, strict=True)]

    @property
    def entry(self) -> int | None:
        """tau, None without divergence."""
        return self.mismatch.index(True) + 1 if any(self.mismatch) else None


@cache
def all_paths(system: FiniteSystem, action: str = ACTION) -> list[Path]:
    """Every pair of paths that has a positive probability."""
    return list(_paths(system, action))


def _paths(system: FiniteSystem, action: str) -> Iterator[Path]:
    law = cache(lambda side, history: side_law(system, side, history))
    for x in product(range(system.alphabet), repeat=system.horizon):
        for y in product(range(system.alphabet), repeat=system.horizon):
            probability, delta, f = 1.0, [], []
            for t in range(system.horizon):
                p, q = law(None, x[:t]), law(action, y[:t])
                probability *= transition(p, q, x[t], y[t])
                if probability == 0:
                    break
                delta.append(deficit(p, q))
                f.append(deficit(p, law(action, x[:t])))
            else:
                yield Path(x, y, probability, delta, f)


def evaluations(system: FiniteSystem, x: History, y: History, first: int) -> int:
    """Positions ``first``..H of a pair of paths before which not both sides have ended."""
    eos = set(system.eos_tokens)
    return sum(not (set(x[: t - 1]) & eos and set(y[: t - 1]) & eos) for t in range(first, system.horizon + 1))
