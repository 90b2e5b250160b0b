"""Formats of event logs, recognized by content: Parquet, Arrow IPC files and streams, CSV and JSON Lines.

CSV, JSON Lines and Arrow streams may be compressed with gzip or zstd. A file is read batch by batch, and only some of
its columns; a batch is limited to fit the memory, since even a small file can claim any number of rows.

Values of text have the types of table ``events``. A number of an integer column may be written as 7.0, a flag as true,
false, 1 or 0, and an empty field of CSV is null. Any other text is an error, which names the line.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from kvdrift.ingestion.inputs import Place
from kvdrift.ingestion.records import shown
from kvdrift.schema.errors import InputError, first_line, reading
from kvdrift.schema.tables import EVENTS, GROUP_KEY

SLICE_ROWS = 1 << 18  # rows that are converted together
MOST_ROWS = 1 << 23  # in a group, or in a file of one portion; a row takes 100 bytes while it is checked
MOST_BYTES = 1 << 30  # most bytes of a column of a Parquet row group, or of an IPC batch
BLOCK_BYTES: Final = 1 << 22  # of text that is parsed at once; a line is at most as long

_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # by the first bytes
_BINARY_NAMES: Final = (".parquet", ".arrow", ".arrows", ".ipc", ".feather")
_TEXT_NAMES: Final = (".csv", ".jsonl", ".ndjson", ".json")
_MEASURED: Final = ("x_token", "y_token", "delta", "f")  # a file with none of these columns is no event log

IGNORED: Final = ("kl", "kl_own", "top1")  # columns of events that are not taken from other generators
_OWN: Final = ("unit", *IGNORED)
LATER: Final = {
    name: value for name, value in EVENTS.defaults.items() if name not in _OWN
}  # columns that a log may lack

_FIELDS: Final = [field for field in EVENTS.schema if field.name not in _OWN]
_WHOLE: Final = {field.name for field in _FIELDS if pa.types.is_integer(field.type)}
_NUMBERS: Final = _WHOLE | {field.name for field in _FIELDS if pa.types.is_floating(field.type)}
_PARSED: Final = {field.name: pa.float64() if field.name in _NUMBERS else field.type for field in _FIELDS}
_TYPES: Final = _PARSED | dict.fromkeys(_WHOLE, pa.int64())  # of columns of text, once they are checked
_TRUE, _FALSE = ["true", "True", "TRUE", "1"], ["false", "False", "FALSE", "0"]  # flags of CSV
_LARGEST: Final = 2.0**62  # larger numbers become this number, which fits no column, since int64 would overflow


class NoEventsError(InputError):
    """A file is no event log; if nobody named the file, ``ingest`` passes over it."""


class LogReader(ABC):
    """One file of events.

    Attributes:
        file: The file.
        schema: Its columns; in CSV and JSON Lines they have types that fit table ``events``, null for unknown columns.
        rows: Number of rows.
        ends: Whether the format shows that the file is complete; if not, a file that is still growing looks complete.
    """

    kind: str
    ends = True
    schema: pa.Schema
    rows: int

    def __init__(self, file: Place) -> None:
        self.file = file

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield some columns of all rows, in the file's order."""

    def reading(self) -> AbstractContextManager[None]:
        """Return a context manager that turns exceptions of the format's library into an error about this file."""
        return reading(f"{self.file.location}: cannot be read as {self.kind}", pa.ArrowException)


