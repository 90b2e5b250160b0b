"""Who may change a local store: many writers at once, or one repair; and one run of studies at a time.

Writers at once commit to a table in turn, so that they do not race for its next version.

The locks are on folders of the store. They end with their processes. A file system without locks keeps nobody apart.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from schema.errors import OperationError
from schema.location import is_local

_PATIENCE: Final = 5.0  # seconds: longer than a commit takes

_LOOK: Final = 0.5  # seconds from one look to the next of a run that waits

_STUCK: Final = 10.0  # seconds: a writer whose turn lasts so long is not waited for
_FIRST_LOOK, _LONGEST_LOOK = 0.002, 0.5  # seconds from one look for one's turn to the next, which is random

_repaired: Final = set[str]()  # stores that a repair of this process has


@contextmanager
def written(location: str) -> Iterator[None]:
    """A block that writes to a store; waits while another process repairs it."""
    if not is_local(location) or location in _repaired:
        yield
        return
    with _opened(location) as folder:
        _lock(folder, fcntl.LOCK_SH)
        yield


@contextmanager
def run_alone(location: str, say: Callable[[str], None]) -> Iterator[None]:
    """A block that runs studies of a store; waits while another one does, and says so.

    Two at once would do no harm, but generate the same documents twice. Nobody waits for those of a store behind a URL.
    """
    if not is_local(location):
        yield
        return
    with _opened(f"{location}/events") as folder:
        if not _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            say(f"another run is at work on {location}: this one waits until it ends, and then does what is left")
            while not _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                time.sleep(_LOOK)
        yield


@contextmanager
def repaired(location: str) -> Iterator[None]:
    """A block that repairs a local store, beside which no other process writes to it."""
    with _opened(location) as folder:
        begun = time.monotonic()
        while not _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if time.monotonic() - begun > _PATIENCE:
                raise OperationError(
                    f"{location}: another process repairs or writes to it; let it end, then kvdrift verify --repair"
                )
            time.sleep(0.05)
        _repaired.add(location)
        try:
            yield
        finally:
            _repaired.discard(location)


@contextmanager
def in_turn(log: Path, version: Callable[[], int]) -> Iterator[None]:
    """A block that one writer of a log is in at a time, unless that one is stuck.

    Nothing depends on turns: writers that commit at once are kept apart by the log itself, and one of them tries again.

    Args:
        log: The log's folder.
        version: Returns the log's newest version, which tells that other writers go on.

    """
    with _opened(str(log)) as folder:
        turn, newest, since = 0, version(), time.monotonic()
        while not (ours := _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)):
            if time.monotonic() - since > _STUCK:
                before, newest, since = newest, version(), time.monotonic()
                if newest == before:
                    break
            time.sleep(random.uniform(0, min(_LONGEST_LOOK, _FIRST_LOOK * 2 ** min(turn, 10))))  # noqa: S311 - no event depends on it
            turn += 1
        try:
            yield
        finally:
            if ours:  # for a process that was forked meanwhile, too
                _lock(folder, fcntl.LOCK_UN)


@contextmanager
def _opened(location: str) -> Iterator[int | None]:
    """Open the store's folder, to lock it; None if it cannot be opened: the reader reports why."""
    try:
        folder = os.open(location, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        os.close(folder)


def _lock(folder: int | None, kind: int) -> bool:
    """Take a lock, and tell whether no other process keeps it from us."""
    try:
        if folder is not None:
            fcntl.flock(folder, kind)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
