"""The line for an exception in the code of a selector or codec: what it is, and where in its file."""

from __future__ import annotations

import sys
import traceback

from schema.errors import first_line


def failure_of(error: BaseException, part: object) -> str:
    """Name an exception and the line of the part's file that it came through, or the one that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(part).__module__), "__file__", None)
    place = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({place.filename}, line {place.lineno})"
