"""Rows of local JSON Lines and JSON files; an error names the file, the line, the field and the expected content.

A byte order mark, which some editors write at the start of a file, is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.schema.errors import InputError, reading

CHUNK = 1 << 20  # characters


@dataclass(frozen=True)
class SourceRow:
    """One JSON object of a file, with its place for error messages."""

    file: Path
    place: str  # where in the file the object is: ``line 3``, ``entry 7``, ``ctxs[2] of line 3``
    fields: dict[str, Any]  # the object

    def has(self, name: str) -> bool:
        """Return whether the field is there and not null."""
        return self.fields.get(name) is not None

    def text(self, *names: str) -> str:
        """Return the text of the first of the fields ``names`` that is there and not null."""
        return self.encodable(" or ".join(names), self._get(names, str, "text"))

    def number(self, name: str) -> float:
        """Return the field's number."""
        return float(self._get((name,), (int, float), "a number"))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the field's list of texts; a single text counts as a list of one."""
        value = self._get((name,), (str, list), "a list of texts")
        entries = [value] if isinstance(value, str) else value
        if not all(isinstance(entry, str) for entry in entries):
            raise self._wrong(name, "a list of texts", value)
        return tuple(self.encodable(name, entry) for entry in entries)

    def rows(self, name: str) -> list[SourceRow]:
        """Return the field's list of objects as rows."""
        value = self._get((name,), list, "a list of objects")
        if not all(isinstance(entry, dict) for entry in value):
            raise self._wrong(name, "a list of objects", value)
        return [SourceRow(self.file, f"{name}[{number}] of {self.place}", entry) for number, entry in enumerate(value)]

    def error(self, message: str) -> InputError:
        """Return an error whose message begins with the file and the place."""
        return InputError(f"{self.file}, {self.place}: {message}")

    def _get(self, names: tuple[str, ...], kind: type | tuple[type, ...], expected: str) -> Any:
        for name in names:
            if (value := self.fields.get(name)) is None:
                continue
            if not isinstance(value, kind) or isinstance(value, bool):
                raise self._wrong(name, expected, value)
            return value
        wanted, there = " or ".join(names), ", ".join(self.fields) or "none"
        raise self.error(f"field '{wanted}' is missing: expected {expected}; the fields are {there}")

    def encodable(self, name: str, text: str) -> str:
        """Return a field's text; refuse a text with half of a surrogate pair, which JSON can write and UTF-8 cannot."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = json.dumps(text[error.start])
            raise self.error(f"field '{name}': has {half}, half of a surrogate pair, which is no character") from None
        return text

    def _wrong(self, name: str, expected: str, value: Any) -> InputError:
        shown = json.dumps(value)
        return self.error(f"field '{name}': expected {expected}, not {shown[:40] + '…' * (len(shown) > 40)}")


def find_file(places: Iterable[Path], purpose: str) -> Path:
    """Return the first of the paths ``places`` that is a file; an error says that ``purpose`` was expected there."""
    tried = list(places)
    for place in tried:
        if place.is_file():
            return place
    others = f" (or {', '.join(map(str, tried[1:]))})" if tried[1:] else ""
    raise InputError(f"{tried[0]}: no such file, expected {purpose}{others}")


def read_rows(path: Path, numbers: Collection[int] | None = None) -> Iterator[tuple[int, SourceRow]]:
    """Yield the rows of a JSON Lines file, or of a ``.json`` file with one array, with their numbers from 0.

    An array is read entry by entry, since some files have gigabytes. ``numbers`` are the rows to yield; None for all.
    """
    unit, entries = ("entry", _array_entries(path)) if path.suffix == ".json" else ("line", _lines(path))
    with reading(f"{path}: cannot be read"):
        try:
            for number, (label, value) in enumerate(entries):
                if numbers is not None and number not in numbers:
                    continue
                if not isinstance(value, dict):
                    raise InputError(f"{path}, {unit} {label}: expected a JSON object")
                yield number, SourceRow(path, f"{unit} {label}", value)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}: expected text in UTF-8, but byte {error.start:,} is not UTF-8: {error.reason}"
            ) from None


def read_object(path: Path) -> SourceRow:
    """Read a file that holds one JSON object."""
    with reading(f"{path}: cannot be read as JSON"):
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object")
    return SourceRow(path, "the object", value)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            with reading(f"{path}, line {number}: expected one JSON object per line"):
                try:
                    value = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(error.msg) from None  # its place is in this line, and not in the file
            yield number, value


def _array_entries(path: Path) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig") as file:
        text, position, number = file.read(CHUNK), 0, 1
        position = _skip(text, 0, " \t\r\n")
        if text[position : position + 1] != "[":
            raise InputError(f"{path}: expected an array of JSON objects")
        position += 1
        while True:
            position = _skip(text, position, " \t\r\n,")
            if text[position : position + 1] == "]":
                return
            with reading(f"{path}, entry {number}: expected a JSON object"):
                try:
                    value, end = decoder.raw_decode(text, position)
                except json.JSONDecodeError as error:
                    # Cut off by the chunk's end, or broken; reading as much again keeps the work linear.
                    more = file.read(max(CHUNK, len(text) - position))
                    if not more:
                        raise ValueError(error.msg) from None
                    text, position = text[position:] + more, 0
                    continue
            yield number, value
            position, number = end, number + 1


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position
