"""Another Python of ours: what it is started with, and what it said when it failed."""

from __future__ import annotations

import os
import sys


def own_environment() -> dict[str, str]:
    """Return the environment in which a Python that is started finds the modules that this one does."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109 - '' stands for it
    return os.environ | {"PYTHONPATH": paths}


def last_words(said: str, exit_code: int | None) -> str:
    """Return the last line that a process wrote to standard error, or else its exit code."""
    return next(reversed(said.strip().splitlines()), f"ended with exit code {exit_code}")
