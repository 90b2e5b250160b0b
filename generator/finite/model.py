"""Finite-state systems as the model of a study: every system is a document, and an action is one of its kernels.

Streams look distributions up in the tables of systems.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvdrift.generator.actions import Action
from kvdrift.generator.coupling.streams import SharingOptions, StreamDecoder
from kvdrift.generator.finite.study_systems import file_systems, study_systems
from kvdrift.generator.finite.system import FiniteSystem
from kvdrift.generator.identity import ActionIdentity
from kvdrift.schema.document import Document
from kvdrift.schema.errors import OperationError
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling
from kvdrift.schema.study import Study


class FiniteStreams(StreamDecoder):
    """Streams of a system.

    Cache 0 is the reference, cache a is the a-th of ``actions``, which may repeat. Distributions come from the tables,
    float64 on the CPU. After an EOS token they are ignored: the rollout replaces them.
    """

    def __init__(self, system: FiniteSystem, actions: Sequence[str]) -> None:
        names = list(dict.fromkeys(actions))  # each once
        kernels = [system.distributions(None), *(system.distributions(name) for name in names)]
        super().__init__(system.eos_tokens, "cpu")
        self.vocabulary_size = system.alphabet
        self._tables = [torch.from_numpy(np.stack(position)) for position in zip(*kernels, strict=True)]
        self._table_of = torch.tensor([0, *(names.index(name) + 1 for name in actions)])
        self._position = 0  # tokens that every open stream has
        nothing = torch.empty(0, dtype=torch.int64)
        self._table, self._code = nothing, nothing  # [streams]
        self._parked_table, self._parked_code, self._parked_length = nothing, nothing, nothing  # [parked streams]

    def open(self, caches: Sequence[int]) -> Tensor:
        """Start one stream for each entry of ``caches``; return the first distributions, float64 [streams, V]."""
        self.rewind()
        self._table = self._table_of[torch.tensor(caches, dtype=torch.int64)]
        self._code = torch.zeros_like(self._table)
        return self._tables[0][self._table, self._code]

    def advance(self, tokens: Tensor) -> Tensor:
        """Append a token to each open stream, int64 [streams]; return the next distributions, float64 [streams, V]."""
        self._position += 1
        self._code = self._code * self.vocabulary_size + tokens
        return self._tables[self._position][self._table, self._code]

    @property
    def cuts_back(self) -> bool:
        """Whether a parked stream can be continued from positions before the one at which it was parked: True here."""
        return True

    def select(self, rows: Tensor) -> None:
        """Replace the open streams: new stream i continues old stream ``rows[i]``, int64 [streams].

        With n streams open, row n + i is parked stream i, with its history up to the present position.
        """
        # A parked history is cut back to the present position by dropping its last digits.
        beyond = (self._parked_length - self._position).clamp_(min=0)
        parked = self._parked_code // torch.pow(self.vocabulary_size, beyond)
        self._table = torch.cat([self._table, self._parked_table])[rows]
        self._code = torch.cat([self._code, parked])[rows]

    def park(self, rows: Tensor, places: Tensor) -> None:
        """Keep the histories of the open streams ``rows`` as the parked streams ``places``, for a later ``select``.

        ``rows`` and ``places`` are int64 [parked].
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


