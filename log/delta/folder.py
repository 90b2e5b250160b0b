"""One folder of Delta Lake tables: make them, read them at versions, and commit Parquet files that are written already.

This module knows paths, bytes and commits, but not the meaning of rows. ``kvdrift.log.units`` says which rows may be
appended, and ``kvdrift.log.store`` which rows are visible when.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError, DeltaError

from kvdrift.log.delta.commits import Commit, changes_rows, write_first_commit
from kvdrift.log.delta.durability import make_folder, side_by_side, sync
from kvdrift.log.delta.parquet_files import replace_file
from kvdrift.log.delta.table_log import CHECKPOINT_EVERY, empty_commit, prepare_commit
from kvdrift.log.delta.versions import (
    AT_ONCE,
    ATTEMPTS,
    VERSION_KEY,
    Snapshot,
    TableVersions,
    has_gap,
    listed,
    wait_after,
)
from kvdrift.schema.errors import DamagedStoreError, InputError, OperationError, first_line, is_disk_fault
from kvdrift.schema.location import join
from kvdrift.schema.locking import in_turn, written
from kvdrift.schema.tables import SCHEMA_VERSION, TABLES

_FORGETTING = {"delta.setTransactionRetentionDuration": "interval 1 days"}  # of ``commits.guards``
# Commits record how many rows a file has, and nothing of its columns, so that loading a log reads nothing else.
_ROW_COUNTS_ALONE = {"delta.dataSkippingNumIndexedCols": "0"}
_REMOTE_CHECKPOINTS = {"delta.checkpointInterval": "5"}  # versions; behind a URL each log file is two requests

_DAMAGED = (pa.ArrowException, OSError, ValueError)  # ValueError: nulls in a column that must have none

_Made = TypeVar("_Made")

READABLE_SINCE = "kvdrift.readable-since"  # application id: its version is the first whose files all still exist


class DeltaFolder(TableVersions):
    """The tables of ``kvdrift.schema.tables`` in a local folder or behind a URL: versions, rows and commits."""

    def __init__(self, location: str | Path) -> None:
        """Keep a location, without accessing it; raises as ``TableVersions`` does."""
        super().__init__(location)
        self._changing: dict[tuple[str, int], bool] = {}  # whether a version changed rows
        self._made: dict[tuple[str, Callable[[pa.Table], Any]], dict[str, Any]] = {}  # by path; see ``of_files``
        self._bounds: dict[tuple[str, str], dict[str, tuple[str, str] | None]] = {}  # by path, by table and column
        # Local checkpoints hold durable commits only, so this module writes them; behind a URL, delta-rs writes them.
        self._checkpoints = PostCommitHookProperties(create_checkpoint=not self._local)

    def _check_readable(self, snapshot: Snapshot) -> None:
        if self._newest_known(snapshot.table) == snapshot.version:
            return
        since = self.load(snapshot.table).transaction_version(READABLE_SINCE) or 0
        if snapshot.version < since:
            raise InputError(
                f"{self.location}: version {snapshot.version} of '{snapshot.table}' cannot be read any more: compact "
                f"--vacuum has deleted its files; give {since} or later"
            )

    def count_rows(self, snapshot: Snapshot) -> int:
        """Return the number of visible rows, from the log; footers are read only if the log lacks counts."""
        if snapshot.row_count is not None:
            return snapshot.row_count
        return int(self.dataset(snapshot).count_rows())

    def data_version(self, snapshot: Snapshot) -> int:
        """Return the last version, up to the snapshot's, that changed rows; log files are read from the newest back.

        A commit that only replaces files by others with the same rows changes no row.
        """
        version = snapshot.version
        while version > 0 and not self._changes_rows(snapshot.table, version):
            version -= 1
        return version

    def _changes_rows(self, table: str, version: int) -> bool:
        known = self._changing.get((table, version))
        if known is None:
            lines = self.log_lines(table, version)
            try:
                known = not lines or changes_rows(lines)
            except ValueError:
                known = True
            self._changing[table, version] = known
        return known

    def log_lines(self, table: str, version: int) -> list[bytes]:
        """Return the lines of a version's log file; none if a clean-up has deleted it, or it cannot be read."""
        try:
            with self._files.open_input_file(join(self._root, table, "_delta_log", f"{version:020d}.json")) as file:
                content: bytes = file.read()
        except OSError:
            return []
        return content.splitlines()

    def dataset(
        self, snapshot: Snapshot, paths: Sequence[str] | None = None, coded: Collection[str] = ()
    ) -> pads.Dataset:
        """Return the visible files, or some of them, as a dataset of the declared schema; nothing is read yet.

        Page checksums are verified. Text columns in ``coded`` are dictionaries.
        """
        self._check_readable(snapshot)
        scan = pads.ParquetFragmentScanOptions(page_checksum_verification=True)
        parquet = pads.ParquetFileFormat(default_fragment_scan_options=scan, dictionary_columns=list(coded))
        sizes = {file.path: file.size for file in snapshot.files()}  # from the log, which saves a request for each file
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
        compared: Sequence[str] = (),
    ) -> pa.Table:
        """Return the visible rows in some columns, with page checksums verified.

        ``paths`` are some of the visible files. With ``coded``, texts are dictionaries, which may differ between
        chunks. The columns ``compared`` occur in ``where``. They are coded after the read, since Arrow skips no
        part of a file by the bounds of a column that is read as dictionaries.

        Raises:
            DamagedStoreError: A file is missing or damaged.
        """
        table = snapshot.table
        texts = [name for name in columns if coded and TABLES[table].schema.field(name).type == pa.string()]
        try:
            rows = self._scanned(snapshot, paths, columns, where, texts, compared)
            return _cast(rows, _declared(table, texts))
        except _DAMAGED as error:
            raise self._is_damaged(table, paths, error) from None

    def files_with(self, snapshot: Snapshot, column: str, values: Sequence[str], paths: Sequence[str]) -> list[str]:
        """Return those of ``paths`` that may hold some of the sorted ``values`` in a text column, as their footers say.

        Bounds are kept while a file is visible, so that looking for other values in the same files costs nothing.
        """
        table, kept = snapshot.table, self._bounds.get((snapshot.table, column), {})
        if new := [path for path in paths if path not in kept]:
            bounds_of_new = side_by_side(lambda path: self.bounds_of(table, path, column), new)
            known = kept | dict(zip(new, bounds_of_new, strict=True))
            kept = self._bounds[table, column] = {path: known[path] for path in snapshot.paths() if path in known}

        def may_have(path: str) -> bool:
            bounds = kept[path]
            return bounds is None or bisect_left(values, bounds[0]) < bisect_right(values, bounds[1])

        return [path for path in paths if may_have(path)]

    def bounds_of(self, table: str, path: str, column: str) -> tuple[str, str] | None:
        """Return the least and the greatest text of a file's column; None if the footer does not say, or is damaged."""
        try:
            footer = pq.read_metadata(join(self._root, table, path), filesystem=self._files)
            at = footer.schema.names.index(column)
            parts = [footer.row_group(number).column(at).statistics for number in range(footer.num_row_groups)]
        except (*_DAMAGED, ValueError):
            return None
        if not parts or not all(part is not None and isinstance(part.min, str) for part in parts):
            return None
        return min(part.min for part in parts), max(part.max for part in parts)

    def _scanned(
        self, snapshot: Snapshot, paths: Sequence[str] | None, columns: Sequence[str], where: pc.Expression | None,
        texts: Sequence[str], compared: Sequence[str],
    ) -> pa.Table:  # fmt: skip
        """Read rows with the columns ``texts`` as dictionaries.

        Columns that are also in ``compared`` become dictionaries after the read, unless another program has written
        them in a type that Arrow can compare as dictionaries only.
        """
        plain = {*texts} & {*compared}
        try:
            rows = self.dataset(snapshot, paths, {*texts} - plain).to_table(columns=list(columns), filter=where)
        except pa.ArrowNotImplementedError:  # another program's string views, which Arrow compares as dictionaries only
            return self.dataset(snapshot, paths, texts).to_table(columns=list(columns), filter=where)
        for name in plain:
            rows = rows.set_column(rows.column_names.index(name), name, rows[name].dictionary_encode())
        return rows

    def of_files(
        self,
        snapshot: Snapshot,
        columns: Sequence[str],
        make: Callable[[pa.Table], _Made],
        paths: Sequence[str] | None = None,
    ) -> dict[str, _Made]:
        """Return the result of ``make`` for each visible file's rows, by path; texts are dictionaries.

        A file never changes, so its result is kept until a later call reads new files and does not ask for this one.
        Reading a growing table again therefore costs only the new files. Every call with the same function must give
        the same columns.
        """
        table, kept = snapshot.table, self._made.get((snapshot.table, make), {})
        wanted = snapshot.paths() if paths is None else paths
        if new := [path for path in wanted if path not in kept]:
            kept = kept | {path: make(rows) for path, rows in self._each_file(snapshot, columns, new).items()}
        made = {path: kept[path] for path in wanted}
        if new:  # a call for an older version must not drop the results of newer files
            self._made[table, make] = made
        return made

    def _each_file(self, snapshot: Snapshot, columns: Sequence[str], paths: Sequence[str]) -> dict[str, pa.Table]:
        """Read several files at once, with texts coded, and return the rows of each by path."""
        texts = [name for name in columns if TABLES[snapshot.table].schema.field(name).type == pa.string()]
        # Threads would cost as much as reading a small table.
        scanner = self.dataset(snapshot, paths, texts).scanner(columns=list(columns), use_threads=False)
        batches = {path: list[pa.RecordBatch]() for path in paths}
        beginning = len(join(self._root, snapshot.table, ""))
        declared = _declared(snapshot.table, texts)
        try:
            for tagged in scanner.scan_batches():
                batches[tagged.fragment.path[beginning:]].append(tagged.record_batch)
            tables = {
                path: pa.Table.from_batches(file_batches, scanner.projected_schema)
                for path, file_batches in batches.items()
            }
            return {path: _cast(rows, declared).unify_dictionaries() for path, rows in tables.items()}
        except _DAMAGED as error:
            raise self._is_damaged(snapshot.table, paths, error) from None

    def _is_damaged(self, table: str, paths: Sequence[str] | None, error: Exception) -> DamagedStoreError:
        damaged = f"{table}/{paths[0]}" if paths is not None and len(paths) == 1 else f"table '{table}'"
        return DamagedStoreError(f"{self.location}: {damaged} is damaged ({first_line(error)})")

    def made_of_file(self, table: str, path: str, rows: pa.Table, make: Callable[[pa.Table], _Made]) -> None:
        """Keep the result of ``make`` for a file about to become visible, so that it need not be read."""
        self._made.setdefault((table, make), {})[path] = make(rows)

    def read_file(self, table: str, path: str) -> pa.Table:
        """Return the rows of a file, visible or not, in the columns that the file has."""
        data = self.read_bytes(table, path)
        try:
            with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as parquet:
                return parquet.read()
        except _DAMAGED as error:
            raise self._is_damaged(table, [path], error) from None

    def parts(self, snapshot: Snapshot, path: str, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of one visible file in some columns, one part at a time; raises as ``read`` does.

        A file of any size then takes little memory.
        """
        table = snapshot.table
        try:
            scan = self.dataset(snapshot, [path]).scanner(
                columns=list(columns), use_threads=False, batch_readahead=1, fragment_readahead=1
            )
            for batch in scan.to_batches():
                yield _cast(pa.Table.from_batches([batch]), _declared(table, ()))
        except _DAMAGED as error:
            raise self._is_damaged(table, [path], error) from None

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
        again. Commits without common ids do not disturb each other, but a commit made ``alone`` is refused if any
        commit was made since that version.

        Raises:
            OperationError: Writing failed, or every attempt was refused.
        """
        with written(self.location):
            return self._commit(table, attempt, alone=alone)

    def _commit(self, table: str, attempt: Callable[[Snapshot], Commit | None], *, alone: bool) -> int:
        for turn in range(ATTEMPTS):
            with self.turn(table):
                begun = time.monotonic()
                commit, loaded, refused = self._try(table, attempt, alone=alone)
                took = time.monotonic() - begun
            if commit is None:
                self.make_durable(table)  # another writer may have made the commit, and not yet have synced it
                return 0
            if refused is None:
                # A checkpoint spares readers the entries of replaced files.
                self.make_durable(table, loaded, checkpoint=len(commit.replaced) >= CHECKPOINT_EVERY)
                return len(commit.files)
            wait_after(turn, took)
        raise OperationError(f"{self.location}: cannot commit to '{table}' after {ATTEMPTS} attempts ({refused})")

    def turn(self, table: str) -> AbstractContextManager[None]:
        """Return a context manager that makes writers of a local table take turns; behind a URL it does nothing."""
        if self._logs is None:
            return nullcontext()
        log = self._logs[table]
        return in_turn(log.folder, log.newest)

    def _try(
        self, table: str, attempt: Callable[[Snapshot], Commit | None], *, alone: bool
    ) -> tuple[Commit | None, DeltaTable | None, str | None]:
        """Try to make one commit; return it, the table after it and the reason of a refusal, each None if missing."""
        snapshot = self.load(table)
        commit = attempt(snapshot)
        if commit is None:
            return None, None, None
        loaded = self._open(table, snapshot.version)
        try:
            logs = self._logs
            metadata = {} if logs is None else prepare_commit(logs, table, commit, snapshot.version, snapshot.id)
            loaded.create_write_transaction(
                commit.actions(),
                mode="append",
                schema=TABLES[table].schema,
                commit_properties=CommitProperties(
                    app_transactions=commit.transactions,
                    custom_metadata=metadata,
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
        """Tell whether a table is as a commit would leave it, whichever writer did so."""
        now = self.load(table)
        paths = set(now.paths())
        if commit.files or commit.replaced:
            return {file.path for file in commit.files} <= paths and paths.isdisjoint(commit.replaced)
        return all(now.transaction_version(guard.app_id) == guard.version for guard in commit.transactions)

    def remove(self, table: str, paths: Collection[str]) -> int:
        """Hide files by one commit without deleting them; return how many were visible."""
        removed: list[str] = []

        def attempt(loaded: Snapshot) -> Commit | None:
            removed[:] = [path for path in loaded.paths() if path in paths]
            return Commit([], [], removed) if removed else None

        self.commit(table, attempt)
        return len(removed)

    def rewrite(
        self, table: str, change: Callable[[pa.Table], pa.Table], candidates: Callable[[Snapshot], Collection[str]]
    ) -> int:
        """Replace files by files with changed rows, by one commit; return how many were replaced.

        ``candidates`` returns the paths of the files of a version whose rows may change. ``change`` returns the same
        object for rows that stay.
        """
        replaced: list[str] = []

        def attempt(loaded: Snapshot) -> Commit | None:
            files, replaced[:] = [], []
            for path in candidates(loaded):
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
        if self._logs is None:
            raise InputError(f"{self.location}: the history of a table can be deleted on a local disk only")
        log, root = self._logs[table], Path(self.location, table)
        replace_file(log.file(log.newest() + 1), empty_commit())  # a commit may name a forgotten document
        with self._opened(table) as loaded:
            self.make_durable(table, loaded, checkpoint=True)
        log.delete_before(log.checkpointed())
        visible = {root / path for path in self.load(table).paths()}
        for path in sorted(root.rglob("*")):
            if path.is_file() and path not in visible and log.folder not in path.parents:
                path.unlink()
                sync(path.parent)

    def make_durable(self, table: str, loaded: DeltaTable | None = None, *, checkpoint: bool = False) -> None:
        """Make every commit of a local table durable, also the commits of other writers.

        ``loaded`` is the table after a commit of this process: if its log has become long, or ``checkpoint`` is given,
        a checkpoint is written.
        """
        log = None if self._logs is None else self._logs[table]
        try:
            if log is not None:
                log.sync()
            if loaded is not None and (checkpoint or (log is not None and log.needs_checkpoint())):
                listed(loaded.update_incremental)  # a commit leaves it at the version before
                if log is not None:
                    log.sync()  # later commits of other writers are in the checkpoint too
                listed(loaded.create_checkpoint)
                if log is not None:
                    log.sync_checkpoint()
        except (DeltaError, OSError) as error:
            raise OperationError(f"{self.location}: cannot sync '{table}' to the disk ({first_line(error)})") from None
        if loaded is not None:
            self._tables.give_back(table, loaded)


def _cast(rows: pa.Table, declared: pa.Schema) -> pa.Table:
    """Return rows in the declared types: other programs write texts and lists in several Arrow types."""
    return rows.cast(pa.schema([declared.field(name) for name in rows.column_names]))


def _declared(table: str, coded: Collection[str]) -> pa.Schema:
    """Return the declared schema, with dictionaries for the text columns in ``coded``."""
    codes = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([field.with_type(codes) if field.name in coded else field for field in TABLES[table].schema])
