"""Store the tokens of prompts, and the entries that each action keeps of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kvdrift.log.delta.commits import Commit, guards
from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.versions import Snapshot
from kvdrift.schema.tables import PROMPTS

MOST_COUNTS = 1 << 18
"""The most counts of one prompt and action: if layers times positions are more, layers are counted in groups."""

_NAMES = PROMPTS.key


@dataclass(frozen=True)
class KeptEntries:
    """The entries of a prompt that are kept after ``step`` generated tokens; step 0 is right after prefill."""

    layers: int  # L, the layers of the model
    pairs: int  # the number of (layer, KV head) pairs counted; after a step, the pairs of all streams
    counts: NDArray[np.int32]  # int32[G, n], for each group of layers the pairs that have the entry of each position
    step: int = 0


def layer_groups(layers: int, entries: int) -> int:
    """Return the number of groups into which ``layers`` are put for a prompt of ``entries`` entries.

    It is one group for each layer, or fewer, so that groups times entries are at most ``MOST_COUNTS``.
    """
    return max(1, min(layers, MOST_COUNTS // entries))


def kept_entries(of_layer: Sequence[NDArray[np.int64]], pairs: int, step: int = 0) -> KeptEntries:
    """Count the kept entries by groups of layers.

    ``of_layer`` has for each layer the number of its (layer, KV head) pairs that have the entry of each position,
    int64 [n]; ``pairs`` is the number of such pairs in all layers.
    """
    layers = len(of_layer)
    groups = layer_groups(layers, len(of_layer[0]))
    bounds = [group * layers // groups for group in range(groups + 1)]
    counts = [np.sum(of_layer[first:last], axis=0) for first, last in itertools.pairwise(bounds)]
    return KeptEntries(layers, pairs, np.stack(counts).astype(np.int32), step)


def kept_row(unit: Mapping[str, Any], kept: KeptEntries) -> dict[str, Any]:
    """Return the row of table ``prompts`` with the entries kept under a unit's action; ``unit`` is the unit's row."""
    names = {name: unit[name] for name in ("study", "model", "doc", "action")}
    return names | {
        "action_revision": unit.get("action_revision", 0),
        "document_revision": 0,
        "step": kept.step,
        "tokens": None,
        "records": None,
        "layers": kept.layers,
        "pairs": kept.pairs,
        "kept": kept.counts.reshape(-1),
        "turns": None,
    }


def append_prompts(folder: DeltaFolder, rows: Iterable[Mapping[str, Any]]) -> int:
    """Append those rows whose keys table ``prompts`` lacks, by one commit; return how many.

    A stored row stays even if the given row of the same key has other values.
    """
    by_key = {tuple(row[name] for name in _NAMES): row for row in rows}
    new: list[Mapping[str, Any]] = []

    def attempt(loaded: Snapshot) -> Commit | None:
        known = folder.of_files(loaded, _NAMES, _keys)
        keys = [key for key in by_key if not any(key in of_file for of_file in known.values())]
        new[:] = [by_key[key] for key in keys]
        if not new:
            return None
        file = folder.put_rows("prompts", pa.Table.from_pylist(new, schema=PROMPTS.schema))
        return Commit([file], guards((f"kvdrift.prompts-{key!r}", 1) for key in keys))

    if by_key:
        folder.commit("prompts", attempt)
    return len(new)


def _keys(rows: pa.Table) -> frozenset[tuple[Any, ...]]:
    return frozenset(zip(*(rows[name].to_pylist() for name in _NAMES), strict=True))
