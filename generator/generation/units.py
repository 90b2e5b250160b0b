"""Generation of documents' units: prefill, evict, decode and couple, record.

With a small model several documents are decoded side by side, and two threads do so: torch releases the interpreter's
lock while it computes. Each thread has modules of its own over the same weights.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from kvdrift.generator.actions import Action
from kvdrift.generator.coupling.residual_branching import PURPOSES, ResidualBranches, branch_replicates
from kvdrift.generator.coupling.rollout import (
    ActionReplicates,
    CoupledSteps,
    DocumentReplicates,
    rollout_documents,
    uniform_table,
)
from kvdrift.generator.coupling.streams import SHARE_ALL, SharingOptions
from kvdrift.generator.generation.model import Model, PreparedDocument
from kvdrift.generator.transformer.memory import is_memory_shortage
from kvdrift.log.store import Unit
from kvdrift.schema.document import Document
from kvdrift.schema.errors import OperationError, first_line
from kvdrift.schema.process_memory import give_back_memory
from kvdrift.schema.sampling import FULL_SOFTMAX, Sampling
from kvdrift.schema.study import ModelSection
from kvdrift.schema.tables import BRANCH, COUPLED, EVENTS, PLAIN, SCAN, SWRB

_Place = tuple[int, int]  # of an item: the number of its document in the group, and its number there, from 1
THREADS = 2  # more threads would wait for the interpreter's lock, which a small model holds about half of the time

_Uniforms = Callable[..., NDArray[np.float64]]  # of one document: action, replicates, horizon, purposes, estimator


@dataclass(frozen=True)
class StudySampling:
    """The name and sampling of a study, where several studies share a model and its documents."""

    study: str
    sampling: Sampling


@dataclass(frozen=True)
class PendingUnit:
    """Replicates of an action's revision that are still to be generated: ``first .. first + count - 1``.

    ``of`` is the replicates' study, with its sampling; None for the study that generation is called for, with the
    model's sampling.
    """

    action: Action
    first: int
    count: int
    estimator: str = PLAIN
    revision: int = 0
    of: StudySampling | None = None

    @property
    def replicates(self) -> range:
        """The replicate numbers."""
        return range(self.first, self.first + self.count)

    def study(self, whole: str) -> str:
        """Return the name of the unit's study: ``of.study`` or, if ``of`` is None, ``whole``, the generated study."""
        return whole if self.of is None else self.of.study

    def within(self, start: int, stop: int) -> PendingUnit:
        """Return the part of the unit with replicates from ``start`` to ``stop`` - 1, possibly empty."""
        first = max(self.first, start)
        return replace(self, first=first, count=max(min(self.first + self.count, stop) - first, 0))


Work = Sequence[tuple[Document, Sequence[PendingUnit]]]
"""Documents, each with its pending units."""


def generate_units(
    model: Model, study: str, document: Document, pending: Sequence[PendingUnit], horizon: int, seed: int,
    sharing: SharingOptions = SHARE_ALL,
) -> list[Unit]:  # fmt: skip
    """Generate all pending units of one document, as ``generate_together`` does for several documents."""
    (units,) = generate_together(model, study, [(document, pending)], horizon, seed, sharing)
    return units


