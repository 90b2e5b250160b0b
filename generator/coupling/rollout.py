"""The coupled rollout: reference and compressed continuations of one document, position by position.

Knows nothing of transformers: it is written once against ``kernels.StreamKernels``. Per pair (action,
replicate) three laws are wanted at each position: the reference on its history X, the compressed model on its own
history Y, and the compressed model forced along X. Streams are shared wherever they are the same one:

- the reference stream of a replicate serves every action;
- until the first mismatch, "compressed on Y" and "compressed on X" are one stream, forked when the pair parts;
- replicates that follow one cache along equal histories are one stream;
- after a side's EOS its law is a point mass and its stream is dropped.

Each of these can be switched off (``generator.coupling.streams``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from generator.coupling.kernels import StreamKernels
from generator.coupling.pairs import CoupledPairs
from generator.coupling.streams import ALL_SAVINGS, Savings


@dataclass(frozen=True)
class ActionReplicates:
    """One action's part of a rollout: its cache number, its replicates and their uniforms [replicates, H, purposes]."""

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
    laws: float  # stream-steps of the action's own cache, and its share of the reference's and of shared streams
    pair_evaluations: int  # positions of pairs not yet absorbed on both sides


def rollout(
    kernels: StreamKernels,
    actions: Sequence[ActionReplicates],
    reference_replicates: Sequence[int],
    reference_uniforms: NDArray[np.float64],
    horizon: int,
    savings: Savings = ALL_SAVINGS,
) -> list[CoupledSteps]:
    """Run all actions of a document together; returns one ``CoupledSteps`` per action, in order.

    Every action's uniforms are [replicates, H, 2]; ``reference_uniforms`` is [reference_replicates, H, 1]. Every
    action's replicates must be among the reference's.
    """
    place = {replicate: row for row, replicate in enumerate(reference_replicates)}
    pair_reference = torch.tensor([place[k] for a in actions for k in a.replicates])
    pair_cache = torch.tensor([a.cache for a in actions for _ in a.replicates])
    reference_owner = torch.zeros(len(place), dtype=torch.int64)  # the reference's streams belong to no action
    if not savings.share_reference:
        reference_uniforms = reference_uniforms[pair_reference]
        pair_reference, reference_owner = torch.arange(len(pair_cache)), pair_cache
    u_x = torch.from_numpy(reference_uniforms[:, :, 0]).to(kernels.device)
    u_pair = torch.from_numpy(np.concatenate([a.uniforms for a in actions])).to(kernels.device)

    pairs = CoupledPairs(kernels, pair_reference, pair_cache, reference_owner, horizon, savings)
    pairs.open(u_x[:, 0], u_pair[:, 0])
    for column in range(1, horizon):
        if not pairs.step(column, u_x[:, column], u_pair[:, column]):
            break
    return _per_action(actions, pairs)


def _per_action(actions: Sequence[ActionReplicates], pairs: CoupledPairs) -> list[CoupledSteps]:
    record = pairs.record.arrays()
    rows_used, evaluations = pairs.rows_used.tolist(), pairs.evaluations.cpu().numpy()
    results, start = [], 0
    for action in actions:
        own = slice(start, start + len(action.replicates))
        start = own.stop
        share = rows_used[0] * len(action.replicates) / len(evaluations)
        results.append(
            CoupledSteps(
                **{name: values[own] for name, values in record.items()},
                laws=rows_used[action.cache] + share,
                pair_evaluations=int(evaluations[own].sum()),
            )
        )
    return results