@dataclass(frozen=True)
class FiniteModel:
    """A study's systems by document, as a ``Model`` (``kvdrift.generator.generation.model``).

    The tables hold distributions under ``sampling``. ``file`` has all systems of the study's file, also those that the
    study may take later; None if systems are drawn.
    """

    id: str
    systems: Mapping[str, FiniteSystem]
    file: Sequence[FiniteSystem] | None = None
    sampling: Sampling = FULL_SOFTMAX
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[str] = "float64"
    logits_dtype: ClassVar[None] = None  # there are none
    batch_deviation: ClassVar[float] = 0.0  # distributions are looked up
    row_multiple: ClassVar[int] = 1
    pairs_at_once: ClassVar[int] = 0  # a table is looked up as fast for one document

    def identity(self, action: Action) -> ActionIdentity:
        """Return the identity of an action's units: the distributions of the reference and of the action."""
        return ActionIdentity(
            self._distributions_sha256[None], None, self._distributions_sha256[None if action.control else action.name]
        )

    def weight_bytes(self, action: Action) -> None:
        """Return None, since a system has no weights."""

    @cached_property
    def _distributions_sha256(self) -> dict[str | None, str]:
        """Return SHA-256 of the distributions of the reference (None) and of each action, to the study's horizon."""
        horizon = max(system.horizon for system in self.systems.values())
        systems = list(self.systems.values()) if self.file is None else self.file
        names = {name: None for system in self.systems.values() for name in system.actions}
        return {name: _distributions_sha256(systems, name, horizon) for name in (None, *names)}

    def twins(self, count: int, before: Callable[[], None]) -> list[FiniteModel]:  # noqa: ARG002 - no pass takes long
        """Return the model itself, ``count`` times, since threads can share it."""
        return [self] * count

    def computing(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def prepare(self, document: Document, actions: Sequence[Action], horizon: int) -> PreparedSystem:  # noqa: ARG002
        """Return the document's system, in which a control has the reference's distributions."""
        system = self.systems[document.doc]
        controls = {action.name: system.reference for action in actions if action.control}
        controlled = replace(system, actions={**system.actions, **controls})
        return PreparedSystem(controlled, [action.name for action in actions])


@dataclass(frozen=True)
class PreparedSystem:
    """One system and its actions, as a ``PreparedDocument`` of ``kvdrift.generator.generation.model``."""

    system: FiniteSystem
    actions: list[str]

    def kernels(  # they take no room
        self,
        streams: int,  # noqa: ARG002
        sharing: SharingOptions,  # noqa: ARG002
        beside: Sequence[PreparedSystem] = (),  # noqa: ARG002
        parked: int = 0,  # noqa: ARG002
    ) -> FiniteStreams:
        """Return the decoder of this system; ``beside`` is empty, since each system is decoded alone."""
        return FiniteStreams(self.system, self.actions)

    def under(self, sampling: Sampling) -> PreparedSystem:
        """Raise an error, since the tables hold distributions of one sampling only."""
        raise OperationError(
            f"system '{self.system.name}': its tables hold distributions of another sampling than {sampling.words}"
        )

    def replicates_at_once(self, actions: int, estimator: str) -> int:  # noqa: ARG002 - histories take no room
        """Return a number above all numbers of replicates, since histories take almost no memory."""
        return sys.maxsize

    def record(self, number: int, streams: int) -> dict[str, Any]:  # noqa: ARG002 - nothing is kept of a prompt
        """Return the columns of ``units``: only the seconds of prefill, 0, since there is no prompt."""
        return {"prefill_seconds": 0.0}

    def kept(self, number: int) -> tuple[()]:  # noqa: ARG002
        """Return nothing: there is no prompt."""
        return ()


def finite_model(study: Study) -> FiniteModel:
    """Draw or read the study's systems as its model."""
    file = file_systems(study)
    strata = study_systems(study, file)
    systems = [system for split in strata.values() for stratum in split.values() for system in stratum]
    return FiniteModel(study.model.id, {system.name: system for system in systems}, file, study.sampling)


def _distributions_sha256(systems: Iterable[FiniteSystem], action: str | None, horizon: int) -> str:
    """Return SHA-256 of the distributions of an action, or of the reference (None), in all systems with the action."""
    digest = hashlib.sha256()
    for system in sorted(systems, key=lambda system: system.name):
        if action is None or action in system.actions:
            digest.update(repr((system.name, system.alphabet, system.eos_tokens)).encode())
            for distributions in system.distributions(action)[:horizon]:
                digest.update(distributions.astype("<f8").tobytes())
    return digest.hexdigest()
