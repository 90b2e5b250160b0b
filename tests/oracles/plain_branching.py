"""Residual branching by the paper's algorithm, one replicate after another, without any sharing of work.

It shares the uniforms with the fast path and nothing else: one replicate has caches of its own, the scan keeps nothing,
and a branch starts from the prompt again, fed the scanned prefix token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracles.plain_generator import Chooser, _advance, _expanded, _prefill, coupled_pair, distribution_of, inverse_cdf

from kvdrift.generator.coupling.rollout import uniform_table
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling


@dataclass
class PlainBranch:
    """One replicate: the scan's tokens, deficits and weights, and the branch's rows (t, x, y, delta, f)."""

    tokens: list[int] = field(default_factory=list)
    deficits: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    branch: list[tuple[int, int, int, float, float]] = field(default_factory=list)


class Stream:
    """One cache followed along one history, absorbed by EOS."""

    def __init__(
        self,
        network: Any,
        prompt: Any,
        kept: list[Any],
        logits: Any,
        entries: int,
        eos: Sequence[int],
        made_by: Sampling,
    ) -> None:
        self.law, self._made_by = distribution_of(logits, made_by), made_by
        self._network, self._cache, self._position, self._eos = network, _expanded(prompt, kept, 1), entries, eos

    def feed(self, token: int) -> None:
        """Append a token and compute the next law."""
        if token in self._eos or self._position < 0:
            self.law = np.zeros(len(self.law))
            self.law[self._eos[0]] = 1.0
            self._position = -1
            return
        self.law = _advance(self._network, self._cache, np.array([token]), self._position, self._made_by)[0]
        self._position += 1


def plain_branching(
    network: Any,
    tokens: Sequence[int],
    chooser: Chooser,
    *,
    seed: int,
    document: str,
    action: str,
    replicates: Sequence[int],
    horizon: int,
    eos_tokens: Sequence[int],
    sampling: Sampling = FULL_SOFTMAX,
) -> list[PlainBranch]:
    """Generate every replicate of one action of one document."""
    prompt, logits, kept = _prefill(network, tokens, chooser)
    everything = [np.tile(np.arange(len(tokens)), (len(layer), 1)) for layer in kept]

    def stream(choice: list[Any]) -> Stream:
        return Stream(network, prompt, choice, logits, len(tokens), eos_tokens, sampling)

    table = uniform_table(seed, document, action, replicates, horizon, 7, estimator="swrb")
    return [_replicate(lambda: stream(everything), lambda: stream(kept), u, horizon) for u in table]


def _replicate(
    reference: Callable[[], Stream], compressed: Callable[[], Stream], u: NDArray[np.float64], horizon: int
) -> PlainBranch:
    found, survival, chosen = PlainBranch(), 1.0, (0, 0, 0)
    along, against = reference(), compressed()
    for column in range(horizon):
        p, q = along.law, against.law
        overlap = np.minimum(p, q)
        e = 0.0 if np.array_equal(p, q) else 1.0 - overlap.sum()
        w = survival * e
        survival *= 1.0 - e
        found.deficits.append(e)
        found.weights.append(w)
        if w > 0 and u[column, 1] * sum(found.weights) < w:
            chosen = column + 1, inverse_cdf(p - overlap, u[column, 2]), inverse_cdf(q - overlap, u[column, 3])
        token = inverse_cdf(overlap, u[column, 0])
        found.tokens.append(token)
        along.feed(token)
        against.feed(token)
    if chosen[0]:
        _branch(found, reference, compressed, chosen, u[:, 4:], horizon)
    return found


def _branch(
    found: PlainBranch,
    reference: Callable[[], Stream],
    compressed: Callable[[], Stream],
    chosen: tuple[int, int, int],
    u: NDArray[np.float64],
    horizon: int,
) -> None:
    start, x, y = chosen
    on_x, on_y, forced = reference(), compressed(), compressed()
    for token in found.tokens[: start - 1]:
        for stream in (on_x, on_y, forced):
            stream.feed(token)
    found.branch.append((start, x, y, found.deficits[start - 1], found.deficits[start - 1]))
    for column in range(start, horizon):
        on_x.feed(x)
        forced.feed(x)
        on_y.feed(y)
        p, q = on_x.law, on_y.law
        delta, f = (1.0 - np.minimum(p, other).sum() for other in (q, forced.law))
        x, y = coupled_pair(p, q, *u[column])
        found.branch.append((column + 1, x, y, delta, f))
