"""One folder of Delta Lake tables: loading a version, putting Parquet files in place, committing them.

This module knows paths, bytes and commits, and nothing of what a row means: that is ``schema.appends`` (what may be
appended) and ``schema.store`` (what is visible when).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from schema.errors import InputError, OperationError
from schema.tables import SCHEMA_VERSION, TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_VERSION_KEY = "kvdrift.schema_version"

# A lost race is always another writer's progress, so this bound is met only when the log cannot be written at all.
_ATTEMPTS = 200


@dataclass(frozen=True)
class StoredFile:
    """A Parquet file that lies in a table's folder and may not be visible yet."""

    path: str  # relative to the table
    size: int  # bytes
    rows: int


def digest(*parts: object) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of ``parts`` as a JSON list: equal only for equal parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def encode_parquet(rows: pa.Table, footer: Mapping[str, str] | None = None) -> bytes:
    """``rows`` as one Parquet file: zstd, dictionaries, page checksums, ``footer`` as its key-value metadata."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, rows.schema, compression="zstd", use_dictionary=True, write_page_checksum=True, store_schema=False
    ) as writer:
        writer.write_table(rows)
        if footer:
            writer.add_key_value_metadata(dict(footer))
    return bytes(sink.getvalue())


def first_line(error: BaseException) -> str:
    """What an error says, on one line: libraries add causes and hints below."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class DeltaFolder:
    """The tables of ``schema.tables`` under one local folder or object-store URL. Holds no state but its place."""

    def __init__(self, location: str | Path) -> None:
        text = str(location)
        if text.startswith("file://"):
            text = unquote(urlsplit(text).path)
        self._local = "://" not in text
        if self._local:
            self.location = str(Path(text).expanduser().absolute())
            if unquote(self.location) != self.location:
                raise InputError(f"{self.location}: a store's path cannot hold a '%' before two hexadecimal digits")
            self._files, self._root = pafs.LocalFileSystem(), self.location
        else:
            self.location = text.rstrip("/")
            try:
                self._files, self._root = pafs.FileSystem.from_uri(self.location)
            except (pa.ArrowException, OSError) as error:
                raise InputError(f"{self.location}: not a store URL ({first_line(error)})") from None

    def create(self, table: str) -> None:
        """Make ``table`` where it is missing; InputError where it cannot be made."""
        uri = f"{self.location}/{table}"
        try:
            if self._local:
                Path(uri).mkdir(parents=True, exist_ok=True)
            if DeltaTable.is_deltatable(uri):
                return
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
                },
                raise_if_key_not_exists=False,  # the version key is ours
                # With retries, processes that make a table at once would make it again, one version up.
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except (DeltaError, OSError) as error:
            if self._exists(uri):  # another process made it first
                return
            raise InputError(f"{self.location}: cannot make a store here ({first_line(error)})") from None

    @staticmethod
    def _exists(uri: str) -> bool:
        try:
            return bool(DeltaTable.is_deltatable(uri))
        except (DeltaError, OSError):
            return False

    def load(self, table: str, version: int | None = None) -> DeltaTable:
        """``table`` at ``version`` (the latest by default); InputError where there is none that can be read."""
        uri = f"{self.location}/{table}"
        if self._local and Path(self.location).is_file():
            raise InputError(f"{self.location} is a file, not a store; give the store's folder")
        # delta-rs makes the folder of a table that it is asked for, so ask the file system first.
        if self._local and not Path(uri, "_delta_log").is_dir():
            raise InputError(f"{self.location} is not a kvdrift store: it has no '{table}' table")
        try:
            loaded = DeltaTable(uri)
            latest = loaded.version()
            if version is not None and not 0 <= version <= latest:
                raise InputError(f"{self.location}: '{table}' has no version {version}; its versions are 0..{latest}")
            if version is not None and version != latest:
                loaded.load_as_version(version)
            configuration = loaded.metadata().configuration
        except TableNotFoundError:
            raise InputError(f"{self.location} is not a kvdrift store: it has no '{table}' table") from None
        except (DeltaError, OSError, ValueError) as error:
            raise InputError(f"{self.location}: table '{table}' is damaged ({first_line(error)})") from None
        self._check_schema_version(table, configuration.get(_VERSION_KEY))
        return loaded

    def _check_schema_version(self, table: str, found: str | None) -> None:
        if found is None or not found.isdecimal():
            raise InputError(f"{self.location}: table '{table}' was not made by kvdrift (no {_VERSION_KEY})")
        if int(found) > SCHEMA_VERSION:
            raise InputError(
                f"{self.location}: table '{table}' has schema version {found}, this kvdrift reads up to "
                f"{SCHEMA_VERSION}; update kvdrift"
            )

    @staticmethod
    def paths(loaded: DeltaTable) -> list[str]:
        """Relative paths of the files that are visible, sorted."""
        return sorted(pa.table(loaded.get_add_actions()).column("path").to_pylist())

    @staticmethod
    def count_rows(loaded: DeltaTable) -> int:
        """Rows that are visible, counted from the log alone."""
        return sum(pa.table(loaded.get_add_actions()).column("num_records").to_pylist())

    def read(self, table: str, loaded: DeltaTable, columns: Sequence[str]) -> pa.Table:
        """The visible rows in ``columns``, page checksums verified; InputError where a file is missing or damaged."""
        declared = TABLES[table].schema
        scan = pads.ParquetFragmentScanOptions(page_checksum_verification=True)
        try:
            # A column that a later schema version declares is absent from older files: the dataset gives null there,
            # and this is the place to fill in its declared default. Version 1 has none.
            rows = pads.FileSystemDataset.from_paths(
                [f"{self._root}/{table}/{path}" for path in self.paths(loaded)],
                schema=declared,
                format=pads.ParquetFileFormat(default_fragment_scan_options=scan),
                filesystem=self._files,
            ).to_table(columns=list(columns))
            return rows.cast(pa.schema([declared.field(name) for name in columns]))
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self.location}: table '{table}' is damaged ({first_line(error)})") from None

    def footer(self, table: str, path: str) -> dict[bytes, bytes]:
        """The key-value metadata of one Parquet file; InputError where it is missing or damaged."""
        try:
            metadata = pq.read_metadata(f"{self._root}/{table}/{path}", filesystem=self._files).metadata
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self.location}: {table}/{path} is damaged ({first_line(error)})") from None
        return dict(metadata or {})

    def put(self, table: str, path: str, data: bytes) -> None:
        """Put a file in place as a whole or not at all; InputError without permission, else OperationError."""
        target = f"{self._root}/{table}/{path}"
        try:
            if self._local:
                _replace(Path(target), data)
            else:  # an object appears when its upload is complete
                with self._files.open_output_stream(target) as sink:
                    sink.write(data)
        except PermissionError:
            raise InputError(f"{self.location} cannot be written: permission denied for {table}/{path}") from None
        except OSError as error:
            raise OperationError(f"{self.location}: cannot write {table}/{path} ({first_line(error)})") from None

    def commit(self, table: str, attempt: Callable[[DeltaTable], Commit | None]) -> int:
        """Make files visible by one commit; returns how many.

        ``attempt`` sees the latest version and says what is still to be committed. delta-rs refuses a commit whose
        application ids meet those of a commit that came in between; then ``attempt`` is asked again. Commits without
        common ids go one after the other. OperationError where the log cannot be written.
        """
        for turn in range(_ATTEMPTS):
            loaded = self.load(table)
            commit = attempt(loaded)
            if commit is None or not commit.files:
                return 0
            try:
                loaded.create_write_transaction(
                    [_add(file) for file in commit.files],
                    mode="append",
                    schema=TABLES[table].schema,
                    commit_properties=CommitProperties(app_transactions=commit.transactions),
                )
            except CommitFailedError as error:
                refused = first_line(error)
                time.sleep(0.002 * min(turn, 50))
            except (DeltaError, OSError) as error:
                raise OperationError(f"{self.location}: cannot commit to '{table}' ({first_line(error)})") from None
            else:
                return len(commit.files)
        raise OperationError(f"{self.location}: cannot commit to '{table}' after {_ATTEMPTS} attempts ({refused})")


@dataclass(frozen=True)
class Commit:
    """What one commit makes visible, and the application transactions that guard it."""

    files: Sequence[StoredFile]
    transactions: list[Transaction]


def transactions(versions: Iterable[tuple[str, int]]) -> list[Transaction]:
    """Application transactions from (application id, version) pairs; of equal ids the last one counts."""
    return [Transaction(app_id, version) for app_id, version in dict(versions).items()]


def _add(file: StoredFile) -> AddAction:
    now = int(time.time() * 1000)
    return AddAction(file.path, file.size, {}, now, data_change=True, stats=json.dumps({"numRecords": file.rows}))


def _replace(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        with aside.open("xb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())  # no commit may outlive, in a power cut, the file that it names
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
