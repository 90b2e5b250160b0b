"""Generation of one document's units: prefill, evict, decode and couple, record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from generator.actions import Action
from generator.coupling.residual_branching import PURPOSES, ResidualBranches, branch_replicates
from generator.coupling.rollout import ActionReplicates, CoupledSteps, rollout
from generator.coupling.streams import ALL_SAVINGS, Savings
from generator.coupling.uniforms import uniform_table
from generator.events import event_rows, join_replicates, library_versions
from generator.model import Model, PreparedDocument
from schema.document import Document
from schema.store.store import Unit
from schema.tables import PLAIN, SWRB

_Uniforms = Callable[..., NDArray[np.float64]]  # of one document: action, replicates, horizon, purposes, estimator


@dataclass(frozen=True)
class PendingUnit:
    """Replicates of an action's revision that are still to be generated: ``first .. first + count - 1``."""

    action: Action
    first: int
    count: int
    estimator: str = PLAIN
    revision: int = 0

    @property
    def replicates(self) -> range:
        """The replicate numbers."""
        return range(self.first, self.first + self.count)

    def within(self, start: int, stop: int) -> PendingUnit:
        """Its replicates from ``start`` to ``stop`` - 1, possibly none."""
        first = max(self.first, start)
        return replace(self, first=first, count=max(min(self.first + self.count, stop) - first, 0))


def generate_units(
    model: Model, study: str, document: Document, pending: Sequence[PendingUnit], horizon: int, seed: int,
    savings: Savings = ALL_SAVINGS,
) -> list[Unit]:  # fmt: skip
    """Generate all pending units of one document.

    Events depend on (seed, document, action, estimator, replicate) alone: not on which units are generated together,
    how many replicates there is memory for, or what is saved.

    Returns:
        One unit for each pending one, those of coupled rollouts before those of residual branching.

    Raises:
        InputError: A retention cannot hold its selector's window and sinks, or the prompt is too long.
    """
    items = sorted(pending, key=lambda item: item.estimator == SWRB)
    uniforms = partial(uniform_table, seed, document.doc)
    units = []
    with model.computing():
        # 1) Prefill: the prompt once, recording what the selectors of all actions need
        prompt = model.prefill(document, [item.action for item in items], horizon)

        # 2) Evict: cache a = 1, 2, ... keeps what item a's action selects; cache 0 is the whole prompt
        caches = prompt.evict()

        for estimator in (PLAIN, SWRB):
            own = {a: item for a, item in enumerate(items, start=1) if item.estimator == estimator}
            if not own:
                continue

            # 3) Decode and couple: the items side by side, as many replicates at once as there is memory for
            decode = _branch if estimator == SWRB else _couple
            began = time.perf_counter()
            parts: dict[int, list[Any]] = {a: [] for a in own}
            for batch in _batches(own, caches.replicates_at_once(len(own), estimator)):
                for a, part in zip(batch, decode(caches, batch, uniforms, horizon, savings), strict=True):
                    parts[a].append(part)  # [replicates of the batch, H]
            decoded = {a: join_replicates(own_parts) for a, own_parts in parts.items()}  # [replicates, H]
            seconds = time.perf_counter() - began

            # 4) Record: one unit for each item, with its share of the time
            laws = max(sum(steps.laws for steps in decoded.values()), 1)
            for a, item in own.items():
                record = {
                    **model.identity(item.action).columns,
                    **_settings(study, model, document, item, horizon, seed),
                    **caches.record(a, item.count),
                    "decode_seconds": seconds / laws * decoded[a].laws,
                    "kernel_evaluations": round(decoded[a].laws),
                    "pair_evaluations": decoded[a].pair_evaluations,
                }
                units.append(Unit(record, event_rows(record, decoded[a])))
    return units


def _batches(items: Mapping[int, PendingUnit], at_once: int) -> Iterator[dict[int, PendingUnit]]:
    """The first ``at_once`` replicates of the items that have them, then the next ones, and so on; by cache."""
    numbers = sorted({replicate for item in items.values() for replicate in item.replicates})
    for start in range(0, len(numbers), at_once):
        batch = numbers[start : start + at_once]
        shares = {a: item.within(batch[0], batch[-1] + 1) for a, item in items.items()}
        yield {a: share for a, share in shares.items() if share.count}


def _couple(
    caches: PreparedDocument, items: Mapping[int, PendingUnit], uniforms: _Uniforms, horizon: int, savings: Savings
) -> list[CoupledSteps]:
    """Coupled rollouts of the items, by cache; all actions meet the same reference continuation of a replicate."""
    actions = [
        ActionReplicates(a, tuple(item.replicates), uniforms(item.action.name, item.replicates, horizon, 2))
        for a, item in items.items()
    ]
    reference = sorted({replicate for item in items.values() for replicate in item.replicates})
    pairs = sum(item.count for item in items.values())
    streams = 2 * pairs + (len(reference) if savings.share_reference else pairs)
    kernels = caches.kernels(streams, savings)
    return rollout(kernels, actions, reference, uniforms(None, reference, horizon, 1), horizon, savings)


def _branch(
    caches: PreparedDocument, items: Mapping[int, PendingUnit], uniforms: _Uniforms, horizon: int, savings: Savings
) -> list[ResidualBranches]:
    """Residual branching of the items, by cache; their uniforms are not those of coupled rollouts."""
    actions = []
    for a, item in items.items():
        table = uniforms(item.action.name, item.replicates, horizon, PURPOSES, SWRB)
        actions.append(ActionReplicates(a, tuple(item.replicates), table))
    kernels = caches.kernels(3 * sum(item.count for item in items.values()), savings)
    return branch_replicates(kernels, actions, horizon, savings)


def _settings(
    study: str, model: Model, document: Document, item: PendingUnit, horizon: int, seed: int
) -> dict[str, Any]:
    """What tells a unit from all others, and what it was made with."""
    return {
        "study": study, "model": model.id, "doc": document.doc, "action": item.action.name,
        "action_revision": item.revision, "estimator": item.estimator, "first_replicate": item.first,
        "replicates": item.count, "horizon": horizon, "device": model.device, "dtype": model.dtype,
        "versions": json.dumps(library_versions(), sort_keys=True), "batch_invariant": model.batch_deviation == 0.0,
        "batch_deviation": model.batch_deviation, "seed": seed, "prompt_sha256": document.prompt_sha256,
    }  # fmt: skip
