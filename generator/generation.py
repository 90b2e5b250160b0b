"""One document's units: prefill once, evict for each pending action, roll out, record what it took."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version

import numpy as np
import pyarrow as pa

from generator.actions import Action
from generator.eviction import CompactCache, evict, kept_entries
from generator.models import LoadedModel
from generator.rollout import ActionReplicates, CoupledSteps, rollout
from generator.transformer import Prompt, TransformerKernels
from generator.uniforms import uniform_table
from schema.document import Document
from schema.store import Unit
from schema.tables import EVENTS


@dataclass(frozen=True)
class PendingUnit:
    """What is still to be generated of a document: replicates ``first .. first + count - 1`` of an action."""

    action: Action
    first: int
    count: int

    @property
    def replicates(self) -> range:
        """The replicate numbers."""
        return range(self.first, self.first + self.count)


def generate_units(
    model: LoadedModel, study: str, document: Document, pending: Sequence[PendingUnit], horizon: int, seed: int
) -> list[Unit]:
    """Generate all pending units of one document together: one prefill, one reference stream per replicate.

    Events depend on (seed, document, action, replicate) and on nothing else: not on which units are asked for at once.
    InputError when a retention cannot hold its selector's window and sinks.
    """
    entries = document.prompt_tokens
    kept = [_kept(item.action, document) for item in pending]
    began = time.perf_counter()
    prompt = Prompt(model, document.tokens, window=max(item.action.selector.window for item in pending))
    prefill_seconds = (time.perf_counter() - began) / len(pending)

    caches, eviction_seconds = [], []
    for item, m in zip(pending, kept, strict=True):
        began = time.perf_counter()
        caches.append(evict(prompt.layers, item.action.selector, m))
        eviction_seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    reference = sorted({replicate for item in pending for replicate in item.replicates})
    actions = []
    for cache_number, item in enumerate(pending, start=1):
        uniforms = uniform_table(seed, document.doc, item.action.name, item.replicates, horizon, 2)
        actions.append(ActionReplicates(cache_number, tuple(item.replicates), uniforms))
    reference_uniforms = uniform_table(seed, document.doc, None, reference, horizon, 1)
    kernels = TransformerKernels(model, prompt, caches, horizon)
    steps = rollout(kernels, actions, reference, reference_uniforms, horizon)
    decode_seconds = time.perf_counter() - began

    laws = [part.own_rows + part.shared_rows for part in steps]
    units = []
    for item, compact, seconds, part, share in zip(pending, caches, eviction_seconds, steps, laws, strict=True):
        record = _identity(study, model, document, item, horizon, seed) | _memory(kernels, compact, entries, item.count)
        record |= {
            "prefill_seconds": prefill_seconds + seconds,
            "decode_seconds": decode_seconds * share / max(sum(laws), 1),
            "kernel_evaluations": round(share),
        }
        units.append(Unit(record, _events(study, model.id, document.doc, item, part)))
    return units


def _kept(action: Action, document: Document) -> int:
    where = f"action '{action.name}', document '{document.doc}'"
    return kept_entries(action.selector, action.retention, document.prompt_tokens, where)


def _identity(
    study: str, model: LoadedModel, document: Document, item: PendingUnit, horizon: int, seed: int
) -> dict[str, object]:
    return {
        "study": study,
        "model": model.id,
        "doc": document.doc,
        "action": item.action.name,
        "first_replicate": item.first,
        "replicates": item.count,
        "horizon": horizon,
        "device": model.device,
        "dtype": model.dtype,
        "versions": _versions(),
        "batch_invariant": model.batch_invariant,
        "seed": seed,
    }


def _memory(kernels: TransformerKernels, compact: CompactCache, entries: int, streams: int) -> dict[str, object]:
    stored = compact.payload_bytes + compact.index_bytes + compact.metadata_bytes
    return {
        "prompt_entries": entries,
        "kept_entries": compact.kept_entries,
        "payload_bytes": compact.payload_bytes,
        "index_bytes": compact.index_bytes,
        "metadata_bytes": compact.metadata_bytes,
        "resident_bytes": stored + kernels.stream_bytes * streams,
        "kept_sha256": list(compact.kept_sha256),
    }


@cache
def _versions() -> str:
    packages = ("torch", "transformers", "numpy")
    found = {"python": platform.python_version()} | {name: version(name) for name in packages}
    return json.dumps(found, sort_keys=True)


def _events(study: str, model: str, doc: str, item: PendingUnit, steps: CoupledSteps) -> pa.Table:
    replicates, horizon = steps.x_token.shape
    rows = replicates * horizon
    columns = {
        "study": pa.repeat(study, rows),
        "model": pa.repeat(model, rows),
        "doc": pa.repeat(doc, rows),
        "action": pa.repeat(item.action.name, rows),
        "replicate": np.repeat(np.arange(item.first, item.first + replicates, dtype=np.int32), horizon),
        "t": np.tile(np.arange(1, horizon + 1, dtype=np.int32), replicates),
        "x_token": steps.x_token.ravel(),
        "y_token": steps.y_token.ravel(),
        "delta": steps.delta.ravel(),
        "f": steps.f.ravel(),
        "x_eos": steps.x_eos.ravel(),
        "y_eos": steps.y_eos.ravel(),
    }
    return pa.table(columns, schema=EVENTS.schema)
