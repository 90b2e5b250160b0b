"""Keep results that take long to make, and are equal in every process, in the user's cache folder.

A file's name contains a digest of everything that the file was made from, so that another version never reads it. The
file begins with a SHA-256 of the rest of its content, so that a truncated file is noticed and made again. If no file
can be written into the folder, nothing is kept.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_KEPT: Final = 16  # files of the newest versions


def kept_build(name: str, made_from: bytes, build: Callable[[], bytes]) -> bytes:
    """Return the result of ``build``, from the cache folder if an earlier call kept it under the name.

    ``made_from`` are bytes that determine the result.
    """
    file = cache_folder() / f"{name}-{hashlib.sha256(made_from).hexdigest()[:32]}"
    try:
        stored = file.read_bytes()
    except OSError:
        stored = b""
    digest, content = stored[:32], stored[32:]
    if content and hashlib.sha256(content).digest() == digest:
        return content
    content = build()
    _keep(file, hashlib.sha256(content).digest() + content)
    return content


def cache_folder() -> Path:
    """Return the cache folder, which may not exist; if no home folder is known, a path where no file can be made."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "kvdrift")
    except RuntimeError:  # nobody's home is known
        return Path(os.devnull)


def _keep(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".") as aside:
            Path(aside, "content").write_bytes(content)
            Path(aside, "content").replace(file)
        name = file.name.rpartition("-")[0]
        now = time.time()
        others = sorted((one for one in file.parent.glob(f"{name}-*") if one != file), key=lambda one: _made(one, now))
        for old in others[: 1 - _KEPT]:  # besides the new file
            old.unlink(missing_ok=True)
    except OSError:
        pass


def _made(path: Path, now: float) -> float:
    """Return when a file was made; files ahead of the clock count as oldest, lest they stay and newer ones go."""
    made = path.stat().st_mtime
    return made if made <= now else 0.0
