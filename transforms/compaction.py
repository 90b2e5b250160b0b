"""Merge the files of a store: all of them, for ``kvdrift compact``, or small files during a live derivation.

A process that merges files of all sizes keeps memory that it no longer uses. A live derivation therefore merges in a
separate process, which is replaced after some merges.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple, Self

from kvdrift.log.store import Store
from kvdrift.schema.errors import KvdriftError, OperationError, first_line
from kvdrift.schema.own_process import OwnProcesses
from kvdrift.schema.progress import SILENT, Progress
from kvdrift.schema.tables import TABLES

_TIMES = 32  # merges of one process, before a new process replaces it
BATCHES = 16  # micro-batches between two merges; each micro-batch leaves one file in a table
LIVE_ROWS = 1 << 15  # most rows of a file that a live derivation merges, so that each merge is short


class FileCount(NamedTuple):
    """The number of a table's visible files, and their size in bytes."""

    files: int
    size: int


def compact(store: Store, progress: Progress = SILENT) -> dict[str, tuple[FileCount, FileCount]]:
    """Merge the files of all tables; return those with fewer files than before, each with its files before and after.

    It is safe beside writers, readers and another compaction.
    """
    store.reconcile()
    before, damaged = _count_files(store), list[str]()
    progress.begin("compact", sum(count.files for count in before.values()), "files")
    for table in TABLES:
        damaged += store.compact(table, progress.advance).damaged
    if damaged:
        more = f" and {len(damaged) - 1} more files" if len(damaged) > 1 else ""
        raise OperationError(
            f"{store.location}: damaged files are not merged: {damaged[0]}{more}: kvdrift verify {store.location}"
        )
    after = _count_files(store)
    return {table: (before[table], after[table]) for table in TABLES if after[table].files < before[table].files}


def _count_files(store: Store) -> Mapping[str, FileCount]:
    stored = {table: store.stored_files(table) for table in TABLES}
    return {table: FileCount(len(files), sum(file.size for file in files)) for table, files in stored.items()}


class Gathering:
    """Merges small files of the store at a location in a separate process, so that a derivation need not wait."""

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
        """Count a micro-batch; after every ``BATCHES``, start a merge, unless the last merge is still under way.

        Raises:
            OperationError: The last merge failed.
        """
        self._batches += 1
        if self._batches >= BATCHES and (self._under_way is None or self._under_way.done()):
            self._hear()
            self._batches = 0
            self._under_way = self._process.submit(_gather, self._location)

    def _hear(self) -> None:
        """Wait for a merge under way; raise OperationError if it failed."""
        if self._under_way is not None:
            try:
                self._under_way.result()
            except (KvdriftError, BrokenProcessPool) as error:
                raise OperationError(f"small files cannot be merged: {first_line(error)}") from error
            finally:
                self._under_way = None


def _gather(location: str) -> int:
    return Store.open(location).gather(LIVE_ROWS)
