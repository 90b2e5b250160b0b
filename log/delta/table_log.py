"""The log files of tables on a local disk: find the newest, the damaged, and the lost ones.

delta-rs does not notice some damage: it reads an empty log file as an empty commit, a file cut at the end of a line as
a whole commit, and a log without its newest file as the earlier log. It also reads files of two stores in one folder as
one log. So each commit of the store records how many lines its file has, the versions of other tables that its rows
rely on, the table's id, and the digest of the log file of the version that it was made from. Opening a table compares
these with the files. This reads a bounded amount: the files since the last checkpoint, which delta-rs reads, too.
``TableLog.breaks`` compares the whole log. Commits of other programs have no such record, and are taken as they are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from kvdrift.log.delta.commits import REPAIR, Commit
from kvdrift.log.delta.durability import side_by_side, sync, sync_names
from kvdrift.log.delta.parquet_files import content_digest

# Versions between checkpoints: a commit opens its table, which reads the log files since the last one.
CHECKPOINT_EVERY = 20
_SPARSE, _LARGE = 100, 1 << 20  # versions between checkpoints of at least so many bytes, which take longer to write

# Tables that the rows of others rely on: tables that are made from nothing else in the store; and calibration, since
# results, which are written after it, record that the analysis is done. Lost rows of ``units`` and of derived tables
# are made again.
RELIED_ON = (
    "events", "documents", "prompts", "actions", "studies", "identities", "plans", "exact_values", "calibration",
)  # fmt: skip

_OURS = "kvdrift"  # the key of kvdrift's entry in a commit's info
_LOOKED_AT = 4  # of the newest commits are compared: concurrent writers may commit in another order than they read

LogState: TypeAlias = tuple[int, int, int, int]
"""A log's version, with inode, size and time of its file; if unchanged, so is the log up to this version."""


