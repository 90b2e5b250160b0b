"""Streams of a finite-state system, whose laws are looked up in tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvdrift.generator.finite.system import FiniteSystem


class FiniteKernels:
    """Streams of a system, as ``StreamKernels`` of ``kvdrift.generator.coupling.kernels``.

    Cache 0 is the reference, cache a is the a-th of ``actions``, which may repeat. Laws come from the tables, float64
    on the CPU. After an EOS token they are ignored: the rollout replaces them.
    """

    def __init__(self, system: FiniteSystem, actions: Sequence[str]) -> None:
        names = list(dict.fromkeys(actions))  # each once
        kernels = [system.laws(None), *(system.laws(name) for name in names)]
        self.vocabulary_size, self.eos_tokens, self.device = system.alphabet, system.eos_tokens, "cpu"
        self._tables = [torch.from_numpy(np.stack(position)) for position in zip(*kernels, strict=True)]
        self._table_of = torch.tensor([0, *(names.index(name) + 1 for name in actions)])
        self._position = 0  # tokens that every open stream has
        nothing = torch.empty(0, dtype=torch.int64)
        self._table, self._code = nothing, nothing  # [streams]
        self.sent = nothing
        self.ahead = None  # a step waits for its tokens
        self._parked_table, self._parked_code, self._parked_length = nothing, nothing, nothing  # [parked streams]

    def open(self, caches: Sequence[int]) -> Tensor:
        """Start one stream for each entry of ``caches``, and return the laws of position 1, float64 [streams, V]."""
        self.rewind()
        self._table = self._table_of[torch.tensor(caches, dtype=torch.int64)]
        self._code = torch.zeros_like(self._table)
        return self._tables[0][self._table, self._code]

    def send(self, indices: Tensor) -> None:
        """Take integers, int64 of any shape, to the place of the laws."""
        self.sent = indices

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token to each open stream, int64 [streams], and return the next laws, float64 [streams, V]."""
        self._position += 1
        self._code = self._code * self.vocabulary_size + tokens
        return self._tables[self._position][self._table, self._code]

    @property
    def cuts_back(self) -> bool:
        """Whether parked histories can be cut back: always True, since histories are numbers."""
        return True

    def select(self, rows: Tensor) -> None:
        """Replace the open streams by ``rows``, int64 [streams]; numbers after the open streams are parked ones."""
        # A parked history is cut back to the present position by dropping its last digits.
        beyond = (self._parked_length - self._position).clamp_(min=0)
        parked = self._parked_code // torch.pow(self.vocabulary_size, beyond)
        self._table = torch.cat([self._table, self._parked_table])[rows]
        self._code = torch.cat([self._code, parked])[rows]

    def park(self, rows: Tensor, places: Tensor) -> None:
        """Keep the histories of open streams as the parked streams ``places``, for a later ``select``.

        Both are int64 [parked].
        """
        more = max(int(places.max()) + 1 - len(self._parked_table), 0)
        self._parked_table, self._parked_code, self._parked_length = (
            torch.cat([parked, torch.zeros(more, dtype=torch.int64)])
            for parked in (self._parked_table, self._parked_code, self._parked_length)
        )
        self._parked_table[places], self._parked_code[places] = self._table[rows], self._code[rows]
        self._parked_length[places] = self._position

    def rewind(self) -> None:
        """Close the open streams and return to position 1; parked streams stay."""
        self._position = 0
        self._table, self._code = self._table[:0], self._code[:0]
