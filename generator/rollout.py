"""The coupled rollout: reference and compressed continuations of one document, position by position.

Knows nothing of transformers: it is written once against ``generator.kernels.StreamKernels``. Per pair (action,
replicate) three laws are wanted at each position: the reference on its history X, the compressed model on its own
history Y, and the compressed model forced along X. Streams are shared wherever they are the same one:

- the reference stream of a replicate serves every action;
- until the first mismatch, "compressed on Y" and "compressed on X" are one stream, forked when the pair parts;
- after a side's EOS its law is a point mass and its stream is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from generator.coupling import couple, draw, point_mass, total_variation
from generator.kernels import StreamKernels


@dataclass(frozen=True)
class ActionReplicates:
    """One action's part of a rollout: its cache number, its replicates and their uniforms [replicates, H, 2]."""

    cache: int
    replicates: tuple[int, ...]
    uniforms: NDArray[np.float64]


@dataclass(frozen=True)
class CoupledSteps:
    """What one action's rollout recorded; arrays are [replicates, H], positions 1..H in column order."""

    x_token: NDArray[np.int32]
    y_token: NDArray[np.int32]
    delta: NDArray[np.float32]
    f: NDArray[np.float32]
    x_eos: NDArray[np.bool_]
    y_eos: NDArray[np.bool_]
    own_rows: int  # stream-steps of the action's own cache
    shared_rows: float  # its share of the reference's stream-steps


class _Recorder:
    """Step arrays of the pairs, filled one column per position."""

    def __init__(self, pairs: int, horizon: int, eos: int, device: str) -> None:
        # What is never written belongs to pairs with both sides absorbed: EOS on both, delta = f = 0.
        self.tokens = torch.full((2, pairs, horizon), eos, dtype=torch.int32, device=device)
        self.distances = torch.zeros((2, pairs, horizon), dtype=torch.float32, device=device)
        self.ended = torch.ones((2, pairs, horizon), dtype=torch.bool, device=device)

    def write(
        self, column: int, tokens: tuple[Tensor, Tensor], distances: tuple[Tensor, Tensor], ended: tuple[Tensor, Tensor]
    ) -> None:
        for side in range(2):
            self.tokens[side, :, column] = tokens[side].to(torch.int32)
            self.distances[side, :, column] = distances[side].to(torch.float32)
            self.ended[side, :, column] = ended[side]


@dataclass
class _Streams:
    """Which open row serves whom; -1 where no stream is needed any more."""

    reference: Tensor  # [replicates]
    on_x: Tensor  # [pairs]: the action's cache along X
    on_y: Tensor  # [pairs]: the action's cache along Y; the same row as on_x until the pair parts


def rollout(
    kernels: StreamKernels,
    actions: Sequence[ActionReplicates],
    reference_replicates: Sequence[int],
    reference_uniforms: NDArray[np.float64],
    horizon: int,
) -> list[CoupledSteps]:
    """Run all actions of a document together; returns one ``CoupledSteps`` per action, in order.

    ``reference_uniforms`` is [reference_replicates, H, 1]; every action's replicates must be among the reference's.
    Position 1 uses one law for all sides (eviction follows prefill), so delta_1 = f_1 = 0.
    """
    device = kernels.device
    place = {replicate: row for row, replicate in enumerate(reference_replicates)}
    pair_reference = torch.tensor([place[k] for a in actions for k in a.replicates], device=device)
    pair_cache = torch.tensor([a.cache for a in actions for _ in a.replicates], device=device)
    u_x = torch.from_numpy(reference_uniforms[:, :, 0]).to(device)
    u_pair = torch.from_numpy(np.concatenate([a.uniforms for a in actions])).to(device)

    eos_tokens = torch.tensor(kernels.eos_tokens, dtype=torch.int64, device=device)
    absorbed_token = kernels.eos_tokens[0] if kernels.eos_tokens else 0
    recorder = _Recorder(len(pair_reference), horizon, absorbed_token, device)

    first = kernels.first_law()
    absorbed_law = point_mass(kernels.vocabulary_size, absorbed_token, first)
    x = draw(first.expand(len(place), -1), u_x[:, 0])
    y = x[pair_reference]
    x_done = torch.isin(x, eos_tokens)
    y_done = x_done[pair_reference]
    parted = torch.zeros_like(y_done)
    zero = torch.zeros(len(y), dtype=torch.float64, device=device)
    recorder.write(0, (x[pair_reference], y), (zero, zero), (x_done[pair_reference], y_done))

    caches = [0] * len(place) + pair_cache.tolist()
    kernels.open(caches)
    pairs = torch.arange(len(y), device=device) + len(place)
    streams = _Streams(torch.arange(len(place), device=device), pairs, pairs.clone())
    row_cache = torch.tensor(caches, device=device)
    rows_used = torch.zeros(int(pair_cache.max()) + 1, dtype=torch.int64, device=device)

    for column in range(1, horizon):
        streams, kept = _regroup(streams, pair_reference, pair_cache, x_done, y_done, parted)
        if not kept.numel():
            break
        row_cache = row_cache[kept]
        kernels.select(kept)
        laws = kernels.advance(_row_tokens(streams, len(kept), x, y, pair_reference, parted))
        rows_used += torch.bincount(row_cache, minlength=len(rows_used))

        p = _laws_of(laws, streams.reference, absorbed_law)
        p_pair = p[pair_reference]
        q = _laws_of(laws, streams.on_y, absorbed_law)
        delta = total_variation(p_pair, q)
        f = _forced_distance(laws, streams, p_pair, delta, parted)

        x = draw(p, u_x[:, column])
        y = couple(p_pair, q, x[pair_reference], u_pair[:, column, 0], u_pair[:, column, 1])
        x_done = x_done | torch.isin(x, eos_tokens)
        y_done = y_done | torch.isin(y, eos_tokens)
        parted = parted | (x[pair_reference] != y)
        recorder.write(column, (x[pair_reference], y), (delta, f), (x_done[pair_reference], y_done))

    return _per_action(actions, recorder, rows_used.tolist())


