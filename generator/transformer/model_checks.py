"""Check models before they are loaded, and keep the proofs that were made on this machine.

Headers of weight files show whether they hold every tensor that the configuration needs. A selector's window and
statistics show what it needs of a model's layers: a selector that reads queries computes attention by itself, and must
know a soft cap.

A proof holds for the weights' fingerprint, the versions of torch and transformers, the dtype and the kind of device.
It is kept in the user's cache folder; if the file is missing or damaged, every model is proven again.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvdrift.generator.actions import Action
from kvdrift.generator.attention.fused import attention_fault
from kvdrift.generator.attention.holding import DTYPES
from kvdrift.generator.attention.parts import LayerTraits
from kvdrift.generator.identity import NUMERICS_VERSION
from kvdrift.generator.selectors import Selector
from kvdrift.generator.selectors.expected_attention import QueryMoments
from kvdrift.generator.selectors.kvpress import AttentionInputs
from kvdrift.generator.transformer.files.configuration import (
    check_supported,
    known_by_family,
    read_configuration,
)
from kvdrift.generator.transformer.files.digests import digests_path, read_remembered, write_remembered
from kvdrift.generator.transformer.files.fingerprints import model_identity
from kvdrift.generator.transformer.files.local_folders import (
    ARCHITECTURES,
    has_local_weights,
    is_multimodal,
    local_configuration,
    local_folder,
    model_source,
    safetensors_files,
)
from kvdrift.generator.transformer.files.text_ends import configured_ends
from kvdrift.schema.errors import InputError, first_line, installing, nearest, reading

_Shape = tuple[int, ...]


def check_tensors(model_id: str, config: Any, revision: str | None) -> bool:
    """Compare names and sizes of the stored tensors with the configuration; nothing is loaded.

    Returns whether the comparison was possible; it is not if the weights are quantized, not safetensors, or not on this
    machine.
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


_OF_KVPRESS = ("llama", "mistral", "phi3", "qwen2", "qwen3", "gemma3_text")  # types whose modules kvpress knows


def check_layers(action: Action, traits: LayerTraits) -> None:
    """Raise an error if an action's selector, or its policy's first cut, needs something that the layers lack."""
    problem = _missing(action.chooser, traits)
    if problem is not None:
        name = action.selector_name if action.policy is None else type(action.chooser).__name__
        raise InputError(f"action '{action.name}': selector {name}: {problem}; take another selector")


def _missing(selector: Selector, traits: LayerTraits) -> str | None:
    statistics = selector.statistics
    if any(isinstance(statistic, AttentionInputs) for statistic in statistics) and traits.kind not in (
        None,
        *_OF_KVPRESS,
    ):
        return f"kvpress takes models of type {', '.join(_OF_KVPRESS)}, and this model is '{traits.kind}'"
    if (selector.window or statistics) and traits.softcap is not None and not selector.applies_softcap:
        return f"computes attention itself, without the soft cap of {traits.softcap:g} that this model has"
    if any(isinstance(statistic, QueryMoments) for statistic in statistics) and traits.turned_by_halves is False:
        return "needs layers that rotate whole heads by halves (channel i with i + size / 2), and this model's do not"
    return None


_PROOFS = 4  # version of the proof


@dataclass(frozen=True)
class Proof:
    """The result of proving a model: why it was refused, or None, and two traits of its layers."""

    refusal: str | None
    softcap: float | None = None
    turned_by_halves: bool = False

    def traits(self, kind: str) -> LayerTraits:
        """Return the traits of the model, whose type is ``kind``, for selectors."""
        return LayerTraits(kind, self.softcap, self.turned_by_halves)


def remembered(weights_sha256: str | None, dtype: str, device: str) -> Proof | None:
    """Return the kept proof for weights, dtype and kind of device; None if there is none."""
    match read_remembered(_proofs_path()).get(_proof_key(weights_sha256, dtype, device)) if weights_sha256 else None:
        case {"refusal": str() | None as refusal, "softcap": float() | None as cap, "turned_by_halves": bool(halves)}:
            return Proof(refusal, cap, halves)
    return None


def remember(weights_sha256: str | None, dtype: str, device: str, model_id: str, proof: Proof) -> None:
    """Keep the proof of a model; do nothing if that fails, or if the weights have no fingerprint."""
    path = _proofs_path()
    if path is None or weights_sha256 is None:
        return
    made = {_proof_key(weights_sha256, dtype, device): {"model": model_id, **asdict(proof)}}
    write_remembered(path, read_remembered(path) | made)


