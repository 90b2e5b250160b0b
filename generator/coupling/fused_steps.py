"""Positions of coupled pairs that are begun on the laws' device before the host has read the last tokens.

A pair's streams change only when it parts or ends. As long as none does, the device alone can feed the tokens that it
has drawn: all tables of the step before stay valid, and so do all shapes. So once a position has used the streams of
the position before, the next position is begun at once, and the host reads tokens and distances of the last position
meanwhile. If these tokens show that streams change after all, the position that was begun is given up and computed
again with new streams, which writes over everything that it has written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from generator.coupling.fused_draws import fused_draws
from generator.coupling.kernels import StreamKernels
from generator.coupling.step_indices import Arrival
from generator.coupling.streams import DistinctStreams


class FusedSteps:
    """The draws of all positions, by ``fused_draws``.

    ``pair_reference`` is the reference of each pair, int64 [pairs]. ``uniforms``, on the laws' device, are for each
    position those of ``fused_draws``, [H, references + 2 pairs]. An ended side emits token ``absent``.
    """

    def __init__(self, kernels: StreamKernels, pair_reference: Tensor, uniforms: Tensor, absent: int) -> None:
        self._kernels, self._ahead, self._uniforms, self._absent = kernels, kernels.ahead, uniforms, absent
        self._reference = pair_reference.to(kernels.device)
        self._wanted, pairs = uniforms.shape[1], len(pair_reference)
        references = self._wanted - 2 * pairs
        # Of each stream that may be wanted, the place of its token among the results of ``fused_draws``.
        self._drawn = torch.cat([torch.arange(references), pair_reference, references + torch.arange(pairs)])
        self._column, self._streams, self._rows = -1, -1, torch.empty(0)
        self._same = False  # whether the streams and rows of this position equal those of the last position
        self._begun: Tensor | None = None  # the draws of the next position, on the device

    def open(self, streams: DistinctStreams, wanted: Tensor, rows: Tensor) -> Tensor:
        """Start the streams at the prompt and return the draws of position 1; arguments are those of ``step``."""
        self._prepare(0, streams, wanted, rows)
        return self._read(self._drawn_by(self._kernels.open(streams.cache.tolist())))

    def step(self, column: int, streams: DistinctStreams, wanted: Tensor, rows: Tensor) -> Tensor:
        """Advance every stream by one position; return the result of ``fused_draws``, on the CPU.

        ``column`` is the position, from 0; ``wanted`` says which of all streams that may be wanted are, bool
        [references + 2 pairs]; ``rows`` are those of laws to compare, as ``fused_draws`` takes them. If no stream is
        open, the result is empty.
        """
        self._prepare(column, streams, wanted, rows)
        found = self._begun
        if found is None:
            self._kernels.select(streams.row)
            laws = self._kernels.advance(streams.token)
            if not self._streams:
                return torch.empty(0)
            found = self._drawn_by(laws)
        return self._read(found)

    def _prepare(self, column: int, streams: DistinctStreams, wanted: Tensor, rows: Tensor) -> None:
        """Give the position up if it was begun with other streams, and let the next call send what it needs."""
        stay = self._streams >= 0 and torch.equal(streams.row, torch.arange(self._streams))
        self._same = stay and torch.equal(rows, self._rows)
        self._column, self._streams, self._rows = column, len(streams.row), rows
        if self._begun is not None and self._ahead is not None:
            if self._same:
                return
            self._ahead.give_up()
            self._begun = None
        tokens = self._drawn[wanted][streams.member]
        unused = tokens.new_zeros(self._wanted - len(tokens))
        self._kernels.send(torch.cat([rows.flatten(), torch.tensor([column]), tokens, unused]))

    def _read(self, found: Tensor) -> Tensor:
        """Return draws of this position, and begin the next position before the host waits for these draws."""
        arrival, self._begun = Arrival(found), None
        if self._same and self._ahead is not None and self._column + 1 < len(self._uniforms):
            _, column, tokens = self._sent()
            column.add_(1)
            self._begun = self._drawn_by(self._ahead.follow(found[tokens].long()))
        return arrival.wait()

    def _drawn_by(self, laws: Tensor) -> Tensor:
        rows, column, _ = self._sent()
        uniforms = self._uniforms.index_select(0, column).squeeze(0)
        return fused_draws(laws, rows.view(2, -1), self._reference, uniforms, self._absent)

    def _sent(self) -> tuple[Tensor, ...]:
        """Return rows, position, and the places of the streams' tokens, on the laws' device."""
        return torch.split(self._kernels.sent, [2 * self._wanted, 1, self._wanted])
