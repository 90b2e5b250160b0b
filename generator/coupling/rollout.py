"""The coupled rollout: reference and compressed continuations of documents, position by position.

This module knows no models, only ``StreamDecoder``. A pair (action, replicate) needs three distributions at each
position: the reference's on its history X, the compressed model's on its own history Y, and the compressed model's on
X. Equal distributions are computed once:

- All actions share the reference stream of a replicate.
- Until the first mismatch, the compressed model's streams along X and Y are one, which forks when the pair diverges.
- Replicates that follow one cache along equal histories share a stream.
- After a side's EOS its distribution is a point mass, which needs no stream.

Several documents can be decoded side by side: a position then takes one call for all of them.

A step of ``CoupledPairs`` is the same whether a pair started at the prompt or at a branch
(``kvdrift.generator.coupling.residual_branching``). Distributions stay on the device that computes them. Streams are
assigned to pairs on the CPU, from tokens alone. The rows of distributions that a pair needs are known before the
distributions are computed, and go to the device with the tokens. If operations are fused, a step then waits for the
device once, for its tokens and distances, and the next step may be under way by then
(``kvdrift.generator.coupling.steps``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdrift.generator.coupling.distributions import ABSORBED, NOTHING, DistributionTable, are_fused, fused_draws
from kvdrift.generator.coupling.steps import FusedSteps
from kvdrift.generator.coupling.streams import (
    SHARE_ALL,
    DistinctStreams,
    SharingOptions,
    StreamDecoder,
    distinct_streams,
)
from kvdrift.schema.keyed_random import keyed_generator


def uniform_table(
    seed: int, document: str, action: str | None, replicates: Sequence[int], horizon: int, purposes: int,
    estimator: str | None = None,
) -> NDArray[np.float64]:  # fmt: skip
    """Return the uniforms of some replicates of an action.

    A row depends neither on the other replicates nor on the horizon. The reference has no action (None), so that every
    action meets the same reference continuation (common random numbers). Uniforms with an ``estimator`` are independent
    of those without; ``purposes`` is the number of uniforms at each position.

    Returns:
        Uniforms in [0, 1) with 53 random bits, float64 [replicates, horizon, purposes].
    """
    named = [seed, document, action] if estimator is None else [seed, document, action, estimator]
    name = json.dumps(named)
    table = np.empty((len(replicates), horizon, purposes))
    generator = keyed_generator(name)
    state: Any = generator.bit_generator.state  # set again and again: a new generator takes five times as long
    counter = state["state"]["counter"]
    for row, replicate in enumerate(replicates):
        counter[:] = (0, replicate, 0, 0)  # replicate * 2**64, in words of 64 bits
        generator.bit_generator.state = state
        generator.random(out=table[row])
    return table


@dataclass(frozen=True)
class _DistributionRows:
    """The row of each distribution that a position needs, int64; ``ABSORBED`` for the point mass of an ended side."""

    reference: Tensor  # the distribution of each reference, [references]
    p: Tensor  # the reference's distribution, for each pair, [pairs]
    on_x: Tensor  # the compressed model's distribution on X, for each pair
    on_y: Tensor  # the compressed model's distribution on Y, for each pair

    @property
    def diverged(self) -> Tensor:
        """Whether f needs a distribution of its own, bool [pairs]: X has not ended, and Y follows another stream."""
        return (self.on_x >= 0) & (self.on_x != self.on_y)

    def compared(self) -> Tensor:
        """The argument ``rows`` of ``fused_draws``, int64 [2, references + 2 pairs]."""
        left = [torch.full_like(self.reference, NOTHING), self.p, self.p.where(self.diverged, ABSORBED)]
        right = [self.reference, self.on_y, self.on_x.where(self.diverged, ABSORBED)]
        return torch.stack([torch.cat(left), torch.cat(right)])


class CoupledPairs:
    """Pairs (action, replicate) under the maximal coupling, advanced together.

    Pairs begin at ``open`` (all pairs, at the prompt) or at ``join`` (some pairs, at a branch).
    Everything but distributions and uniforms is on the CPU; uniforms go to the distributions' device once. ``steps``
    has the columns of ``events``, [pairs, H] each. At first they hold the values of pairs whose sides have both ended:
    EOS on both, delta = f = 0, and NaN for both KL divergences, which are known at positions up to X's end alone.

    Args:
        pair_reference: The reference of each pair, int64 [pairs].
        reference_cache: The cache of each reference, int64 [references], ascending.
        pair_cache: The action's cache of each pair, int64 [pairs], ascending.
        reference_owner: The cache for which each reference's distributions count in ``rows_used``, int64 [references].
        u_x: Uniforms of the references' tokens, float64 [references, H].
        u_pair: Uniforms of acceptance and of the residual token, float64 [pairs, H, 2].
    """

    def __init__(
        self, kernels: StreamDecoder, pair_reference: Tensor, reference_cache: Tensor, pair_cache: Tensor,
        reference_owner: Tensor, u_x: Tensor, u_pair: Tensor, sharing: SharingOptions = SHARE_ALL,
    ) -> None:  # fmt: skip
        absent = kernels.eos_tokens[0] if kernels.eos_tokens else 0
        self._kernels = kernels
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
        # The place of their tokens among the results of ``fused_draws``.
        references, pairs, _ = (torch.arange(size) for size in self._sizes)
        self._drawn = torch.cat([references, pair_reference, len(references) + pairs])
        self._owner = torch.cat([reference_owner, pair_cache, pair_cache])
        # Equal streams of unlike labels are not shared.
        self._label = torch.zeros_like(self._cache) if sharing.share_streams else torch.arange(len(self._cache))
        self._row = torch.full_like(self._cache, -1)  # the open stream of each entry; -1 if none
        self._open = 0  # open streams
        shape = (len(pair_cache), u_x.shape[1])
        self.steps: dict[str, NDArray[Any]] = {
            **{name: np.full(shape, absent, dtype=np.int32) for name in ("x_token", "y_token")},
            **{name: np.zeros(shape, dtype=np.float32) for name in ("delta", "f")},
            **{name: np.ones(shape, dtype=np.bool_) for name in ("x_eos", "y_eos")},
            **{name: np.full(shape, np.nan, dtype=np.float32) for name in ("kl", "kl_own")},
            "top1": np.ones(shape, dtype=np.bool_),
        }
        # Distributions computed for each owner; one for several streams counts in equal parts.
        self.rows_used = torch.zeros(int(pair_cache.max()) + 1, dtype=torch.float64)
        self.evaluations = torch.zeros_like(pair_cache)
        # For each position uniforms for X, for residual tokens and for acceptance, [H, references + 2 pairs].
        uniforms = torch.cat([u_x, u_pair[:, :, 1], u_pair[:, :, 0]]).t().contiguous()
        self._uniforms = uniforms.to(kernels.device)
        self._fused: FusedSteps | None = None
        if are_fused(sharing, kernels.device):
            draw = partial(fused_draws, reference=pair_reference.to(kernels.device), absorbed_token=absent)
            self._fused = FusedSteps(kernels, draw, self._uniforms, sum(self._sizes))

    def open(self) -> None:
        """Start every pair at the prompt and couple position 1."""
        self._x_done.fill_(value=False)
        self._y_done.fill_(value=False)
        self._row.fill_(0)  # all histories are empty
        streams, wanted = self._regroup()
        rows = self._distribution_rows()
        if self._fused is not None:
            draws = self._split(self._fused.open(streams, self._drawn[wanted][streams.member], rows.compared()))
        else:
            draws = self._plain_draws(self._kernels.open(streams.cache.tolist()), rows, 0)
        self._record(0, rows, *draws)

    def join(
        self, pairs: Tensor, column: int, tokens: tuple[Tensor, Tensor], distance: Tensor, rows: tuple[Tensor, Tensor]
    ) -> None:
        """Start some pairs, int64 [joining], at a branch; each pair has a reference of its own.

        They diverge at ``column``, from 0: ``tokens`` are x and y there, int64 [joining] each. Delta and f are
        ``distance``, float64 [joining]. ``rows`` are the parked streams that the reference's and the compressed
        histories continue, int64 [joining] each.
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

    def step(self, column: int) -> bool:
        """Advance every pair to position ``column``, from 0.

        Returns whether a stream is open; if none is, nothing was recorded.
        """
        streams, wanted = self._regroup()
        self.rows_used.index_add_(0, self._owner[wanted], streams.share)
        rows = self._distribution_rows()
        if self._fused is not None:
            draws = self._fused.step(column, streams, self._drawn[wanted][streams.member], rows.compared())
        else:
            self._kernels.select(streams.row)
            draws = self._kernels.advance(streams.token)
        if not self._open:
            return False
        self._record(column, rows, *(self._split(draws) if self._fused else self._plain_draws(draws, rows, column)))
        return True

    def _write(self, column: int, pairs: NDArray[np.int64] | slice, **values: Tensor) -> None:
        """Write ``values`` of ``pairs``, CPU tensors [pairs] by name, into ``steps`` at position ``column``, from 0."""
        for name, value in values.items():
            self.steps[name][pairs, column] = value.numpy()

    def _done(self) -> Tensor:
        """Return for each reference, each pair along X and each pair along Y whether that side has ended."""
        return torch.cat([self._x_done, self._x_done[self._pair_reference], self._y_done])

    def _regroup(self) -> tuple[DistinctStreams, Tensor]:
        """Return the distinct streams of the next position, and which references and pairs need a stream.

        The second result is bool [references + 2 pairs]: the references, then the pairs along X, then along Y. A side
        that has ended loses its stream, and a pair that has diverged gets two streams.
        """
        wanted = (self._row >= 0) & ~self._done()
        tokens = torch.cat([self._x, self._x[self._pair_reference], self._y])
        streams = distinct_streams(*(part[wanted] for part in (self._cache, self._row, tokens, self._label)))
        self._row = torch.full_like(self._row, -1).masked_scatter_(wanted, streams.place)
        self._open = len(streams.row)
        return streams, wanted

    def _distribution_rows(self) -> _DistributionRows:
        """Return the rows of distributions that the position needs."""
        reference, on_x, on_y = torch.split(self._row.masked_fill(self._done(), ABSORBED), self._sizes)
        return _DistributionRows(reference, reference[self._pair_reference], on_x, on_y)

    def _record(
        self, column: int, rows: _DistributionRows, x: Tensor, y: Tensor, delta: Tensor, forced_f: Tensor,
        kl_own: Tensor, forced_kl: Tensor, top1: Tensor,
    ) -> None:  # fmt: skip
        """Record what was drawn at ``column``; arguments from ``x`` on are what ``_plain_draws`` returns."""
        self.evaluations += self._active()
        self._x, self._y = x, y
        ended = rows.on_x < 0
        f = torch.where(rows.diverged, forced_f, delta.masked_fill(ended, 0.0))  # delta while the pair agrees
        kl_own = kl_own.masked_fill(ended, torch.nan)
        kl = torch.where(rows.diverged, forced_kl, kl_own)
        self._x_done |= torch.isin(x, self._eos_tokens)
        self._y_done |= torch.isin(y, self._eos_tokens)
        x_token, x_done = x[self._pair_reference], self._x_done[self._pair_reference]
        self._write(
            column, slice(None), x_token=x_token, y_token=y, delta=delta, f=f, x_eos=x_done, y_eos=self._y_done, kl=kl,
            kl_own=kl_own, top1=top1,
        )  # fmt: skip

    def _active(self) -> Tensor:
        """Return which pairs have a side that has not ended, bool [pairs]."""
        return ~(self._x_done[self._pair_reference] & self._y_done)

    def _split(self, draws: Tensor) -> tuple[Tensor, ...]:
        """Split the result of ``fused_draws`` into the tensors that ``_plain_draws`` returns."""
        x, y, *distances, top1 = torch.split(draws, [len(self._x)] + 6 * [len(self._y)])
        return x.long(), y.long(), *distances, top1.bool()

    def _plain_draws(self, distributions: Tensor, rows: _DistributionRows, column: int) -> tuple[Tensor, ...]:
        """Draw the tokens of ``column`` from the open streams' distributions, [streams, V], and compare distributions.

        Returns, on the CPU, x [references]; y, delta and f, [pairs] each; KL along own histories and along X, [pairs]
        each; and whether the most probable tokens along X are equal, [pairs]. f and KL along X are computed for
        diverged pairs only, and KL and the most probable tokens mean nothing after X's end.
        """
        u_x, u_residual, u_accept = torch.split(self._uniforms[column], [len(self._x), len(self._y), len(self._y)])
        drawn, coupled = (rows.reference >= 0).nonzero().squeeze(-1), self._active().nonzero().squeeze(-1)
        diverged = rows.diverged.nonzero().squeeze(-1)
        table, device = DistributionTable(distributions, self._absent), distributions.device
        x = torch.full_like(self._x, self._absent, device=device)
        x[drawn.to(device)] = table.draw(rows.reference[drawn], u_x[drawn.to(device)])
        there = coupled.to(device)
        pair_x = x[self._pair_reference[coupled].to(device)]
        y = torch.full_like(self._y, self._absent)
        y[coupled] = table.couple(rows.p[coupled], rows.on_y[coupled], pair_x, u_accept[there], u_residual[there]).cpu()

        delta, forced_f, kl_own, forced_kl = torch.zeros((4, len(self._y)), dtype=torch.float64)
        p, q = torch.cat([rows.p[coupled], rows.p[diverged]]), torch.cat([rows.on_y[coupled], rows.on_x[diverged]])
        for own, forced, found in zip((delta, kl_own), (forced_f, forced_kl), table.compare(p, q), strict=True):
            own[coupled], forced[diverged] = torch.split(found.cpu(), [len(coupled), len(diverged)])
        top = table.most_probable()
        return x.cpu(), y, delta, forced_f, kl_own, forced_kl, top[rows.p.clamp(min=0)] == top[rows.on_x.clamp(min=0)]


