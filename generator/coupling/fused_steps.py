"""Positions of coupled pairs that are begun on the laws' device before the host has read the last tokens.

A pair's streams change only when it parts or ends. As long as none does, the device alone can feed the tokens that it
has drawn: all tables of the step before stay valid, and so do all shapes. So once a position has used the streams of
the position before, the next position is begun at once, and the host reads tokens and distances of the last position
meanwhile. If these tokens show that streams change after all, the position that was begun is given up and computed
again with new streams, which writes over everything that it has written.

On CUDA the operations that compute a position's laws and draws are captured as one graph. Later positions of equal
shapes replay the graph, whether their streams are new or not (``kvdrift.generator.coupling.step_graphs``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvdrift.generator.coupling.kernels import AheadKernels, StreamKernels
from kvdrift.generator.coupling.step_graphs import StepGraphs
from kvdrift.generator.coupling.step_indices import Arrival
from kvdrift.generator.coupling.streams import DistinctStreams


class FusedSteps:
    """The draws of all positions, with at most ``most`` streams open at once.

    ``draw`` returns the draws of a position, of any shape, from its laws [streams, V], ``rows`` as given to ``step``,
    and its uniforms. The draws contain the next token of each stream. ``uniforms`` are those of each position, [H,
    ...], on the laws' device.
    """

    def __init__(
        self, kernels: StreamKernels, draw: Callable[[Tensor, Tensor, Tensor], Tensor], uniforms: Tensor, most: int
    ) -> None:
        self._kernels, self._ahead, self._draw = kernels, kernels.ahead, draw
        self._uniforms, self._most = uniforms, most
        self._column, self._streams, self._rows = -1, -1, torch.empty(0)
        self._same = False  # whether the streams and rows of this position equal those of the last position
        self._begun = False  # whether the draws of the next position are computed already
        self._found = torch.empty(0)  # draws, on the device; those of equal shapes lie at the same place
        self._graphs = StepGraphs(kernels.device)

    def open(self, streams: DistinctStreams, places: Tensor, rows: Tensor) -> Tensor:
        """Start the streams at the prompt and return the draws of position 1; arguments are those of ``step``."""
        self._prepare(0, streams, places, rows)
        self._find(self._kernels.open(streams.cache.tolist()))
        return self._read()

    def step(self, column: int, streams: DistinctStreams, places: Tensor, rows: Tensor) -> Tensor:
        """Advance every stream by one position and return its draws, on the CPU; nothing if no stream is open.

        ``column`` is the position, from 0; ``places`` has the place of each stream's token among the draws of the last
        position, int64 [streams]; ``rows`` are those of laws that the draws are from, int64 of any shape, on the CPU.
        """
        self._prepare(column, streams, places, rows)
        if not self._begun:
            self._kernels.select(streams.row)
            if not self._streams:
                self._kernels.advance(streams.token)
                return torch.empty(0)
            if self._ahead is None:
                self._find(self._kernels.advance(streams.token))
            else:
                self._ahead.place(streams.token)
                self._compute(self._ahead)
        return self._read()

    def _prepare(self, column: int, streams: DistinctStreams, places: Tensor, rows: Tensor) -> None:
        """Give the position up if it was begun with other streams, and let the next call send what it needs."""
        stay = self._streams >= 0 and torch.equal(streams.row, torch.arange(self._streams))
        self._same = stay and torch.equal(rows, self._rows)
        self._column, self._streams, self._rows = column, len(streams.row), rows
        if self._begun and self._ahead is not None:
            if self._same:
                return
            self._ahead.give_up()
            self._begun = False
        unused = places.new_zeros(self._most - len(places))
        self._kernels.send(torch.cat([rows.flatten(), torch.tensor([column]), places, unused]))

    def _read(self) -> Tensor:
        """Return draws of this position, and begin the next position before the host waits for these draws."""
        arrival, self._begun = Arrival(self._found), False
        if self._same and self._ahead is not None and self._column + 1 < len(self._uniforms):
            _, column, places = self._sent()
            column.add_(1)
            self._ahead.feed(self._found.flatten()[places].long())
            self._compute(self._ahead)
            self._begun = True
        return arrival.wait()

    def _compute(self, ahead: AheadKernels) -> None:
        """Compute the draws of the position that ``place`` or ``feed`` has prepared, by a graph if there is one."""
        bucket = (ahead.bucket, self._rows.shape, self._found.shape, self._found.data_ptr())
        self._graphs.run(bucket, lambda: self._find(ahead.laws()))

    def _find(self, laws: Tensor) -> None:
        rows, column, _ = self._sent()
        uniforms = self._uniforms.index_select(0, column).squeeze(0)
        found = self._draw(laws, rows.view(self._rows.shape), uniforms)
        self._found = self._found.copy_(found) if found.shape == self._found.shape else found

    def _sent(self) -> tuple[Tensor, ...]:
        """Return rows, position, and the places of the streams' tokens, on the laws' device."""
        return torch.split(self._kernels.sent, [self._rows.numel(), 1, self._most])
