"""Read files of tokens and certificates, for both ends of a service."""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path

from schema.errors import InputError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LEAST_TOKEN = 16  # characters; shorter ones can be guessed


def read_token(path: Path) -> str:
    """Return the token in the file of ``--token-file``."""
    if os.name == "posix" and path.is_file() and (mode := stat.S_IMODE(path.stat().st_mode)) & _OTHERS:
        raise InputError(
            f"--token-file {path}: others can read it (mode {mode:03o}); chmod 600 {shlex.quote(str(path))}"
        )
    token = _read("--token-file", path).decode(errors="replace").strip()
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise InputError(f"--token-file {path}: should hold one line of printable characters without spaces")
    if len(token) < _LEAST_TOKEN:
        raise InputError(f"--token-file {path}: {len(token)} characters are too few; write at least {_LEAST_TOKEN}")
    return token


def read_pem(option: str, path: Path) -> bytes:
    """Return the content of a PEM file of certificates or keys that ``option`` names."""
    content = _read(option, path)
    if b"-----BEGIN " not in content:
        raise InputError(f"{option} {path}: is not PEM (no -----BEGIN line)")
    return content


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be read ({error.strerror})") from None
