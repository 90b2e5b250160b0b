"""A facts file, CSV, JSONL or Parquet: how another generator made its events.

A row is about one action, for one document or for all. Its bytes, seconds and engine go into the rows of units that are
ingested together with the facts; its settings and weights go into the action's row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from kvdrift.ingestion.records import Record, RecordKind, checked_text, read_records, shown, whole_number
from kvdrift.schema.errors import InputError

_KEYS: Final = ("study", "model", "doc", "action")
_PARTS: Final = ("scale_bytes", "index_bytes", "metadata_bytes")
_COUNTS: Final = ("prompt_entries", "kept_entries", "payload_bytes", *_PARTS, "resident_bytes")
_SECONDS: Final = ("prefill_seconds", "decode_seconds")
_TEXTS: Final = ("device", "dtype", "weights")
_OBJECTS: Final = ("engine", "settings")
_OF_ACTIONS: Final = ("settings", "weights")
COLUMNS: Final = (*_KEYS, *_COUNTS, *_SECONDS, *_TEXTS, *_OBJECTS)

_KIND = RecordKind("a row of facts", "a facts file", COLUMNS, ("action",))


class FactRows:
    """The rows of a facts file. If two rows set the same column of a unit, the row with more keys wins."""

    def __init__(self, rows: Iterable[Record] = (), unknown: Iterable[str] = ()) -> None:
        """Index the rows; ``unknown`` are names of columns that no table takes."""
        self.unknown = [*unknown]
        self._rows: dict[str, list[Record]] = {}
        self._used: set[str] = set()
        first: dict[tuple[Any, ...], Record] = {}
        for row in rows:
            keys = tuple(row.values.get(name) for name in _KEYS)
            if (other := first.setdefault(keys, row)) is not row:
                raise InputError(
                    f"{row.where}: action '{row.values['action']}' has another such row ({other.where}), must have one"
                )
            self._rows.setdefault(row.values["action"], []).append(row)

    @property
    def unused(self) -> list[str]:
        """Return the actions of rows that were about no unit so far."""
        return sorted(self._rows.keys() - self._used)

    def of_unit(self, key: Mapping[str, str]) -> dict[str, Any]:
        """Return the facts of a unit by column of table ``units``; parts of a cache that no row names are 0 bytes."""
        found = {name: value for name, value in self._merged(key).items() if name not in (*_KEYS, *_OF_ACTIONS)}
        if "payload_bytes" in found:
            found = dict.fromkeys(_PARTS, 0) | found
            found.setdefault("resident_bytes", sum(found[name] for name in ("payload_bytes", *_PARTS)))
        return found

    def of_action(self, study: str, model: str, action: str) -> dict[str, Any]:
        """Return the facts of an action by column of table ``actions``.

        An action whose engine is named always has settings, if only empty ones.
        """
        found = self._merged({"study": study, "model": model, "action": action})
        said: dict[str, Any] = {name: found[name] for name in _OF_ACTIONS if name in found}
        return {"settings": "{}", **said} if said or "engine" in found else said

    def _merged(self, key: Mapping[str, str]) -> dict[str, Any]:
        about = [row for row in self._rows.get(key["action"], ()) if _is_about(row, key)]
        if about:
            self._used.add(key["action"])
        merged: dict[str, Any] = {}
        for row in sorted(about, key=lambda row: sum(name in row.values for name in _KEYS)):
            merged |= row.values
        return merged


def _is_about(row: Record, key: Mapping[str, str]) -> bool:
    """Tell whether a row is about a study, model, document and action."""
    return all(row.values.get(name, value) == value for name, value in key.items())


def read_facts_file(path: Path) -> FactRows:
    """Read all rows of a facts file."""
    return FactRows(*read_records(path, _KIND, _clean))


def _clean(record: dict[str, Any], where: str) -> dict[str, Any]:
    given = {name: _value(name, record[name], where) for name in COLUMNS if record.get(name) not in (None, "")}
    if "action" not in given:
        raise InputError(f"{where}: action is missing")
    if "doc" in given and (own := [name for name in _OF_ACTIONS if name in given]):
        raise InputError(f"{where}: {own[0]} belongs to a whole action; give it in a row without doc")
    return given


def _value(name: str, value: Any, where: str) -> Any:
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