class _Parquet(LogReader):
    kind = "Parquet"

    def __init__(self, file: Place) -> None:
        super().__init__(file)
        with self.reading(), file.open() as source, pq.ParquetFile(source) as parquet:
            self.schema, self.rows = parquet.schema_arrow, int(parquet.metadata.num_rows)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        coded = [name for name in columns if name in GROUP_KEY]
        with (
            self.file.open() as source,
            pq.ParquetFile(source, read_dictionary=coded, page_checksum_verification=True) as parquet,
        ):
            self._check_sizes(parquet.metadata, columns)
            yield from parquet.iter_batches(batch_size=SLICE_ROWS, columns=list(columns))

    def _check_sizes(self, metadata: pq.FileMetaData, columns: Sequence[str]) -> None:
        """Refuse a column that would take more memory than events can.

        Columns of a small row group are not examined: if their entries in the footer contradict each other, Arrow 25
        ends the process.
        """
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if group.total_byte_size <= MOST_BYTES:
                continue
            for column in (group.column(place) for place in range(group.num_columns)):
                if column.path_in_schema in columns and column.total_uncompressed_size > MOST_BYTES:
                    size, where = column.total_uncompressed_size, f"in row group {number}"
                    raise InputError(
                        f"{self.file.location}: column '{column.path_in_schema}' has {size:,} bytes {where}, "
                        f"must be {MOST_BYTES:,} at most"
                    )


class _Ipc(LogReader):
    """An Arrow IPC file, which is mapped into memory, or a stream, of which only the compressed shows its end."""

    kind = "an Arrow IPC file"

    def __init__(self, file: Place, *, stream: bool = False) -> None:
        super().__init__(file)
        self._stream = stream
        if stream:
            self.kind, self.ends = "an Arrow IPC stream", file.compression is not None
        with self.reading():
            with file.open(mapped=not stream) as source:
                self.schema = self._reader(source).schema
            self.rows = sum(batch.num_rows for batch in self.batches(self.schema.names[-1:]))

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        options = pa.ipc.IpcReadOptions(included_fields=[self.schema.names.index(name) for name in columns])
        with self.file.open(mapped=not self._stream) as source:
            reader = self._reader(source, options)
            for batch in reader if self._stream else map(reader.get_batch, range(reader.num_record_batches)):
                yield _checked(batch, self.file)

    def _reader(self, source: pa.NativeFile, options: pa.ipc.IpcReadOptions | None = None) -> Any:
        if self._stream:
            return pa.ipc.open_stream(pa.PythonFile(_Bounded(source), mode="r"), options=options)
        return pa.ipc.open_file(source, options=options)


def _checked(batch: pa.RecordBatch, file: Place) -> pa.RecordBatch:
    """Check that a batch's values are valid, as Parquet's decoder does and Arrow IPC's does not; return the batch."""
    if batch.nbytes > MOST_BYTES or batch.num_rows > MOST_ROWS:
        raise InputError(
            f"{file.location}: a batch of {batch.num_rows:,} rows with {batch.nbytes:,} bytes, must be {MOST_ROWS:,} "
            f"rows and {MOST_BYTES:,} bytes at most"
        )
    batch.validate(full=True)
    return batch


class _Bounded(io.RawIOBase):
    """A stream that refuses to read very many bytes in one call, since a damaged length would take all memory."""

    def __init__(self, source: pa.NativeFile) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MOST_BYTES:
            raise ValueError(f"a batch of {size:,} bytes, must be {MOST_BYTES:,} at most")
        data: bytes = self._source.read(size)
        return data


