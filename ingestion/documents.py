"""A documents file, CSV, JSONL or Parquet by its content: facts about documents from another generator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ingestion.records import RecordKind, is_text, read_records, shown
from schema.document import SPLITS
from schema.errors import InputError, nearest
from schema.study import POOLED
from schema.tables import DOCUMENTS

REQUIRED = ("doc", "stratum", "split")
_KIND = RecordKind("a document", "a documents file", DOCUMENTS.columns, REQUIRED)
_INT32_END = 2**31


@dataclass(frozen=True)
class DocumentRow:
    """One row of a documents file.

    Attributes:
        given: The row's values by column of the documents table, without nulls; ``doc`` is always among them.
        where: File and row, for error lines.
    """

    given: dict[str, Any]
    where: str

    def applies_to(self, study: str | None, model: str | None) -> bool:
        """Tell whether the row is about documents of a study and model; None in the row means any."""
        pairs = ((self.given.get("study"), study), (self.given.get("model"), model))
        return all(own is None or other is None or own == other for own, other in pairs)


class DocumentRows:
    """The rows of a documents file by document id. A row without study or model is about all studies or models."""

    def __init__(self, rows: Iterable[DocumentRow] = (), unknown: Iterable[str] = ()) -> None:
        """Index the rows; ``unknown`` are column names that the documents table lacks."""
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
        """Return the row about a document; None if there is none."""
        return next((row for row in self._rows.get(doc, ()) if row.applies_to(study, model)), None)


def read_documents(path: Path) -> DocumentRows:
    """Read all rows of a documents file."""
    records = read_records(path, _KIND)
    unknown = {name for record in records for name in record.values if name not in DOCUMENTS.columns}
    return DocumentRows((DocumentRow(_clean(record.values, record.where), record.where) for record in records), unknown)


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
            raise InputError(f"{where}: {name} is {shown(value)}, must be a whole number of tokens")
        return int(text)
    if pa.types.is_list(kind):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(is_text(item) for item in items):
            raise InputError(f"{where}: {name} is {shown(value)}, must be a list of strings")
        if not all(item.strip() for item in items):
            raise InputError(f"{where}: {name} is {shown(value)}, must be a list of strings that are not empty")
        return items
    if not is_text(value):
        raise InputError(f"{where}: {name} is {shown(value)}, must be a string")
    return value
