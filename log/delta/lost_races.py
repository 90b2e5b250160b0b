"""Compute how long a writer waits after losing a race for a version of a log.

Writers that lost the same race and wait equally long meet again. So a wait is random, and the range of waits doubles
with each lost race: "exponential backoff with full jitter" (Marc Brooker, "Exponential Backoff And Jitter", AWS
Architecture Blog, 2015). The range begins with the time that an attempt takes: milliseconds on a local disk, a second
behind a URL.
"""

from __future__ import annotations

import random
import time
from typing import Final

ATTEMPTS: Final = 60
"""The most attempts, some ten minutes: a lost race is another writer's progress, so fewer suffice."""

AT_ONCE: Final = 1
"""The number of lost races after which delta-rs itself tries again at once; delta-rs' default is 15."""

_LONGEST: Final = 20.0  # seconds: a thousand commits to a local log take some 30


def longest_wait(turn: int, took: float) -> float:
    """Return the longest wait, in seconds, after attempt ``turn``, counted from 0, which took ``took`` seconds."""
    return float(min(_LONGEST, took * 2**turn))


def wait_after(turn: int, took: float) -> None:
    """Wait after a lost race; the arguments are those of ``longest_wait``."""
    time.sleep(random.uniform(0, longest_wait(turn, took)))  # noqa: S311 - no event depends on it
