"""Coupled pairs, advanced one position at a time: their tokens, which have ended or parted, and their streams.

A step is the same whether a pair started at the prompt (``generator.coupling.rollout``) or at a branch
(``generator.coupling.residual_branching``). Laws stay on the device that computes them. Streams are assigned to pairs
on the CPU, by tokens alone, so that a step waits for the device once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from generator.coupling.kernels import StreamKernels
from generator.coupling.laws import LawTable
from generator.coupling.streams import ALL_SAVINGS, DistinctStreams, Savings, distinct_streams


class CoupledPairs:
    """Pairs (action, replicate) under the maximal coupling, advanced together.

    A pair takes part from ``open`` on (all pairs, at the prompt) or from ``join`` on (some pairs, at a branch).
    Everything but laws and uniforms is on the CPU. ``steps`` has the columns of ``events``, [pairs, H] each; at first
    they hold what pairs have whose sides have both ended: EOS on both, delta = f = 0.

    Args:
        pair_reference: The reference of each pair, int64 [pairs].
        reference_cache: The cache of each reference, int64 [references], ascending.
        pair_cache: The action's cache of each pair, int64 [pairs], ascending.
        reference_owner: The cache to whose account a reference stream's laws go, int64 [references].
    """

    def __init__(
        self, kernels: StreamKernels, pair_reference: Tensor, reference_cache: Tensor, pair_cache: Tensor,
        reference_owner: Tensor, horizon: int, savings: Savings = ALL_SAVINGS,
    ) -> None:  # fmt: skip
        absent = kernels.eos_tokens[0] if kernels.eos_tokens else 0
        self._kernels, self._savings = kernels, savings
        self._pair_reference = pair_reference
        self._eos_tokens = torch.tensor(kernels.eos_tokens, dtype=torch.int64)
        self._absent = absent
        self._x = torch.full_like(reference_owner, absent)
        self._y = torch.full_like(pair_cache, absent)
        self._x_done = torch.ones_like(reference_owner, dtype=torch.bool)
        self._y_done = torch.ones_like(pair_cache, dtype=torch.bool)
        # Streams that may be wanted: the references', then compressed ones along X, then along Y.
        self._sizes = [len(reference_owner), len(pair_cache), len(pair_cache)]
        self._cache = torch.cat([reference_cache, pair_cache, pair_cache])
        self._owner = torch.cat([reference_owner, pair_cache, pair_cache])
        self._label = self._labels(pair_cache)
        self._row = torch.full_like(self._cache, -1)  # the open stream that serves; -1 where there is none
        self._open = 0  # open streams
        shape = (len(pair_cache), horizon)
        self.steps: dict[str, NDArray[Any]] = {
            **{name: np.full(shape, absent, dtype=np.int32) for name in ("x_token", "y_token")},
            **{name: np.zeros(shape, dtype=np.float32) for name in ("delta", "f")},
            **{name: np.ones(shape, dtype=np.bool_) for name in ("x_eos", "y_eos")},
        }
        self.rows_used = torch.zeros(int(pair_cache.max()) + 1, dtype=torch.float64)  # by owner; shared ones in parts
        self.evaluations = torch.zeros_like(pair_cache)

    def open(self, u_x: Tensor, u_pair: Tensor) -> None:
        """Start every pair at the prompt and couple position 1.

        Args:
            u_x: Uniforms of the references' tokens, [references].
            u_pair: Uniforms of acceptance and of the residual token, [pairs, 2].
        """
        self._x_done.fill_(value=False)
        self._y_done.fill_(value=False)
        self._row.fill_(0)  # all histories are empty
        streams, _ = self._regroup()
        self._couple(0, self._kernels.open(streams.cache.tolist()), u_x, u_pair)

    def join(
        self, pairs: Tensor, column: int, tokens: tuple[Tensor, Tensor], distance: Tensor, rows: tuple[Tensor, Tensor]
    ) -> None:
        """Start some pairs at a branch; each has a reference of its own.

        Args:
            pairs: Which pairs, int64 [joining].
            column: The position at which they part, from 0.
            tokens: x and y at that position, int64 [joining] each.
            distance: delta = f at that position, float64 [joining].
            rows: The parked streams that the reference's and the compressed histories continue, int64 [joining] each.
        """
        references = self._pair_reference[pairs]
        x, y = tokens
        x_eos, y_eos = torch.isin(x, self._eos_tokens), torch.isin(y, self._eos_tokens)
        self._x[references], self._y[pairs] = x, y
        self._x_done[references], self._y_done[pairs] = x_eos, y_eos
        reference, on_x, on_y = torch.split(self._row, self._sizes)
        reference[references] = rows[0] + self._open
        on_x[pairs] = on_y[pairs] = rows[1] + self._open
        self._write(column, pairs.numpy(), x_token=x, y_token=y, delta=distance, f=distance, x_eos=x_eos, y_eos=y_eos)

    def step(self, column: int, u_x: Tensor, u_pair: Tensor) -> bool:
        """Advance every pair by one position.

        Args:
            column: The position to couple, from 0.
            u_x: Uniforms of the references' tokens, [references].
            u_pair: Uniforms of acceptance and of the residual token, [pairs, 2].

        Returns:
            Whether a stream is open; if none is, nothing was recorded.
        """
        streams, owner = self._regroup()
        self.rows_used.index_add_(0, owner, streams.share)
        self._kernels.select(streams.row)
        laws = self._kernels.advance(streams.token)
        if not self._open:
            return False
        self._couple(column, laws, u_x, u_pair)
        return True

    def _write(self, column: int, pairs: NDArray[np.int64] | slice, **values: Tensor) -> None:
        """Record one position of some pairs: values [pairs], on the CPU, by the name of their column."""
        for name, value in values.items():
            self.steps[name][pairs, column] = value.numpy()

    def _labels(self, pair_cache: Tensor) -> Tensor:
        """Of every stream that may be wanted, a label; equal streams with different labels are not shared."""
        savings = self._savings
        reference, on_x, on_y = (torch.arange(size) for size in self._sizes)
        if savings.share_equal_histories:
            # Without a common reference each pair has its own; those of one action may still be the same.
            reference = torch.zeros_like(reference) if savings.share_reference else pair_cache
            on_x = on_y = torch.zeros_like(on_x)
        return torch.cat([reference, 2 * on_x, 2 * on_y + (0 if savings.share_until_parting else 1)])

    def _done(self) -> Tensor:
        """Of every stream that may be wanted, whether its side has ended."""
        return torch.cat([self._x_done, self._x_done[self._pair_reference], self._y_done])

    def _regroup(self) -> tuple[DistinctStreams, Tensor]:
        """The streams of the next position, and the cache to whose account each wanted one goes.

        A side that has ended loses its stream, and a pair that has parted gets two.
        """
        wanted = self._row >= 0
        if self._savings.drop_ended:
            wanted &= ~self._done()
        tokens = torch.cat([self._x, self._x[self._pair_reference], self._y])
        streams = distinct_streams(*(part[wanted] for part in (self._cache, self._row, tokens, self._label)))
        self._row = torch.full_like(self._row, -1).masked_scatter_(wanted, streams.place)
        self._open = len(streams.row)
        return streams, self._owner[wanted]

    def _couple(self, column: int, laws: Tensor, u_x: Tensor, u_pair: Tensor) -> None:
        """Draw the tokens of ``column`` by the laws of the open streams, [streams, V], and record them."""
        own = self._row.masked_fill(self._done(), -1)  # the row of each law; -1 for the point mass on EOS
        reference, on_x, on_y = torch.split(own, self._sizes)
        p, active = reference[self._pair_reference], ~(self._x_done[self._pair_reference] & self._y_done)
        self.evaluations += active

        drawn, coupled = (reference >= 0).nonzero().squeeze(-1), active.nonzero().squeeze(-1)
        forced = ((on_x >= 0) & (on_x != on_y)).nonzero().squeeze(-1)
        table, device = LawTable(laws, self._absent), laws.device
        x = torch.full_like(self._x, self._absent, device=device)
        x[drawn.to(device)] = table.draw(reference[drawn], u_x[drawn.to(device)])
        pair_x = x[self._pair_reference[coupled].to(device)]
        y, distance = table.couple(p[coupled], on_y[coupled], pair_x, u_pair[coupled.to(device)])
        forced_distance = table.distance(p[forced], on_x[forced])

        self._x, self._y = x.cpu(), torch.full_like(self._y, self._absent)
        self._y[coupled] = y.cpu()
        delta = torch.zeros(len(self._y), dtype=torch.float64)
        delta[coupled] = distance.cpu()
        f = delta.masked_fill(on_x < 0, 0.0)  # delta itself while the pair agrees
        f[forced] = forced_distance.cpu()
        self._x_done |= torch.isin(self._x, self._eos_tokens)
        self._y_done |= torch.isin(self._y, self._eos_tokens)
        x_token, x_done = self._x[self._pair_reference], self._x_done[self._pair_reference]
        self._write(
            column, slice(None), x_token=x_token, y_token=self._y, delta=delta, f=f, x_eos=x_done, y_eos=self._y_done
        )  # fmt: skip
