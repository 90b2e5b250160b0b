"""The line for an exception in a selector's code: what it is, and where in the selector's file."""

from __future__ import annotations

import sys
import traceback

from generator.selectors.selector import Selector
from schema.errors import first_line


def failure_of(error: BaseException, selector: Selector) -> str:
    """Name an exception and the line of the selector's file that it came through, or the one that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(selector).__module__), "__file__", None)
    place = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({place.filename}, line {place.lineno})"
