"""Make commits, with the transactions that guard them, and read past commits from a log."""

from __future__ import annotations

import functools
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote

import pyarrow.fs
from deltalake import Schema, Transaction
from deltalake.transaction import AddAction, RemoveAction

from kvdrift.log.delta.parquet_files import StoredFile
from kvdrift.schema.location import filesystem_of, join
from kvdrift.schema.tables import SCHEMA_VERSION, TABLES

REPAIR = "REPAIR"
"""The operation name of an empty commit that replaces a lost commit."""

_LEAP = 366 * 24 * 3600.0  # seconds
_LONG_AGO = 1  # milliseconds since 1970
_PROTOCOL = {"minReaderVersion": 1, "minWriterVersion": 2}  # of append-only tables


@dataclass(frozen=True)
class Commit:
    """The content of a commit: files that become visible, files that they replace, and guarding transactions.

    The commit is refused if another commit made since the snapshot has the id of one of ``transactions``. Since
    tables are append-only, the log states that a commit which replaces files changes no data.
    """

    files: Sequence[StoredFile]
    transactions: list[Transaction]
    replaced: Sequence[str] = ()

    def actions(self) -> list[AddAction | RemoveAction]:
        """Return the changes of files in Delta's form."""
        now = int(time.time() * 1000)
        return [
            *(
                AddAction(
                    file.path, file.size, {}, now,
                    data_change=not self.replaced,
                    stats=json.dumps({"numRecords": file.rows}),
                )
                for file in self.files
            ),
            # The tables are append-only: a removal must say that no data changes.
            *(RemoveAction(path, data_change=False, deletion_timestamp=now) for path in self.replaced),
        ]  # fmt: skip


def transactions(versions: Iterable[tuple[str, int]]) -> list[Transaction]:
    """Make application transactions of (application id, version) pairs; of pairs with equal ids the last one counts."""
    return [Transaction(app_id, version) for app_id, version in dict(versions).items()]


def guards(versions: Iterable[tuple[str, int]]) -> list[Transaction]:
    """Make transactions that refuse a simultaneous commit with the same ids; the next checkpoint leaves them out."""
    return [Transaction(app_id, version, last_updated=_LONG_AGO) for app_id, version in dict(versions).items()]


def added_files(table_folder: str) -> set[str]:
    """Return the paths of all files that any commit of a table has made visible, including files hidden since."""
    return {
        unquote(json.loads(line)["add"]["path"])
        for _, lines in _commits(table_folder)
        for line in lines
        if b'"add"' in line
    }


def replaced_files(table_folder: str, age: timedelta) -> tuple[int, set[str]]:
    """Return the last version whose commit hid files at least ``age`` ago, and all files hidden up to then.

    Time is added up from commit to commit. A step back of the clock adds nothing, and neither does a leap of more than
    a year, after which nobody knows how much time went by. So no wrong clock makes a file older than it is, unless it
    is wrong by less than a year.
    """
    last, hidden, elapsed, later = 0, set[str](), 0.0, time.time()
    for version, lines in sorted(_commits(table_folder), reverse=True):
        infos = [json.loads(line)["commitInfo"] for line in lines if line.startswith(b'{"commitInfo"')]
        at = next((info["timestamp"] / 1000 for info in infos if "timestamp" in info), later)
        elapsed += later - at if 0 <= later - at <= _LEAP else 0.0
        later = at
        gone = {unquote(json.loads(line)["remove"]["path"]) for line in lines if line.startswith(b'{"remove"')}
        if gone and elapsed >= age.total_seconds():
            last, hidden = max(last, version), hidden | gone
    return last, hidden


def changes_rows(lines: Iterable[bytes]) -> bool:
    """Tell from the lines of a log file whether its commit may change a row of the table.

    A commit of another program that compacts, vacuums or sets properties changes no row. A commit of
    a repair may change rows, since it may stand for a lost commit.
    """
    for line in lines:
        action: dict[str, Any] = json.loads(line)
        if any(action[kind].get("dataChange", True) for kind in ("add", "remove") if kind in action):
            return True
        if action.get("commitInfo", {}).get("operation") == REPAIR:
            return True
    return False


def _commits(table_folder: str) -> Iterator[tuple[int, list[bytes]]]:
    """Yield each version that has a log file, and the file's lines."""
    filesystem, folder = filesystem_of(join(table_folder, "_delta_log"))
    for info in filesystem.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True)):
        name = PurePath(info.path)
        if name.suffix == ".json" and name.stem.isdecimal():
            with filesystem.open_input_stream(info.path) as content:
                yield int(name.stem), content.read().splitlines()


def write_first_commit(table: str, folder: Path, configuration: Mapping[str, str]) -> None:
    """Make a local table by writing its first commit as one file, which is not durable yet.

    delta-rs would take as long as for three commits, and a store has many tables.
    """
    now = int(time.time() * 1000)
    declared = {
        "id": str(uuid.uuid4()),
        "name": table,
        "description": TABLES[table].row,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": _schema(table),
        "partitionColumns": [],
        "createdTime": now,
        "configuration": dict(configuration),
    }
    made = {"timestamp": now, "operation": "CREATE TABLE", "engineInfo": f"kvdrift schema {SCHEMA_VERSION}"}
    actions = [{"commitInfo": made}, {"protocol": _PROTOCOL}, {"metaData": declared}]
    log_folder = folder / "_delta_log"
    log_folder.mkdir(parents=True, exist_ok=True)
    # delta-rs's pattern for temporary files, so that its cleanup removes leftovers
    aside = log_folder / f"_commit_{uuid.uuid4()}.json.tmp"
    try:
        aside.write_text("\n".join(map(json.dumps, actions)), encoding="utf-8")
        os.link(aside, log_folder / f"{0:020d}.json")
    finally:
        aside.unlink(missing_ok=True)


@functools.cache
def _schema(table: str) -> str:
    return str(Schema.from_arrow(TABLES[table].schema).to_json())
