"""The memory that allocators keep of what this process has freed."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress

# With these variables Arrow uses C's allocator, and delta-rs' jemalloc has one pool that returns freed memory at once.
_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "_RJEM_MALLOC_CONF": "narenas:1,dirty_decay_ms:0,muzzy_decay_ms:0,tcache:false",
}
# Parameters of mallopt (malloc.h): two pools of glibc; blocks above 64 KiB are mapped, and unmapped when freed.
_GLIBC = {-8: 2, -3: 1 << 16}  # M_ARENA_MAX, M_MMAP_THRESHOLD


def bound_memory() -> None:
    """Make allocators keep little memory; call this before pyarrow and deltalake load, which then read the settings.

    By default the allocators of glibc, Arrow and delta-rs keep the freed memory of a large batch, in several pools that
    each serve a few threads. So a process that merges files of all sizes grows for long, though it needs no more.
    Settings in the user's environment win. Child processes inherit the settings.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with suppress(OSError, AttributeError):  # C libraries other than glibc have no such option
        for option, bound in _GLIBC.items():
            ctypes.CDLL(None).mallopt(option, bound)


def release_memory() -> None:
    """Free unused objects that refer to each other, and give back the memory that glibc keeps.

    ``kvdrift.program`` makes Python search for such objects seldom, and some of them hold memory of Arrow and delta-rs.
    """
    gc.collect()
    give_back_memory()


def give_back_memory() -> None:
    """Give back the memory that glibc keeps; this takes milliseconds."""
    with suppress(OSError, AttributeError):  # C libraries other than glibc have no such function
        ctypes.CDLL(None).malloc_trim(0)
