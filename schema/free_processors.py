"""How many threads compute: all that torch would use while the machine has processors for them, else one.

torch and llama.cpp divide every operation among threads that meet again at its end. If another process holds one of
the processors, all threads wait until the system runs the thread that it has interrupted, at each of the thousands of
operations of a step. One thread then gets more done. The system itself tells whether this happens: it counts how long a
thread that could run had to wait for a processor.

Only computations whose results do not depend on the number of threads may be spread this way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_WINDOW = 0.25  # seconds between two readings of the clock
_WAITED = 0.5  # share of a window: if all threads together wait longer, the machine counts as busy
_ALONE = 5.0  # seconds with one thread before more are tried again

_TASKS = Path("/proc/self/task")


def waited() -> float:
    """Return the seconds that this process's threads have waited for a processor; 0 if the system does not say."""
    total = 0
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError, IndexError, ValueError):  # a thread that has just ended, or a system without it
                total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


class FreeProcessors:
    """Chooses the number of threads by how long the process's threads wait for processors.

    Args:
        waited: Returns the seconds that these threads have waited so far.
        clock: Returns the present time in seconds.
    """

    def __init__(self, waited: Callable[[], float] = waited, clock: Callable[[], float] = time.monotonic) -> None:
        self._waited, self._clock = waited, clock
        self._lock = threading.Lock()
        self._alone_until = 0.0
        self._looked: tuple[float, float] | None = None  # time of the last reading, and the seconds waited until then

    def threads(self, most: int) -> int:
        """Return how many threads compute next, at most ``most``; call this before every part of a computation."""
        if most == 1:
            return 1
        with self._lock:
            now = self._clock()
            if now < self._alone_until:
                return 1
            if self._looked is None:
                self._looked = now, self._waited()
                return most
            since, before = self._looked
            if now - since < _WINDOW:
                return most
            total = self._waited()
            if total - before > _WAITED * (now - since):
                self._alone_until, self._looked = now + _ALONE, None
                return 1
            self._looked = now, total
            return most


FREE_PROCESSORS = FreeProcessors()