def results() -> dict[str, str | None]:
    """Return the models proven or refused here under the installed versions, each with why it was refused, or None."""
    made = read_remembered(_proofs_path()).items()
    entries = [entry for key, entry in made if key.endswith(f" {_versions()}") and isinstance(entry, dict)]
    return {str(entry.get("model")): entry.get("refusal") for entry in entries}


def _proof_key(weights_sha256: str | None, dtype: str, device: str) -> str:
    return f"{weights_sha256} {dtype} {torch.device(device).type} {_versions()}"


def _versions() -> str:
    return f"{torch.__version__} {version('transformers')} {NUMERICS_VERSION} {_PROOFS}"


def _proofs_path() -> Path | None:
    digests = digests_path()
    return None if digests is None else digests.with_name("proofs.json")


def check_model(
    model_id: str,
    *,
    dtype: str,
    revision: str | None,
    device: str = "cpu",
    device_map: str | None = None,
    served: bool = False,
) -> bool:
    """Check everything about a model that can be known without loading its weights.

    If the model is ``served``, another process has the weights, and a folder needs none. Returns whether the weights
    were checked, too: by the headers of their files, or by a kept proof.
    """
    config = checked_configuration(model_id, dtype, revision, device, device_map, served=served)
    if not known_by_family(config) or is_multimodal(model_id, revision):
        proof = remembered(model_identity(model_id, revision).weights_sha256, dtype, device)
        if proof is not None and proof.refusal is not None:
            raise InputError(f"model.id = '{model_id}': not supported: {proof.refusal}")
        return proof is not None  # only transformers knows the names of its tensors
    return check_tensors(model_id, config, revision)


def known_traits(model_id: str, *, dtype: str, revision: str | None, device: str) -> LayerTraits:
    """Return the traits of a model's layers without loading the model: by its family, or from an earlier proof."""
    stated = local_configuration(model_id, revision) or {}
    kind = stated.get("model_type")
    if kind in ARCHITECTURES.values():
        return LayerTraits(kind, None, turned_by_halves=True)
    proof = remembered(model_identity(model_id, revision).weights_sha256, dtype, device)
    if proof is not None:
        return proof.traits(str(kind))
    return LayerTraits(kind, stated.get("attn_logit_softcapping"), None)


def check_placement(dtype: str, device: str, device_map: str | None) -> None:
    """Raise an error if a dtype is unknown, or if a device or device map cannot be used here."""
    if dtype not in DTYPES:
        raise InputError(f"model.dtype = '{dtype}': {nearest(dtype, DTYPES)}")
    if device_map is None:
        try:
            torch.empty(1, device=torch.device(device))
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"model.device = '{device}': {first_line(error)}") from error
        if torch.device(device).type == "meta":
            raise InputError(f"model.device = '{device}': computes nothing; write cpu, cuda or another device of torch")
    elif importlib.util.find_spec("accelerate") is None:
        raise InputError(f"model.device_map = '{device_map}': needs accelerate: {installing('multi-gpu')}")


def check_row_tile(action: Action, device: str, device_map: str | None) -> None:
    """Raise an error if an action sets ``row_tile`` on a GPU with fused attention, which has fixed tiles.

    Attention is fused on a GPU for which Triton can build its kernels. If this machine has no GPU, another machine with
    such a GPU is assumed.
    """
    if action.row_tile is None:
        return
    gpu = torch.cuda.is_available()
    on_gpu = gpu if device_map is not None else device.partition(":")[0] == "cuda"
    if on_gpu and (not gpu or attention_fault(torch.device("cuda")) is None):
        setting = f"model.device = '{device}'" if device_map is None else f"model.device_map = '{device_map}'"
        raise InputError(
            f"action '{action.name}': row_tile = {action.row_tile}: {setting} is a GPU, whose fused attention has "
            "fixed tiles; leave row_tile out"
        )


def visible_gpus() -> list[str]:
    """Return the names of the usable GPUs in CUDA_VISIBLE_DEVICES, or their numbers if it is unset.

    They are in CUDA's order. Nothing is computed on a GPU.
    """
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return named[:count] or [str(number) for number in range(count)]


def checked_configuration(
    model_id: str, dtype: str, revision: str | None, device: str, device_map: str | None, *, served: bool = False
) -> Any:
    """Return the configuration of a model; raise an error if it shows that the model cannot be loaded.

    If the model is ``served`` by another process, a folder needs no weights.
    """
    check_placement(dtype, device, device_map)
    model_source(model_id)  # refuses a folder that is not there or has no configuration
    if not served and local_folder(model_id) is not None and not has_local_weights(model_id):
        raise InputError(f"model.id = '{model_id}': the folder has no weights (*.safetensors), or not all")
    config = read_configuration(model_id, revision)
    check_supported(config, model_id)
    configured_ends(model_id, revision)  # refuses a name that is no token
    return config