def together(pairs_at_once: int, work: Work, threads: int = 1) -> Iterator[Work]:
    """Divide work, in its order, into parts whose documents are decoded together; threads get about equally many pairs.

    A part of several documents has at most ``pairs_at_once`` pairs (action, replicate).
    """
    total = sum(_pairs(pending) for _, pending in work)
    rounds = -(-total // max(pairs_at_once * threads, 1))
    enough = min(-(-total // max(rounds * threads, 1)), pairs_at_once)
    part: list[tuple[Document, Sequence[PendingUnit]]] = []
    pairs = 0
    for document, pending in work:
        added = _pairs(pending)
        if part and (pairs >= enough or pairs + added > pairs_at_once):
            yield part
            part, pairs = [], 0
        part.append((document, pending))
        pairs += added
    if part:
        yield part


def _pairs(pending: Sequence[PendingUnit]) -> int:
    """Return the most pairs (action, replicate) of a document that share a sampling, and are decoded together."""
    counts = Counter[StudySampling | None]()
    for item in pending:
        counts[item.of] += item.count
    return max(counts.values())


def generate_together(
    model: Model, study: str, work: Work, horizon: int, seed: int, sharing: SharingOptions = SHARE_ALL
) -> list[list[Unit]]:
    """Generate all pending units of some documents, which are in memory together; return a list for each document.

    Events depend only on (seed, sampling, document, action, estimator, replicate). They do not depend on which units
    are generated together, how many replicates fit into memory, or which computations are shared. Units of coupled
    rollouts come before those of residual branching.
    """
    with model.computing():
        # 1) Prefill: each prompt once, recording what the selectors of all actions need
        # 2) Evict: cache a = 1, 2, ... keeps what item a's action selects; cache 0 is the whole prompt
        prepared = [_prepare(model, document, pending, horizon, seed) for document, pending in work]

        units: dict[str, list[Unit]] = {prompt.document.doc: [] for prompt in prepared}
        samplings = dict.fromkeys(item.of for prompt in prepared for item in prompt.items)
        for of, estimator in itertools.product(samplings, (PLAIN, SWRB)):
            for group in _groups(prepared, of, estimator):
                # 3) Decode and couple: the items side by side, as many replicates at once as there is memory for,
                # and half as many if it ran out; the samplings one after the other, from the same caches
                decoded, seconds = _decode(group, of, estimator, horizon, sharing)

                # 4) Record: one unit for each item, with its share of the time
                computed = max(sum(steps.kernel_evaluations for steps in decoded.values()), 1)
                for (d, a), steps in decoded.items():
                    prompt, item = group[d], group[d].items[a - 1]
                    record = {
                        **model.identity(item.action).columns,
                        **_settings(study, model, prompt.document, item, horizon, seed),
                        **prompt.caches.record(a, item.count),
                        "weight_bytes": model.weight_bytes(item.action),
                        "decode_seconds": seconds / computed * steps.kernel_evaluations,
                        "kernel_evaluations": round(steps.kernel_evaluations),
                        "pair_evaluations": steps.pair_evaluations,
                    }
                    units[prompt.document.doc].append(Unit(record, event_rows(record, steps), prompt.caches.kept(a)))
    return list(units.values())


def generate_documents(
    model: Model, study: str, work: Work, horizon: int, seed: int
) -> Generator[list[Unit], None, None]:
    """Generate all units of some work, and yield a list of units for each document; documents come in any order.

    Events are equal in one thread and in several. If the generator is closed or raises an error, its threads stop at
    their next position.
    """
    threads = min(THREADS, len(os.sched_getaffinity(0))) if model.pairs_at_once else 1
    parts = list(together(model.pairs_at_once, work, threads))
    if threads > 1 and len(parts) > 1:
        yield from _in_threads(threads, model, study, parts, horizon, seed)
        return
    for part in parts:
        yield from generate_together(model, study, part, horizon, seed)
        give_back_memory()  # the allocator would keep more memory with each document of another length


@dataclass(frozen=True)
class _Prepared:
    """A prefilled document, the units to generate (``items``), and their caches; cache a belongs to item a - 1."""

    document: Document
    items: Sequence[PendingUnit]
    caches: PreparedDocument
    uniforms: _Uniforms


def _prepare(model: Model, document: Document, pending: Sequence[PendingUnit], horizon: int, seed: int) -> _Prepared:
    items = sorted(pending, key=lambda item: item.estimator == SWRB)
    try:
        caches = model.prepare(document, [item.action for item in items], horizon)
    except (MemoryError, RuntimeError) as error:
        if not is_memory_shortage(error):
            raise
        raise OperationError(
            f"document '{document.doc}': the memory is too small for its prompt of {document.prompt_tokens} tokens and "
            f"the entries that the actions keep ({first_line(error)}); ask for fewer actions or shorter prompts, or "
            "take a larger device"
        ) from None
    return _Prepared(document, items, caches, partial(uniform_table, seed, document.doc))


def _groups(prepared: Sequence[_Prepared], of: StudySampling | None, estimator: str) -> list[list[_Prepared]]:
    """Group the documents that have units of study ``of`` and ``estimator``; a group is decoded side by side."""
    having = [
        prompt if of is None else replace(prompt, caches=prompt.caches.under(of.sampling))
        for prompt in prepared
        if any((item.of, item.estimator) == (of, estimator) for item in prompt.items)
    ]
    if estimator == SWRB:
        return [[prompt] for prompt in having]
    return [having] if having else []


def _decode(
    group: Sequence[_Prepared], of: StudySampling | None, estimator: str, horizon: int, sharing: SharingOptions
) -> tuple[dict[_Place, Any], float]:
    """Decode a group's units of study ``of`` and ``estimator``; return each unit's steps, and the seconds of all.

    Steps are [replicates, H]. The seconds leave out the trial steps that a model makes before it decodes a new number
    of streams.
    """
    items = {
        (d, a): item
        for d, prompt in enumerate(group)
        for a, item in enumerate(prompt.items, start=1)
        if (item.of, item.estimator) == (of, estimator)
    }
    # The reference of each document but the first takes no more room than another action does.
    at_once = group[0].caches.replicates_at_once(len(items) + len(group) - 1, estimator)
    begin = _branching if estimator == SWRB else _coupling
    seconds = 0.0
    numbers = sorted({replicate for item in items.values() for replicate in item.replicates})
    parts: dict[_Place, list[Any]] = {place: [] for place in items}
    while numbers:
        batch = _batch(items, numbers[:at_once])
        try:
            decode = begin(group, batch, horizon, sharing)
            began = time.perf_counter()
            decoded = decode()
        except (MemoryError, RuntimeError, OperationError) as error:  # OperationError comes from a custom policy
            if not is_memory_shortage(error):
                raise
            if min(at_once, len(numbers)) == 1:
                raise _too_large(group, len(items), horizon, error) from None
            at_once = min(at_once, len(numbers)) // 2
            continue
        seconds += time.perf_counter() - began
        for place, part in zip(batch, decoded, strict=True):
            parts[place].append(part)  # [replicates of the batch, H]
        numbers = numbers[at_once:]
    return {place: join_replicates(pieces) for place, pieces in parts.items()}, seconds


def _batch(items: Mapping[_Place, PendingUnit], numbers: Sequence[int]) -> dict[_Place, PendingUnit]:
    """Return the items with replicates from the first to the last of ``numbers``, each cut to these replicates."""
    shares = {place: item.within(numbers[0], numbers[-1] + 1) for place, item in items.items()}
    return {place: share for place, share in shares.items() if share.count}


def _too_large(group: Sequence[_Prepared], actions: int, horizon: int, error: Exception) -> OperationError:
    documents = f"document '{group[0].document.doc}'" + (f" and {len(group) - 1} others" if group[1:] else "")
    return OperationError(
        f"{documents}: the memory is too small for one replicate of {actions} actions over {horizon} positions "
        f"({first_line(error)}); ask for fewer actions, a shorter horizon or shorter prompts, or take a larger device"
    )


def _coupling(
    group: Sequence[_Prepared], items: Mapping[_Place, PendingUnit], horizon: int, sharing: SharingOptions
) -> Callable[[], list[CoupledSteps]]:
    """Return a function that runs coupled rollouts of the items.

    In each replicate, all actions of a document are coupled with the same reference continuation.
    """
    documents, cache, streams = [], 0, 0
    for d, prompt in enumerate(group):
        of_document = {a: item for (place, a), item in items.items() if place == d}
        if of_document:
            reference = sorted({replicate for item in of_document.values() for replicate in item.replicates})
            actions = [
                ActionReplicates(
                    cache + a, tuple(item.replicates), prompt.uniforms(item.action.name, item.replicates, horizon, 2)
                )
                for a, item in of_document.items()
            ]
            documents.append(
                DocumentReplicates(cache, reference, prompt.uniforms(None, reference, horizon, 1), actions)
            )
            pairs = sum(item.count for item in of_document.values())
            streams += 2 * pairs + len(reference)
        cache += 1 + len(prompt.items)
    kernels = group[0].caches.kernels(streams, sharing, [prompt.caches for prompt in group[1:]])
    return partial(rollout_documents, kernels, documents, horizon, sharing)


def _branching(
    group: Sequence[_Prepared], items: Mapping[_Place, PendingUnit], horizon: int, sharing: SharingOptions
) -> Callable[[], list[ResidualBranches]]:
    """Return a function that runs residual branching of one document's items; coupled rollouts have other uniforms."""
    (prompt,) = group
    actions = []
    for (_, a), item in items.items():
        table = prompt.uniforms(item.action.name, item.replicates, horizon, PURPOSES, SWRB)
        actions.append(ActionReplicates(a, tuple(item.replicates), table))
    pairs = sum(item.count for item in items.values())
    kernels = prompt.caches.kernels(3 * pairs, sharing, parked=2 * pairs)
    return partial(branch_replicates, kernels, actions, horizon, sharing)


def _settings(
    study: str, model: Model, document: Document, item: PendingUnit, horizon: int, seed: int
) -> dict[str, Any]:
    """Return the columns that identify a unit, and the settings that it was made with."""
    made_with = versions_on(model.device) | {"row_multiple": str(model.row_multiple)}
    if model.logits_dtype is not None:
        made_with["logits_dtype"] = model.logits_dtype
    sampling = model.sampling if item.of is None else item.of.sampling
    if sampling != FULL_SOFTMAX:
        made_with["sampling"] = sampling.words
    return {
        "study": item.study(study), "model": model.id, "doc": document.doc, "action": item.action.name,
        "action_revision": item.revision, "estimator": item.estimator, "first_replicate": item.first,
        "replicates": item.count, "horizon": horizon, "device": model.device, "dtype": model.dtype,
        "versions": json.dumps(made_with, sort_keys=True), "seed": seed,
        "batch_invariant": model.batch_deviation == 0.0, "batch_deviation": model.batch_deviation,
        "prompt_sha256": document.prompt_sha256,
    }  # fmt: skip


class StoppedError(Exception):
    """Nobody waits for the result any more; raised before the next pass through the network."""


def _in_threads(
    threads: int, model: Model, study: str, parts: Sequence[Work], horizon: int, seed: int
) -> Generator[list[Unit], None, None]:
    stopping = threading.Event()

    def go_on() -> None:
        if stopping.is_set():
            raise StoppedError

    idle: queue.SimpleQueue[Model] = queue.SimpleQueue()
    for twin in model.twins(threads, go_on):
        idle.put(twin)

    def generate(part: Work) -> list[list[Unit]]:
        twin = idle.get_nowait()
        try:
            return generate_together(twin, study, part, horizon, seed)
        finally:
            idle.put(twin)

    with model.computing(), ThreadPoolExecutor(threads, "generation") as pool:
        try:
            for made in as_completed([pool.submit(generate, part) for part in parts]):
                yield from made.result()
        finally:
            stopping.set()
            pool.shutdown(cancel_futures=True)


Decoded = TypeVar("Decoded", CoupledSteps, ResidualBranches)

_STEP_COLUMNS = ("x_token", "y_token", "delta", "f", "x_eos", "y_eos")
_ALONG_X = ("kl", "kl_own", "top1")  # known at positions up to X's end, where ``kl`` is not NaN


@cache
def library_versions() -> Mapping[str, str]:
    """Return the versions of Python and of the libraries that affect numbers."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers", "numpy")}


def versions_on(device: str) -> dict[str, str]:
    """Return the versions of the libraries that compute on a device, and for CUDA the GPU's name and torch's CUDA.

    With a device map, only the GPU of the first device is named.
    """
    versions = dict(library_versions())
    if torch.device(device).type == "cuda":
        versions |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return versions


def gpu_here(model: ModelSection) -> str | None:
    """Return the name of the GPU here on which a study's model computes, the first of a device map; None on a CPU."""
    device = "cuda" if model.device_map is not None else model.device
    there = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return versions_on(device)["gpu"] if there else None


def join_replicates(parts: Sequence[Decoded]) -> Decoded:
    """Join the results of consecutive replicates of one action: concatenate arrays and add counts."""
    return parts[0] if len(parts) == 1 else type(parts[0])(**_join([vars(part) for part in parts]))


def event_rows(record: Mapping[str, Any], decoded: CoupledSteps | ResidualBranches) -> pa.Table:
    """Make the rows of ``events`` of one unit, from its row of ``units`` and the decoded steps of its replicates.

    Rows are sorted by replicate and position; with residual branching, a replicate's rows of kind "scan" come before
    those of kind "branch".
    """
    if isinstance(decoded, CoupledSteps):
        steps = {name: getattr(decoded, name) for name in (*_STEP_COLUMNS, *_ALONG_X)}  # [replicates, H] each
        return _rows(record, COUPLED, np.ones(decoded.x_token.shape, dtype=np.bool_), steps, None)
    position = np.arange(1, decoded.token.shape[1] + 1)  # [H]
    branch = decoded.branch[:, None]  # [replicates, 1]
    scan: dict[str, NDArray[Any]] = {
        **dict.fromkeys(("x_token", "y_token"), decoded.token),
        **dict.fromkeys(("delta", "f"), decoded.deficit),
        **dict.fromkeys(("x_eos", "y_eos"), decoded.ended),
    }
    table = pa.concat_tables([
        _rows(record, SCAN, position <= decoded.scanned[:, None], scan, decoded.weight),
        _rows(record, BRANCH, (branch > 0) & (position >= branch), decoded.steps, None),
    ])  # fmt: skip
    return table.sort_by([("replicate", "ascending"), ("kind", "descending"), ("t", "ascending")])


def _rows(
    record: Mapping[str, Any],
    kind: str,
    chosen: NDArray[np.bool_],
    steps: Mapping[str, NDArray[Any]],
    weight: NDArray[np.float64] | None,
) -> pa.Table:
    """Return rows of ``events``, all of one ``kind``, for the positions at which ``chosen`` [replicates, H] is True.

    The columns of ``_ALONG_X`` are null if ``steps`` lacks them.
    """
    replicate, column = chosen.nonzero()
    for name in ("delta", "f"):
        lost = ~np.isfinite(steps[name][chosen])
        if lost.any():
            raise OperationError(
                f"document '{record['doc']}', action '{record['action']}': {name} is no number at position "
                f"{column[lost.argmax()] + 1}: the model's logits are not finite; its weights are damaged, or "
                f"{record['dtype']} cannot hold its results"
            )
    rows = len(replicate)
    columns: dict[str, Any] = {name: pa.repeat(record[name], rows) for name in ("study", "model", "doc", "action")}
    columns["replicate"] = (replicate + record["first_replicate"]).astype(np.int32)
    columns["t"] = (column + 1).astype(np.int32)
    columns["kind"] = pa.repeat(kind, rows)
    for name in _STEP_COLUMNS:
        columns[name] = pa.array(steps[name][chosen]).cast(EVENTS.schema.field(name).type)
    unknown = np.isnan(steps["kl"][chosen]) if "kl" in steps else np.ones(rows, dtype=np.bool_)
    for name in _ALONG_X:
        values = steps[name][chosen] if name in steps else np.zeros(rows, dtype=np.bool_)
        columns[name] = pa.array(values, mask=unknown).cast(EVENTS.schema.field(name).type)
    columns["action_revision"] = pa.repeat(pa.scalar(record["action_revision"], pa.int32()), rows)
    columns["unit"] = pa.nulls(rows, pa.int64())  # which the store fills in
    columns["weight"] = pa.nulls(rows, pa.float64()) if weight is None else weight[chosen]
    return pa.table({name: columns[name] for name in EVENTS.columns}, schema=EVENTS.schema)


def _join(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name, value in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(value, dict):
            joined[name] = _join(values)
        else:
            joined[name] = np.concatenate(values) if isinstance(value, np.ndarray) else sum(values)
    return joined
