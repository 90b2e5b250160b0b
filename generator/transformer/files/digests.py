"""SHA-256 of files, remembered in the user's cache folder.

Every byte is hashed once: the digest of a file is kept in the user's cache folder, with its path, size and time of
modification. A file younger than ``_YOUNG_NS`` may change again without a change of that time, and is always hashed. If
the kept digests are missing or damaged, everything is hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdrift.schema.errors import InputError

_YOUNG_NS = 2_000_000_000

Digests = dict[str, Any]
"""By path a list: size, time of modification in nanoseconds, SHA-256 in hexadecimal; other values are damage."""


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal, remembered like the hashes of a model's files."""
    (digest,) = file_digests([file])
    return digest


def cache_folder() -> Path | None:
    """Return kvdrift's folder in XDG_CACHE_HOME or ~/.cache; None if there is no home folder."""
    setting = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(setting) if Path(setting).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "kvdrift"


def digests_path() -> Path | None:
    """Return the file of kept digests; None if there is no home folder."""
    folder = cache_folder()
    return None if folder is None else folder / "digests.json"


def file_digests(files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file; store new ones in the cache folder, and drop those of deleted files there."""
    known = read_remembered(digests_path())
    digests = dict(known)
    of_files = [_digest(file, digests) for file in files]
    if digests != known and (path := digests_path()) is not None:
        content = {key: entry for key, entry in (read_remembered(path) | digests).items() if Path(key).exists()}
        write_remembered(path, content)
    return of_files


def _digest(file: Path, remembered: Digests) -> str:
    """Return a file's SHA-256 from ``remembered``, or compute it; add it there unless the file may still change."""
    key = str(file.resolve())  # a Hugging Face snapshot has links to its files
    try:
        with file.open("rb") as opened:
            began, before = time.time_ns(), os.fstat(opened.fileno())
            match remembered.get(key):
                case [before.st_size, before.st_mtime_ns, str(digest)]:
                    return digest
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
            after = os.fstat(opened.fileno())
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    if same and began - before.st_mtime_ns >= _YOUNG_NS:
        remembered[key] = [before.st_size, before.st_mtime_ns, digest]
    return digest


def read_remembered(path: Path | None) -> dict[str, Any]:
    """Read a JSON object of the user's cache folder; empty if there is no file, or it is damaged."""
    try:
        content = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_remembered(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file of the user's cache folder by a JSON object, in one step; if that fails, the file stays."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            aside = Path(folder, path.name)
            aside.write_text(json.dumps(content), encoding="utf-8")
            os.replace(aside, path)  # noqa: PTH105 - the atomic replacement, by its own name
