"""A documents file: what another generator knows of its documents, as CSV, JSONL or Parquet, told apart by content."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schema.document import SPLITS
from schema.errors import InputError, first_line, nearest, reading
from schema.location import check_regular
from schema.study import POOLED
from schema.tables import DOCUMENTS

REQUIRED = ("doc", "stratum", "split")
MOST_BYTES = 1 << 28  # of a file, and of the values of one column
MOST_ROWS = 1 << 20
_SHOWN = 80  # characters of a value
_INT32_END = 2**31


@dataclass(frozen=True)
class DocumentRow:
    """One row of a documents file.

    Attributes:
        given: Its values by the columns of the documents table, without nulls; ``doc`` is always among them.
        where: File and row, for error lines.

    """

    given: dict[str, Any]
    where: str

    def applies_to(self, study: str | None, model: str | None) -> bool:
        """Tell whether the row is about documents of a study and model; None stands for any."""
        pairs = ((self.given.get("study"), study), (self.given.get("model"), model))
        return all(own is None or other is None or own == other for own, other in pairs)


class DocumentRows:
    """The rows of a documents file by document id. A row without study or model is about all of them."""

    def __init__(self, rows: Iterable[DocumentRow] = (), unknown: Iterable[str] = ()) -> None:
        """Index some rows; ``unknown`` are names of columns that no document has.

        Raises:
            InputError: A document has two rows, or a cluster is in both splits.

        """
        self.unknown = sorted(unknown)
        self._rows: dict[str, list[DocumentRow]] = {}
        splits: dict[tuple[Any, ...], DocumentRow] = {}
        for row in rows:
            same = self._rows.setdefault(row.given["doc"], [])
            for other in same:
                if row.applies_to(other.given.get("study"), other.given.get("model")):
                    raise InputError(
                        f"{row.where}: document '{row.given['doc']}' has another row ({other.where}), must have one"
                    )
            same.append(row)
            cluster = tuple(row.given.get(name) for name in ("study", "model", "cluster"))
            first = splits.setdefault(cluster, row) if cluster[-1] is not None else row
            if first.given["split"] != row.given["split"]:
                raise InputError(
                    f"{row.where}: split is '{row.given['split']}', but cluster '{cluster[-1]}' is in split "
                    f"'{first.given['split']}' ({first.where}); a cluster must be in one split"
                )

    def find(self, study: str, model: str, doc: str) -> DocumentRow | None:
        """Return the row that is about a document; None if there is none."""
        return next((row for row in self._rows.get(doc, ()) if row.applies_to(study, model)), None)


def read_documents(path: Path) -> DocumentRows:
    """Read all rows of a documents file.

    Raises:
        InputError: The file cannot be read, or a row has an error; the line names the path and the row.

    """
    check_regular(path)
    if not path.exists():
        raise InputError(f"{path}: no such documents file")
    with reading(f"{path}: cannot be read"):
        if (size := path.stat().st_size) > MOST_BYTES:
            raise InputError(f"{path}: {size:,} bytes, a documents file may have {MOST_BYTES:,} at most")
        data = path.read_bytes()
        numbered = "row" if data.startswith(b"PAR1") else "line"
        records = _parquet(path, data) if numbered == "row" else _text(path, data)
    if len(records) > MOST_ROWS:
        raise InputError(f"{path}: {len(records):,} rows, a documents file may have {MOST_ROWS:,} at most")
    unknown = {name for _, record in records for name in record if name not in DOCUMENTS.columns}
    places = ((f"{path}, {numbered} {number}", record) for number, record in records)
    return DocumentRows((DocumentRow(_clean(record, where), where) for where, record in places), unknown)


Records = list[tuple[int, dict[str, Any]]]  # with their row or line number, from 1


def _text(path: Path, data: bytes) -> Records:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: neither Parquet nor UTF-8 text (CSV or JSONL)") from None
    return _jsonl(path, text) if text.lstrip()[:1] in {"{", "["} else _csv(path, text)


def _parquet(path: Path, data: bytes) -> Records:
    with (
        reading(f"{path}: cannot be read as Parquet", pa.ArrowException),
        pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as parquet,
    ):
        names = parquet.schema_arrow.names
        _check_columns(path, names)
        _check_size(path, parquet.metadata)
        records = parquet.read(columns=[name for name in names if name in DOCUMENTS.columns]).to_pylist()
    others = dict.fromkeys(name for name in names if name not in DOCUMENTS.columns)
    return list(enumerate([{**others, **record} for record in records], 1))


def _check_size(path: Path, metadata: pq.FileMetaData) -> None:
    """Refuse a small file that holds more than memory takes."""
    if metadata.num_rows > MOST_ROWS:
        raise InputError(f"{path}: {metadata.num_rows:,} rows, a documents file may have {MOST_ROWS:,} at most")
    for number in range(metadata.num_row_groups):  # not their columns: damaged entries of these end the process
        if (size := metadata.row_group(number).total_byte_size) > MOST_BYTES:
            raise InputError(f"{path}: row group {number} has {size:,} bytes, must be {MOST_BYTES:,} at most")


def _jsonl(path: Path, text: str) -> Records:
    records: Records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or lists in lists
            reason = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
            raise InputError(f"{path}, line {number}: not JSON ({reason}); write one object per line") from None
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number}: not a JSON object; write one object per line")
        records.append((number, record))
    return records


def _csv(path: Path, text: str) -> Records:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    records: Records = []
    try:
        _check_columns(path, [name.strip() for name in reader.fieldnames or []])
        for record in reader:
            if None in record or None in record.values():
                raise InputError(f"{path}, line {reader.line_num}: the number of fields differs from the header's")
            records.append((reader.line_num, {name.strip(): value or None for name, value in record.items()}))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV ({first_line(error)})") from None
    return records


def _check_columns(path: Path, names: list[str]) -> None:
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise InputError(f"{path}: no column {', '.join(map(repr, missing))}; a document has {', '.join(REQUIRED)}")
    for name in names:
        if name in DOCUMENTS.columns and names.count(name) > 1:
            raise InputError(f"{path}: {names.count(name)} columns are named '{name}', must be one")


def _clean(record: dict[str, Any], where: str) -> dict[str, Any]:
    given = {name: _value(name, record[name], where) for name in DOCUMENTS.columns if record.get(name) is not None}
    given = {name: value for name, value in given.items() if not isinstance(value, str) or value.strip()}
    for name in REQUIRED:
        if name not in given:
            raise InputError(f"{where}: {name} is missing")
    if given["split"] not in SPLITS:
        raise InputError(f"{where}: split is '{given['split']}'; {nearest(given['split'], SPLITS)}")
    if given["stratum"] == POOLED:
        raise InputError(f"{where}: stratum is '{POOLED}', which names the rows that pool all strata; choose another")
    return given


def _value(name: str, value: Any, where: str) -> Any:
    kind = DOCUMENTS.schema.field(name).type
    if pa.types.is_integer(kind):
        text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
        digits = text.isdecimal() and text.isascii() and len(text) <= len(str(_INT32_END))
        if not digits or int(text) >= _INT32_END:
            raise InputError(f"{where}: {name} is {_shown(value)}, must be a whole number of tokens")
        return int(text)
    if pa.types.is_list(kind):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(_is_text(item) for item in items):
            raise InputError(f"{where}: {name} is {_shown(value)}, must be a list of strings")
        if not all(item.strip() for item in items):
            raise InputError(f"{where}: {name} is {_shown(value)}, and every continuation states an empty one")
        return items
    if not _is_text(value):
        raise InputError(f"{where}: {name} is {_shown(value)}, must be a string")
    return value


def _is_text(value: Any) -> bool:
    """Tell whether a value can be stored as text; JSON may escape half of a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _shown(value: Any) -> str:
    """Return a value as an error line shows it, which is one line and no long one."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
