"""What a compacted file stands for: its footer lists the units, or the files, whose rows it has."""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from log.appends import DERIVED, UNIT_FOOTER, is_compacted, with_defaults
from log.delta.folder import DeltaFolder
from schema.errors import InputError

UNITS_FOOTER = "kvdrift.units"  # of a compacted file of events
FILES_FOOTER = "kvdrift.files"  # of any compacted file that is not derived from one of events

_OF_EVENTS = {"events", *(table for tables in DERIVED.values() for table in tables)}


@dataclass(frozen=True)
class Member:
    """A unit in a file of events.

    Attributes:
        path: The path that the unit was appended as.
        rows: How many rows it has; a compacted file has its units one after the other.
        record: A ``units`` row without ``path``.

    """

    path: str
    rows: int
    record: dict[str, Any]


def units_footer(members: Sequence[Member]) -> dict[str, str]:
    """Return the footer of a compacted file of events; who asks for paths need not read all records."""
    units = packed([[member.path, member.rows, member.record] for member in members])
    return {UNITS_FOOTER: units} | files_footer([member.path for member in members])


def files_footer(paths: Sequence[str]) -> dict[str, str]:
    """Return the footer of a compacted file of a table that is not derived from events."""
    return {FILES_FOOTER: packed(list(paths))}


def members_in(path: str, rows: int, footer: Mapping[bytes, bytes]) -> list[Member] | None:
    """Return the units in a file of events, which has ``rows`` rows; None where its footer does not say."""
    try:
        if is_compacted(path):
            found = unpacked(footer[UNITS_FOOTER.encode()])
            return [Member(str(name), int(count), with_defaults(record)) for name, count, record in found]
        return [Member(path, rows, with_defaults(json.loads(footer[UNIT_FOOTER.encode()])))]
    except (KeyError, ValueError, TypeError):
        return None


def members_of(folder: DeltaFolder, path: str) -> list[Member]:
    """Read the units in a file of events from its footer.

    Raises:
        InputError: The file is missing or damaged.

    """
    found = members_in(path, *folder.footer("events", path))
    if found is None:
        raise InputError(f"{folder.location}: events/{path} is damaged (no unit record in its footer)")
    return found


def originals(folder: DeltaFolder, table: str, paths: Iterable[str]) -> set[str]:
    """Return the paths that rows of some files were appended as, of derived tables those of their events.

    Raises:
        InputError: A file is missing or damaged.

    """
    found, holder = set[str](), "events" if table in _OF_EVENTS else table
    for path in paths:
        if not is_compacted(path):
            found.add(path)
            continue
        _, footer = folder.footer(holder, path)
        if table in _OF_EVENTS and FILES_FOOTER.encode() not in footer:  # of an earlier version of kvdrift
            found.update(member.path for member in members_of(folder, path))
            continue
        try:
            found.update(unpacked(footer[FILES_FOOTER.encode()]))
        except (KeyError, ValueError):
            raise InputError(f"{folder.location}: {holder}/{path} is damaged (its footer lists no files)") from None
    return found


class UnitEvents:
    """Reads single units out of files of events, as they were when this was made."""

    def __init__(self, folder: DeltaFolder) -> None:
        self._folder = folder
        self._paths = folder.load("events").paths()

    def read(self, path: str, columns: Sequence[str]) -> pa.Table:
        """Read the events of a unit and verify page checksums.

        Args:
            path: The path that the unit was appended as.
            columns: Names of columns.

        Raises:
            InputError: The file is missing or damaged, or another program has rewritten the table.

        """
        if path not in self._places:
            raise InputError(f"{self._folder.location}: events/{path} is in no file of 'events' that names it")
        file, begin, rows = self._places[path]
        return self._folder.read_slice("events", file, columns, begin, rows)

    @functools.cached_property
    def _places(self) -> dict[str, tuple[str, int, int | None]]:
        """The file of each unit, and the unit's rows there: the first, and how many, None for all."""
        found: dict[str, tuple[str, int, int | None]] = {}
        for path in self._paths:
            if not is_compacted(path):
                found[path] = path, 0, None
                continue
            begin = 0
            for member in members_of(self._folder, path):
                found[member.path] = path, begin, member.rows
                begin += member.rows
        return found


def packed(value: Any) -> str:
    """Write a value as text for a footer."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def unpacked(text: bytes) -> Any:
    """Read such a text.

    Raises:
        ValueError: It is none.

    """
    try:
        return json.loads(zlib.decompress(base64.b64decode(text)))
    except zlib.error as error:
        raise ValueError(str(error)) from None
