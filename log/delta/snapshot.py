"""Open tables through delta-rs, and tell which files are visible at a version."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from kvdrift.log.delta.parquet_files import StoredFile
from kvdrift.log.delta.retries import listed
from kvdrift.log.delta.table_log import LogState, TableLog
from kvdrift.schema.location import join

_FILE = ("path", "size_bytes", "num_records")  # what is taken of each visible file: the fields of a ``StoredFile``
_ADDED = (*_FILE, "modification_time")

# A table that goes on from commit to commit holds what it has read of each, some kilobytes; opening it anew takes as
# long as ten commits.
_VERSIONS_HELD = 200


class OpenTables:
    """A pool of tables that delta-rs has opened; an open table is updated by reading new commits.

    After many commits a table is opened anew, since an open table keeps everything that it has read.

    Each open table has one user at a time. The user gives the table back unless an error occurred. Meanwhile another
    user opens the table anew.
    """

    def __init__(self, location: str, logs: Mapping[str, TableLog] | None) -> None:
        self._location, self._logs = location, logs  # no logs are looked at behind a URL
        self._free: dict[str, tuple[DeltaTable, LogState | int | None]] = {}
        self._opened_at: dict[str, int] = {}  # version by table

    def take(self, table: str, version: int | None = None) -> DeltaTable:
        """Take a table at a version, by default the latest."""
        loaded, state = self._free.pop(table, (None, None))
        if loaded is not None and state is not None and state == self.state(table, loaded.version()):
            if version == loaded.version():
                return loaded
            if version is None and loaded.version() < self._opened_at[table] + _VERSIONS_HELD:
                if self._logs is None or self._logs[table].newest() != loaded.version():
                    listed(loaded.update_incremental)
                return loaded
            if version is not None:
                self._free[table] = loaded, state
        opened = listed(lambda: DeltaTable(join(self._location, table), version=version))
        self._opened_at[table] = opened.version()
        return opened

    def give_back(self, table: str, loaded: DeltaTable) -> None:
        """Give a table back, for the next user unless the pool has a later version of it."""
        other, _ = self._free.get(table, (None, None))
        if other is None or other.version() <= loaded.version():
            self._free[table] = loaded, self.state(table, loaded.version())

    def state(self, table: str, version: int) -> LogState | int | None:
        """Return a value that differs if a version was lost and made again with other content."""
        return version if self._logs is None else self._logs[table].state(version)


class Snapshot:
    """One table at one version: its visible files."""

    def __init__(self, table: str, loaded: DeltaTable, transaction_version: Callable[[str], int | None]) -> None:
        """Take the visible files of a table that delta-rs has loaded; the table may be updated later.

        ``transaction_version`` returns the version of an application's last transaction up to this version.
        """
        self.table = table
        self.version = int(loaded.version())
        self.id = str(loaded.metadata().id)  # given when the table was made
        self._added = pa.table(loaded.get_add_actions()).select(_ADDED)
        self._transactions = dict[str, int | None]()
        self._find_transaction = transaction_version

    def paths(self) -> list[str]:
        """Return the relative paths of the visible files, sorted."""
        return [*self._paths]

    def files(self) -> list[StoredFile]:
        """Return the visible files with the sizes and rows that the log has, sorted by path."""
        return sorted(self._files, key=lambda file: file.path)

    def newest_files(self) -> list[StoredFile]:
        """Return the visible files as ``files`` does, newest commit first."""
        made = zip(self._values("modification_time"), self._files, strict=True)
        return [file for _, file in sorted(made, key=lambda one: (one[0], one[1].path), reverse=True)]

    @functools.cached_property
    def row_count(self) -> int | None:
        """The number of visible rows by the log; None if another program wrote a file without its count."""
        counts = self._values("num_records")
        return None if None in counts else sum(counts)

    def transaction_version(self, app_id: str) -> int | None:
        """Return the version of an application's last transaction; None before the first."""
        if app_id not in self._transactions:
            self._transactions[app_id] = self._find_transaction(app_id)
        return self._transactions[app_id]

    @functools.cached_property
    def _files(self) -> list[StoredFile]:
        return [StoredFile(*values) for values in zip(*map(self._values, _FILE), strict=True)]

    @functools.cached_property
    def _paths(self) -> list[str]:
        return sorted(self._values("path"))

    def _values(self, name: str) -> list[Any]:
        values: list[Any] = self._added.column(name).to_pylist()
        return values
