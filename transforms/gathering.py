"""Merge small files during a live derivation, in a process of its own.

Merging files of all sizes leaves memory behind. The separate process is replaced after some merges, so that the
derivation does not keep this memory.
"""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Self

from log.store import Store
from schema.errors import KvdriftError, OperationError, first_line
from schema.own_process import OwnProcesses

LIVE_ROWS = 1 << 15  # of a new file: what is held no longer than a batch takes
BATCHES = 16  # micro-batches from one time to the next; each leaves one file
_TIMES = 32  # that a process does it


class Gathering:
    """Merges small files of the store at a location while a derivation goes on, without making it wait."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._process = OwnProcesses(1, times=_TIMES)
        self._under_way: Future[int] | None = None
        self._batches = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for a merge under way, and end the process."""
        with self._process:
            if kind is None:
                self._hear()

    def batch_done(self) -> None:
        """Count a micro-batch, and start a merge after some of them, unless the last merge is still under way.

        Raises:
            OperationError: The last merge failed.
        """
        self._batches += 1
        if self._batches >= BATCHES and (self._under_way is None or self._under_way.done()):
            self._hear()
            self._batches = 0
            self._under_way = self._process.submit(_gather, self._location)

    def _hear(self) -> None:
        """Wait for a merge under way."""
        if self._under_way is not None:
            try:
                self._under_way.result()
            except (KvdriftError, BrokenProcessPool) as error:
                raise OperationError(f"putting files together: {first_line(error)}") from error
            finally:
                self._under_way = None


def _gather(location: str) -> int:
    return Store.open(location).gather(LIVE_ROWS)
