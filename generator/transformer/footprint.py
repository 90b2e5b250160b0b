"""Estimate the bytes of a study's model, caches and decoding, before the model is loaded."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvdrift.generator.attention.holding import DTYPES, Holding, bytes_as_stored
from kvdrift.generator.attention.prompt_reads import PrefixLayer
from kvdrift.generator.transformer.files.local_folders import local_configuration, safetensors_files
from kvdrift.generator.transformer.memory import (
    PREFILL_CHUNK,
    ModelShape,
    available_bytes,
    inner_width,
    replicates_within,
)
from kvdrift.schema.errors import InputError

_INDEX_BYTES = 4  # kept indices are int32
_EXTENT_BYTES = 16  # prompt length and kept entries of a layer, int64
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of their number in configurations


@dataclass(frozen=True)
class Footprint:
    """A model's shape, and the bytes of its weights in memory."""

    shape: ModelShape
    weight_bytes: int

    def cache_bytes(self, entries: Sequence[int], holdings: Sequence[Holding], *, indexed: Container[int] = ()) -> int:
        """Return the bytes of a cache: payload, scales, index and metadata.

        ``entries`` are those of a KV head in each layer with full attention, and ``holdings`` the forms in which they
        are stored. ``indexed`` are the numbers of the layers from which entries are ever removed; others have no index.
        A layer with a window counts as a full window, and a layer with a state as its state.
        """
        shape, stored = self.shape, 0
        for layer, (kept, holding) in enumerate(zip(entries, holdings, strict=True)):
            part = torch.empty((shape.kv_heads, kept, shape.head_size), dtype=DTYPES[shape.dtype], device="meta")
            stored += bytes_as_stored(PrefixLayer(part, part), holding).total + _EXTENT_BYTES
            stored += shape.kv_heads * kept * _INDEX_BYTES if layer in indexed else 0
        return shape.fixed_bytes(sys.maxsize) + stored


@dataclass(frozen=True)
class MemoryPlan:
    """The number of replicates decoded at once, and the bytes that decoding takes besides the weights."""

    replicates: int
    replicates_at_once: int
    prompt_bytes: int  # the whole prompt and the caches of all actions
    prefill_bytes: int  # besides prompt_bytes, while a chunk is processed
    replicate_bytes: int  # besides prompt_bytes, for each replicate that all actions decode at once
    decoding_bytes: int  # besides prompt_bytes, for the replicates at once, and for the trial of their steps
    available_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any time; prefill's are added to decoding's, since allocators keep freed memory."""
        return self.prompt_bytes + self.prefill_bytes + self.decoding_bytes

    @property
    def fits(self) -> bool:
        """Whether prefill and, after it, decoding ``replicates_at_once`` replicates fit in the available memory."""
        most = max(self.prefill_bytes, self.replicates_at_once * self.replicate_bytes)
        return self.prompt_bytes + most <= self.available_bytes


def plan_memory(
    sides: Sequence[tuple[ModelShape, Sequence[int], Sequence[int]]], entries: int, horizon: int, available_bytes: int,
    estimator: str, *, apart: bool = False, scored: int = 0, packed: bool = False,
) -> MemoryPlan:  # fmt: skip
    """Plan the memory of one document; at least one replicate is planned, even if it does not fit.

    ``sides`` has for each model, the reference's first, its shape, and m and the number of replicates of each action
    that it decodes; every model holds the whole prompt, of n = ``entries``. ``available_bytes`` are left besides the
    weights. ``apart``: whether an action's prompt is prefilled separately; one such prompt is in memory at a time.
    ``scored`` is the number of prompt entries whose scores a policy keeps. ``packed``: whether packed copies of keys
    are kept, as on a CPU.
    """
    whole = [side.fixed_bytes(entries) + side.evictable_bytes * entries for side, *_ in sides]
    prompt = sum(whole) + sum(side.evictable_bytes * sum(budgets) for side, budgets, _ in sides)
    prompt += prompt // 2 * packed
    step = entries, horizon, estimator, scored
    replicate = sum(side.decoding_bytes([1] * len(budgets), *step) for side, budgets, _ in sides)
    most = max(max(counts, default=1) for *_, counts in sides)
    at_once = min(most, replicates_within(available_bytes - prompt, replicate))
    decoding = sum(
        side.decoding_bytes([min(count, at_once) for count in counts], *step, reference=not number, tried=True)
        for number, (side, _, counts) in enumerate(sides)
    )
    prefill = min(entries, PREFILL_CHUNK) * max(side.activation_bytes for side, *_ in sides) + apart * whole[0]
    return MemoryPlan(most, at_once, prompt, prefill, replicate, decoding, available_bytes)


def local_footprint(model_id: str, dtype: str, revision: str | None = None, device: str = "cpu") -> Footprint | None:
    """Return the model's footprint on a device; None if ``config.json`` is not on this machine or lacks a number."""
    config = local_configuration(model_id, revision)
    if config is None or dtype not in DTYPES:
        return None
    try:
        shape = ModelShape.of(config, dtype, device)
        files = [] if config.get("quantization_config") else safetensors_files(model_id, revision)
        stored = sum(map(_numbers, files)) * shape.item_bytes
        experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
        tables = 1 if config.get("tie_word_embeddings") else 2
        return Footprint(shape, stored or matrix_bytes(shape, tables, inner_width(config, experts)))
    except (ValueError, KeyError, TypeError, ArithmeticError, OSError, InputError):
        return None


def _numbers(file: Path) -> int:
    """Return how many numbers a safetensors file has, by its header."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def matrix_bytes(shape: ModelShape, tables: int, inner: int | None = None) -> int:
    """Return the bytes of the weights' matrices; norms and biases are negligible.

    ``tables`` is 1 if the embedding is also the head, else 2. ``inner`` is the inner width of an MLP, or of all experts
    together; by default the inner width that one token goes through.
    """
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_size
    layers = shape.layers * shape.width * (attention + 3 * (inner or shape.inner_width))
    return (layers + tables * shape.vocabulary * shape.width) * shape.item_bytes


def memory_here(device: str, device_map: str | None) -> int | None:
    """Return the free bytes of a device or, with a device map, of all GPUs; None if there is no such device."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    devices = [device] if device_map is None else gpus or ["cpu"]
    try:
        return sum(available_bytes(name) for name in devices)
    except (RuntimeError, AssertionError):
        return None
