"""A documents file, CSV, JSONL or Parquet by its content: facts about documents from another generator."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvdrift.ingestion.records import Record, RecordKind, checked_text, is_text, read_records, shown, whole_number
from kvdrift.schema.document import SPLITS
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.study import POOLED
from kvdrift.schema.tables import DOCUMENTS

REQUIRED = ("doc", "stratum", "split")
_KIND = RecordKind("a document", "a documents file", DOCUMENTS.columns, REQUIRED)


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
                if _applies_to(row, other.values.get("study"), other.values.get("model")):
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
        return next((row for row in self._rows.get(doc, ()) if _applies_to(row, study, model)), None)


def _applies_to(row: Record, study: str | None, model: str | None) -> bool:
    """Tell whether a row is about documents of a study and model; None in the row means any."""
    pairs = ((row.values.get("study"), study), (row.values.get("model"), model))
    return all(own is None or other is None or own == other for own, other in pairs)


def read_documents(path: Path) -> DocumentRows:
    """Read all rows of a documents file."""
    return DocumentRows(*read_records(path, _KIND, _clean))


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
        return whole_number(name, value, where, "tokens", 31)
    if pa.types.is_list(kind):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(is_text(item) for item in items):
            raise InputError(f"{where}: {name} is {shown(value)}, must be a list of strings")
        if not all(item.strip() for item in items):
            raise InputError(f"{where}: {name} is {shown(value)}, must be a list of strings that are not empty")
        return items
    return checked_text(name, value, where)
