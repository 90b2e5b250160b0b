"""Streams of several models side by side: each cache's streams go to the kernels of its own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvdrift.generator.coupling.kernels import StreamKernels

_NONE = torch.empty(0, dtype=torch.int64)


class JointKernels:
    """``StreamKernels`` of caches that several models decode: ``parts``, with laws on one device, of one vocabulary.

    Open streams have one numbering; within a part they keep their order, and parked streams keep their places.
    ``caches`` has for each cache the part that decodes it and the cache's number there, ascending within a part.
    """

    def __init__(self, parts: Sequence[StreamKernels], caches: Sequence[tuple[int, int]]) -> None:
        self._parts, self._caches = parts, caches
        self._owner = _NONE  # the part of each open stream, int64 [streams]
        self._rows: list[Tensor] = [_NONE] * len(parts)  # of each part, its open streams, ascending
        self._parked = _NONE  # the part of each parked stream, int64 [places]
        self.sent = _NONE
        self.ahead = None  # a step waits for its tokens

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text: those of the first part, the reference's."""
        return self._parts[0].eos_tokens

    @property
    def device(self) -> str:
        """The device of the laws."""
        return self._parts[0].device

    def send(self, indices: Tensor) -> None:
        """Send integers, int64 of any shape, to the laws' device at once."""
        self.sent = indices.to(self.device)

    def open(self, caches: Sequence[int]) -> Tensor:
        """Start one stream for each of ``caches``, which ascend, and return the laws of position 1, [streams, V].

        Each model has prefilled the prompt by itself, so the laws of one prompt may differ.
        """
        self.rewind()
        self._assign(torch.tensor([self._caches[cache][0] for cache in caches], dtype=torch.int64))
        numbers = [self._caches[cache][1] for cache in caches]
        return self._laws(lambda part, rows: part.open([numbers[row] for row in rows.tolist()]))

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token to each open stream, int64 [streams], and return the next laws, [streams, V]."""
        for part, rows in zip(self._parts, self._rows, strict=True):
            if not len(rows):
                part.advance(_NONE)  # only the position goes on
        return self._laws(lambda part, rows: part.advance(tokens[rows]))

    def select(self, rows: Tensor) -> None:
        """Replace the open streams by ``rows``, int64 [streams]; numbers after the open streams are parked ones."""
        streams = len(self._owner)
        within = torch.empty_like(self._owner)  # each stream's row in its own part
        for own in self._rows:
            within[own] = torch.arange(len(own))
        parked = rows >= streams
        open_rows, places = rows[~parked], rows[parked] - streams
        owner, row = torch.empty_like(rows), torch.empty_like(rows)
        owner[~parked], row[~parked] = self._owner[open_rows], within[open_rows]
        counts = torch.tensor([len(own) for own in self._rows])
        owner[parked] = self._parked[places]
        row[parked] = counts[owner[parked]] + places
        self._assign(owner)
        for part, own in zip(self._parts, self._rows, strict=True):
            part.select(row[own])

    @property
    def cuts_back(self) -> bool:
        """Whether parked streams of every model can be continued from earlier positions."""
        return all(part.cuts_back for part in self._parts)

    def park(self, rows: Tensor, places: Tensor) -> None:
        """Keep the histories of open streams ``rows`` as the parked streams ``places``, int64 [parked] each."""
        more = int(places.max()) + 1 - len(self._parked)
        self._parked = torch.cat([self._parked, torch.zeros(max(more, 0), dtype=torch.int64)])
        self._parked[places] = self._owner[rows]
        for number, (part, own) in enumerate(zip(self._parts, self._rows, strict=True)):
            mine = self._owner[rows] == number
            if mine.any():
                part.park(torch.searchsorted(own, rows[mine]), places[mine])

    def rewind(self) -> None:
        """Close the open streams and go back to the end of the prompt; parked streams stay."""
        self._assign(_NONE)
        for part in self._parts:
            part.rewind()

    def _assign(self, owner: Tensor) -> None:
        """Assign open stream i to part ``owner[i]``."""
        self._owner = owner
        self._rows = [(owner == number).nonzero().squeeze(-1) for number in range(len(self._parts))]

    def _laws(self, of_part: Callable[[StreamKernels, Tensor], Tensor]) -> Tensor:
        """Return the laws of the open streams, [streams, V], from those of each part that has some."""
        found = [(rows, of_part(part, rows)) for part, rows in zip(self._parts, self._rows, strict=True) if len(rows)]
        if len(found) == 1:
            return found[0][1]
        if not found:
            return torch.empty((0, 0), dtype=torch.float64, device=self.device)
        laws = found[0][1].new_empty((len(self._owner), found[0][1].shape[1]))
        for rows, own in found:
            laws[rows.to(laws.device)] = own
        return laws
