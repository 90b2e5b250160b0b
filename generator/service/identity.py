"""The identity of a loaded model, with a fingerprint of its weights."""

from __future__ import annotations

import hashlib
import json

import torch

from generator.events import library_versions
from generator.service.protocol import PROTOCOL, Identity
from generator.transformer.model import LoadedModel
from schema.tables import SCHEMA_VERSION

_SAMPLED = 4096
_IGNORED_SETTINGS = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache")


def identity_of(model: LoadedModel, revision: str | None) -> Identity:
    """Return the identity of a model that was loaded at ``revision``."""
    return Identity(
        protocol=PROTOCOL, schema_version=SCHEMA_VERSION, model=model.id, device=model.device, dtype=model.dtype,
        revision=revision, positions=model.positions, weights=fingerprint(model), versions=dict(library_versions()),
    )  # fmt: skip


def fingerprint(model: LoadedModel) -> str:
    """Compute the SHA-256, in hexadecimal, of a model's configuration, EOS tokens and parameters.

    Of each parameter it takes the name, the shape and a sample of up to ``_SAMPLED`` values at equal distances. That is
    fast for any size of model, the same on every device, and different for other checkpoints of one architecture. It
    detects mistakes, not forgeries.
    """
    configuration = {
        name: value for name, value in model.network.config.to_dict().items() if name not in _IGNORED_SETTINGS
    }
    digest = hashlib.sha256(json.dumps([configuration, model.eos_tokens], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.network.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(len(flat) // _SAMPLED, 1)][:_SAMPLED]
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.to("cpu", torch.float64).numpy().astype("<f8").tobytes())
    return digest.hexdigest()
