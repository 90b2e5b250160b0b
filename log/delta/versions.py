"""Find, load and check versions of Delta Lake tables."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from kvdrift.log.delta.parquet_files import DataFiles
from kvdrift.log.delta.snapshot import OpenTables, Snapshot
from kvdrift.log.delta.table_log import LocalDisk, LogState, lost_commits
from kvdrift.schema.errors import DamagedStoreError, InputError, MissingStoreError, first_line
from kvdrift.schema.location import join
from kvdrift.schema.tables import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION_KEY = "kvdrift.schema_version"

_HELD_VERSIONS = 4  # of a table: the latest ones, and those that others were made from


class TableVersions(DataFiles):
    """The versions of the tables of ``kvdrift.schema.tables`` under one local folder or object-store URL.

    A loaded version is used again while its log file is unchanged.
    """

    def __init__(self, location: str | Path) -> None:
        """Keep a location, without accessing it."""
        super().__init__(location)
        if self._local and unquote(self.location) != self.location:
            raise InputError(f"{self.location}: a store's path cannot hold a '%' before two hexadecimal digits")
        if self._local and "?" in self.location:  # DuckDB takes what follows for parameters, and writes elsewhere
            raise InputError(f"{self.location}: a store's path cannot hold a '?'")
        self._disk = LocalDisk(Path(self.location)) if self._local else None
        self._tables = OpenTables(self.location, None if self._disk is None else self._disk.logs)
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
        """Return the newest version of a table by the names of its log files; -1 if loading the table must tell."""
        known = self._newest_known(table)
        if self._disk is not None or known < 0:
            return known
        try:
            self._files.open_input_file(join(self._root, table, "_delta_log", f"{known + 1:020d}.json")).close()
        except FileNotFoundError:
            return known
        except OSError:  # what loads the log says what is wrong
            return -1
        return -1

    def _newest_known(self, table: str) -> int:
        """Return the newest version known without a request to an object store; -1 if none is known."""
        if self._disk is not None:
            return self._disk.logs[table].newest()
        return max(self._snapshots.get(table, ()), default=-1)

    def _load(self, table: str, version: int | None) -> Snapshot:
        with self._opened(table, version) as loaded:
            at = int(loaded.version())
            return Snapshot(table, loaded, lambda app_id: self._transaction_version(table, at, app_id))

    def _transaction_version(self, table: str, version: int, app_id: str) -> int | None:
        with self._opened(table, version) as loaded:
            found = loaded.transaction_version(app_id)
        return None if found is None else int(found)

    def exists(self, table: str) -> bool:
        """Tell whether a table exists."""
        uri = join(self.location, table)
        # delta-rs makes the folder of a table that it is asked for, so ask the file system first.
        if self._local and not Path(uri, "_delta_log").is_dir():
            return False
        if self._disk is not None and self._disk.logs[table].newest() >= 0:
            return True  # delta-rs lists the log for it, which grows with every commit
        try:
            return bool(DeltaTable.is_deltatable(uri))
        except (DeltaError, OSError):
            return False

    @contextmanager
    def _opened(self, table: str, version: int | None = None) -> Iterator[DeltaTable]:
        """Open a table for a block; afterwards the table stands at an existing version."""
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
                if self._disk is not None and version < (first := self._disk.logs[table].first_readable()):
                    raise InputError(
                        f"{self.location}: version {version} of '{table}' cannot be read any more: its log was "
                        f"deleted; give {first} or later"
                    ) from None
            fault = self._disk and self._disk.logs[table].first_fault()
            if isinstance(error, TableNotFoundError) and not fault:
                raise MissingStoreError(self._without(table)) from None
            raise self.damaged(f"table '{table}' is damaged ({fault or first_line(error)})") from None
        if self._disk is not None:
            log = self._disk.logs[table]
            if fault := log.fault_of_tail():
                raise self.damaged(f"table '{table}' is damaged ({fault})")
            if fault := log.break_of_tail(str(loaded.metadata().id)):
                raise DamagedStoreError(
                    f"{self.location}: table '{table}' has files of two histories ({fault}), and no repair can tell "
                    "which is right: copy one of the two stores to an empty folder"
                )
        return loaded

    def _without(self, table: str) -> str:
        """Return the error line about a location that lacks a table."""
        if self._local and not Path(self.location).exists():
            return f"{self.location} is not a kvdrift store: there is no such folder"
        return f"{self.location} is not a kvdrift store: it has no '{table}' table"

    def check_nothing_lost(self) -> None:
        """Check that no table has lost commits on which another table relies."""
        for table, wanted, other in () if self._disk is None else lost_commits(self._disk.logs):
            raise self.damaged(f"table '{table}' has lost commits: '{other}' relies on its version {wanted}")

    def damaged(self, what: str) -> DamagedStoreError:
        """Return the error that says what is wrong with the store, and which command repairs it."""
        repair = " --repair" if self._local else ""
        return DamagedStoreError(f"{self.location}: {what}: kvdrift verify {self.location}{repair}")

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