@dataclass(frozen=True)
class ActionReplicates:
    """One action's replicates in a rollout: their numbers, and uniforms [replicates, H, purposes].

    ``cache`` is the number of the action's cache, from 1.
    """

    cache: int
    replicates: tuple[int, ...]
    uniforms: NDArray[np.float64]


@dataclass(frozen=True)
class DocumentReplicates:
    """One document's replicates in a rollout; each action's replicates are also replicates of the reference.

    Attributes:
        cache: The number of the reference's cache; the caches of the actions follow.
        replicates: The replicate numbers of the reference.
        uniforms: The uniforms of the reference, [replicates, H, 1].
        actions: The actions' replicates, in ascending order of their caches; their uniforms are [replicates, H, 2], for
            acceptance and the residual token.
    """

    cache: int
    replicates: Sequence[int]
    uniforms: NDArray[np.float64]
    actions: Sequence[ActionReplicates]


@dataclass(frozen=True)
class CoupledSteps:
    """The recorded steps of one action; arrays are [replicates, H], positions 1..H in column order."""

    x_token: NDArray[np.int32]  # X
    y_token: NDArray[np.int32]  # Y
    delta: NDArray[np.float32]  # total variation between the reference on X and the compressed model on Y
    f: NDArray[np.float32]  # total variation between the reference and the compressed model, both on X
    x_eos: NDArray[np.bool_]  # true from the first EOS of X on
    y_eos: NDArray[np.bool_]  # true from the first EOS of Y on
    kl: NDArray[np.float32]  # KL divergence of the compressed model from the reference, both on X; NaN after X's end
    kl_own: NDArray[np.float32]  # the same of the compressed model on Y
    top1: NDArray[np.bool_]  # whether the most probable tokens of both on X are equal; meaningful if ``kl`` is not NaN
    kernel_evaluations: float  # distributions computed for the action's own cache, plus its share of the reference's
    pair_evaluations: int  # the number of positions before both sides of a pair had ended


