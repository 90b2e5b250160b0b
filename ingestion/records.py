"""Read the files beside events: the documents of another generator, and how it made its events.

Both are CSV, JSONL or Parquet, recognized by content. A row of a facts file is about one action, for one document or
for all. Its bytes, seconds and engine go into the rows of units that are ingested together with the facts; its settings
and weights go into the action's row.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from kvdrift.schema.document import SPLITS
from kvdrift.schema.errors import InputError, first_line, nearest, reading
from kvdrift.schema.location import check_regular
from kvdrift.schema.study import POOLED
from kvdrift.schema.tables import DOCUMENTS

MOST_BYTES = 1 << 28  # of a file, and of a row group of Parquet
MOST_ROWS = 1 << 20
_SHOWN = 80  # characters of a value in a message


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

    ``clean`` gets the values of a record, which may be null, and its file and row for error lines; it checks the values
    and returns those that are not null.
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
    cleaned = [Record(clean(values, where := f"{path}, {numbered} {number}"), where) for number, values in records]
    return cleaned, sorted({name for _, values in records for name in values if name not in kind.columns})


def whole_number(name: str, value: Any, where: str, unit: str, bits: int) -> int:
    """Return a whole number of at most ``bits`` bits that is given as int or as text; errors name its ``unit``."""
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


_REQUIRED = ("doc", "stratum", "split")
_DOCUMENTS = RecordKind("a document", "a documents file", DOCUMENTS.columns, _REQUIRED)


class DocumentRows:
    """The rows of a documents file by document id. A row without study or model is about all studies or models."""

    def __init__(self, rows: Iterable[Record] = (), unknown: Iterable[str] = ()) -> None:
        """Index the rows; ``unknown`` are column names that the documents table lacks."""
        self.unknown = [*unknown]
        self._rows: dict[str, list[Record]] = {}
        splits: dict[tuple[Any, ...], Record] = {}
        for row in rows:
            same = self._rows.setdefault(row.values["doc"], [])
            for other in same:
                if _is_about(row, {name: other.values.get(name) for name in ("study", "model")}):
                    raise InputError(
                        f"{row.where}: document '{row.values['doc']}' has another row ({other.where}), must have one"
                    )
            same.append(row)
            cluster = tuple(row.values.get(name) for name in ("study", "model", "cluster"))
            first = splits.setdefault(cluster, row) if cluster[-1] is not None else row
            if first.values["split"] != row.values["split"]:
                raise InputError(
                    f"{row.where}: split is '{row.values['split']}', but cluster '{cluster[-1]}' is in split "
                    f"'{first.values['split']}' ({first.where}); a cluster must be in one split"
                )

    def find(self, study: str, model: str, doc: str) -> Record | None:
        """Return the row about a document; None if there is none."""
        about = {"study": study, "model": model}
        return next((row for row in self._rows.get(doc, ()) if _is_about(row, about)), None)


def read_documents(path: Path) -> DocumentRows:
    """Read all rows of a documents file."""
    return DocumentRows(*read_records(path, _DOCUMENTS, _clean_document))


def _clean_document(record: dict[str, Any], where: str) -> dict[str, Any]:
    values = {
        name: _document_value(name, record[name], where) for name in DOCUMENTS.columns if record.get(name) is not None
    }
    values = {name: value for name, value in values.items() if not isinstance(value, str) or value.strip()}
    for name in _REQUIRED:
        if name not in values:
            raise InputError(f"{where}: {name} is missing")
    if values["split"] not in SPLITS:
        raise InputError(f"{where}: split is '{values['split']}'; {nearest(values['split'], SPLITS)}")
    if values["stratum"] == POOLED:
        raise InputError(f"{where}: stratum is '{POOLED}', which names the rows that pool all strata; choose another")
    return values


def _document_value(name: str, value: Any, where: str) -> Any:
    kind = DOCUMENTS.schema.field(name).type
    if pa.types.is_integer(kind):
        return whole_number(name, value, where, "tokens", 31)
    if pa.types.is_list(kind):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(is_text(item) for item in items):
            raise InputError(f"{where}: {name} is {shown(value)}, must be a list of strings")
        if not all(item.strip() for item in items):
            raise InputError(f"{where}: {name} is {shown(value)}, must be a list of strings that are not empty")
        return items
    return checked_text(name, value, where)


_FACT_KEYS: Final = ("study", "model", "doc", "action")
_PARTS: Final = ("scale_bytes", "index_bytes", "metadata_bytes")
_COUNTS: Final = ("prompt_entries", "kept_entries", "payload_bytes", *_PARTS, "resident_bytes")
_SECONDS: Final = ("prefill_seconds", "decode_seconds")
_TEXTS: Final = ("device", "dtype", "weights")
_OBJECTS: Final = ("engine", "settings")
_OF_ACTIONS: Final = ("settings", "weights")
_FACT_COLUMNS: Final = (*_FACT_KEYS, *_COUNTS, *_SECONDS, *_TEXTS, *_OBJECTS)

_FACTS = RecordKind("a row of facts", "a facts file", _FACT_COLUMNS, ("action",))


class FactRows:
    """The rows of a facts file. If two rows set the same column of a unit, the row with more key columns wins.

    Two rows with equally many key columns may not set it differently.
    """

    def __init__(self, rows: Iterable[Record] = (), unknown: Iterable[str] = ()) -> None:
        """Index the rows; ``unknown`` are names of columns that no table takes."""
        self.unknown = [*unknown]
        self._rows: dict[str, list[Record]] = {}
        self._used: set[str] = set()
        first: dict[tuple[Any, ...], Record] = {}
        for row in rows:
            keys = tuple(row.values.get(name) for name in _FACT_KEYS)
            if (other := first.setdefault(keys, row)) is not row:
                raise InputError(
                    f"{row.where}: action '{row.values['action']}' has another row ({other.where}) for the same study, "
                    "model and document, must have one"
                )
            self._rows.setdefault(row.values["action"], []).append(row)
        for about in self._rows.values():
            _check_ties(about)

    @property
    def unused(self) -> list[str]:
        """Return the actions whose facts were used for no unit so far."""
        return sorted(self._rows.keys() - self._used)

    def of_unit(self, key: Mapping[str, str]) -> dict[str, Any]:
        """Return the facts of a unit by column of table ``units``.

        If ``payload_bytes`` is known, other parts of the cache are 0 bytes by default, and ``resident_bytes`` is by
        default the sum of all parts.
        """
        values = {name: value for name, value in self._merged(key).items() if name not in (*_FACT_KEYS, *_OF_ACTIONS)}
        if "payload_bytes" in values:
            values = dict.fromkeys(_PARTS, 0) | values
            values.setdefault("resident_bytes", sum(values[name] for name in ("payload_bytes", *_PARTS)))
        return values

    def of_action(self, study: str, model: str, action: str) -> dict[str, Any]:
        """Return the facts of an action by column of table ``actions``.

        An action whose engine is named always has settings, if only empty ones.
        """
        facts = self._merged({"study": study, "model": model, "action": action})
        columns: dict[str, Any] = {name: facts[name] for name in _OF_ACTIONS if name in facts}
        return {"settings": "{}", **columns} if columns or "engine" in facts else columns

    def _merged(self, key: Mapping[str, str]) -> dict[str, Any]:
        about = [row for row in self._rows.get(key["action"], ()) if _is_about(row, key)]
        if about:
            self._used.add(key["action"])
        merged: dict[str, Any] = {}
        for row in sorted(about, key=lambda row: sum(name in row.values for name in _FACT_KEYS)):
            merged |= row.values
        return merged


def _check_ties(rows: Iterable[Record]) -> None:
    """Check that no two rows of an action set a column of a unit differently with equally many key columns."""
    by_keys: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        by_keys.setdefault(tuple(name for name in _FACT_KEYS if name in row.values), []).append(row)
    for one, other in combinations(by_keys, 2):
        if len(one) != len(other):
            continue
        shared = [name for name in one if name in other]
        known: dict[tuple[Any, ...], dict[Any, Record]] = {}
        for row, column, value in _facts_of(by_keys[one]):
            known.setdefault((column, *map(row.values.get, shared)), {}).setdefault(value, row)
        for row, column, value in _facts_of(by_keys[other]):
            values = known.get((column, *map(row.values.get, shared)), {})
            tied = next((record for known_value, record in values.items() if known_value != value), None)
            if tied is not None:
                raise InputError(
                    f"{row.where}: another row ({tied.where}) has another {column} of the same units of action "
                    f"'{row.values['action']}', and neither wins, since each gives {len(one)} of "
                    f"{', '.join(_FACT_KEYS)}; give more of them in one row"
                )


def _facts_of(rows: Iterable[Record]) -> Iterator[tuple[Record, str, Any]]:
    """Yield each fact of rows: its row, its column and its value."""
    return ((row, name, value) for row in rows for name, value in row.values.items() if name not in _FACT_KEYS)


def _is_about(row: Record, key: Mapping[str, str | None]) -> bool:
    """Tell whether a row may be about ``key``: a name that it lacks, or that is None in ``key``, stands for any."""
    return all(value is None or row.values.get(name, value) == value for name, value in key.items())


def read_facts_file(path: Path) -> FactRows:
    """Read all rows of a facts file."""
    return FactRows(*read_records(path, _FACTS, _clean_facts))


def _clean_facts(record: dict[str, Any], where: str) -> dict[str, Any]:
    facts = {name: _fact(name, record[name], where) for name in _FACT_COLUMNS if record.get(name) not in (None, "")}
    if "action" not in facts:
        raise InputError(f"{where}: action is missing")
    if "doc" in facts and (misplaced := [name for name in _OF_ACTIONS if name in facts]):
        raise InputError(f"{where}: {misplaced[0]} belongs to a whole action; give it in a row without doc")
    return facts


def _fact(name: str, value: Any, where: str) -> Any:
    if name in _COUNTS:
        return whole_number(name, value, where, "entries" if name.endswith("entries") else "bytes", 63)
    if name in _SECONDS:
        try:
            seconds = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            seconds = float("nan")
        if not 0 <= seconds < float("inf"):
            raise InputError(f"{where}: {name} is {shown(value)}, must be a number of seconds")
        return seconds
    return _object(name, value, where) if name in _OBJECTS else checked_text(name, value, where)


def _object(name: str, value: Any, where: str) -> str:
    """Return a JSON object as the store holds it: text with sorted keys."""
    try:
        content = json.loads(value) if isinstance(value, str) else value
        if isinstance(content, dict) and (text := json.dumps(content, sort_keys=True, allow_nan=False)):
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    raise InputError(f"{where}: {name} is {shown(value)}, must be a JSON object")