class _Text(LogReader):
    """A text file with one line for each event, after ``headers`` lines of column names; ``names`` are its columns."""

    headers = 0

    def __init__(self, file: Place, names: Sequence[str]) -> None:
        super().__init__(file)
        self.ends = file.compression is not None
        self.schema = pa.schema([(name, _TYPES.get(name, pa.null())) for name in names])
        with self.reading():
            self.rows = sum(batch.num_rows for batch in self.batches([name for name in names if name in _TYPES][:1]))

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        wanted = list(dict.fromkeys(columns))
        try:
            with self.file.open() as source:
                for batch in self._parsed(source, wanted):
                    values = [self._typed(name, batch.column(name)) for name in wanted]
                    yield pa.RecordBatch.from_arrays(values, names=wanted)
        except (pa.ArrowException, ValueError) as error:
            self._name_fault(wanted)
            message = re.sub(r" in row \d+$", "", first_line(error))  # Arrow counts the rows of a block
            raise ValueError(message) from None

    @abstractmethod
    def _parsed(self, source: pa.NativeFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Parse ``source`` and yield batches with the given columns, in the types ``_PARSED``."""

    @abstractmethod
    def _record(self, line: str, where: str) -> dict[str, Any]:
        """Return the values of a line by column: text, numbers, flags and None."""

    def _typed(self, name: str, column: pa.Array) -> pa.Array:
        """Return a parsed column in the type of ``schema``."""
        if name not in _WHOLE:
            return column
        values = column.to_numpy(zero_copy_only=False)
        fractions = (values != np.trunc(values)) & column.is_valid().to_numpy(zero_copy_only=False)
        if fractions.any():
            raise ValueError(f"{name} is {values[np.argmax(fractions)]}, must be an integer")
        return pa.array(np.nan_to_num(np.clip(values, -_LARGEST, _LARGEST)).astype(np.int64), mask=np.isnan(values))

    def _name_fault(self, columns: Sequence[str]) -> None:
        """Raise an error about the first line, if any, that cannot be read or has a wrong value in ``columns``."""
        with self.file.open() as source:
            lines, number, headers = io.BufferedReader(source), 0, self.headers
            while line := lines.readline(BLOCK_BYTES + 1):
                number += 1
                where = f"{self.file.location}, line {number}"
                if len(line) > BLOCK_BYTES:
                    raise InputError(f"{where}: the line is longer than {BLOCK_BYTES:,} bytes")
                if not line.strip():
                    continue
                if headers:
                    headers -= 1
                    continue
                with reading(f"{where}: cannot be read as {self.kind}", csv.Error):
                    record = self._record(line.decode("utf-8-sig" if number == 1 else "utf-8"), where)
                for name in columns:
                    if wanted := self._misfit(name, record.get(name)):
                        raise InputError(f"{where}: {name} is {shown(record[name])}, must be {wanted}")

    def _misfit(self, name: str, value: Any) -> str | None:
        """Return in words what the values of a column must be; None if ``value`` is such a value, or null."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None:
            return None
        if pa.types.is_string(_PARSED[name]):
            return None if isinstance(value, str) else "a string"
        if pa.types.is_boolean(_PARSED[name]):
            return None if isinstance(value, bool) or value in {0, 1} else "true, false, 1 or 0"
        if name in _WHOLE:
            return None if number and (isinstance(value, int) or value.is_integer()) else "an integer"
        return None if number else "a number"


class _Csv(_Text):
    kind = "CSV"
    headers = 1

    def _parsed(self, source: pa.NativeFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
        yield from pyarrow.csv.open_csv(
            source,
            pyarrow.csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=columns, column_types={name: _PARSED[name] for name in columns}, null_values=[""],
                true_values=_TRUE, false_values=_FALSE, strings_can_be_null=False,
            ),
        )  # fmt: skip

    def _record(self, line: str, where: str) -> dict[str, Any]:
        (fields,) = csv.reader([line], strict=True)
        if len(fields) != len(self.schema.names):
            raise InputError(
                f"{where}: {len(fields)} fields, but the first line names {len(self.schema.names)} columns"
            )
        return {name: self._value(name, text) for name, text in zip(self.schema.names, fields, strict=True)}

    def _value(self, name: str, text: str) -> Any:
        if name not in _PARSED or pa.types.is_string(_PARSED[name]):
            return text
        if pa.types.is_boolean(_PARSED[name]):
            return True if text in _TRUE else False if text in _FALSE else text or None
        try:
            return float(text)
        except ValueError:
            return text or None


class _JsonLines(_Text):
    kind = "JSON Lines"

    def __init__(self, file: Place, first: dict[str, Any]) -> None:
        """Take the first line's object. All lines must write flags as this line does: as true and false, or 1 and 0."""
        self._numbered = {name for name in ("x_eos", "y_eos") if type(first.get(name)) in {int, float}}
        self._absent = {name: value for name, value in LATER.items() if name not in first}
        super().__init__(file, [*first, *self._absent])

    def _parsed(self, source: pa.NativeFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
        kinds = [(name, pa.float64() if name in self._numbered else _PARSED[name]) for name in columns]
        yield from pyarrow.json.open_json(
            source,
            pyarrow.json.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
            pyarrow.json.ParseOptions(explicit_schema=pa.schema(kinds), unexpected_field_behavior="ignore"),
        )

    def _typed(self, name: str, column: pa.Array) -> pa.Array:
        if name in self._numbered:
            if not pc.all(pc.is_in(column.drop_null(), pa.array([0.0, 1.0]))).as_py():
                raise ValueError(f"{name} has a number that is neither 0 nor 1")
            return column.cast(pa.bool_())
        typed, default = super()._typed(name, column), self._absent.get(name)
        return typed if default is None else typed.fill_null(default)

    def _record(self, line: str, where: str) -> dict[str, Any]:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise InputError(f"{where}: not a JSON object; write one object per line")
        return record

    def _misfit(self, name: str, value: Any) -> str | None:
        wanted = super()._misfit(name, value)
        if wanted is None and value is not None and pa.types.is_boolean(_PARSED[name]):
            numbered = name in self._numbered
            if isinstance(value, bool) == numbered:
                return f"{'1 or 0' if numbered else 'true or false'}, as in the first line"
        return wanted


def open_log(file: Place) -> LogReader:
    """Open a file in the format that its content shows.

    Raises:
        NoEventsError: The file is of another format, or has none of the columns that only events have.
        InputError: The file is not there, or it is damaged.
    """
    file.check()
    with reading(f"{file.location}: cannot be read"):
        with file.open() as source:
            head = source.read(8)
        file = replace(file, compression=next((c for magic, c in _COMPRESSED.items() if head.startswith(magic)), None))
        if not head.startswith(tuple(_BINARY)):
            with file.open() as source:
                head = source.read(BLOCK_BYTES)
    log = _log_of(file, head)
    columns = ", ".join(_MEASURED)
    if log is None:
        line = f"neither Parquet, Arrow IPC, nor CSV or JSON Lines with columns such as {columns}"
        names = _BINARY_NAMES if head else (*_BINARY_NAMES, *_TEXT_NAMES)
        error = InputError if file.location.removesuffix(".gz").removesuffix(".zst").endswith(names) else NoEventsError
        raise error(f"{file.location}: {line}" + ("" if head else " (the file is empty)"))
    if not any(name in log.schema.names for name in _MEASURED):
        raise NoEventsError(f"{file.location}: {log.kind} without the columns {columns}")
    return log


def _log_of(file: Place, head: bytes) -> LogReader | None:
    """Open a file whose decompressed content begins with ``head``; None if no log of events begins so."""
    if binary := next((kind for magic, kind in _BINARY.items() if head.startswith(magic)), None):
        if file.compression:
            raise InputError(f"{file.location}: {binary.kind} within {file.compression}, must be decompressed")
        return binary(file)
    if head.startswith(_STREAM):
        return _Ipc(file, stream=True)
    first = next((line for line in head.removeprefix(codecs.BOM_UTF8).splitlines() if line.strip()), b"")
    if first.lstrip().startswith((b"{", b"[")):
        return _json_log(file, first, head)
    try:
        (names,) = csv.reader([first.decode()], strict=True)
    except (csv.Error, ValueError):
        return None
    return _Csv(file, names) if any(name in names for name in _MEASURED) else None


def _json_log(file: Place, first: bytes, head: bytes) -> LogReader | None:
    """Open a JSON Lines file, whose first line is ``first``; None if ``head`` names no column that only events have."""
    if not any(f'"{name}"'.encode() in head for name in _MEASURED):
        return None
    with reading(f"{file.location}, line 1: cannot be read as JSON Lines"):
        record = json.loads(first)
    if not isinstance(record, dict):
        raise InputError(f"{file.location}, line 1: not a JSON object; write one object per line")
    return _JsonLines(file, record)


_BINARY: Final[dict[bytes, type[_Parquet | _Ipc]]] = {b"PAR1": _Parquet, b"ARROW1": _Ipc}
_STREAM: Final = b"\xff\xff\xff\xff"  # begins each message
