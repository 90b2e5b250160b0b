"""Compute next-token laws of the streams of one prompt from the sessions of its sides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdrift.generator.coupling.sampling import deployed
from kvdrift.generator.engines.engine import Session
from kvdrift.schema.sampling import SamplingLaw

DOUBLE_VOCABULARY = 4096  # laws over more tokens are float32


@dataclass(frozen=True)
class PromptSide:
    """A side's session that has decoded a prompt, and the logits after it, float32 [V]."""

    session: Session
    logits: NDArray[np.float32]


@dataclass(frozen=True)
class _Stream:
    cache: int
    handle: int


class EngineKernels:
    """Streams of some sides, as ``StreamKernels`` of ``kvdrift.generator.coupling.kernels``.

    ``sides`` has for each cache the side that has decoded the prompt: cache 0 is the reference's, cache a is that of
    the a-th action. Each side prefills by itself, so the laws of position 1 may differ.
    """

    def __init__(self, sides: Sequence[PromptSide], eos_tokens: tuple[int, ...], law: SamplingLaw) -> None:
        self.eos_tokens, self.device = eos_tokens, "cpu"
        self._sides, self._law = sides, law
        self._open: list[_Stream] = []
        self._parked: dict[int, _Stream] = {}
        self.sent = torch.empty(0, dtype=torch.int64)
        self.ahead = None  # a step waits for its tokens

    def send(self, indices: Tensor) -> None:
        """Take integers, int64 of any shape, to the place of the laws."""
        self.sent = indices

    def open(self, caches: Sequence[int]) -> Tensor:
        """Start one stream for each of ``caches`` at the end of the prompt, and return their laws, [streams, V]."""
        self.rewind()
        self._open = [_Stream(cache, self._sides[cache].session.fork()) for cache in caches]
        return self._laws(np.stack([self._sides[cache].logits for cache in caches]))

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token to each open stream, int64 [streams], and return the next laws, [streams, V]."""
        if not self._open:
            return torch.empty((0, len(self._sides[0].logits)), dtype=torch.float64)
        found, given = [], iter(tokens.tolist())
        for cache, own in groupby(self._open, key=lambda stream: stream.cache):
            handles = [stream.handle for stream in own]
            found.append(self._sides[cache].session.step(handles, [next(given) for _ in handles]))
        return self._laws(np.concatenate(found))

    def select(self, rows: Tensor) -> None:
        """Replace the open streams by ``rows``, int64 [streams]; numbers after the open streams are parked ones."""
        before, taken, selected = self._open, set[int](), []
        for row in rows.tolist():
            if row < len(before) and row not in taken:
                taken.add(row)
                selected.append(before[row])
            else:  # a second stream of the same history; or one whose parked history stays
                selected.append(self._forked(before[row] if row < len(before) else self._parked[row - len(before)]))
        self._close(stream for row, stream in enumerate(before) if row not in taken)
        self._open = selected

    @property
    def cuts_back(self) -> bool:
        """Whether parked streams can be cut back: always False here."""
        return False

    def park(self, rows: Tensor, places: Tensor) -> None:
        """Keep the histories of these open streams, int64 [parked], as the parked streams ``places``."""
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            if place in self._parked:
                self._close([self._parked[place]])
            self._parked[place] = self._forked(self._open[row])

    def rewind(self) -> None:
        """Close the open streams and go back to the end of the prompt; parked streams stay."""
        self._close(self._open)
        self._open = []

    def close(self) -> None:
        """Close all streams."""
        self.rewind()
        self._close(self._parked.values())
        self._parked = {}

    def _forked(self, stream: _Stream) -> _Stream:
        return _Stream(stream.cache, self._sides[stream.cache].session.fork(stream.handle))

    def _close(self, streams: Iterable[_Stream]) -> None:
        for stream in streams:
            self._sides[stream.cache].session.drop(stream.handle)

    def _laws(self, logits: NDArray[np.float32]) -> Tensor:
        """Return the laws of logits, [streams, V]."""
        dtype = torch.float64 if logits.shape[-1] <= DOUBLE_VOCABULARY else torch.float32
        laws = torch.empty(logits.shape, dtype=dtype)
        deployed(torch.from_numpy(logits), self._law, laws)
        return laws
