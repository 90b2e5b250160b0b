"""Find, load and check versions of Delta Lake tables.

A file system that lists a folder may show a later new file and miss an earlier one. With thousands of log files and a
busy machine this happens every few thousand commits. delta-rs then reports a gap in the log, and the log is listed
again.

Writers that lost the same race for a version and wait equally long meet again. So a wait is random, and the range of
waits doubles with each lost race: "exponential backoff with full jitter" (Marc Brooker, "Exponential Backoff And
Jitter", AWS Architecture Blog, 2015). The range begins with the time that an attempt takes: milliseconds on a local
disk, a second behind a URL.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from kvdrift.log.delta.parquet_files import DataFiles, StoredFile
from kvdrift.log.delta.table_log import LogState, TableLog, lost_commits
from kvdrift.schema.errors import DamagedStoreError, InputError, MissingStoreError, first_line, reading
from kvdrift.schema.location import join
from kvdrift.schema.tables import SCHEMA_VERSION, TABLES

ATTEMPTS: Final = 60
"""The most attempts at a commit, some ten minutes; fewer suffice, since only another writer's commit wins a race."""

AT_ONCE: Final = 1
"""How often delta-rs itself repeats a commit that lost a race, without a wait; delta-rs' default is 15."""

_LONGEST: Final = 20.0  # seconds: a thousand commits to a local log take some 30
_LISTINGS: Final = 20  # a log that has lost a file has a gap each time
_PAUSE: Final = 0.01  # seconds; a lost file is reported after a fifth of a second

_GAPS: Final = ("Expected contiguous commit files", "Gap between checkpoint version")  # the second right after one

_Result = TypeVar("_Result")


def has_gap(error: BaseException) -> bool:
    """Tell whether delta-rs reports that a file is missing between others of a log."""
    return isinstance(error, DeltaError) and any(message in str(error) for message in _GAPS)


def listed(listing: Callable[[], _Result]) -> _Result:
    """Return the result of ``listing``, which lists a log; repeat the call while the listing has a gap."""
    for _ in range(_LISTINGS - 1):
        try:
            return listing()
        except DeltaError as error:
            if not has_gap(error):
                raise
        time.sleep(_PAUSE)
    return listing()


def longest_wait(turn: int, took: float) -> float:
    """Return the longest wait, in seconds, after attempt ``turn``, counted from 0, which took ``took`` seconds."""
    return float(min(_LONGEST, took * 2**turn))


def wait_after(turn: int, took: float) -> None:
    """Wait after a lost race; the arguments are those of ``longest_wait``."""
    time.sleep(random.uniform(0, longest_wait(turn, took)))  # noqa: S311 - no event depends on it


_FILE = ("path", "size_bytes", "num_records")  # the fields of a ``StoredFile``
_ADDED = (*_FILE, "modification_time")

# An open table that is updated keeps some kilobytes of each commit that it has read; opening it anew takes as
# long as ten commits.
_VERSIONS_HELD = 200


class OpenTables:
    """A pool of tables that delta-rs has opened; an open table is updated by reading new commits.

    After many commits a table is opened anew, since an open table keeps everything that it has read.

    Each open table has one user at a time. The user gives the table back unless an error occurred. Meanwhile another
    user opens the table anew.
    """

    def __init__(self, location: str, logs: Mapping[str, TableLog] | None) -> None:
        self._location, self._logs = location, logs  # no logs are read behind a URL
        self._free: dict[str, tuple[DeltaTable, LogState | int | None]] = {}
        self._opened_at: dict[str, int] = {}  # version by table

    def take(self, table: str, version: int | None = None) -> DeltaTable:
        """Take a table at a version, by default the latest, from the pool; open the table if the pool lacks it."""
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
        """Put a table back into the pool for the next user, unless the pool has a later version of the table."""
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

        ``transaction_version`` takes an application id, and returns the version that the application's last transaction
        records, up to this version of the table.
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
        return [file for _, file in sorted(made, key=lambda pair: (pair[0], pair[1].path), reverse=True)]

    @functools.cached_property
    def row_count(self) -> int | None:
        """The number of visible rows that the log states; None if another program wrote a file without its count."""
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


