"""What takes long to make and is the same in every process, kept in the user's own cache folder.

A file is named after all that it was made from, and begins with a SHA-256 of the rest of it: another version never
reads it, and one that a kill or a full disk cut short is made again. Where the folder takes no file, nothing is kept.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

_KEPT: Final = 16  # files of the newest versions


def kept_build(name: str, made_from: bytes, build: Callable[[], bytes]) -> bytes:
    """Return what ``build`` makes, from the cache folder where it has been made before.

    Args:
        name: What it is, as the file's name begins.
        made_from: All that the result depends on.
        build: Makes it.

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
    """Return the folder, which may not be there; where nobody's home is known, one that takes no file."""
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
        by_age = sorted(file.parent.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime)
        for old in by_age[:-_KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        pass
