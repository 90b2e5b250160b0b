"""A failing disk: builds the library ``library.c``, and controls it in a process that has it preloaded."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

from fixtures.house import ROOT

_SOURCE = Path(__file__).with_name("library.c")


class How(IntEnum):
    """The ways in which changes fail, numbered as in ``library.c``."""

    COUNTED = 1
    KILLED = 2
    HALF = 3
    FULL = 4
    BROKEN = 5
    READ_ONLY = 6


def build_library(folder: Path) -> Path | None:
    """Build the library for preloading; return None if there is no compiler for Linux."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, _SOURCE, "-lpthread", "-ldl"], check=True)
    return library


def start(library: Path, program: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a program of this folder with the library preloaded."""
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join((str(ROOT), f"{ROOT}/tests"))}
    command = [sys.executable, _SOURCE.with_name(program), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.counted_kinds.restype = ctypes.c_char_p
    return library


def fail(folder: Path, how: How, at: int = 0, let_alone: str = "") -> None:
    """Have change number ``at`` below a folder fail in this process, which has the library preloaded.

    Files whose path contains ``let_alone`` never fail.
    """
    _library().fail(str(folder).encode(), let_alone.encode(), int(how), ctypes.c_long(at))


def counted() -> str:
    """Return a letter for each change so far: ``w`` for a write, ``g`` for other growth, ``-`` for neither."""
    return bytes(_library().counted_kinds()).decode()


def set_clock(seconds: float, back: float = 0.0) -> None:
    """Add seconds to the clock, and set it back by ``back`` at each reading."""
    _library().set_clock(ctypes.c_double(seconds), ctypes.c_double(back))


def hide(name: str, listings: int) -> None:
    """Leave a name out of the next listings of its folders."""
    _library().hide(name.encode(), listings)


def hiding() -> int:
    """Return in how many further listings the name will be left out."""
    return int(_library().hiding())
