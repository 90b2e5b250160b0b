"""The shipped studies, in the folder ``studies`` of a clone and of the wheel; and functions that write new files."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import kvdrift
from kvdrift.schema.errors import InputError, nearest


def examples() -> dict[str, str]:
    """Return for each shipped study, by name, the comment that begins its file, as one line."""
    return {path.stem: _comment(path) for path in sorted(_folder().glob("*.toml"))}


def example_files(name: str, study: Path) -> dict[Path, str]:
    """Return the texts of files to write, by path: the shipped study ``name`` at ``study``, and files that it names.

    A named file that is there with the same content, which two studies share, is left out.

    Raises:
        InputError: no shipped study has this name.
    """
    known = examples()
    if name not in known:
        raise InputError(f"--example {name}: {nearest(name, known)}")
    text = (_folder() / f"{name}.toml").read_text("utf-8")
    content = tomllib.loads(text)
    models = content["model"] if isinstance(content["model"], list) else [content["model"]]
    named = {section.get(key) for key in ("tables", "path") for section in (*models, *content.get("documents", ()))}
    beside = {study.parent / path.name: path.read_text("utf-8") for path in _folder().iterdir() if path.name in named}
    there = [path for path, its_text in beside.items() if path.is_file() and path.read_bytes() == its_text.encode()]
    return {**{path: beside[path] for path in beside.keys() - there}, study: text}


def _folder() -> Path:
    """Return the folder of the shipped studies, which is beside the package's folder in a clone."""
    return next(folder for place in kvdrift.__path__ if (folder := Path(place, "studies")).is_dir())


def _comment(path: Path) -> str:
    lines = path.read_text("utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.strip("# "))
    return " ".join(line.removeprefix("# ") for line in lines[:end])


def check_absent(paths: Iterable[Path]) -> None:
    """Refuse files that exist already."""
    for path in paths:
        if path.exists():
            raise InputError(f"{path}: is there already; remove it, or give another name")


def write_files(files: Mapping[Path, str]) -> None:
    """Write the texts of files that do not exist yet.

    Raises:
        InputError: a file exists, or cannot be written.
    """
    for path, text in files.items():
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
