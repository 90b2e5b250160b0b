"""One document's units: prepare its caches once, run the pending estimators, record what it took."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from generator.actions import Action
from generator.coupling.kernels import StreamKernels
from generator.coupling.residual_branching import PURPOSES, ResidualBranches, branch_replicates
from generator.coupling.rollout import ActionReplicates, CoupledSteps, rollout
from generator.coupling.streams import ALL_SAVINGS, Savings
from generator.coupling.uniforms import uniform_table
from schema.document import Document
from schema.store.store import Unit
from schema.tables import BRANCH, COUPLED, EVENTS, PLAIN, SCAN, SWRB


@dataclass(frozen=True)
class PendingUnit:
    """What is still to be generated of a document: replicates ``first .. first + count - 1`` of an action."""

    action: Action
    first: int
    count: int
    estimator: str = PLAIN

    @property
    def replicates(self) -> range:
        """The replicate numbers."""
        return range(self.first, self.first + self.count)

    def within(self, start: int, stop: int) -> PendingUnit:
        """Its replicates from ``start`` to ``stop`` - 1, which may be none."""
        first = max(self.first, start)
        return replace(self, first=first, count=max(min(self.first + self.count, stop) - first, 0))


class PreparedDocument(Protocol):
    """One document made ready for some actions: their caches, and what is known of them."""

    def kernels(self, streams: int, savings: Savings) -> StreamKernels:
        """New kernels of the document for so many open streams; cache a is that of the a-th action, from 1."""

    def replicates_at_once(self, actions: int, estimator: str) -> int:
        """How many replicates of each of so many actions there is room for now; at least one."""

    def record(self, number: int, streams: int) -> dict[str, Any]:
        """What ``units`` says of the a-th cache and ``streams`` streams of it: entries, bytes, hashes, seconds."""


class Model(Protocol):
    """Whatever has next-token laws for documents: a transformer, or a set of finite-state systems."""

    @property
    def id(self) -> str:
        """The model id as the study file gives it."""

    @property
    def device(self) -> str:
        """The device that laws are computed on."""

    @property
    def dtype(self) -> str:
        """The floating-point type of the model."""

    @property
    def batch_deviation(self) -> float:
        """How far a row's numbers depend on the rows beside it, relative to the largest; 0 where they do not."""

    def prepare(self, document: Document, actions: Sequence[Action], horizon: int) -> PreparedDocument:
        """Prefill and evict, or whatever comes before position 1; InputError where an action cannot be taken."""


_Result = CoupledSteps | ResidualBranches


def generate_units(
    model: Model,
    study: str,
    document: Document,
    pending: Sequence[PendingUnit],
    horizon: int,
    seed: int,
    savings: Savings = ALL_SAVINGS,
) -> list[Unit]:
    """Generate all pending units of one document together: one preparation, one reference stream per plain replicate.

    Events depend on (seed, document, action, estimator, replicate) and on nothing else: not on which units are asked
    for at once, on how many replicates there is room for, or on what is saved. Returns the plain units first.
    InputError when a retention cannot hold its selector's window and sinks.
    """
    items = sorted(pending, key=lambda item: item.estimator == SWRB)
    prepared = model.prepare(document, [item.action for item in items], horizon)
    plain = [item for item in items if item.estimator == PLAIN]
    units = []
    for part in (plain, items[len(plain) :]):
        if not part:
            continue
        began = time.perf_counter()
        first = items.index(part[0]) + 1
        results = _results(prepared, part, first, _Draws(seed, document.doc, horizon), savings)
        seconds = (time.perf_counter() - began) / max(sum(result.laws for result in results), 1)
        for number, (item, result) in enumerate(zip(part, results, strict=True), start=first):
            record = {
                **_identity(study, model, document, item, horizon, seed),
                **prepared.record(number, item.count),
                "decode_seconds": seconds * result.laws,
                "kernel_evaluations": round(result.laws),
                "pair_evaluations": result.pair_evaluations,
            }
            units.append(Unit(record, _events(record, result)))
    return units


@dataclass(frozen=True)
class _Draws:
    """What all uniforms of a document are a function of, and how many positions they are for."""

    seed: int
    doc: str
    horizon: int

    def table(
        self, action: str | None, replicates: Sequence[int], purposes: int, estimator: str | None = None
    ) -> NDArray[np.float64]:
        return uniform_table(self.seed, self.doc, action, replicates, self.horizon, purposes, estimator)


def _results(
    prepared: PreparedDocument, items: Sequence[PendingUnit], first: int, draws: _Draws, savings: Savings
) -> list[_Result]:
    """The results of items of one estimator, with caches ``first`` and on; as many replicates at once as fit."""
    run = _branched if items[0].estimator == SWRB else _coupled
    parts: list[list[_Result]] = [[] for _ in items]
    for batch in _batches(items, prepared.replicates_at_once(len(items), items[0].estimator)):
        numbered = [(number, item) for number, item in enumerate(batch, start=first) if item.count]
        results = run(prepared, numbered, draws, savings)
        for (number, _), result in zip(numbered, results, strict=True):
            parts[number - first].append(result)
    return [_joined(found) for found in parts]