def rollout_documents(
    kernels: StreamDecoder, documents: Sequence[DocumentReplicates], horizon: int, sharing: SharingOptions = SHARE_ALL
) -> list[CoupledSteps]:
    """Run all actions of some documents together, and return the recorded steps of each action, document by document.

    Documents are in ascending order of their caches; ``kernels`` decodes the streams of all of them.
    """
    actions = [action for document in documents for action in document.actions]
    pair_cache = torch.tensor([a.cache for a in actions for _ in a.replicates])
    references: list[int] = []  # of each pair
    reference_caches: list[int] = []
    for document in documents:
        first, place = len(reference_caches), {replicate: row for row, replicate in enumerate(document.replicates)}
        references += [first + place[k] for a in document.actions for k in a.replicates]
        reference_caches += [document.cache] * len(document.replicates)
    reference_cache = torch.tensor(reference_caches)
    u_x = torch.from_numpy(np.concatenate([document.uniforms for document in documents])[:, :, 0])
    u_pair = torch.from_numpy(np.concatenate([a.uniforms for a in actions]))

    pairs = CoupledPairs(
        kernels, torch.tensor(references), reference_cache, pair_cache, reference_cache, u_x, u_pair, sharing
    )
    pairs.open()
    for column in range(1, horizon):
        if not pairs.step(column):
            break
    return _per_action(documents, pairs)


def _per_action(documents: Sequence[DocumentReplicates], pairs: CoupledPairs) -> list[CoupledSteps]:
    rows_used, evaluations = pairs.rows_used.tolist(), pairs.evaluations.cpu().numpy()
    results, start = [], 0
    for document in documents:
        count = sum(len(action.replicates) for action in document.actions)
        for action in document.actions:
            rows = slice(start, start + len(action.replicates))
            start = rows.stop
            share = rows_used[document.cache] * len(action.replicates) / count
            results.append(
                CoupledSteps(
                    **{name: values[rows] for name, values in pairs.steps.items()},
                    kernel_evaluations=rows_used[action.cache] + share,
                    pair_evaluations=int(evaluations[rows].sum()),
                )
            )
    return results
