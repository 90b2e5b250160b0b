"""Read the records of a documents or facts file: CSV, JSONL or Parquet, recognized by content."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from kvdrift.schema.errors import InputError, first_line, reading
from kvdrift.schema.location import check_regular

MOST_BYTES = 1 << 28  # of a file, and of a row group of Parquet
MOST_ROWS = 1 << 20
_SHOWN = 80  # characters of a value


@dataclass(frozen=True)
class RecordKind:
    """A kind of file of records, with the words that its messages use, such as "a document" and "a documents file".

    Columns besides ``columns`` are reported and not read; every file must have the ``required`` columns.
    """

    noun: str
    file: str
    columns: Collection[str]
    required: tuple[str, ...]


class Record(NamedTuple):
    """One record of a file: its values by column, without nulls, and its file and row for error lines."""

    values: dict[str, Any]
    where: str


def read_records(
    path: Path, kind: RecordKind, clean: Callable[[dict[str, Any], str], dict[str, Any]]
) -> tuple[list[Record], list[str]]:
    """Read all records of a file; also return the names of columns that are not read, sorted.

    ``clean`` checks the values of a record, which may be null, and returns those that are given.
    """
    check_regular(path)
    if not path.exists():
        raise InputError(f"{path}: no such {kind.file.removeprefix('a ')}")
    with reading(f"{path}: cannot be read"):
        if (size := path.stat().st_size) > MOST_BYTES:
            raise InputError(f"{path}: {size:,} bytes, {kind.file} may have {MOST_BYTES:,} at most")
        data = path.read_bytes()
        numbered = "row" if data.startswith(b"PAR1") else "line"
        records = _parquet(path, data, kind) if numbered == "row" else _text(path, data, kind)
    if len(records) > MOST_ROWS:
        raise InputError(f"{path}: {len(records):,} rows, {kind.file} may have {MOST_ROWS:,} at most")
    found = [Record(clean(values, where := f"{path}, {numbered} {number}"), where) for number, values in records]
    return found, sorted({name for _, values in records for name in values if name not in kind.columns})


def whole_number(name: str, value: Any, where: str, unit: str, bits: int) -> int:
    """Return a whole number of at most ``bits`` bits, which may be written as text."""
    text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(2**bits)) and int(text) < 2**bits):
        raise InputError(f"{where}: {name} is {shown(value)}, must be a whole number of {unit}")
    return int(text)


def checked_text(name: str, value: Any, where: str) -> str:
    """Return a value that must be text."""
    if not is_text(value):
        raise InputError(f"{where}: {name} is {shown(value)}, must be a string")
    return str(value)


def shown(value: Any) -> str:
    """Return a value as text for an error line: one line, cut if long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def is_text(value: Any) -> bool:
    """Tell whether a value is text that UTF-8 can encode; JSON may hold half of a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


_Records = list[tuple[int, dict[str, Any]]]  # with their row or line number, from 1


def _text(path: Path, data: bytes, kind: RecordKind) -> _Records:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: neither Parquet nor UTF-8 text (CSV or JSONL)") from None
    return _jsonl(path, text) if text.lstrip()[:1] in {"{", "["} else _csv(path, text, kind)


def _parquet(path: Path, data: bytes, kind: RecordKind) -> _Records:
    with (
        reading(f"{path}: cannot be read as Parquet", pa.ArrowException),
        pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as parquet,
    ):
        names = parquet.schema_arrow.names
        _check_columns(path, names, kind)
        _check_size(path, parquet.metadata, kind)
        records = parquet.read(columns=[name for name in names if name in kind.columns]).to_pylist()
    others = dict.fromkeys(name for name in names if name not in kind.columns)
    return list(enumerate([{**others, **record} for record in records], 1))


def _check_size(path: Path, metadata: pq.FileMetaData, kind: RecordKind) -> None:
    """Refuse a file whose content would not fit into memory, however small the file is."""
    if metadata.num_rows > MOST_ROWS:
        raise InputError(f"{path}: {metadata.num_rows:,} rows, {kind.file} may have {MOST_ROWS:,} at most")
    for number in range(metadata.num_row_groups):  # columns are not examined: damaged entries crash the process
        if (size := metadata.row_group(number).total_byte_size) > MOST_BYTES:
            raise InputError(f"{path}: row group {number} has {size:,} bytes, must be {MOST_BYTES:,} at most")


def _jsonl(path: Path, text: str) -> _Records:
    records: _Records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, or deeply nested lists
            reason = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
            raise InputError(f"{path}, line {number}: not JSON ({reason}); write one object per line") from None
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number}: not a JSON object; write one object per line")
        records.append((number, record))
    return records


def _csv(path: Path, text: str, kind: RecordKind) -> _Records:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    records: _Records = []
    try:
        _check_columns(path, [name.strip() for name in reader.fieldnames or []], kind)
        for record in reader:
            if None in record or None in record.values():
                raise InputError(f"{path}, line {reader.line_num}: the number of fields differs from the header's")
            records.append((reader.line_num, {name.strip(): value or None for name, value in record.items()}))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV ({first_line(error)})") from None
    return records


def _check_columns(path: Path, names: list[str], kind: RecordKind) -> None:
    missing = [name for name in kind.required if name not in names]
    if missing:
        raise InputError(
            f"{path}: no column {', '.join(map(repr, missing))}; {kind.noun} has {', '.join(kind.required)}"
        )
    for name in names:
        if name in kind.columns and names.count(name) > 1:
            raise InputError(f"{path}: {names.count(name)} columns are named '{name}', must be one")
