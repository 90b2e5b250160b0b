"""Locks of a local store: many writers or one repair at a time, and one run of studies at a time.

Concurrent writers commit to a table in turn, so that they do not race for its next version. Each process locks
its temporary folders, so that other processes recognize the folders that a killed process has left.

The locks are on folders of the store and end with their processes. On a file system without locks nobody waits.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvdrift.schema.errors import OperationError
from kvdrift.schema.location import is_local

TEMPORARY: Final = ".temporary-"
"""How names of temporary folders in a store begin."""

PATIENCE: Final = 5.0  # seconds, longer than a commit takes

_RETRY: Final = 0.5  # seconds between two attempts of a waiting run

STUCK: Final = 10.0  # seconds after which the others no longer wait for a writer's turn to end
_FIRST_RETRY: Final = 0.002  # the longest time before a second attempt to get a turn, in seconds; times are random
_DOUBLINGS: Final = 11  # the longest time doubles with each attempt, up to 4 s

_repaired: Final = set[str]()  # stores that this process is repairing


@contextmanager
def written(location: str) -> Iterator[None]:
    """Hold a store's lock for writing during the block; wait while another process repairs the store."""
    if not is_local(location) or location in _repaired:
        yield
        return
    with _opened(location) as folder:
        _lock(folder, fcntl.LOCK_SH)
        yield


@contextmanager
def run_alone(location: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a store's lock for running studies during the block; wait while another process runs studies, and report it.

    Two runs at once would do no harm, but would generate the same documents twice. Stores behind a URL have no lock.
    """
    if not is_local(location):
        yield
        return
    with _opened(f"{location}/events") as folder:
        if not _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            say(f"another run works on {location}: this run waits for its end, and then does the rest")
            while not _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                time.sleep(_RETRY)
        yield


@contextmanager
def repaired(location: str) -> Iterator[None]:
    """Hold a local store's lock for repair during the block, so that no other process writes to the store."""
    with _opened(location) as folder:
        begun = time.monotonic()
        while not _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if time.monotonic() - begun > PATIENCE:
                raise OperationError(
                    f"{location}: another process repairs the store or writes to it; wait until that process ends, "
                    "then run 'kvdrift verify --repair' again"
                )
            time.sleep(0.05)
        _repaired.add(location)
        try:
            yield
        finally:
            _repaired.discard(location)


@contextmanager
def in_turn(log: Path, version: Callable[[], int]) -> Iterator[None]:
    """Let one writer of a log at a time run the block; writers do not wait for a stuck writer.

    Turns only save work: of writers that commit at once, the log accepts one, and the others try again. ``version``
    returns the log's newest version, whose growth shows that other writers go on.
    """
    with _opened(str(log)) as folder:
        turn, newest, since = 0, version(), time.monotonic()
        while not (ours := _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)):
            if time.monotonic() - since > STUCK:
                before, newest, since = newest, version(), time.monotonic()
                if newest == before:
                    break
            time.sleep(random.uniform(0, _FIRST_RETRY * 2 ** min(turn, _DOUBLINGS)))  # noqa: S311 - no event depends on it
            turn += 1
        try:
            yield
        finally:
            if ours:  # explicitly, since a process forked meanwhile holds the lock, too
                _lock(folder, fcntl.LOCK_UN)


@contextmanager
def temporary_folder(store: Path) -> Iterator[Path]:
    """Make a folder in a local store for this process during the block, and delete the folder afterwards.

    ``sweep`` deletes the folder if the process is killed.
    """
    while True:
        folder = store / f"{TEMPORARY}{uuid.uuid4().hex}"
        folder.mkdir()
        with _opened(str(folder)) as opened:
            if _lock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB) and folder.exists():  # else it is being swept
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return


def hold(file: int) -> bool:
    """Lock a temporary file until it is closed, against ``sweep``; return False if it was swept before."""
    _lock(file, fcntl.LOCK_EX)
    return os.fstat(file).st_nlink > 0


def sweep(folder: Path, pattern: str = f"{TEMPORARY}*") -> None:
    """Delete the temporary files and folders in ``folder`` that no living process has locked.

    On a file system without locks, none is deleted.
    """
    for path in folder.glob(pattern):
        with _opened(str(path)) as opened:
            try:
                if opened is not None:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)
            except OSError:  # a living process has the lock, or the file system has no locks
                pass


@contextmanager
def _opened(location: str) -> Iterator[int | None]:
    """Open a folder or file for locking; yield None if it cannot be opened: code that reads it reports why."""
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
    """Take a lock and return whether it was free; also True if the file system has no locks."""
    try:
        if folder is not None:
            fcntl.flock(folder, kind)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
