"""Encode Parquet files of the store, name them, and write each as a whole."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kvdrift.schema.columns import Table
from kvdrift.schema.errors import (
    DamagedStoreError,
    InputError,
    KvdriftError,
    OperationError,
    first_line,
    is_forbidden,
    nearest,
)
from kvdrift.schema.location import absolute, filesystem_of, is_local, join
from kvdrift.schema.locking import hold, sweep

ROW_GROUP_ROWS = 1 << 17  # readers of few rows skip whole row groups; threads share them


@dataclass(frozen=True)
class StoredFile:
    """A Parquet file in a table's folder, visible or not yet visible."""

    path: str  # relative to the table
    size: int  # bytes
    rows: int | None  # None if the log has no row count


def encode_parquet(
    rows: pa.Table, footer: Mapping[str, str] | None = None, *, row_group: int = ROW_GROUP_ROWS
) -> bytes:
    """Encode rows as one Parquet file: zstd, dictionaries, page checksums, and ``footer`` as key-value metadata.

    Each row group gets a dictionary of only its own texts. Of a dictionary column, Arrow would write all texts into
    every row group.
    """
    words = {field.name: field.type.value_type for field in rows.schema if pa.types.is_dictionary(field.type)}
    schema = pa.schema([field.with_type(words.get(field.name, field.type)) for field in rows.schema])
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, schema, compression="zstd", use_dictionary=True, write_page_checksum=True, store_schema=False
    ) as writer:
        for begin in range(0, max(1, rows.num_rows), row_group):
            writer.write_table(rows.slice(begin, row_group).cast(schema), row_group_size=row_group)
        if footer:
            writer.add_key_value_metadata(dict(footer))
    return bytes(sink.getvalue())


def content_digest(data: bytes | bytearray) -> str:
    """Return the first 16 hexadecimal digits of a content's SHA-256, which name a file that the store writes."""
    return hashlib.sha256(data).hexdigest()[:16]


def replace_file(target: Path, data: bytes) -> None:
    """Write a local file as a whole or not at all, under another name first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        with aside.open("xb") as sink:
            if not hold(sink.fileno()):
                replace_file(target, data)
                return
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())  # after a power cut, a commit's files must exist
            aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


class DataFiles:
    """The files of all tables under one local folder or object-store URL, by table and relative path."""

    def __init__(self, location: str | Path) -> None:
        """Keep a location, without accessing it."""
        self.location = absolute(location)
        self._local = is_local(self.location)
        self._files, self._root = filesystem_of(self.location)

    def footer(self, table: str, path: str) -> dict[bytes, bytes]:
        """Read the key-value metadata of one Parquet file."""
        try:
            metadata = pq.read_metadata(join(self._root, table, path), filesystem=self._files)
        except (pa.ArrowException, OSError) as error:
            raise DamagedStoreError(f"{self.location}: {table}/{path} is damaged ({first_line(error)})") from None
        return dict(metadata.metadata or {})

    def read_bytes(self, table: str, path: str) -> bytes:
        """Read the content of one file."""
        try:
            with self._files.open_input_file(join(self._root, table, path)) as source:
                return bytes(source.read())
        except OSError as error:
            raise InputError(f"{self.location}: {table}/{path} cannot be read ({first_line(error)})") from None

    def put(self, table: str, path: str, data: bytes) -> None:
        """Write a file as a whole or not at all.

        Raises:
            InputError: Writing is not permitted.
            OperationError: Writing failed for another reason.
        """
        target = join(self._root, table, path)
        try:
            if self._local:
                replace_file(Path(target), data)
            else:  # an object appears only when its upload is complete
                with self._files.open_output_stream(target) as sink:
                    sink.write(data)
        except OSError as error:
            raise self._not_written(error, table, path) from None

    def put_rows(
        self, table: str, rows: pa.Table, footer: Mapping[str, str] | None = None, *, row_group: int = ROW_GROUP_ROWS
    ) -> StoredFile:
        """Write rows as one Parquet file named by a digest of its content; no commit makes the file visible yet."""
        data = encode_parquet(rows, footer, row_group=row_group)
        file = StoredFile(f"{content_digest(data)}.parquet", len(data), rows.num_rows)
        self.put(table, file.path, data)
        return file

    def sizes(self, table: str, paths: Collection[str]) -> dict[str, int]:
        """Return the size in bytes of each file of ``paths`` that exists, by path, sorted by path."""
        ordered = sorted(paths)
        infos = self._files.get_file_info([join(self._root, table, path) for path in ordered])
        return {path: info.size for path, info in zip(ordered, infos, strict=True) if info.is_file}

    def sweep(self, table: str) -> None:
        """Delete the temporary files that killed writers have left in a local table."""
        if self._local:
            sweep(Path(self.location, table), ".*.part")

    def delete(self, table: str, paths: Iterable[str]) -> None:
        """Delete files, and local folders that become empty."""
        root = join(self._root, table)
        for path in paths:
            try:
                self._files.delete_file(join(root, path))
            except OSError as error:
                raise self._not_written(error, table, path) from None
            if self._local:
                with suppress(OSError):  # the folder has, or is about to have, other files
                    for parent in Path(path).parents:
                        Path(root, parent).rmdir()

    def _not_written(self, error: OSError, table: str, path: str) -> KvdriftError:
        if is_forbidden(error):
            reason = (error.strerror or first_line(error)).lower()
            return InputError(f"{self.location} cannot be written: {reason} for {table}/{path}")
        return OperationError(f"{self.location}: cannot write {table}/{path} ({first_line(error)})")


def conform(table: Table, rows: pa.Table, *, filled: bool = False) -> pa.Table:
    """Return rows, with columns in any order, in the declared schema of a table.

    A column of ``table.defaults`` may be missing. With ``filled``, nulls in such a column become its default.

    Raises:
        InputError: A column is unknown, missing, there twice, of another type, or null where it must not be.
    """
    names, declared, defaults = rows.column_names, table.columns, table.defaults
    for name in names:
        if name not in declared:
            raise InputError(f"{table.name}: unknown column '{name}'; {nearest(name, declared)}")
    by_name = dict(zip(names, rows.columns, strict=True))
    if len(by_name) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{table.name}: {names.count(twice)} columns are named '{twice}', must be one")
    columns = []
    for field in table.schema:
        if field.name not in by_name and field.name not in defaults:
            raise InputError(f"{table.name}: column '{field.name}' is missing")
        column = by_name.get(field.name)
        if column is None:
            column = pa.chunked_array([pa.repeat(pa.scalar(defaults[field.name], field.type), rows.num_rows)])
        if column.type != field.type:
            raise InputError(f"{table.name}: column '{field.name}' is {column.type}, must be {field.type}")
        if filled and column.null_count and defaults.get(field.name) is not None:
            column = column.fill_null(pa.scalar(defaults[field.name], field.type))
        if column.null_count and not field.nullable:
            raise InputError(f"{table.name}: column '{field.name}' is null in {column.null_count} row(s)")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=table.schema)
