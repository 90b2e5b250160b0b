"""Find the place of the transformer that a study names; a GGUF file's place is a folder that is made of the file."""

from __future__ import annotations

import os
from pathlib import Path

from kvdrift.generator.transformer.files.gguf_folders import gguf_folder
from kvdrift.generator.transformer.files.local_folders import EMBEDDED_FOLDERS, check_hub_id, gguf_file, local_folder
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import ModelSection
from kvdrift.schema.study.model import GGUF, SMOLLM2


def model_location(section: ModelSection) -> str:
    """Return the place of a study file's transformer: a path, a Hugging Face id or an embedded model's id.

    A relative path is relative to the study file's folder. The store uses the name as written in the file.
    """
    return transformer_location(section.id, section.folder, "model.id = ", section.tokenizer)


def transformer_location(written: str, folder: Path | None, key: str, tokenizer: str | None = None) -> str:
    """Return the place of the transformer that a study file in ``folder`` names ``written``.

    ``key`` is the beginning of error messages about the name, such as "model.id = ". ``tokenizer`` is the folder or
    Hugging Face id whose tokenizer a GGUF file is read with, in place of the file's.
    """
    if written == SMOLLM2 or written.endswith(GGUF):
        beside = None if tokenizer is None else (folder or Path()) / Path(tokenizer).expanduser()
        named = str(beside) if beside is not None and beside.is_dir() else tokenizer
        return str(gguf_folder(gguf_file(written, folder), named))
    if folder is None or written in EMBEDDED_FOLDERS or written.startswith(("/", "~")):
        return written
    beside_study = os.path.normpath(folder / written)
    if local_folder(beside_study) is not None:
        return beside_study
    if local_folder(written) is not None:
        raise InputError(
            f"{key}'{written}': paths are relative to the study file's folder, {folder}, but this path leads "
            "to the model from the working folder; write "
            f"'{os.path.relpath(Path(written).absolute(), folder)}', or, if a store has units of the model under this "
            "name, move the study file to the working folder"
        )
    if written.startswith("."):
        return beside_study
    check_hub_id(written, folder, key)
    return written