def _batches(items: Sequence[PendingUnit], at_once: int) -> Iterator[list[PendingUnit]]:
    """Every item's share, which may be none, of the first ``at_once`` replicates, of the next, and so on."""
    numbers = sorted({replicate for item in items for replicate in item.replicates})
    for start in range(0, len(numbers), at_once):
        batch = numbers[start : start + at_once]
        yield [item.within(batch[0], batch[-1] + 1) for item in items]


def _coupled(
    prepared: PreparedDocument, items: Sequence[tuple[int, PendingUnit]], draws: _Draws, savings: Savings
) -> Sequence[_Result]:
    reference = sorted({replicate for _, item in items for replicate in item.replicates})
    actions = [
        ActionReplicates(number, tuple(item.replicates), draws.table(item.action.name, item.replicates, 2))
        for number, item in items
    ]
    pairs = sum(item.count for _, item in items)
    streams = 2 * pairs + (len(reference) if savings.share_reference else pairs)
    kernels = prepared.kernels(streams, savings)
    return rollout(kernels, actions, reference, draws.table(None, reference, 1), draws.horizon, savings)


def _branched(
    prepared: PreparedDocument, items: Sequence[tuple[int, PendingUnit]], draws: _Draws, savings: Savings
) -> Sequence[_Result]:
    actions = [
        ActionReplicates(number, tuple(item.replicates), draws.table(item.action.name, item.replicates, PURPOSES, SWRB))
        for number, item in items
    ]
    kernels = prepared.kernels(3 * sum(item.count for _, item in items), savings)
    return branch_replicates(kernels, actions, draws.horizon, savings)


def _joined(parts: Sequence[_Result]) -> _Result:
    """Consecutive replicates of one action as one result: arrays one after the other, counts added up."""
    return parts[0] if len(parts) == 1 else type(parts[0])(**_joined_values([vars(part) for part in parts]))


def _joined_values(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name, value in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(value, dict):
            joined[name] = _joined_values(values)
        else:
            joined[name] = np.concatenate(values) if isinstance(value, np.ndarray) else sum(values)
    return joined


def _identity(
    study: str, model: Model, document: Document, item: PendingUnit, horizon: int, seed: int
) -> dict[str, Any]:
    return {
        "study": study,
        "model": model.id,
        "doc": document.doc,
        "action": item.action.name,
        "estimator": item.estimator,
        "first_replicate": item.first,
        "replicates": item.count,
        "horizon": horizon,
        "device": model.device,
        "dtype": model.dtype,
        "versions": _versions(),
        "batch_invariant": model.batch_deviation == 0.0,
        "batch_deviation": model.batch_deviation,
        "seed": seed,
    }


@cache
def _versions() -> str:
    packages = ("torch", "transformers", "numpy")
    found = {"python": platform.python_version()} | {name: version(name) for name in packages}
    return json.dumps(found, sort_keys=True)


def _events(record: Mapping[str, Any], result: _Result) -> pa.Table:
    if isinstance(result, CoupledSteps):
        rows = np.ones(result.x_token.shape, dtype=np.bool_)
        return _rows(record, COUPLED, rows, {name: getattr(result, name) for name in _STEP_COLUMNS}, None)
    position = np.arange(1, result.token.shape[1] + 1)
    scan: dict[str, np.ndarray[Any, Any]] = {
        **dict.fromkeys(("x_token", "y_token"), result.token),
        **dict.fromkeys(("delta", "f"), result.deficit),
        **dict.fromkeys(("x_eos", "y_eos"), result.ended),
    }
    branch = result.branch[:, None]
    table = pa.concat_tables([
        _rows(record, SCAN, position <= result.scanned[:, None], scan, result.weight),
        _rows(record, BRANCH, (branch > 0) & (position >= branch), result.steps, None),
    ])  # fmt: skip
    # "scan" before "branch" within a replicate
    return table.sort_by([("replicate", "ascending"), ("kind", "descending"), ("t", "ascending")])


_STEP_COLUMNS = ("x_token", "y_token", "delta", "f", "x_eos", "y_eos")


def _rows(
    record: Mapping[str, Any],
    kind: str,
    chosen: np.ndarray[Any, np.dtype[np.bool_]],
    steps: Mapping[str, np.ndarray[Any, Any]],
    weight: np.ndarray[Any, np.dtype[np.float64]] | None,
) -> pa.Table:
    """Events of one kind at the ``chosen`` [replicates, H]."""
    replicate, column = chosen.nonzero()
    rows = len(replicate)
    columns: dict[str, Any] = {name: pa.repeat(record[name], rows) for name in ("study", "model", "doc", "action")}
    columns |= {"replicate": (replicate + record["first_replicate"]).astype(np.int32)}
    columns |= {"t": (column + 1).astype(np.int32), "kind": pa.repeat(kind, rows)}
    for name in _STEP_COLUMNS:
        columns[name] = pa.array(steps[name][chosen]).cast(EVENTS.schema.field(name).type)
    columns["weight"] = pa.nulls(rows, pa.float64()) if weight is None else weight[chosen]
    return pa.table({name: columns[name] for name in EVENTS.columns}, schema=EVENTS.schema)
