"""Upkeep of a store that is derived live: merged files and the catalogue, for which fresh rows do not wait.

Upkeep runs in processes of low priority; each gives its memory back at its end.
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
    """The upkeep that a derivation leaves undone, in a small part of the time: merged files and the catalogue.

    A store behind a URL has no catalogue.
    """

    def __init__(self, location: str, *, compacts: bool = True) -> None:
        self._location, self._compacts = absolute(location), compacts
        self._process = OwnProcesses(1, os.nice, _NICE, times=1)
        self._under_way: Future[None] | None = None
        self._behind = True  # unknown at the start, so assume that upkeep is due
        self._begun = self._ended = self._cost = 0.0  # of the last upkeep, in seconds

    def rows_came(self) -> None:
        """Take note of new rows."""
        self._behind = True

    def begin_if_due(self) -> None:
        """Begin an upkeep if there are new rows, unless an upkeep is under way or has just ended.

        Raises:
            OperationError: something could not be kept up the last time.
        """
        if self._under_way is not None and self._under_way.done():
            self._end()
        if self._under_way is None and self._behind and time.perf_counter() - self._ended >= _SHARE * self._cost:
            self._begin()

    def finish(self) -> None:
        """Wait for the upkeep under way, and do the upkeep that is left."""
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
            raise OperationError(f"upkeep: {first_line(error)}") from error
        self._ended = time.perf_counter()
        self._cost = self._ended - self._begun


def keep_up(location: str, *, compacts: bool) -> None:
    """Merge small files if it ``compacts``, and write the catalogue."""
    from kvdrift.log.store import Store
    from kvdrift.sql.catalog_file import refresh_catalog

    store = Store.open(location)
    if compacts:
        store.gather()
    if is_local(store.location):
        refresh_catalog(store)
