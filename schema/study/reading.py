"""Read study files; paths in a study file are relative to the file's own folder."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvdrift.schema.errors import InputError, reading
from kvdrift.schema.location import check_regular, straight
from kvdrift.schema.study.mistakes import explained
from kvdrift.schema.study.section import MOST_LISTED
from kvdrift.schema.study.sweeps import of_each_law, of_each_member
from kvdrift.schema.study.whole import Study, check_distinct

_READ_PATHS = ("path", "exclude")  # of [[documents]]


def load_studies(path: Path, folder: Path | None = None) -> list[Study]:
    """Read and validate a study file; return one study for each model and temperature, model by model.

    Paths in the file are relative to ``folder``, in which its modules are found too; by default the file's own folder.

    Raises:
        InputError: The file cannot be read or is not valid; the line names the file, the field and, for an unknown
            key, the nearest known one.
    """
    content, folder = read_content(path), (path.parent if folder is None else folder).absolute()
    with reading(f"{path}: cannot be read as a study file"):
        return _studies_of(path, content, folder)


def _studies_of(path: Path, content: dict[str, Any], folder: Path) -> list[Study]:
    try:
        content = of_each_member(_with_absolute_paths(content, folder))
        models = content.get("model")
        several = models if isinstance(models, list) and models else [models]
        laws = of_each_law(content)
        _check_count(len(several) * len(laws))
        studies = [
            Study.model_validate(law if one is None else law | {"model": one}) for one in several for law in laws
        ]
        check_distinct("models", [study.model.id for study in studies[:: len(laws)]])
        for study in studies:
            study.of_file(folder, content["study"]["name"], several_models=len(several) > 1)
            if study.model.tables is not None:
                _from_folder(folder, study.model.tables, "model.tables")  # settings have it as it is written
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except ValidationError as error:
        raise InputError(f"{path}: {explained(error.errors(), Study)}") from None
    return studies


def _check_count(studies: int) -> None:
    if studies > MOST_LISTED:
        raise InputError(f"model: {studies:,} studies, one for each model and temperature; write at most {MOST_LISTED}")


def read_content(path: Path) -> dict[str, Any]:
    """Return the content of a study file as written, without validation."""
    check_regular(path)
    if not path.exists():
        raise InputError(f"{path}: no such study file")
    with reading(f"{path}: not valid TOML"):
        return tomllib.loads(path.read_text(encoding="utf-8"))


def _with_absolute_paths(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content with absolute paths in its sections of documents; the schema refuses malformed sections."""
    documents = content.get("documents")
    if not isinstance(documents, list):
        return content
    made = []
    for number, part in enumerate(documents):
        given = [name for name in _READ_PATHS if isinstance(part, dict) and isinstance(part.get(name), str)]
        paths = {name: _from_folder(folder, part[name], f"documents[{number}].{name}") for name in given}
        made.append(part | paths if given else part)
    return content | {"documents": made}


def _from_folder(folder: Path, written: str, where: str) -> str:
    """Return a path of the file as an absolute path; raise InputError if it exists only below the working folder."""
    path = expanded(written)
    found = folder / path
    if not found.exists() and path.exists():
        raise InputError(
            f"{where} = '{written}': paths begin at the study file's folder, {folder}; write "
            f"'{os.path.relpath(path.absolute(), folder)}'"
        )
    return straight(found)


def expanded(written: str) -> Path:
    """Return a path with ``~`` replaced by the home folder; unchanged if there is no such user."""
    try:
        return Path(written).expanduser()
    except RuntimeError:
        return Path(written)
