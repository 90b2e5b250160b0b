"""How long a writer waits that lost a race for a version of a log.

Writers that lost the same race and wait equally long meet again. So a wait is random, and the range of waits doubles
with each lost race: "exponential backoff with full jitter" (Marc Brooker, "Exponential Backoff And Jitter", AWS
Architecture Blog, 2015), by which n writers at once make a number of attempts that grows with n, and not with its
square.
"""

from __future__ import annotations

import random
import time
from typing import Final

ATTEMPTS: Final = 40
"""Some five minutes. A lost race is always another writer's progress: only a log that nobody can write takes so many."""

AT_ONCE: Final = 1
"""Lost races after which delta-rs tries again at once; by default they are 15."""

_FIRST, _LONGEST = 0.01, 20.0  # seconds: of a commit to a local log, and of a thousand commits that wait for one


def longest_wait(turn: int) -> float:
    """Return the most seconds to wait after attempt ``turn``, counted from 0."""
    return float(min(_LONGEST, _FIRST * 2**turn))


def wait_after(turn: int) -> None:
    """Wait after attempt ``turn``, counted from 0, was lost."""
    time.sleep(random.uniform(0, longest_wait(turn)))  # noqa: S311 - no event depends on it
