"""One folder of Delta Lake tables: loading a version, putting Parquet files in place, committing them.

This module knows paths, bytes and commits, and nothing of what a row means: that is ``schema.store.appends`` (what may
be appended) and ``schema.store.store`` (what is visible when).

Schema versions: a table carries its version as a property. An upgrade raises it, which from then on keeps the writers
of older versions out, and then adds the columns that came since. The metadata of each such column tells the last table
version without it; the files visible at that version lack it. Nothing is written to a table that lacks a column, so an
upgrade that was killed between the two commits is simply continued.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from schema.errors import (
    DamagedStoreError,
    InputError,
    KvdriftError,
    MissingStoreError,
    OperationError,
    first_line,
    is_disk_fault,
)
from schema.location import join
from schema.locking import written
from schema.store.appends import is_compacted
from schema.store.commits import Commit
from schema.store.durability import make_folder
from schema.store.parquet_files import DataFiles
from schema.store.snapshot import OpenTables, Snapshot, added_columns, lacking_columns
from schema.store.table_log import CHECKPOINT_EVERY, LocalDisk, LogState, lost_commits
from schema.tables import SCHEMA_VERSION, TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

_VERSION_KEY = "kvdrift.schema_version"
READABLE_SINCE = "kvdrift.readable-since"  # the application id of the first version whose files are all there
_FORGETTING = {"delta.setTransactionRetentionDuration": "interval 1 days"}  # of ``commits.guards``
# Commits say how many rows a file has, and nothing of its columns: who loads a log then looks for nothing more.
_ROW_COUNTS_ALONE = {"delta.dataSkippingNumIndexedCols": "0"}
_REMOTE_CHECKPOINTS = {"delta.checkpointInterval": "20"}  # versions; behind a URL each log file is a request

# A lost race is always another writer's progress, so this bound is met only when the log cannot be written at all.
_ATTEMPTS = 200

_HELD_VERSIONS = 4  # of a table: the latest ones, and those that others were made from


class DeltaFolder(DataFiles):
    """The tables of ``schema.tables`` under one local folder or object-store URL.

    What was loaded of a version serves while its log file is the same.
    """

    def __init__(self, location: str | Path) -> None:
        """Take a location without looking at it.

        Raises:
            InputError: The location cannot be that of a store.

        """
        super().__init__(location)
        if self._local and unquote(self.location) != self.location:
            raise InputError(f"{self.location}: a store's path cannot hold a '%' before two hexadecimal digits")
        if self._local and "?" in self.location:  # DuckDB takes what follows for parameters, and writes elsewhere
            raise InputError(f"{self.location}: a store's path cannot hold a '?'")
        self._disk = LocalDisk(Path(self.location)) if self._local else None
        self._tables = OpenTables(self.location, None if self._disk is None else self._disk.logs)
        self._snapshots: dict[str, dict[int, tuple[LogState | int | None, Snapshot]]] = {}  # by table and version
        # Ours are made of durable files only; those of delta-rs, behind a URL, come with the commit.
        self._checkpoints = PostCommitHookProperties(create_checkpoint=not self._local)

    def create(self, table: str) -> None:
        """Make a table if it is missing and upgrade it if it is old.

        Raises:
            InputError: The table cannot be made or upgraded.
            OperationError: The disk is full or broken.

        """
        uri = join(self.location, table)
        try:
            if self._local:
                make_folder(Path(uri))
            if not DeltaTable.is_deltatable(uri):
                DeltaTable.create(
                    uri,
                    schema=TABLES[table].schema,
                    name=table,
                    description=TABLES[table].row,
                    configuration={
                        _VERSION_KEY: str(SCHEMA_VERSION),
                        "delta.appendOnly": "true",
                        # Results cite table versions; by default delta-rs would forget those older than 30 days.
                        "delta.enableExpiredLogCleanup": "false",
                        **_FORGETTING,
                        **_ROW_COUNTS_ALONE,
                        **({} if self._local else _REMOTE_CHECKPOINTS),
                    },
                    raise_if_key_not_exists=False,  # the version key is ours
                    # With retries, processes that make a table at once would make it again, one version up.
                    commit_properties=CommitProperties(max_commit_retries=0),
                )
                self._make_durable(table)
                return
        except (DeltaError, OSError) as error:
            if is_disk_fault(error) or not self._exists(table):
                raise self._refused(error, "cannot make a store here") from None
            # another process made it first
        self._upgrade(table)

    def _upgrade(self, table: str) -> None:
        """Raise the schema version and add columns; if several processes do so at once, one makes each commit."""
        what, refused = f"cannot upgrade '{table}' to schema version {SCHEMA_VERSION}", CommitFailedError()
        for turn in range(_ATTEMPTS):
            loaded = self._open(table)
            older = self._schema_version(table, loaded) < SCHEMA_VERSION
            lacking = lacking_columns(table, loaded)
            if not older and not lacking:
                return
            # Without retries: a commit that came in between must not slip below this one unseen.
            alone = CommitProperties(max_commit_retries=0)
            try:
                if older:
                    loaded.alter.set_table_properties(
                        {_VERSION_KEY: str(SCHEMA_VERSION), **_FORGETTING},
                        raise_if_not_exists=False,
                        commit_properties=alone,
                        post_commithook_properties=self._checkpoints,
                    )
                else:
                    loaded.alter.add_columns(
                        added_columns(table, loaded, lacking),
                        commit_properties=alone,
                        post_commithook_properties=self._checkpoints,
                    )
                self._make_durable(table)
            except CommitFailedError as error:
                refused = error
                time.sleep(0.002 * min(turn, 50))
            except (DeltaError, OSError) as error:
                raise self._refused(error, what) from None
        raise self._refused(refused, what)

    def _refused(self, error: Exception, what: str) -> KvdriftError:
        """Make the error of something that could not be written."""
        kind = OperationError if is_disk_fault(error) else InputError
        return kind(f"{self.location}: {what} ({first_line(error)})")

    def is_current(self, table: str) -> bool:
        """Tell whether a table exists and has every declared column.

        Raises:
            InputError: The table cannot be read.

        """
        if not self._exists(table):
            return False
        with self._opened(table) as loaded:
            return not lacking_columns(table, loaded)

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
        if held.id is None:  # the table may be made any moment
            return held
        others = [item for item in self._snapshots.get(table, {}).items() if item[0] != at]
        self._snapshots[table] = dict([*others[1 - _HELD_VERSIONS :], (at, (state, held))])
        return held

    def _newest(self, table: str) -> int:
        """Return the newest version of a table as its log's files say; -1 where it is not known without loading it."""
        if self._disk is not None:
            return self._disk.logs[table].newest()
        known = max(self._snapshots.get(table, ()), default=-1)
        if known < 0:
            return -1
        following = join(self._root, table, "_delta_log", f"{known + 1:020d}.json")
        try:
            return known if self._files.get_file_info(following).type is pa.fs.FileType.NotFound else -1
        except OSError:  # what loads the log says what is wrong
            return -1

    def _load(self, table: str, version: int | None) -> Snapshot:
        since = TABLES[table].since
        # A store of an older version may lack the table. An upgrade makes it before it touches ``events``, so look for
        # the table first and at the version of ``events`` second.
        if (
            since > 1
            and table not in self._snapshots
            and not self._exists(table)
            and self._events_schema_version() < since
        ):
            self._check_version(table, version, 0)
            return Snapshot(table, None, lambda _: None)
        with self._opened(table, version) as loaded:
            at = int(loaded.version())
            return Snapshot(table, loaded, lambda app_id: self._transaction_version(table, at, app_id))

    def _transaction_version(self, table: str, version: int, app_id: str) -> int | None:
        with self._opened(table, version) as loaded:
            found = loaded.transaction_version(app_id)
        return None if found is None else int(found)

    def _exists(self, table: str) -> bool:
        uri = join(self.location, table)
        # delta-rs makes the folder of a table that it is asked for, so ask the file system first.
        if self._local and not Path(uri, "_delta_log").is_dir():
            return False
        try:
            return bool(DeltaTable.is_deltatable(uri))
        except (DeltaError, OSError):
            return False

    @contextmanager
    def _opened(self, table: str, version: int | None = None) -> Iterator[DeltaTable]:
        """Open a table for a block, which leaves it at a version that exists."""
        loaded = self._open(table, version)
        yield loaded
        self._tables.give_back(table, loaded)

    def _events_schema_version(self) -> int:
        with self._opened("events") as loaded:
            return self._schema_version("events", loaded)

    def _open(self, table: str, version: int | None = None) -> DeltaTable:
        uri = join(self.location, table)
        if self._local and Path(self.location).is_file():
            raise InputError(f"{self.location} is a file, not a store; give the store's folder")
        if self._local and not Path(uri, "_delta_log").is_dir():
            raise MissingStoreError(f"{self.location} is not a kvdrift store: it has no '{table}' table")
        try:
            loaded = self._tables.take(table, version)
            self._schema_version(table, loaded)
        except (DeltaError, OSError, ValueError, OverflowError) as error:
            if version is not None:
                self._check_version(table, version, self._open(table).version())
            fault = self._disk and self._disk.logs[table].first_fault()
            if isinstance(error, TableNotFoundError) and not fault:
                raise MissingStoreError(f"{self.location} is not a kvdrift store: it has no '{table}' table") from None
            raise self.damaged(f"table '{table}' is damaged ({fault or first_line(error)})") from None
        if self._disk is not None and (fault := self._disk.logs[table].fault_of_tail()):
            raise self.damaged(f"table '{table}' is damaged ({fault})")
        return loaded

    def check_nothing_lost(self) -> None:
        """Check that no table has lost commits that another one relies on; reads a few log files and no data.

        Raises:
            DamagedStoreError: One has.

        """
        for table, wanted, other in () if self._disk is None else lost_commits(self._disk.logs):
            raise self.damaged(f"table '{table}' has lost commits: '{other}' relies on its version {wanted}")

    def damaged(self, what: str) -> DamagedStoreError:
        """Make the error that says what is wrong with the store, and which command mends it."""
        repair = " --repair" if self._local else ""
        return DamagedStoreError(f"{self.location}: {what}: kvdrift verify {self.location}{repair}")

    def _check_version(self, table: str, version: int | None, latest: int) -> None:
        if version is not None and not 0 <= version <= latest:
            raise InputError(f"{self.location}: '{table}' has no version {version}; its versions are 0..{latest}")

    def _schema_version(self, table: str, loaded: DeltaTable) -> int:
        found = loaded.metadata().configuration.get(_VERSION_KEY)
        if found is None or not found.isdecimal():
            raise InputError(f"{self.location}: table '{table}' was not made by kvdrift (no {_VERSION_KEY})")
        if int(found) > SCHEMA_VERSION:
            raise InputError(
                f"{self.location}: table '{table}' has schema version {found}, this kvdrift reads up to "
                f"{SCHEMA_VERSION}; update kvdrift"
            )
        return int(found)

    def _check_readable(self, snapshot: Snapshot) -> None:
        if self._newest(snapshot.table) == snapshot.version:
            return
        since = self.load(snapshot.table).transaction_version(READABLE_SINCE) or 0
        if snapshot.version < since:
            raise InputError(
                f"{self.location}: version {snapshot.version} of '{snapshot.table}' cannot be read any more: compact "
                f"--vacuum has deleted its files; give {since} or later"
            )

    def paths_by_missing_columns(self, snapshot: Snapshot) -> dict[tuple[str, ...], list[str]]:
        """Group the visible files by the declared columns that they lack.

        Returns:
            Sorted relative paths by missing columns; files of the present schema version lack none.

        """
        self._check_readable(snapshot)
        paths = snapshot.paths()
        # A compaction writes every column that its table has, and no table loses one.
        last = snapshot.last_versions_without() if not all(map(is_compacted, paths)) else {}
        older = {
            version: set(paths if version == snapshot.version else self.load(snapshot.table, version).paths())
            for version in set(last.values())
        }
        found: dict[tuple[str, ...], list[str]] = {}
        for path in paths:
            missing = tuple(name for name, version in last.items() if path in older[version])
            found.setdefault(missing, []).append(path)
        return found

    def dataset(
        self, snapshot: Snapshot, paths: Sequence[str] | None = None, coded: Collection[str] = ()
    ) -> pads.Dataset:
        """Return the visible files, or some of them, as a dataset of the declared schema, which reads nothing yet.

        Page checksums are verified. The columns that files of older schema versions lack are null. Columns of texts
        that are to be ``coded`` are dictionaries.
        """
        self._check_readable(snapshot)
        scan = pads.ParquetFragmentScanOptions(page_checksum_verification=True)
        parquet = pads.ParquetFileFormat(default_fragment_scan_options=scan, dictionary_columns=list(coded))
        sizes = {file.path: file.size for file in snapshot.files()}  # in the log: no object store is asked for them
        fragments = [
            parquet.make_fragment(join(self._root, snapshot.table, path), self._files, file_size=sizes[path])
            for path in (sizes if paths is None else paths)
        ]
        return pads.FileSystemDataset(fragments, _declared(snapshot.table, coded), parquet, self._files)

    def read(
        self,
        snapshot: Snapshot,
        columns: Sequence[str],
        *,
        where: pc.Expression | None = None,
        paths: Sequence[str] | None = None,
        coded: bool = False,
    ) -> pa.Table:
        """Read the visible rows in some columns and verify page checksums.

        Args:
            snapshot: The table.
            columns: Names of declared columns.
            where: What holds of the rows; columns that came after the table are null there in rows of older files.
            paths: The files to read, some of the visible ones; all of them by default.
            coded: Whether texts come as dictionaries, which may be other ones from chunk to chunk.

        Raises:
            InputError: A file is missing or damaged.

        """
        table = snapshot.table
        defaults = TABLES[table].defaults
        texts = [name for name in columns if coded and TABLES[table].schema.field(name).type == pa.string()]
        declared = _declared(table, texts)
        try:
            # A column that came after the table is null in the rows of older files, also once these are compacted.
            rows = self.dataset(snapshot, paths, texts).to_table(columns=list(columns), filter=where)
            for at, name in enumerate(columns):
                if defaults.get(name) is not None and rows.column(at).null_count:
                    filled = rows.column(at).fill_null(defaults[name])
                    rows = rows.set_column(at, declared.field(name), filled)
            return rows.cast(pa.schema([declared.field(name) for name in columns]))
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self.location}: table '{table}' is damaged ({first_line(error)})") from None

    def commit(
        self,
        table: str,
        attempt: Callable[[Snapshot], Commit | None],
        *,
        since: int | None = None,
        alone: bool = False,
    ) -> int:
        """Change which files are visible by one commit.

        delta-rs refuses a commit that shares an application id with a commit made since its snapshot; then ``attempt``
        is called again. Commits without common ids do not disturb each other, unless one is to be made ``alone``.

        Args:
            table: The table.
            attempt: Gets the latest version and returns what is still to be committed, None if nothing is.
            since: The version that the first attempt gets instead; what was committed after it refuses this commit
                too, if they share an id.
            alone: Whether any commit made since the snapshot refuses this one.

        Returns:
            The number of files made visible.

        Raises:
            OperationError: The log cannot be written.

        """
        with written(self.location):
            return self._commit(table, attempt, since=since, alone=alone)

    def _commit(
        self, table: str, attempt: Callable[[Snapshot], Commit | None], *, since: int | None, alone: bool
    ) -> int:
        for turn in range(_ATTEMPTS):
            snapshot = self.load(table, None if turn else since)
            commit = attempt(snapshot)
            if commit is None:
                self._make_durable(table)  # what is there may be another writer's, who has not been told yet
                return 0
            loaded = self._open(table, snapshot.version)
            try:
                said = {} if self._disk is None else self._disk.prepare_commit(table, commit)
                loaded.create_write_transaction(
                    commit.actions(),
                    mode="append",
                    schema=TABLES[table].schema,
                    commit_properties=CommitProperties(
                        app_transactions=commit.transactions,
                        custom_metadata=said,
                        **({"max_commit_retries": 0} if alone else {}),
                    ),
                    post_commithook_properties=self._checkpoints,
                )
            except CommitFailedError as error:
                refused = first_line(error)
                time.sleep(0.002 * min(turn, 50))
            except (DeltaError, OSError) as error:
                raise OperationError(f"{self.location}: cannot commit to '{table}' ({first_line(error)})") from None
            else:
                # Whoever opens the table is to read what is there, and not all that was replaced.
                self._make_durable(table, loaded, checkpoint=len(commit.replaced) >= CHECKPOINT_EVERY)
                return len(commit.files)
            self._tables.give_back(table, loaded)
        raise OperationError(f"{self.location}: cannot commit to '{table}' after {_ATTEMPTS} attempts ({refused})")

    def remove(self, table: str, paths: Collection[str]) -> int:
        """Take files out of view by one commit; they stay where they are. Return how many were visible.

        Raises:
            OperationError: The log cannot be written.

        """
        removed: list[str] = []

        def attempt(loaded: Snapshot) -> Commit | None:
            removed[:] = [path for path in loaded.paths() if path in paths]
            return Commit([], [], removed) if removed else None

        self.commit(table, attempt)
        return len(removed)

    def _make_durable(self, table: str, loaded: DeltaTable | None = None, *, checkpoint: bool = False) -> None:
        """Make every commit of a local table durable.

        Args:
            table: The table.
            loaded: The table after a commit of ours: put the log together in a checkpoint if it has become long.
            checkpoint: Whether to do so anyhow.

        Raises:
            OperationError: The disk refuses; the commit is visible, but nobody may be told so.

        """
        log = None if self._disk is None else self._disk.logs[table]
        try:
            if log is not None:
                log.sync()
            if loaded is not None and (checkpoint or (log is not None and log.needs_checkpoint())):
                loaded.update_incremental()  # a commit leaves it at the version before
                if log is not None:
                    log.sync()  # what came meanwhile is in the checkpoint too
                loaded.create_checkpoint()
                if log is not None:
                    log.sync_checkpoint()
        except (DeltaError, OSError) as error:
            raise OperationError(f"{self.location}: cannot sync '{table}' to the disk ({first_line(error)})") from None
        if loaded is not None:
            self._tables.give_back(table, loaded)


def _declared(table: str, coded: Collection[str]) -> pa.Schema:
    """The declared schema, with dictionaries in some columns of texts."""
    codes = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([field.with_type(codes) if field.name in coded else field for field in TABLES[table].schema])
