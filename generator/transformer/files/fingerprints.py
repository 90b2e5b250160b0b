"""Compute fingerprints of a model's files, without loading the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from kvdrift.generator.identity import ModelIdentity
from kvdrift.generator.transformer.files.digests import file_digests, file_sha256
from kvdrift.generator.transformer.files.local_folders import GGUF_WEIGHTS, model_folder, tokenizer_files, weight_files


def model_identity(model_id: str, revision: str | None = None) -> ModelIdentity:
    """Return two fingerprints: of a model's weights and configuration together, and of its tokenizer.

    The first is the SHA-256 of the file if the model is a GGUF file. A fingerprint is None if the files are not on this
    machine; the tokenizer's is also None if the model has none.
    """
    folder = model_folder(model_id, revision)
    files = [] if folder is None else weight_files(folder)
    weights = file_sha256(files[0]) if [file.name for file in files] == [GGUF_WEIGHTS] else _fingerprint(files)
    return ModelIdentity(weights, tokenizer_sha256(model_id, revision))


def tokenizer_sha256(model_id: str, revision: str | None = None) -> str | None:
    """Return the fingerprint of a model's tokenizer; None if it has none, or its files are not on this machine."""
    folder = model_folder(model_id, revision)
    return None if folder is None else _fingerprint(tokenizer_files(folder))


def _fingerprint(files: Sequence[Path]) -> str | None:
    """Return the SHA-256 of the files' names and digests; None if there are no files."""
    named = sorted(zip((file.name for file in files), file_digests(files), strict=True))
    return hashlib.sha256(json.dumps(named).encode()).hexdigest() if files else None
