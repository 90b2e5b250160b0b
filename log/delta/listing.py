"""Logs that are listed while commits come: a listing may have a later file and lack an earlier one.

A system that lists a folder promises nothing of names that come meanwhile. With thousands of log files and a busy
machine it happens every few thousand commits. delta-rs then says that the log has a gap.
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
    """Tell whether delta-rs says that a log lacks a file between others."""
    return isinstance(error, DeltaError) and any(said in str(error) for said in _GAPS)


def listed(look: Callable[[], _Result]) -> _Result:
    """Call what lists a log, and again while the listing has a gap."""
    for _ in range(_LISTINGS - 1):
        try:
            return look()
        except DeltaError as error:
            if not has_gap(error):
                raise
        time.sleep(_PAUSE)
    return look()
