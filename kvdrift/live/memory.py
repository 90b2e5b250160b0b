"""Memory of a process that runs for days: freed memory is given back to the system.

The allocators of glibc, Arrow and delta-rs each keep the memory of a large batch, in a pool for each few threads. A
process that puts files of all sizes together then grows for long without holding more.
"""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress

# Arrow is told to allocate as C does; delta-rs, which has its own jemalloc, to keep one empty pool.
_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "_RJEM_MALLOC_CONF": "narenas:1,dirty_decay_ms:0,muzzy_decay_ms:0,tcache:false",
}
# Parameters of mallopt (malloc.h): two pools of glibc; blocks above 64 KiB are mapped, and unmapped when freed.
_GLIBC = {-8: 2, -3: 1 << 16}  # M_ARENA_MAX, M_MMAP_THRESHOLD


def bound_memory() -> None:
    """Make allocators keep little memory; call this before pyarrow and deltalake load, which then read the settings.

    Settings in the user's environment win. Child processes inherit the settings.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with suppress(OSError, AttributeError):  # C libraries other than glibc have no such option
        for option, bound in _GLIBC.items():
            ctypes.CDLL(None).mallopt(option, bound)


def release_memory() -> None:
    """Free objects that hold each other, and give back the memory that glibc keeps for a further batch.

    ``kvdrift.program`` has Python look for such objects seldom, and some hold memory of Arrow and delta-rs.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # as above
        ctypes.CDLL(None).malloc_trim(0)
