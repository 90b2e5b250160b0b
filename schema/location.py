"""Where a store or a file lies: a local path or the URL of an object store. Nothing else decides which of the two."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs

from schema.errors import InputError, first_line


def is_local(location: str | Path) -> bool:
    """Whether a location is a path of this machine's file system, rather than a URL."""
    return "://" not in str(location)


def absolute(location: str | Path) -> str:
    """The location as an absolute path, with ``~`` expanded, or as a URL without a slash at its end.

    A ``file://`` URL becomes the path that it names.
    """
    text = str(location)
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    return str(Path(text).expanduser().absolute()) if is_local(text) else text.rstrip("/")


def join(location: str, *names: str) -> str:
    """The location of a file or folder below another location."""
    return "/".join((location, *names))


def filesystem_of(location: str) -> tuple[pa.fs.FileSystem, str]:
    """The file system that holds a location, and the location's path in it.

    Raises:
        InputError: the location is a URL that Arrow has no file system for.

    """
    if is_local(location):
        return pa.fs.LocalFileSystem(), location
    try:
        filesystem, path = pa.fs.FileSystem.from_uri(location)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{location}: not a URL that can be read ({first_line(error)})") from None
    return filesystem, path