def _regroup(
    streams: _Streams, pair_reference: Tensor, pair_cache: Tensor, x_done: Tensor, y_done: Tensor, parted: Tensor
) -> tuple[_Streams, Tensor]:
    """Drop what is absorbed, fork what has parted; returns the new streams and the old row of each new row.

    Rows are ordered by cache, and within a cache "along X" before "along Y".
    """
    x_done_pair = x_done[pair_reference]
    needs_x = ~x_done_pair
    needs_y = parted & ~y_done
    shares = ~parted & ~x_done_pair  # one stream for both sides

    old = torch.cat([streams.reference[~x_done], streams.on_x[needs_x], streams.on_y[needs_y]])
    cache = torch.cat([torch.zeros_like(streams.reference[~x_done]), pair_cache[needs_x], pair_cache[needs_y]])
    order = torch.argsort(cache, stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)

    alive = int((~x_done).sum())
    along_x = int(needs_x.sum())
    reference = torch.full_like(streams.reference, -1)
    reference[~x_done] = position[:alive]
    on_x = torch.full_like(streams.on_x, -1)
    on_x[needs_x] = position[alive : alive + along_x]
    on_y = torch.full_like(streams.on_y, -1)
    on_y[needs_y] = position[alive + along_x :]
    on_y[shares] = on_x[shares]
    return _Streams(reference, on_x, on_y), old[order]


def _row_tokens(streams: _Streams, rows: int, x: Tensor, y: Tensor, pair_reference: Tensor, parted: Tensor) -> Tensor:
    """The token each open row has to be fed: X's along X, Y's along Y."""
    tokens = torch.zeros(rows, dtype=torch.int64, device=x.device)
    reference = streams.reference >= 0
    tokens[streams.reference[reference]] = x[reference]
    on_x = streams.on_x >= 0
    tokens[streams.on_x[on_x]] = x[pair_reference][on_x]
    on_y = parted & (streams.on_y >= 0)
    tokens[streams.on_y[on_y]] = y[on_y]
    return tokens


def _laws_of(laws: Tensor, rows: Tensor, absorbed_law: Tensor) -> Tensor:
    """Laws [len(rows), V]; an absorbed side (row -1) has the point mass on EOS."""
    chosen = laws[rows.clamp(min=0)]
    chosen[rows < 0] = absorbed_law
    return chosen


def _forced_distance(laws: Tensor, streams: _Streams, p_pair: Tensor, delta: Tensor, parted: Tensor) -> Tensor:
    """f of each pair: delta itself while the pair agrees, 0 once X is absorbed, else measured along X."""
    f = torch.where(parted, torch.zeros_like(delta), delta)
    forced = (parted & (streams.on_x >= 0)).nonzero().squeeze(-1)
    if forced.numel():
        f[forced] = total_variation(p_pair[forced], laws[streams.on_x[forced]])
    return f


def _per_action(actions: Sequence[ActionReplicates], recorder: _Recorder, rows_used: list[int]) -> list[CoupledSteps]:
    tokens, distances, ended = (part.cpu().numpy() for part in (recorder.tokens, recorder.distances, recorder.ended))
    total = sum(len(action.replicates) for action in actions)
    results, start = [], 0
    for action in actions:
        own = slice(start, start + len(action.replicates))
        start = own.stop
        results.append(
            CoupledSteps(
                x_token=tokens[0, own],
                y_token=tokens[1, own],
                delta=distances[0, own],
                f=distances[1, own],
                x_eos=ended[0, own],
                y_eos=ended[1, own],
                own_rows=rows_used[action.cache],
                shared_rows=rows_used[0] * len(action.replicates) / total,
            )
        )
    return results
