"""What a study's model, caches and decoding take in bytes, before the model is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from generator.attention.holding import DTYPES, Holding, bytes_as_stored
from generator.attention.shared_prefix import PrefixLayer
from generator.transformer.files.local_folders import local_configuration, safetensors_files
from generator.transformer.memory import PREFILL_CHUNK, ModelShape, available_bytes, inner_width, replicates_within
from schema.errors import InputError

_INDEX_BYTES = 4  # kept indices are int32
_EXTENT_BYTES = 16  # prompt length and kept entries of a layer, int64
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how a configuration says their number


@dataclass(frozen=True)
class Footprint:
    """A model's shape, and the bytes of its weights in memory."""

    shape: ModelShape
    weight_bytes: int

    def cache_bytes(self, entries: int, holding: Holding, *, indexed: bool) -> int:
        """Bytes of payload, scales, index and metadata of ``entries`` per KV head and layer, as they are stored.

        A layer with a window holds the window's own entries, of a prompt that is longer than the window, and a layer
        with a state holds that.

        ``indexed`` says whether entries are ever removed; without that there is no index.
        """
        shape = self.shape
        part = torch.empty((shape.kv_heads, entries, shape.head_size), dtype=DTYPES[shape.dtype], device="meta")
        stored = bytes_as_stored(PrefixLayer(part, part), holding).total
        index = shape.kv_heads * entries * _INDEX_BYTES if indexed else 0
        windows = sum(2 * part[:, :1].nbytes * (window - 1) for window in shape.windows)
        evictable = shape.layers - shape.without_attention - len(shape.windows)
        return windows + shape.state_bytes + evictable * (stored + index + _EXTENT_BYTES)


@dataclass(frozen=True)
class MemoryPlan:
    """How many replicates are decoded at once, and the bytes that it takes besides the weights."""

    replicates: int
    replicates_at_once: int
    prompt_bytes: int  # the whole prompt and the caches of all actions
    prefill_bytes: int  # above the prompt, while a chunk is processed
    replicate_bytes: int  # above the prompt, for each replicate at once
    available_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most at any time."""
        return self.prompt_bytes + max(self.prefill_bytes, self.replicates_at_once * self.replicate_bytes)

    @property
    def fits(self) -> bool:
        """Whether so much is available."""
        return self.peak_bytes <= self.available_bytes


def plan_memory(
    shape: ModelShape, entries: int, kept: Sequence[int], replicates: int, horizon: int, available_bytes: int,
    estimator: str, *, apart: bool = False, scored: int = 0, others: Sequence[tuple[ModelShape, Sequence[int]]] = (),
    packed: bool = False,
) -> MemoryPlan:  # fmt: skip
    """Plan the memory of one document; at least one replicate is planned, whether or not it fits.

    n is ``entries``, and ``kept`` has m of each action; ``available_bytes`` are left besides the weights.
    ``apart`` says whether an action's prompt is prefilled apart; one such prompt is in memory at a time. Of ``scored``
    prompt entries a policy keeps scores. ``others`` are the models of actions with weights of their own, each with m of
    its actions: every model has the whole prompt. ``packed`` says whether keys are packed besides, as on a CPU.
    """
    sides = [(shape, kept), *others]
    prompt = sum(one.entry_bytes * (entries + sum(own)) for one, own in sides)
    prompt += prompt // 2 * packed
    replicate = sum(one.replicate_bytes(len(own), entries, horizon, estimator, scored) for one, own in sides)
    activations = max(one.activation_bytes for one, _ in sides)
    return MemoryPlan(
        replicates=replicates,
        replicates_at_once=min(replicates, replicates_within(available_bytes - prompt, replicate)),
        prompt_bytes=prompt,
        prefill_bytes=min(entries, PREFILL_CHUNK) * activations + apart * shape.entry_bytes * entries,
        replicate_bytes=replicate,
        available_bytes=available_bytes,
    )


def local_footprint(model_id: str, dtype: str, revision: str | None = None) -> Footprint | None:
    """Return the model's footprint; None where its ``config.json`` is not on this machine."""
    config = local_configuration(model_id, revision)
    if config is None or dtype not in DTYPES:
        return None
    try:
        shape = ModelShape.of(config, dtype)
        files = [] if config.get("quantization_config") else safetensors_files(model_id, revision)
        stored = sum(map(_numbers, files)) * shape.item_bytes
        experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
        tables = 1 if config.get("tie_word_embeddings") else 2
        return Footprint(shape, stored or matrix_bytes(shape, tables, inner_width(config, experts)))
    except (ValueError, KeyError, TypeError, ArithmeticError, OSError, InputError):
        return None


def _numbers(file: Path) -> int:
    """How many numbers a safetensors file has, by its header."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def matrix_bytes(shape: ModelShape, tables: int, inner: int | None = None) -> int:
    """Return the bytes of the weights' matrices; norms and biases are negligible.

    Args:
        shape: The model's numbers.
        tables: 1 if the embedding is the head, else 2.
        inner: The inner width of an MLP or of all experts together, if it is not the one that a token goes through.
    """
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_size
    layers = shape.layers * shape.width * (attention + 3 * (inner or shape.inner_width))
    return (layers + tables * shape.vocabulary * shape.width) * shape.item_bytes


def memory_here(device: str, device_map: str | None) -> int | None:
    """Bytes that can be allocated on the device, or on all GPUs of a device map; None where there is none."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    devices = [device] if device_map is None else gpus or ["cpu"]
    try:
        return sum(available_bytes(name) for name in devices)
    except (RuntimeError, AssertionError):
        return None
