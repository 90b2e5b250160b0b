"""Check, by headers alone, that a model's weight files hold every tensor that its configuration needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kvdrift.generator.transformer.files.local_folders import safetensors_files
from kvdrift.schema.errors import InputError, reading

_Shape = tuple[int, ...]


def check_tensors(model_id: str, config: Any, revision: str | None) -> bool:
    """Compare names and sizes of the stored tensors with the configuration; nothing is loaded.

    Returns whether the comparison was possible; it is not if the weights are elsewhere, packed, or not safetensors.
    """
    if getattr(config, "quantization_config", None) is not None:
        return False
    files = safetensors_files(model_id, revision)
    if not files:
        return False
    stored: dict[str, _Shape] = {}
    for file in files:
        with reading(f"model.id = '{model_id}': cannot load its weights", SafetensorError):
            stored |= _shapes(file)
    with reading(f"model.id = '{model_id}': its configuration gives no sizes of tensors", TypeError, AttributeError):
        needed = needed_tensors(config)
    # Files of the network without its head leave out how its tensors' names begin.
    check_complete(
        model_id,
        [name for name, shape in needed.items() if stored.get(name, stored.get(name.removeprefix("model."))) != shape],
    )
    return True


def check_complete(model_id: str, absent: list[str]) -> None:
    """Raise an error if tensors of a model are absent."""
    if absent:
        raise InputError(
            f"model.id = '{model_id}': its weights lack {len(absent)} tensor(s) of the configured size: {min(absent)}"
        )


def _shapes(file: Path) -> dict[str, _Shape]:
    with safe_open(file, framework="numpy") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - no mapping


def needed_tensors(config: Any) -> Mapping[str, _Shape]:
    """Return the tensors of a supported architecture by name, with their sizes; transformers' code is not loaded."""
    width, inner, kind = config.hidden_size, config.intermediate_size, config.model_type
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = (head * heads for heads in (config.num_attention_heads, config.num_key_value_heads))
    sizes = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}
    attention: dict[str, _Shape] = {f"self_attn.{name}_proj.weight": size for name, size in sizes.items()}
    biased = "qkv" if kind == "qwen2" else "qkvo" if config.attention_bias else ""
    attention |= {f"self_attn.{name}_proj.bias": sizes[name][:1] for name in biased}
    if kind == "qwen3":
        attention |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    products = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    mlp: dict[str, _Shape] = {f"mlp.{name}_proj.weight": size for name, size in products.items()}
    if getattr(config, "mlp_bias", False):
        mlp |= {f"mlp.{name}_proj.bias": size[:1] for name, size in products.items()}
    layer = attention | mlp | {f"{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    table = config.vocab_size, width
    tensors: dict[str, _Shape] = {"model.embed_tokens.weight": table, "model.norm.weight": (width,)}
    for number in range(config.num_hidden_layers):
        tensors |= {f"model.layers.{number}.{name}": size for name, size in layer.items()}
    return tensors if config.tie_word_embeddings else tensors | {"lm_head.weight": table}
