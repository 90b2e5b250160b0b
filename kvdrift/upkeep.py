"""Upkeep of a store while its events are derived: small files are merged and the catalogue is written.

Each upkeep runs in a new process of low priority, so that it delays no new rows, and its memory is freed at its end.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

from kvdrift.schema.errors import KvdriftError, OperationError, first_line
from kvdrift.schema.location import absolute, is_local
from kvdrift.schema.own_process import OwnProcesses

_SHARE = 29  # an upkeep is followed by a pause of at least this many times its own duration
_NICE = 10


class Upkeep:
    """Starts an upkeep of a store in another process now and then, for at most a thirtieth of the time.

    An upkeep merges small files, if ``compacts``, and writes the catalogue, which a store behind a URL does not have.
    """

    def __init__(self, location: str, *, compacts: bool = True) -> None:
        self._location, self._compacts = absolute(location), compacts
        self._process = OwnProcesses(1, os.nice, _NICE, times=1)
        self._under_way: Future[None] | None = None
        self._behind = True  # unknown at the start, so assume that upkeep is due
        self._begun = self._ended = self._cost = 0.0  # of the last upkeep, in seconds

    def rows_came(self) -> None:
        """Record that new rows were derived, so that an upkeep is due."""
        self._behind = True

    def begin_if_due(self) -> None:
        """Begin an upkeep if there are new rows, none is under way, and the pause after the last one has passed.

        Raises:
            OperationError: the last upkeep failed.
        """
        if self._under_way is not None and self._under_way.done():
            self._end()
        if self._under_way is None and self._behind and time.perf_counter() - self._ended >= _SHARE * self._cost:
            self._begin()

    def finish(self) -> None:
        """Wait for the upkeep under way; if rows came after its beginning, do another.

        Raises:
            OperationError: an upkeep failed.
        """
        with self._process:
            self._end()
            if self._behind:
                self._begin()
                self._end()

    def _begin(self) -> None:
        self._behind, self._begun = False, time.perf_counter()
        self._under_way = self._process.submit(keep_up, self._location, compacts=self._compacts)

    def _end(self) -> None:
        if self._under_way is None:
            return
        done, self._under_way = self._under_way, None
        try:
            done.result()
        except (KvdriftError, BrokenProcessPool) as error:
            raise OperationError(f"upkeep could not merge files or write the catalogue: {first_line(error)}") from error
        self._ended = time.perf_counter()
        self._cost = self._ended - self._begun


def keep_up(location: str, *, compacts: bool) -> None:
    """Merge the small files of a store, if ``compacts``, and write the catalogue, if the store is local."""
    from kvdrift.log.store import Store
    from kvdrift.sql.catalog_file import refresh_catalog

    store = Store.open(location)
    if compacts:
        store.gather()
    if is_local(store.location):
        refresh_catalog(store)