class TableLog:
    """The folder ``_delta_log`` of one local table."""

    def __init__(self, table_folder: Path) -> None:
        self.folder = table_folder / "_delta_log"
        self._prefix = f"{self.folder}{os.sep}"
        self._newest = -1
        self._whole = -1  # the version through which no file is empty
        self._followed = -1  # the version through which each commit follows the version that it was made from
        self._durable = -1  # the version through which every file is durable

    def file(self, version: int) -> Path:
        """Return the path of a version's file."""
        return self.folder / f"{version:020d}.json"

    def checkpointed(self) -> int:
        """Return the version of the last checkpoint; 0 before the first."""
        try:
            return int(json.loads((self.folder / "_last_checkpoint").read_bytes())["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def newest(self) -> int:
        """Return the version of the newest file without a gap before it; -1 if the log has none."""
        version = self._newest
        if version < 0 or self._stat(version) is None:
            version = self.checkpointed() or -1  # the checkpoint has it, whether the file is there or not
        while self._stat(version + 1) is not None:
            version += 1
        self._newest = version
        return version

    def state(self, version: int) -> LogState | None:
        """Return a value that changes if the version is replaced; None if the version has no file."""
        status = self._stat(version)
        return None if status is None else (version, status.st_ino, status.st_size, status.st_mtime_ns)

    def _stat(self, version: int) -> os.stat_result | None:
        """Return the status of a version's file, None without a file; a path as text is faster than a ``Path``."""
        try:
            return os.stat(f"{self._prefix}{version:020d}.json")  # noqa: PTH116
        except OSError:
            return None

    def sync(self) -> None:
        """Make durable every log file not known to be durable, at most those since the last checkpoint.

        A checkpoint is made of durable files only, so the files before it are durable.
        """
        newest = self.newest()
        if newest <= self._durable:
            return
        if self._durable < 0:
            first = self.checkpointed()
            self._sync_checkpoint()
            for folder in (self.folder.parent, self.folder.parent.parent):  # threads would take longer
                sync(folder)
        else:
            first = self._durable + 1
        files = map(self.file, range(first, newest + 1))
        side_by_side(sync, [file for file in files if file.exists()])
        sync(self.folder)
        self._durable = newest

    def needs_checkpoint(self) -> bool:
        """Tell whether the log is so long that the next reader should find a checkpoint."""
        last = self.checkpointed()
        try:
            large = self._checkpoint(last).stat().st_size > _LARGE
        except OSError:  # there is none yet
            large = False
        return self.newest() - last >= (_SPARSE if large else CHECKPOINT_EVERY)

    def sync_checkpoint(self) -> None:
        """Make a checkpoint that was just written durable."""
        self._sync_checkpoint()
        sync(self.folder)

    def _sync_checkpoint(self) -> None:
        for path in (self._checkpoint(self.checkpointed()), self.folder / "_last_checkpoint"):
            if path.is_file():
                sync(path)

    def _checkpoint(self, version: int) -> Path:
        return self.folder / f"{version:020d}.checkpoint.parquet"

    def fault_of_tail(self) -> str | None:
        """Return a fault that delta-rs would not notice in the newest files; None if there is none."""
        newest, checkpoint = self.newest(), self.checkpointed()
        # Commits in a checkpoint are not read from their files, which may be long, or deleted by a clean-up.
        for version in range(max(self._whole + 1, checkpoint + 1 if checkpoint else 0), newest + 1):
            if fault := self._fault(version):
                return f"log file {self.file(version).name} {fault}"
        self._whole = newest
        return None

    def break_of_tail(self, table_id: str) -> str | None:
        """Return how one of the newest commits shows that files of another log were copied over this one.

        ``table_id`` is the id of the table as delta-rs has opened it.
        """
        newest, checkpoint = self.newest(), self.checkpointed()
        oldest = max(newest - _LOOKED_AT, self._followed, checkpoint) + 1
        for version in range(newest, oldest - 1, -1):
            file = self.file(version)
            if fault := self._break(file, table_id, since=checkpoint + 1):
                return f"log file {file.name} {fault}"
            if _table_id(file) is not None:  # an older commit may have been made under another id
                break
        self._followed = newest
        return None

    def breaks(self) -> dict[Path, str]:
        """Read the whole log; return by path how commits contradict the versions that they were made from."""
        faults, table_id = dict[Path, str](), None
        for file in self._files():
            if fault := self._break(file, table_id):
                faults[file] = fault
            table_id = _table_id(file) or table_id
        return faults

    def _break(self, file: Path, table_id: str | None, since: int = 0) -> str | None:
        """Return how a commit contradicts ``table_id`` or the version that it was made from; None if it does not.

        Versions before ``since`` are not read.
        """
        made_from = _record_of(file).get("made_from")
        if not made_from:
            return None
        if table_id is not None and made_from["table"] != table_id:
            return f"is of another table, with id {made_from['table']}, must be of this one, with id {table_id}"
        if made_from["version"] < since:
            return None
        before = self.file(made_from["version"])
        try:
            data = before.read_bytes()
        except OSError:  # a clean-up may have deleted it
            return None
        if content_digest(data) == made_from["digest"] or f'"{REPAIR}"'.encode() in data:
            return None
        return (
            f"does not follow log file {before.name}: that has digest {content_digest(data)}, must have "
            f"{made_from['digest']}, as the commit was made from it"
        )

    def faults(self) -> dict[Path, str]:
        """Read the whole log, and return all faults by path."""
        faults = {}
        versions, checkpoints = self._versions()
        for version in range(self.oldest(), max(versions | checkpoints.keys(), default=-1) + 1):
            if fault := self._fault(version):  # a file may have come while the folder was listed
                faults[self.file(version)] = fault
        for path in checkpoints.values():
            try:
                pq.read_table(path)
            except (pa.ArrowException, OSError) as error:
                faults[path] = f"is no checkpoint that can be read ({type(error).__name__})"
        if (checkpoint := self.checkpointed()) and not self._checkpoint(checkpoint).is_file():
            faults[self.folder / "_last_checkpoint"] = f"names the checkpoint of version {checkpoint}, which is missing"
        return faults

    def _fault(self, version: int) -> str | None:
        path = self.file(version)
        return _fault_of(path.read_bytes(), first=version == 0) if path.is_file() else "is missing"

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.json") if path.stem.isdecimal())

    def _versions(self) -> tuple[set[int], dict[int, Path]]:
        """Return the versions that have a log file, and the checkpoints by version."""
        versions = {int(path.stem) for path in self._files()}
        return versions, {int(path.name[:20]): path for path in self.folder.glob("*.checkpoint.parquet")}

    def oldest(self) -> int:
        """Return the oldest version whose log file must be there.

        A clean-up by any Delta tool deletes the oldest files, whose content a checkpoint has.
        """
        versions, checkpoints = self._versions()
        oldest = min(versions, default=0)
        return oldest if any(version + 1 >= oldest for version in checkpoints) else 0

    def first_readable(self) -> int:
        """Return the oldest version that can be read: 0, or that of a checkpoint after a clean-up."""
        return 0 if self._stat(0) is not None else min(self._versions()[1], default=0)

    def delete_before(self, version: int) -> None:
        """Delete all files of the log before a version that has a checkpoint, and the temporary files of writers."""
        for path in sorted(self.folder.iterdir()):
            number = path.name[:20]
            if path.name != "_last_checkpoint" and not (number.isdecimal() and int(number) >= version):
                path.unlink()
        sync(self.folder)

    def first_fault(self) -> str | None:
        """Return the first fault of the whole log; None if there is none."""
        return next((f"log file {path.name} {fault}" for path, fault in self.faults().items()), None)

    def made_from(self, version: int, table_id: str | None) -> dict[str, Any] | None:
        """Return a record of the version that a commit is made from: version, digest of its log file, and table id.

        None if the log file is missing.
        """
        try:
            digest = content_digest(self.file(version).read_bytes())
        except OSError:  # a clean-up deleted it
            return None
        return {"version": version, "digest": digest, "table": table_id}

    def table_id(self) -> str | None:
        """Return the table's id from the oldest log file that states an id; None if none does."""
        for file in self._files():
            if table := (_record_of(file).get("made_from") or {}).get("table") or _table_id(file):
                return str(table)
        return None

    def seen(self) -> dict[str, int]:
        """Return the versions of other tables that the newest commits rely on."""
        newest, versions = self.newest(), dict[str, int]()
        for version in range(max(0, newest - _LOOKED_AT + 1), newest + 1):
            for table, at in _record_of(self.file(version)).get("seen", {}).items():
                versions[table] = max(at, versions.get(table, at))
        return versions


def prepare_commit(
    logs: Mapping[str, TableLog], table: str, commit: Commit, version: int, table_id: str | None
) -> dict[str, Any]:
    """Make durable all files that a commit to a local table names or relies on; return the commit's record of itself.

    The commit is made from ``version`` of the table with the id ``table_id``.
    """
    sync_names(logs[table].folder.parent, (file.path for file in commit.files))
    seen = {}
    for other in RELIED_ON:
        if other != table and (newest := logs[other].newest()) >= 0:
            logs[other].sync()
            seen[other] = newest
    lines = len(commit.actions()) + len(commit.transactions)
    return commit_record(lines, seen, logs[table].made_from(version, table_id))


def commit_record(actions: int, seen: Mapping[str, int], made_from: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a commit's record of itself.

    It has the number of other lines in the commit's file, the versions of other tables that the commit relies on
    (``seen``), and the version that the commit was made from, as ``TableLog.made_from`` returns it.
    """
    return {_OURS: {"actions": actions, "seen": dict(seen), "made_from": made_from}}


def empty_commit() -> bytes:
    """Return the content of a log file that changes no file, in place of a lost commit or to begin a new version."""
    info = {"timestamp": int(time.time() * 1000), "operation": REPAIR, **commit_record(0, {})}
    return json.dumps({"commitInfo": info}).encode()


def lost_commits(logs: Mapping[str, TableLog]) -> Iterator[tuple[str, int, str]]:
    """Yield each table that lacks a version on which a commit of another table relies.

    Each item has the table, the newest such version, and the other table.
    """
    by_table = {name: log.seen() for name, log in logs.items()}  # before the newest versions are read
    for table in (name for name in RELIED_ON if name in logs):
        wanted, other = max(((seen.get(table, -1), name) for name, seen in by_table.items()), default=(-1, ""))
        if wanted > logs[table].newest():
            yield table, wanted, other


def _record_of(path: Path) -> dict[str, Any]:
    """Return the record of a log file's commit; empty if another program made the commit or the file is unreadable."""
    try:
        with path.open("rb") as lines:
            for line in lines:
                if isinstance(info := json.loads(line).get("commitInfo"), dict):
                    ours = info.get(_OURS)
                    return ours if isinstance(ours, dict) else {}
    except (OSError, ValueError, AttributeError):
        pass
    return {}


def _table_id(path: Path) -> str | None:
    """Return the id that a log file gives to the table; None if the file gives none, or cannot be read."""
    try:
        data = path.read_bytes()
        lines = [json.loads(line) for line in data.splitlines()] if b'"metaData"' in data else []
        return next((str(line["metaData"]["id"]) for line in lines if "metaData" in line), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _fault_of(data: bytes, *, first: bool) -> str | None:
    """Return the fault of a log file's content, None if it has none; ``first`` marks the table's first file."""
    if not data:
        return "is empty"
    if not data.strip(b"\0"):
        return "holds zeros"
    try:
        actions = [json.loads(line) for line in data.splitlines() if line]
        infos = [action["commitInfo"] for action in actions if "commitInfo" in action]
        ours = infos[0].get(_OURS) if infos else None
    except (ValueError, TypeError, AttributeError):
        return "is not whole"
    if first and not {"protocol", "metaData"} <= {kind for action in actions for kind in action}:
        return "is not whole: it lacks the table's protocol or metadata"
    if isinstance(ours, dict) and ours.get("actions", len(actions) - 1) != len(actions) - 1:
        return f"is not whole: it has {len(actions) - 1} of {ours['actions']} Delta actions"
    return None
