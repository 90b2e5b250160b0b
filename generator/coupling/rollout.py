"""The coupled rollout: reference and compressed continuations of a document, position by position.

This module knows no models, only ``StreamKernels``. A pair (action, replicate) needs three laws at each position: the
reference's on its history X, the compressed model's on its own history Y, and the compressed model's on X. Equal laws
are computed once:

- All actions share the reference stream of a replicate.
- Until the first mismatch, the compressed model's streams along X and Y are one, which forks when the pair parts.
- Replicates that follow one cache along equal histories share a stream.
- After a side's EOS its law is a point mass, which needs no stream.

Several documents can be decoded side by side: a position then takes one call for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvdrift.generator.coupling.kernels import StreamKernels
from kvdrift.generator.coupling.pairs import CoupledPairs
from kvdrift.generator.coupling.streams import ALL_SAVINGS, Savings


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
        actions: The actions that follow the document's other caches, ascending; their uniforms are [replicates, H, 2],
            for acceptance and the residual token.
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
    laws: float  # the number of laws computed for the action's own cache, plus its share of the reference's laws
    pair_evaluations: int  # the number of positions before both sides of a pair had ended


def rollout(
    kernels: StreamKernels, actions: Sequence[ActionReplicates], reference_replicates: Sequence[int],
    reference_uniforms: NDArray[np.float64], horizon: int, savings: Savings = ALL_SAVINGS,
) -> list[CoupledSteps]:  # fmt: skip
    """Run all actions of a document together, and return the recorded steps of each action.

    Arguments are those of ``DocumentReplicates``; the reference has cache 0.
    """
    document = DocumentReplicates(0, reference_replicates, reference_uniforms, actions)
    return rollout_documents(kernels, [document], horizon, savings)


def rollout_documents(
    kernels: StreamKernels, documents: Sequence[DocumentReplicates], horizon: int, savings: Savings = ALL_SAVINGS
) -> list[CoupledSteps]:
    """Run all actions of some documents together, and return the recorded steps of each, document by document.

    Documents are in ascending order of their caches; ``kernels`` have the laws of all their streams.
    """
    actions = [action for document in documents for action in document.actions]
    pair_cache = torch.tensor([a.cache for a in actions for _ in a.replicates])
    references: list[int] = []  # of each pair
    reference_caches: list[int] = []
    tables: list[NDArray[np.float64]] = []
    for document in documents:
        first, place = len(reference_caches), {replicate: row for row, replicate in enumerate(document.replicates)}
        rows = [place[k] for a in document.actions for k in a.replicates]
        tables.append(document.uniforms if savings.share_reference else document.uniforms[rows])
        references += [first + row for row in (rows if savings.share_reference else range(len(rows)))]
        reference_caches += [document.cache] * len(tables[-1])
    reference_cache = torch.tensor(reference_caches)
    # A shared stream of the reference belongs to no action.
    reference_owner = reference_cache if savings.share_reference else pair_cache
    u_x = torch.from_numpy(np.concatenate(tables)[:, :, 0])
    u_pair = torch.from_numpy(np.concatenate([a.uniforms for a in actions]))

    pairs = CoupledPairs(
        kernels, torch.tensor(references), reference_cache, pair_cache, reference_owner, u_x, u_pair, savings
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
            own = slice(start, start + len(action.replicates))
            start = own.stop
            share = rows_used[document.cache] * len(action.replicates) / count
            results.append(
                CoupledSteps(
                    **{name: values[own] for name, values in pairs.steps.items()},
                    laws=rows_used[action.cache] + share,
                    pair_evaluations=int(evaluations[own].sum()),
                )
            )
    return results
