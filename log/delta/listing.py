"""Retry reading a log whose listing has a gap because commits came meanwhile.

A file system that lists a folder may show a later new file and miss an earlier one. With thousands of log files and a
busy machine this happens every few thousand commits. delta-rs then reports a gap in the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from deltalake.exceptions import DeltaError

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
