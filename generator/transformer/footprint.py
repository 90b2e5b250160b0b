"""What a model and the kept cache of a prompt take in bytes, from the model's configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from generator.transformer.loading import DTYPES
from generator.transformer.local_folders import local_configuration
from generator.transformer.memory import ModelShape, available_bytes

_INDEX_BYTES = 4  # kept indices are int32
_EXTENT_BYTES = 16  # prompt length and kept entries of a layer, int64


@dataclass(frozen=True)
class Footprint:
    """A model's shape, and whether its embedding is its head too."""

    shape: ModelShape
    tied: bool

    def cache_bytes(self, entries: int) -> int:
        """Payload, index and metadata of ``entries`` kept per KV head and layer."""
        shape = self.shape
        return shape.entry_bytes * entries + shape.layers * (shape.kv_heads * entries * _INDEX_BYTES + _EXTENT_BYTES)

    @property
    def weight_bytes(self) -> int:
        """The weights' matrices; norms and biases are next to nothing."""
        shape = self.shape
        attention = 2 * (shape.heads + shape.kv_heads) * shape.head_size
        layers = shape.layers * shape.width * (attention + 3 * shape.inner_width)
        return (layers + (1 if self.tied else 2) * shape.vocabulary * shape.width) * shape.item_bytes


def local_footprint(model_id: str, dtype: str, revision: str | None = None) -> Footprint | None:
    """By the model's ``config.json``, where that is at hand on this machine; None where it is not."""
    config = local_configuration(model_id, revision)
    if config is None or dtype not in DTYPES:
        return None
    try:
        return Footprint(ModelShape.of(config, dtype), tied=bool(config.get("tie_word_embeddings")))
    except (ValueError, KeyError, TypeError):
        return None


def memory_here(device: str, device_map: str | None) -> int | None:
    """Bytes that can be taken on the device, or on all GPUs of a device map; None where there is no such device."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    devices = [device] if device_map is None else gpus or ["cpu"]
    try:
        return sum(available_bytes(name) for name in devices)
    except (RuntimeError, AssertionError):
        return None
