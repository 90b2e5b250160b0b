"""What a prompt's kept cache takes in bytes, from the model's configuration alone: no weights, nothing downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from generator.models import DTYPES, EMBEDDED_FOLDER, EMBEDDED_ID

_INDEX_BYTES = 4  # kept indices are int32
_EXTENT_BYTES = 16  # prompt length and kept entries of a layer, int64


@dataclass(frozen=True)
class CacheShape:
    """Layers, KV heads and the width of a head, in a cache of ``dtype``."""

    layers: int
    heads: int
    width: int
    dtype: str

    def bytes_of(self, entries: int) -> int:
        """Payload, index and metadata of ``entries`` kept per KV head and layer (``generator.eviction``)."""
        payload = 2 * self.width * DTYPES[self.dtype].itemsize
        return self.layers * (self.heads * entries * (payload + _INDEX_BYTES) + _EXTENT_BYTES)


def local_cache_shape(model_id: str, dtype: str, revision: str | None = None) -> CacheShape | None:
    """The shape by the model's ``config.json``, where that is at hand on this machine; None where it is not."""
    file = _config_file(model_id, revision)
    if file is None or dtype not in DTYPES:
        return None
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        query_heads = config["num_attention_heads"]
        return CacheShape(
            layers=int(config["num_hidden_layers"]),
            heads=int(config.get("num_key_value_heads") or query_heads),
            width=int(config.get("head_dim") or config["hidden_size"] // query_heads),
            dtype=dtype,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _config_file(model_id: str, revision: str | None) -> Path | None:
    folder = EMBEDDED_FOLDER if model_id == EMBEDDED_ID else Path(model_id).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    try:
        cached = try_to_load_from_cache(model_id, "config.json", revision=revision)
    except HFValidationError:  # not a name that a Hugging Face repository can have
        return None
    return Path(cached) if isinstance(cached, str) else None
