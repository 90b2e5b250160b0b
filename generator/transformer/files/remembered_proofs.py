"""Proofs that were made on this machine, in the user's cache folder beside the digests of files.

A proof is of the weights' fingerprint, the versions of torch and transformers, the dtype and the kind of device. A file
that is missing or damaged makes every model be proven anew.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch

from generator.identity import NUMERICS_VERSION
from generator.transformer.files.fingerprints import digests_path, read_remembered, write_remembered

_PROOFS = 1  # version of what a proof tries


def remembered(weights_sha256: str | None, dtype: str, device: str) -> tuple[bool, str | None]:
    """Return whether a proof was made, and why the model was refused, if it was."""
    found = read_remembered(_path()).get(_key(weights_sha256, dtype, device)) if weights_sha256 else None
    if not isinstance(found, dict) or not isinstance(found.get("refusal"), str | None):
        return False, None
    return True, found.get("refusal")


def remember(weights_sha256: str | None, dtype: str, device: str, model_id: str, refusal: str | None) -> None:
    """Remember a proof's result; if that fails, or the weights have no fingerprint, nothing happens."""
    path = _path()
    if path is None or weights_sha256 is None:
        return
    made = {_key(weights_sha256, dtype, device): {"model": model_id, "refusal": refusal}}
    write_remembered(path, read_remembered(path) | made)


def results() -> dict[str, str | None]:
    """Return the models that these versions tried on this machine, each with why it was refused, if it was."""
    made = read_remembered(_path()).items()
    entries = [one for key, one in made if key.endswith(f" {_versions()}") and isinstance(one, dict)]
    return {str(one.get("model")): one.get("refusal") for one in entries}


def _key(weights_sha256: str | None, dtype: str, device: str) -> str:
    return f"{weights_sha256} {dtype} {torch.device(device).type} {_versions()}"


def _versions() -> str:
    return f"{torch.__version__} {version('transformers')} {NUMERICS_VERSION} {_PROOFS}"


def _path() -> Path | None:
    digests = digests_path()
    return None if digests is None else digests.with_name("proofs.json")
