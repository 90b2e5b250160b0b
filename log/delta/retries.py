"""Try again: to read a log whose listing has a gap because commits came meanwhile, and to win a version of a log.

A file system that lists a folder may show a later new file and miss an earlier one. With thousands of log files and a
busy machine this happens every few thousand commits. delta-rs then reports a gap in the log.

Writers that lost the same race for a version and wait equally long meet again. So a wait is random, and the range of
waits doubles with each lost race: "exponential backoff with full jitter" (Marc Brooker, "Exponential Backoff And
Jitter", AWS Architecture Blog, 2015). The range begins with the time that an attempt takes: milliseconds on a local
disk, a second behind a URL.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from deltalake.exceptions import DeltaError

ATTEMPTS: Final = 60
"""The most attempts, some ten minutes: a lost race is another writer's progress, so fewer suffice."""

AT_ONCE: Final = 1
"""The number of lost races after which delta-rs itself tries again at once; delta-rs' default is 15."""

_LONGEST: Final = 20.0  # seconds: a thousand commits to a local log take some 30
_LISTINGS: Final = 20  # a log that has lost a file has a gap each time
_PAUSE: Final = 0.01  # seconds; of a lost file it is said after a fifth of a second

_GAPS: Final = ("Expected contiguous commit files", "Gap between checkpoint version")  # the second right after one

_Result = TypeVar("_Result")


def has_gap(error: BaseException) -> bool:
    """Tell whether delta-rs reports that a file is missing between others of a log."""
    return isinstance(error, DeltaError) and any(said in str(error) for said in _GAPS)


def listed(look: Callable[[], _Result]) -> _Result:
    """Return the result of ``look``, which lists a log; repeat the call while the listing has a gap."""
    for _ in range(_LISTINGS - 1):
        try:
            return look()
        except DeltaError as error:
            if not has_gap(error):
                raise
        time.sleep(_PAUSE)
    return look()


def longest_wait(turn: int, took: float) -> float:
    """Return the longest wait, in seconds, after attempt ``turn``, counted from 0, which took ``took`` seconds."""
    return float(min(_LONGEST, took * 2**turn))


def wait_after(turn: int, took: float) -> None:
    """Wait after a lost race; the arguments are those of ``longest_wait``."""
    time.sleep(random.uniform(0, longest_wait(turn, took)))  # noqa: S311 - no event depends on it
