"""One folder of Delta Lake tables: make tables, and commit Parquet files that are in place.

This module knows paths, bytes and commits, but not the meaning of rows. ``kvdrift.log.units`` says which rows may be
appended, and ``kvdrift.log.store`` which rows are visible when.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError, DeltaError

from kvdrift.log.delta.commits import Commit, write_first_commit
from kvdrift.log.delta.durability import make_folder, sync
from kvdrift.log.delta.parquet_files import replace_file
from kvdrift.log.delta.reading import TableReading
from kvdrift.log.delta.retries import AT_ONCE, ATTEMPTS, has_gap, listed, wait_after
from kvdrift.log.delta.snapshot import Snapshot
from kvdrift.log.delta.table_log import CHECKPOINT_EVERY, empty_commit
from kvdrift.log.delta.versions import VERSION_KEY
from kvdrift.schema.errors import InputError, OperationError, first_line, is_disk_fault
from kvdrift.schema.location import join
from kvdrift.schema.locking import in_turn, written
from kvdrift.schema.tables import SCHEMA_VERSION, TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_FORGETTING = {"delta.setTransactionRetentionDuration": "interval 1 days"}  # of ``commits.guards``
# Commits say how many rows a file has, and nothing of its columns: who loads a log then looks for nothing more.
_ROW_COUNTS_ALONE = {"delta.dataSkippingNumIndexedCols": "0"}
_REMOTE_CHECKPOINTS = {"delta.checkpointInterval": "5"}  # versions; behind a URL each log file is two requests


class DeltaFolder(TableReading):
    """The tables of ``kvdrift.schema.tables`` in a local folder or behind a URL: versions, rows and commits."""

    def __init__(self, location: str | Path) -> None:
        """Keep a location, without accessing it."""
        super().__init__(location)
        # Ours are made of durable files only; those of delta-rs, behind a URL, come with the commit.
        self._checkpoints = PostCommitHookProperties(create_checkpoint=not self._local)

    def create(self, table: str) -> None:
        """Make a table if it is missing."""
        uri = join(self.location, table)
        properties = {
            VERSION_KEY: str(SCHEMA_VERSION),
            "delta.appendOnly": "true",
            # Results cite table versions; by default delta-rs would forget those older than 30 days.
            "delta.enableExpiredLogCleanup": "false",
            **_FORGETTING,
            **_ROW_COUNTS_ALONE,
        }
        try:
            if self._local:
                make_folder(Path(uri))
            if self.exists(table):
                self.load(table)  # which refuses other schema versions
                return
            if self._local:
                write_first_commit(table, Path(uri), properties)
            else:
                DeltaTable.create(
                    uri,
                    schema=TABLES[table].schema,
                    name=table,
                    description=TABLES[table].row,
                    configuration=properties | _REMOTE_CHECKPOINTS,
                    raise_if_key_not_exists=False,  # the version key is ours
                    # With retries, processes that make a table at once would make it again, one version up.
                    commit_properties=CommitProperties(max_commit_retries=0),
                )
            self.make_durable(table)
        except (DeltaError, OSError) as error:
            if is_disk_fault(error) or not self.exists(table):
                kind = OperationError if is_disk_fault(error) else InputError
                raise kind(f"{self.location}: cannot make a store here ({first_line(error)})") from None
            # another process made it first

    def commit(self, table: str, attempt: Callable[[Snapshot], Commit | None], *, alone: bool = False) -> int:
        """Change by one commit which files are visible; return how many files became visible.

        ``attempt`` gets the latest version and returns the commit that is still to be made; None if nothing is left. If
        a commit since that version shares an application id, delta-rs refuses the commit, and ``attempt`` is called
        again. Commits without common ids do not disturb each other, unless a commit is made ``alone``.
        """
        with written(self.location):
            return self._commit(table, attempt, alone=alone)

    def _commit(self, table: str, attempt: Callable[[Snapshot], Commit | None], *, alone: bool) -> int:
        for turn in range(ATTEMPTS):
            with self._turn(table):
                begun = time.monotonic()
                commit, loaded, refused = self._try(table, attempt, alone=alone)
                took = time.monotonic() - begun
            if commit is None:
                self.make_durable(table)  # what is there may be another writer's, who has not been told yet
                return 0
            if refused is None:
                # Whoever opens the table is to read what is there, and not all that was replaced.
                self.make_durable(table, loaded, checkpoint=len(commit.replaced) >= CHECKPOINT_EVERY)
                return len(commit.files)
            wait_after(turn, took)
        raise OperationError(f"{self.location}: cannot commit to '{table}' after {ATTEMPTS} attempts ({refused})")

    def _turn(self, table: str) -> AbstractContextManager[None]:
        """Return a block in which other writers of this machine, or of a file system with locks, do not commit."""
        if self._disk is None:
            return nullcontext()
        log = self._disk.logs[table]
        return in_turn(log.folder, log.newest)

    def _try(
        self, table: str, attempt: Callable[[Snapshot], Commit | None], *, alone: bool
    ) -> tuple[Commit | None, DeltaTable | None, str | None]:
        """Try to make one commit; return what was to be committed, the table, and why it was refused."""
        snapshot = self.load(table)
        commit = attempt(snapshot)
        if commit is None:
            return None, None, None
        loaded = self._open(table, snapshot.version)
        try:
            disk = self._disk
            said = {} if disk is None else disk.prepare_commit(table, commit, snapshot.version, snapshot.id)
            loaded.create_write_transaction(
                commit.actions(),
                mode="append",
                schema=TABLES[table].schema,
                commit_properties=CommitProperties(
                    app_transactions=commit.transactions,
                    custom_metadata=said,
                    max_commit_retries=0 if alone else AT_ONCE,
                ),
                post_commithook_properties=self._checkpoints,
            )
        except CommitFailedError as error:
            self._tables.give_back(table, loaded)
            return commit, None, first_line(error)
        except (DeltaError, OSError) as error:
            if not has_gap(error):
                raise OperationError(f"{self.location}: cannot commit to '{table}' ({first_line(error)})") from None
            if not self._is_made(table, commit):  # delta-rs lists the log before a commit, and after it
                return commit, None, first_line(error)
        return commit, loaded, None

    def _is_made(self, table: str, commit: Commit) -> bool:
        """Tell whether a table is as a commit would leave it, whoever made the change."""
        now = self.load(table)
        paths = set(now.paths())
        if commit.files or commit.replaced:
            return {file.path for file in commit.files} <= paths and paths.isdisjoint(commit.replaced)
        return all(now.transaction_version(one.app_id) == one.version for one in commit.transactions)

    def remove(self, table: str, paths: Collection[str]) -> int:
        """Hide files by one commit without deleting them; return how many were visible."""
        removed: list[str] = []

        def attempt(loaded: Snapshot) -> Commit | None:
            removed[:] = [path for path in loaded.paths() if path in paths]
            return Commit([], [], removed) if removed else None

        self.commit(table, attempt)
        return len(removed)

    def rewrite(self, table: str, change: Callable[[pa.Table], pa.Table], candidates: Collection[str]) -> int:
        """Replace files by files with changed rows, by one commit; return how many were replaced.

        ``candidates`` are the paths of the files whose rows may change. ``change`` returns the same object for rows
        that stay.
        """
        replaced: list[str] = []

        def attempt(loaded: Snapshot) -> Commit | None:
            files, replaced[:] = [], []
            for path in [path for path in loaded.paths() if path in candidates]:
                rows = self.read(loaded, TABLES[table].columns, paths=[path])
                changed = change(rows)
                if changed is not rows:
                    replaced.append(path)
                    files += [self.put_rows(table, changed)] if changed.num_rows else []
            return Commit(files, [], replaced) if replaced else None

        self.commit(table, attempt, alone=True)
        return len(replaced)

    def forget_history(self, table: str) -> None:
        """Make the present version of a local table the first, and delete all other files of it, for good.

        No other process may write to the store meanwhile. After a kill, a second call does the rest.
        """
        if self._disk is None:
            raise InputError(f"{self.location}: the history of a table is deleted on a local disk only")
        log, root = self._disk.logs[table], Path(self.location, table)
        replace_file(log.file(log.newest() + 1), empty_commit())  # a commit may name what is to be forgotten
        with self._opened(table) as loaded:
            self.make_durable(table, loaded, checkpoint=True)
        log.delete_before(log.checkpointed())
        visible = {root / path for path in self.load(table).paths()}
        for path in sorted(root.rglob("*")):
            if path.is_file() and path not in visible and log.folder not in path.parents:
                path.unlink()
                sync(path.parent)

    def make_durable(self, table: str, loaded: DeltaTable | None = None, *, checkpoint: bool = False) -> None:
        """Make every commit of a local table durable, whoever made it.

        ``loaded`` is the table after a commit of this process: if its log has become long, or ``checkpoint`` is given,
        a checkpoint is written.
        """
        log = None if self._disk is None else self._disk.logs[table]
        try:
            if log is not None:
                log.sync()
            if loaded is not None and (checkpoint or (log is not None and log.needs_checkpoint())):
                listed(loaded.update_incremental)  # a commit leaves it at the version before
                if log is not None:
                    log.sync()  # what came meanwhile is in the checkpoint too
                listed(loaded.create_checkpoint)
                if log is not None:
                    log.sync_checkpoint()
        except (DeltaError, OSError) as error:
            raise OperationError(f"{self.location}: cannot sync '{table}' to the disk ({first_line(error)})") from None
        if loaded is not None:
            self._tables.give_back(table, loaded)
