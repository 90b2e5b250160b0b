"""A disk that fails: the library of ``library.c``, built once, and what a process that has it preloaded asks of it."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

_SOURCE = Path(__file__).with_name("library.c")


class How(IntEnum):
    """How changes fail; as in ``library.c``."""

    COUNTED = 1
    KILLED = 2
    HALF = 3
    FULL = 4
    BROKEN = 5
    READ_ONLY = 6


def build_library(folder: Path) -> Path | None:
    """Build the library that is to be preloaded; None where there is no compiler for Linux."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, _SOURCE, "-lpthread", "-ldl"], check=True)
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.counted_kinds.restype = ctypes.c_char_p
    return library


def fail(folder: Path, how: How, at: int = 0, let_alone: str = "") -> None:
    """Have change number ``at`` below a folder fail in this process, which has the library preloaded.

    Files whose path contains ``let_alone`` are let alone.
    """
    _library().fail(str(folder).encode(), let_alone.encode(), int(how), ctypes.c_long(at))


def counted() -> str:
    """What each change was since they are counted: ``w`` a write, ``g`` other growth, ``-`` neither."""
    return bytes(_library().counted_kinds()).decode()


def set_clock(seconds: float, back: float = 0.0) -> None:
    """Add seconds to the time of day, and take ``back`` from it at each look."""
    _library().set_clock(ctypes.c_double(seconds), ctypes.c_double(back))


def hide(name: str, listings: int) -> None:
    """Leave a name out of the next listings of the folders that have it."""
    _library().hide(name.encode(), listings)


def hiding() -> int:
    """How many listings are still to lack the name."""
    return int(_library().hiding())