VERSION_KEY = "kvdrift.schema_version"

_HELD_VERSIONS = 4  # loaded versions of a table that are kept: the last ones used


class TableVersions(DataFiles):
    """The versions of the tables of ``kvdrift.schema.tables`` under one local folder or object-store URL.

    A loaded version is used again while its log file is unchanged.
    """

    def __init__(self, location: str | Path) -> None:
        """Keep a location, without accessing it."""
        super().__init__(location)
        if self._local and unquote(self.location) != self.location:
            raise InputError(f"{self.location}: a store's path cannot hold a '%' before two hexadecimal digits")
        if self._local and "?" in self.location:  # DuckDB reads the rest as parameters, and writes elsewhere
            raise InputError(f"{self.location}: a store's path cannot hold a '?'")
        self._logs = {table: TableLog(Path(self.location, table)) for table in TABLES} if self._local else None
        self._tables = OpenTables(self.location, self._logs)
        self._snapshots: dict[str, dict[int, tuple[LogState | int | None, Snapshot]]] = {}  # by table and version

    def load(self, table: str, version: int | None = None) -> Snapshot:
        """Load a table at a version, by default the latest.

        Raises:
            InputError: The table or the version is missing or cannot be read.
        """
        at = self._newest(table) if version is None else version
        state, held = self._snapshots.get(table, {}).get(at, (None, None))
        if held is None or state is None or state != self._tables.state(table, at):
            held = self._load(table, version)
            at, state = held.version, self._tables.state(table, held.version)
        others = [item for item in self._snapshots.get(table, {}).items() if item[0] != at]
        self._snapshots[table] = dict([*others[1 - _HELD_VERSIONS :], (at, (state, held))])
        return held

    def _newest(self, table: str) -> int:
        """Return the newest version of a table by the names of its log files; -1 if only loading the table can tell."""
        known = self._newest_known(table)
        if self._logs is not None or known < 0:
            return known
        try:
            self._files.open_input_file(join(self._root, table, "_delta_log", f"{known + 1:020d}.json")).close()
        except FileNotFoundError:
            return known
        except OSError:  # loading the log reports what is wrong
            return -1
        return -1

    def _newest_known(self, table: str) -> int:
        """Return the newest version known without a request to an object store; -1 if none is known."""
        if self._logs is not None:
            return self._logs[table].newest()
        return max(self._snapshots.get(table, ()), default=-1)

    def _load(self, table: str, version: int | None) -> Snapshot:
        with self._opened(table, version) as loaded:
            at = int(loaded.version())
            return Snapshot(table, loaded, lambda app_id: self._transaction_version(table, at, app_id))

    def _transaction_version(self, table: str, version: int, app_id: str) -> int | None:
        with self._opened(table, version) as loaded:
            stored = loaded.transaction_version(app_id)
        return None if stored is None else int(stored)

    def exists(self, table: str) -> bool:
        """Tell whether a table exists."""
        uri = join(self.location, table)
        # delta-rs makes the folder of a missing table, so ask the file system first.
        if self._local and not Path(uri, "_delta_log").is_dir():
            return False
        if self._logs is not None and self._logs[table].newest() >= 0:
            return True  # delta-rs lists the log for it, which grows with every commit
        try:
            return bool(DeltaTable.is_deltatable(uri))
        except (DeltaError, OSError):
            return False

    @contextmanager
    def _opened(self, table: str, version: int | None = None) -> Iterator[DeltaTable]:
        """Open a table for a ``with`` block, which must leave it at an existing version; then return it to the pool."""
        loaded = self._open(table, version)
        yield loaded
        self._tables.give_back(table, loaded)

    def _open(self, table: str, version: int | None = None) -> DeltaTable:
        uri = join(self.location, table)
        if self._local and Path(self.location).is_file():
            raise InputError(f"{self.location} is a file, not a store; give the store's folder")
        if self._local and not Path(uri, "_delta_log").is_dir():
            raise MissingStoreError(self._without(table))
        try:
            loaded = self._tables.take(table, version)
            self._check_schema_version(table, loaded)
        except (DeltaError, OSError, ValueError, OverflowError) as error:
            if version is not None:
                self._check_version(table, version, self._open(table).version())
                if self._logs is not None and version < (first := self._logs[table].first_readable()):
                    raise InputError(
                        f"{self.location}: version {version} of '{table}' cannot be read any more: its log was "
                        f"deleted; give {first} or later"
                    ) from None
            fault = self._logs and self._logs[table].first_fault()
            if isinstance(error, TableNotFoundError) and not fault:
                raise MissingStoreError(self._without(table)) from None
            raise self.damaged(f"table '{table}' is damaged ({fault or first_line(error)})") from None
        if self._logs is not None:
            log = self._logs[table]
            if fault := log.fault_of_tail():
                raise self.damaged(f"table '{table}' is damaged ({fault})")
            if fault := log.break_of_tail(str(loaded.metadata().id)):
                raise DamagedStoreError(
                    f"{self.location}: table '{table}' has files of two histories ({fault}), and no repair can tell "
                    "which is right: copy one of the two stores to an empty folder"
                )
        return loaded

    def _without(self, table: str) -> str:
        if self._local and not Path(self.location).exists():
            return f"{self.location} is not a kvdrift store: there is no such folder"
        return f"{self.location} is not a kvdrift store: it has no '{table}' table"

    def check_nothing_lost(self) -> None:
        """Check that no table has lost commits on which another table relies.

        Raises:
            DamagedStoreError: A table has lost such commits.
        """
        for table, wanted, other in () if self._logs is None else lost_commits(self._logs):
            raise self.damaged(f"table '{table}' has lost commits: '{other}' relies on its version {wanted}")

    def damaged(self, what: str) -> DamagedStoreError:
        """Return the error about damage to the store, with the command that repairs it or, behind a URL, shows it."""
        verify = f"kvdrift verify {self.location}"
        hint = f"to repair the store: {verify} --repair" if self._local else f"to see all faults: {verify}"
        return DamagedStoreError(f"{self.location}: {what}; {hint}")

    def _check_version(self, table: str, version: int | None, latest: int) -> None:
        if version is not None and not 0 <= version <= latest:
            raise InputError(f"{self.location}: '{table}' has no version {version}; its versions are 0..{latest}")

    def _check_schema_version(self, table: str, loaded: DeltaTable) -> None:
        version = loaded.metadata().configuration.get(VERSION_KEY)
        if version is None:
            raise InputError(f"{self.location}: table '{table}' was not made by kvdrift (no {VERSION_KEY})")
        if version != str(SCHEMA_VERSION):
            raise InputError(
                f"{self.location}: table '{table}' has schema version {version}, this kvdrift reads version "
                f"{SCHEMA_VERSION} only: use the kvdrift that made the store, or generate or ingest its studies again "
                "into a new store"
            )


def live_files(location: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the files that hold a table's rows at its newest version, sorted: path, and values of partition columns.

    A path begins at the table's folder. Rows that were deleted or replaced are in other files, or in none.

    Raises:
        InputError: There is no table, or reading it needs a feature that pyarrow lacks: deletion vectors (rows of a
            live file are deleted) or column mapping (its columns have other names).
    """
    with reading(f"{location}: cannot be read as a Delta table", DeltaError):
        fragments = DeltaTable(location).to_pyarrow_dataset().get_fragments()
        keys = pyarrow.dataset.get_partition_keys
        return sorted((file.path, keys(file.partition_expression)) for file in fragments)
