"""Memory of a process that goes on for days: what is freed goes back to the system.

glibc's allocator, Arrow's and that of delta-rs each keep for later what a large batch took, in a pool for each few
threads. A process that puts files of all sizes together then grows for long without holding more.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

# Arrow allocates as C does; delta-rs, which has a jemalloc of its own, keeps one pool and nothing in it.
_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "_RJEM_MALLOC_CONF": "narenas:1,dirty_decay_ms:0,muzzy_decay_ms:0,tcache:false",
}
# Of mallopt, malloc.h: two pools of glibc; what is larger than 64 KiB is mapped, and unmapped when it is freed.
_GLIBC = {-8: 2, -3: 1 << 16}  # M_ARENA_MAX, M_MMAP_THRESHOLD


def bound_memory() -> None:
    """Let allocators keep little; call it before pyarrow and deltalake are imported, which look at it once.

    What the user has set in the environment stays. Processes that are started inherit it.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with suppress(OSError, AttributeError):  # another C library has no such option
        for option, bound in _GLIBC.items():
            ctypes.CDLL(None).mallopt(option, bound)


def release_memory() -> None:
    """Give back what glibc kept for a batch that may never come."""
    with suppress(OSError, AttributeError):  # as above
        ctypes.CDLL(None).malloc_trim(0)
