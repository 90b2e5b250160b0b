"""Locations of stores and files: local paths, or URLs of an object store."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs

from kvdrift.schema.errors import InputError, first_line

_LONGEST_NAME: Final = 200  # bytes; file systems take 255


def is_local(location: str | Path) -> bool:
    """Tell whether a location is a path of this machine's file system, not a URL."""
    return "://" not in str(location)


def absolute(location: str | Path) -> str:
    """Return a path as an absolute path, with ``~`` expanded; a URL without a slash at its end.

    A ``..`` is removed, unless the folder before it is a link elsewhere. A ``file://`` URL becomes the path that it
    names.

    Raises:
        InputError: The location is empty.
    """
    text = str(location)
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    if not text.strip():
        raise InputError("the store's location is empty; give a folder, which may be '.', or a URL")
    return straight(Path(text).expanduser().absolute()) if is_local(text) else text.rstrip("/")


def straight(path: Path) -> str:
    """Return a path without ``..`` if that names the same place; a folder before ``..`` may be a link elsewhere."""
    text = os.path.normpath(path)
    return text if os.path.realpath(text) == os.path.realpath(path) else str(path)


def join(location: str, *names: str) -> str:
    """Return the location of a file or folder below another location."""
    return "/".join((location, *names))


def filesystem_of(location: str) -> tuple[pa.fs.FileSystem, str]:
    """Return the file system that holds a location, and the location's path in that file system."""
    if is_local(location):
        return pa.fs.LocalFileSystem(), location
    # A small object is then written by one request instead of three.
    options = "?allow_delayed_open=true" if location.startswith("s3://") else ""
    try:
        filesystem, path = pa.fs.FileSystem.from_uri(location + options)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{location}: not a URL that can be read ({first_line(error)})") from None
    return filesystem, path


def check_regular(path: Path) -> None:
    """Refuse a folder, a pipe or a device: reading a pipe waits, and a device may have no end."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is {'a folder' if path.is_dir() else 'no regular file'}; give a file")


def folder_name(name: str) -> str:
    """Return the name of a folder for ``name``: ``name`` itself if it can be one, else a cleaned name plus a digest.

    Names come from study files and from other people's logs, and must not lead out of their folder.
    """
    usual = name.isprintable() and not re.search(r"[/\\:]", name) and not name.startswith(".")
    if usual and name == name.strip() and 0 < len(name.encode()) <= _LONGEST_NAME:
        return name
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40]
    return f"{plain or 'x'}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"
