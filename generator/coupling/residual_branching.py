"""Survival-weighted residual branching: no replicate is spent on a pair that agrees to the end (paper, sec. "swrb").

A replicate scans a common prefix U, drawn from the overlap of both distributions. At every position s the residual
branch has the weight w_s = S e_s: e_s is the distance of the distributions there, and the survival S is the product of
1 - e_r over the positions r before s. The replicate chooses a position J with probability w_J / M, M being the sum of
the weights, and continues the coupling from there to the horizon. This module knows no models, only ``StreamDecoder``.

J is drawn while scanning: position s replaces the candidate with probability w_s over the sum of weights so far, so
that s is the last candidate with probability w_s / M. No distribution is kept or computed again: a candidate's residual
pair is drawn immediately, and the branch continues the scan's caches, cut back to U_<J. If the decoder cannot cut a
stream back, its state is kept at every candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdrift.generator.coupling.distributions import are_fused, draw, pairs_at_once, total_variation
from kvdrift.generator.coupling.rollout import ActionReplicates, CoupledPairs
from kvdrift.generator.coupling.steps import FusedSteps
from kvdrift.generator.coupling.streams import (
    SHARE_ALL,
    DistinctStreams,
    SharingOptions,
    StreamDecoder,
    distinct_streams,
)

SCAN_UNIFORMS = 4  # of a scanned position: for U_s, whether s replaces the candidate, and residual tokens of X and Y
PURPOSES = SCAN_UNIFORMS + 3  # besides, of a position of the branch: for X, acceptance, and the residual token of Y


@dataclass(frozen=True)
class ResidualBranches:
    """The recorded steps of one action; arrays are [replicates, H], with positions 1..H in order, or [replicates]."""

    token: NDArray[np.int32]  # U_t; -1 if survival reached 0 and nothing was drawn
    deficit: NDArray[np.float64]  # e_t, the distance of both distributions after U_<t; 1 if they have no overlap
    weight: NDArray[np.float64]  # w_t = S e_t
    ended: NDArray[np.bool_]  # true from U's EOS on
    scanned: NDArray[np.int64]  # the last position of the scan
    branch: NDArray[np.int64]  # J; 0 if M = 0
    steps: dict[str, NDArray[Any]]  # the branches' columns of ``events``, meaningful from J on
    kernel_evaluations: float  # distributions computed in both phases; shared ones are divided among the actions
    pair_evaluations: int  # the number of positions, scanned or continued, before both sides of a pair had ended


def branch_replicates(
    kernels: StreamDecoder, actions: Sequence[ActionReplicates], horizon: int, sharing: SharingOptions = SHARE_ALL
) -> list[ResidualBranches]:
    """Scan and branch every replicate of every action, and return the recorded steps of each action.

    The uniforms of actions are [replicates, H, PURPOSES].
    """
    uniforms = torch.from_numpy(np.concatenate([action.uniforms for action in actions]))
    pair_cache = torch.tensor([a.cache for a in actions for _ in a.replicates])
    scan = _Scan(kernels, pair_cache, horizon, sharing)
    numbers, (u_x, u_pair) = torch.arange(len(pair_cache)), torch.split(uniforms[:, :, SCAN_UNIFORMS:], [1, 2], 2)
    pairs = CoupledPairs(
        kernels, numbers, torch.zeros_like(numbers), pair_cache, pair_cache, u_x.squeeze(-1), u_pair, sharing
    )
    scan.run(uniforms[:, :, :SCAN_UNIFORMS])
    _continue(pairs, scan)

    recorded = ("token", "deficit", "weight", "ended", "scanned", "branch")
    arrays = {name: getattr(scan, name).numpy() for name in recorded}
    evaluations = (scan.evaluations + pairs.evaluations).numpy()
    kernel_evaluations = (scan.kernel_evaluations + pairs.rows_used).tolist()
    results, start = [], 0
    for action in actions:
        rows = slice(start, start + len(action.replicates))
        start = rows.stop
        columns = {name: values[rows] for name, values in arrays.items()}
        steps = {name: values[rows] for name, values in pairs.steps.items()}
        counted = int(evaluations[rows].sum())
        results.append(
            ResidualBranches(
                **columns, steps=steps, kernel_evaluations=kernel_evaluations[action.cache], pair_evaluations=counted
            )
        )
    return results


class _Scan:
    """The overlap scan of all pairs and their residual branches; everything but distributions is on the CPU."""

    def __init__(self, kernels: StreamDecoder, pair_cache: Tensor, horizon: int, sharing: SharingOptions) -> None:
        pairs = len(pair_cache)
        eos = kernels.eos_tokens
        self._kernels, self._pair_cache, self._sharing = kernels, pair_cache, sharing
        self._fused = are_fused(sharing, kernels.device)
        self._absent = eos[0] if eos else 0
        self._eos_tokens = torch.tensor(eos, dtype=torch.int64)
        self.token = torch.full((pairs, horizon), self._absent, dtype=torch.int32)
        self.deficit = torch.zeros((pairs, horizon), dtype=torch.float64)
        self.weight = torch.zeros_like(self.deficit)
        self.ended = torch.ones((pairs, horizon), dtype=torch.bool)
        self.scanned = torch.full((pairs,), horizon)
        self.branch = torch.zeros_like(self.scanned)
        self.residual = torch.zeros((2, pairs), dtype=torch.int64)
        self.parked = torch.full((2, pairs), -1)  # numbers of the reference's and the action's stream
        self.evaluations = torch.zeros_like(self.scanned)
        self.kernel_evaluations = torch.zeros(int(pair_cache.max()) + 1, dtype=torch.float64)
        self._row = torch.zeros((2, pairs), dtype=torch.int64)  # open streams of the reference and of the action
        self._survival = torch.ones(pairs, dtype=torch.float64)
        self._mass = torch.zeros_like(self._survival)

    def run(self, uniforms: Tensor) -> None:
        """Scan to the horizon, to U's EOS, or until survival is 0; uniforms [pairs, H, SCAN_UNIFORMS]."""
        by_position = uniforms.transpose(0, 1).contiguous().to(self._kernels.device)
        steps = FusedSteps(self._kernels, _overlaps, by_position, self.parked.numel())
        live = torch.arange(len(self._pair_cache))
        draws = steps.open(*self._streams(live, torch.zeros_like(live)))
        for column in range(self.token.shape[1]):
            draws = draws[:, : len(live)]
            goes_on, replaced, token = self._position(live, column, draws, uniforms[live, column, 1])
            if column + 1 == self.token.shape[1]:
                goes_on = torch.zeros_like(goes_on)
            self._park(live[~goes_on & (self.branch[live] > 0)] if self._kernels.cuts_back else replaced)
            stays = goes_on.nonzero().squeeze(-1)
            live = live[stays]
            if not len(live):
                break
            streams, places, rows = self._streams(live, token[stays])
            draws = steps.step(column + 1, streams, places, rows)
            self.kernel_evaluations.index_add_(0, self._pair_cache[live].repeat(2), streams.share)
        steps.close()
        self._kernels.rewind()

    def _streams(self, live: Tensor, token: Tensor) -> tuple[DistinctStreams, Tensor, Tensor]:
        """Return what ``FusedSteps.step`` needs for the ``live`` pairs, int64 [live], whose next tokens are ``token``.

        Returns the pairs' distinct streams; the place of each stream's token among the last draws; and, as
        ``_overlaps`` takes them, the reference's stream, the action's stream and the number of each pair.
        """
        cache = torch.stack([torch.zeros_like(live), self._pair_cache[live]])
        label = torch.zeros_like(live) if self._sharing.share_streams else live
        streams = distinct_streams(cache.flatten(), self._row[:, live].flatten(), token.repeat(2), label.repeat(2))
        self._row[:, live] = streams.place.view(2, -1)
        # On a GPU shapes stay when pairs end: the first live pair fills their places.
        pairs = live if not self._fused else torch.cat([live, live[:1].expand(len(self._pair_cache) - len(live))])
        return streams, len(pairs) + streams.member % len(live), torch.cat([self._row[:, pairs], pairs[None]])

    def _position(self, live: Tensor, column: int, draws: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Record the weight of position ``column``, from 0, for the ``live`` pairs, int64 [live].

        ``draws`` are the pairs' results of ``_overlap``, [4, live]; uniforms ``u`` [live] decide whether the position
        replaces a pair's candidate. Returns which pairs continue, bool [live]; the numbers of the pairs whose candidate
        was replaced, int64; and the tokens of U at the position, int64 [live].
        """
        self.evaluations[live] += 1
        deficit, token, residual_x, residual_y = draws[0], *draws[1:].long()

        weight = self._survival[live] * deficit
        self._survival[live] *= 1 - deficit
        self._mass[live] += weight
        replaces = ((weight > 0) & (u * self._mass[live] < weight)).nonzero().squeeze(-1)
        self.branch[live[replaces]] = column + 1
        self.residual[:, live[replaces]] = torch.stack([residual_x, residual_y])[:, replaces]

        survives = self._survival[live] > 0
        ends = torch.isin(token, self._eos_tokens) & survives
        self.token[live, column] = torch.where(survives, token, -1).to(torch.int32)
        self.deficit[live, column], self.weight[live, column] = deficit, weight
        self.ended[live, column] = ends
        self.scanned[live[~survives]] = column + 1
        return survives & ~ends, live[replaces], token

    def _park(self, pairs: Tensor) -> None:
        """Park the streams of some pairs, replacing their earlier parked streams."""
        if not len(pairs):
            return
        rows, number = torch.unique(self._row[:, pairs], return_inverse=True)
        self.parked[:, pairs] = -1
        unused = torch.ones(self.parked.numel(), dtype=torch.bool)
        unused[self.parked[self.parked >= 0]] = False
        places = unused.nonzero().squeeze(-1)[: len(rows)]
        self._kernels.park(rows, places)
        self.parked[:, pairs] = places[number]


def _overlaps(distributions: Tensor, rows: Tensor, u: Tensor) -> Tensor:
    """Return the result of ``_overlap`` for B pairs, [4, B], from the distributions of all streams, [streams, V].

    ``rows``, int64 [3, B], has for each pair the stream of the reference, the stream of the action, and the pair's
    number, which is its row in ``u``, [all pairs, >= SCAN_UNIFORMS].
    """
    parts = torch.split(rows, pairs_at_once(distributions), 1)
    return torch.cat(
        [_overlap(distributions[reference], distributions[action], u[pair]) for reference, action, pair in parts], 1
    )


def _overlap(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """Return four rows, float64 [4, B]: the distance e, a token drawn from the overlap, and residual tokens of X and Y.

    The reference's distributions ``p`` and the action's ``q`` are [B, V], uniforms [B, >= SCAN_UNIFORMS].
    """
    overlap = torch.minimum(p, q)
    shares = overlap.sum(-1) > 0
    excess_x, excess_y = (p - q).clamp_(min=0.0), (q - p).clamp_(min=0.0)
    # Distributions that differ in their last bit may leave an excess on one side only: then there is no residual pair.
    differs = (excess_x.sum(-1) > 0) & (excess_y.sum(-1) > 0)
    deficit = total_variation(p, q).masked_fill(~differs, 0.0).masked_fill(~shares, 1.0)
    token = draw(torch.where(shares[:, None], overlap, p), u[:, 0])
    return torch.stack(
        [deficit, *(drawn.double() for drawn in (token, draw(excess_x, u[:, 2]), draw(excess_y, u[:, 3])))]
    )


def _continue(pairs: CoupledPairs, scan: _Scan) -> None:
    """Continue every branch from its residual pair to the horizon."""
    for column in range(scan.token.shape[1]):
        if column:
            pairs.step(column)
        joining = (scan.branch == column + 1).nonzero().squeeze(-1)
        if len(joining):
            x, y = scan.residual[:, joining]
            reference, compressed = scan.parked[:, joining]
            pairs.join(joining, column, (x, y), scan.deficit[joining, column], (reference, compressed))
