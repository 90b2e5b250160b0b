"""Check a model before it is loaded, without importing anything that loads or computes."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from kvdrift.generator.attention.holding import DTYPES
from kvdrift.generator.attention.layer_traits import LayerTraits
from kvdrift.generator.transformer.files.configuration import (
    check_supported,
    known_by_family,
    read_configuration,
)
from kvdrift.generator.transformer.files.fingerprints import model_identity
from kvdrift.generator.transformer.files.local_folders import (
    ARCHITECTURES,
    has_local_weights,
    is_multimodal,
    local_configuration,
    local_folder,
    model_source,
)
from kvdrift.generator.transformer.files.remembered_proofs import remembered
from kvdrift.generator.transformer.files.stored_tensors import check_tensors
from kvdrift.generator.transformer.files.text_ends import configured_ends
from kvdrift.schema.errors import InputError, first_line, nearest


def check_model(
    model_id: str, *, dtype: str, revision: str | None, device: str = "cpu", device_map: str | None = None
) -> bool:
    """Check everything about a model that can be known without loading its weights.

    Returns whether its weights were checked too, by their headers; they are not if they are not on this machine.
    """
    config = checked_configuration(model_id, dtype, revision, device, device_map)
    if not known_by_family(config) or is_multimodal(model_id, revision):
        proof = remembered(model_identity(model_id, revision).weights_sha256, dtype, device)
        if proof is not None and proof.refusal is not None:
            raise InputError(f"model.id = '{model_id}': not supported: {proof.refusal}")
        return proof is not None  # its tensors are of names that transformers alone knows
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
    """Check the study file's settings of device, dtype and device map."""
    if dtype not in DTYPES:
        raise InputError(f"model.dtype = '{dtype}': {nearest(dtype, DTYPES)}")
    if device_map is None:
        _check_device(device)
    elif importlib.util.find_spec("accelerate") is None:
        raise InputError(
            f"model.device_map = '{device_map}': needs accelerate: pip install -e '.[multi-gpu]' in kvdrift's folder"
        )


def visible_gpus() -> list[str]:
    """Return the names of usable GPUs in CUDA_VISIBLE_DEVICES, in CUDA's order; uses none of them."""
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return given[:count] or [str(number) for number in range(count)]


def checked_configuration(model_id: str, dtype: str, revision: str | None, device: str, device_map: str | None) -> Any:
    """Return the configuration of a model; raise an error if it shows that the model cannot be loaded."""
    check_placement(dtype, device, device_map)
    model_source(model_id)  # refuses a folder that is not there or has no configuration
    if local_folder(model_id) is not None and not has_local_weights(model_id):
        raise InputError(f"model.id = '{model_id}': the folder has no weights (*.safetensors)")
    config = read_configuration(model_id, revision)
    check_supported(config, model_id)
    configured_ends(model_id, revision)  # refuses what is no token
    return config


def _check_device(device: str) -> None:
    try:
        torch.empty(1, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"model.device = '{device}': {first_line(error)}") from error
    if torch.device(device).type == "meta":
        raise InputError(f"model.device = '{device}': computes nothing; write cpu, cuda or another device of torch")
