"""Systems for tests whose laws are tables over histories, as ``StreamKernels`` that count the rows they advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from generator.rollout import ActionReplicates
from generator.uniforms import uniform_table

History = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A system and how long it runs."""

    name: str
    size: int
    horizon: int
    eos: tuple[int, ...]
    replicates: int


# Every event of the process is seen in one of these: with and without EOS, two EOS tokens, EOS that is not token 0.
CASES = [
    Case("binary", 2, 4, (), 12_000),
    Case("binary-eos", 2, 4, (1,), 12_000),
    Case("ternary", 3, 3, (), 12_000),
    Case("ternary-eos", 3, 4, (2,), 12_000),
    Case("ternary-two-eos", 3, 4, (2, 0), 12_000),
]
ACTIONS = 3  # the last one has the reference's own laws


class TableKernels:
    """``StreamKernels`` whose laws stand in a table; notes how many rows each call advanced."""

    def __init__(self, case: Case, seed: int = 1) -> None:
        random = np.random.default_rng([seed, case.size, case.horizon])
        self.eos_tokens = case.eos
        self.vocabulary_size = case.size
        self.device = "cpu"
        self.tables = []  # per position [caches, histories, V], a history read as a number in base V
        for t in range(case.horizon):
            laws = random.gamma(0.7, size=(ACTIONS + 1, case.size**t, case.size)) + 0.02
            laws /= laws.sum(-1, keepdims=True)
            # Compressed laws stay near the reference's, so that agreement lasts; the last action's are the same.
            laws[1:] = 0.6 * laws[0] + 0.4 * laws[1:]
            laws[ACTIONS] = laws[0]
            if t == 0:
                laws[:] = laws[0]  # eviction follows prefill
            self.tables.append(laws)
        self.rows: list[NDArray[np.int64]] = []  # per call, rows of each cache
        self._caches = self._codes = torch.empty(0, dtype=torch.int64)
        self._position = 0

    def law(self, cache_number: int, history: History) -> NDArray[np.float64]:
        """The next-token law of a cache after a history, EOS not yet seen to."""
        code = 0
        for token in history:
            code = code * self.vocabulary_size + token
        return np.asarray(self.tables[len(history)][cache_number, code])

    def open(self, caches: Sequence[int]) -> Tensor:
        """Streams at the empty history, and their laws."""
        assert list(caches) == sorted(caches)
        self._caches = torch.tensor(caches)
        self._codes = torch.zeros_like(self._caches)
        self._position = 0
        self.rows = []
        return torch.from_numpy(self.tables[0])[self._caches, 0]

    def advance(self, tokens: Tensor) -> Tensor:
        """Longer histories and their laws."""
        assert tokens.shape == self._codes.shape
        self._codes = self._codes * self.vocabulary_size + tokens
        self._position += 1
        self.rows.append(np.bincount(self._caches.numpy(), minlength=ACTIONS + 1))
        return torch.from_numpy(self.tables[self._position])[self._caches, self._codes]

    def select(self, rows: Tensor) -> None:
        """Other streams."""
        self._caches, self._codes = self._caches[rows], self._codes[rows]
        assert bool((self._caches.diff() >= 0).all()), "rows come grouped by cache"


def actions_for(replicates: Sequence[int], horizon: int, which: Sequence[int] = (1, 2, 3)) -> list[ActionReplicates]:
    return [
        ActionReplicates(a, tuple(replicates), uniform_table(5, "doc", f"action-{a}", replicates, horizon, 2))
        for a in which
    ]
