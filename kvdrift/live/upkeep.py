"""What is kept up in a store that is derived live, and what fresh rows do not wait for: files, moments and catalogue.

It is done in a process of its own, which yields to all others, and which gives its memory back when it is done.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from schema.errors import KvdriftError, OperationError, first_line
from schema.location import absolute, is_local
from schema.own_process import last_words, own_environment

_NO_COMPACT = "--no-compact"
_SHARE = 29  # how much longer than it last took it is left alone while rows come


class Upkeep:
    """Keeps up what a derivation does not, in a small part of the time: larger files, moments and catalogue.

    A store behind a URL has neither moments nor catalogue.

    Args:
        location: The store.
        compacts: Whether files are put together.

    """

    def __init__(self, location: str, *, compacts: bool = True) -> None:
        self._command = [sys.executable, "-m", __name__, absolute(location), *(() if compacts else (_NO_COMPACT,))]
        self._process: subprocess.Popen[str] | None = None
        self._behind = True  # as far as is known
        self._begun = self._ended = self._cost = 0.0  # when it was done last, and what that took, in seconds

    def rows_came(self) -> None:
        """Take note of new rows."""
        self._behind = True

    def begin_if_due(self) -> None:
        """Begin if there are new rows, unless this was done just now or is under way."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None and self._behind and time.perf_counter() - self._ended >= _SHARE * self._cost:
            self._begin()

    def finish(self) -> None:
        """Wait for what is under way, and do what is left."""
        if self._process is not None:
            self._end()
        if self._behind:
            self._begin()
            self._end()

    def _begin(self) -> None:
        self._behind, self._begun = False, time.perf_counter()
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            self._command,
            env=own_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us
        )

    def _end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        _, said = process.communicate()
        self._ended = time.perf_counter()
        self._cost = self._ended - self._begun
        if process.returncode:
            raise OperationError(f"upkeep: {last_words(said, process.returncode)}")


def keep_up(location: str, *, compacts: bool) -> None:
    """Put many files together, and write the catalogue.

    Args:
        location: The store.
        compacts: Whether files are put together.

    """
    from log.store import Store
    from sql.catalog_file import refresh_catalog

    store = Store.open(location)
    if compacts:
        store.gather()
    if is_local(store.location):
        refresh_catalog(store)


if __name__ == "__main__":
    os.nice(10)
    try:
        keep_up(sys.argv[1], compacts=_NO_COMPACT not in sys.argv)
    except KvdriftError as error:
        sys.exit(first_line(error))
