"""Files of tokens and certificates, read for the two ends of a service."""

from __future__ import annotations

import re
from pathlib import Path

from schema.errors import InputError

_LEAST_TOKEN = 16  # characters; shorter ones can be guessed


def read_token(path: Path) -> str:
    """Read the file of ``--token-file``.

    Raises:
        InputError: the file cannot be read, or does not hold one line of at least 16 printable characters.

    """
    token = _read("--token-file", path).decode(errors="replace").strip()
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise InputError(f"--token-file {path}: should hold one line of printable characters without spaces")
    if len(token) < _LEAST_TOKEN:
        raise InputError(f"--token-file {path}: {len(token)} characters are too few; write at least {_LEAST_TOKEN}")
    return token


def read_pem(option: str, path: Path) -> bytes:
    """Read a file of PEM certificates or keys that ``option`` names.

    Raises:
        InputError: the file cannot be read or is not PEM.

    """
    content = _read(option, path)
    if b"-----BEGIN " not in content:
        raise InputError(f"{option} {path}: is not PEM (no -----BEGIN line)")
    return content


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be read ({error.strerror})") from None
