"""What a study's model, caches and decoding take in bytes, before the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from generator.attention.holding import DTYPES, Holding, bytes_as_stored
from generator.attention.shared_prefix import PrefixLayer
from generator.transformer.files.local_folders import local_configuration
from generator.transformer.memory import PREFILL_CHUNK, ModelShape, available_bytes, replicates_within

_INDEX_BYTES = 4  # kept indices are int32
_EXTENT_BYTES = 16  # prompt length and kept entries of a layer, int64


@dataclass(frozen=True)
class Footprint:
    """A model's shape, and whether its embedding is tied to its head."""

    shape: ModelShape
    tied: bool

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

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights' matrices; norms and biases are negligible."""
        shape = self.shape
        attention = 2 * (shape.heads + shape.kv_heads) * shape.head_size
        layers = shape.layers * shape.width * (attention + 3 * shape.inner_width)
        return (layers + (1 if self.tied else 2) * shape.vocabulary * shape.width) * shape.item_bytes


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
    estimator: str, *, apart: bool = False, scored: int = 0,
) -> MemoryPlan:  # fmt: skip
    """Plan the memory of one document; at least one replicate is planned, whether or not it fits.

    n is ``entries``, and ``kept`` has m of each action; ``available_bytes`` are left besides the weights.
    ``apart`` says whether an action's prompt is prefilled apart; one such prompt is in memory at a time. Of ``scored``
    prompt entries a policy keeps scores.
    """
    prompt = shape.entry_bytes * (entries + sum(kept))
    replicate = shape.replicate_bytes(len(kept), entries, horizon, estimator, scored)
    return MemoryPlan(
        replicates=replicates,
        replicates_at_once=min(replicates, replicates_within(available_bytes - prompt, replicate)),
        prompt_bytes=prompt,
        prefill_bytes=min(entries, PREFILL_CHUNK) * shape.activation_bytes + apart * shape.entry_bytes * entries,
        replicate_bytes=replicate,
        available_bytes=available_bytes,
    )


def local_footprint(model_id: str, dtype: str, revision: str | None = None) -> Footprint | None:
    """Return the model's footprint; None where its ``config.json`` is not on this machine."""
    config = local_configuration(model_id, revision)
    if config is None or dtype not in DTYPES:
        return None
    try:
        return Footprint(ModelShape.of(config, dtype), tied=bool(config.get("tie_word_embeddings")))
    except (ValueError, KeyError, TypeError, ArithmeticError):
        return None


def memory_here(device: str, device_map: str | None) -> int | None:
    """Bytes that can be allocated on the device, or on all GPUs of a device map; None where there is none."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    devices = [device] if device_map is None else gpus or ["cpu"]
    try:
        return sum(available_bytes(name) for name in devices)
    except (RuntimeError, AssertionError):
        return None
