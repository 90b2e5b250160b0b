"""Pass small result records from a runner's workers to the driver: one JSON file for each group.

The records go through the store, since every worker and the driver reach it. Each run has a folder of its own beside
the tables, so that no run can remove another run's records. A record is named by its group's number, so a group that a
runner tries twice leaves one record.

On a local disk the driver holds a lock on its folder, which ends with the process. Only a folder without a lock is
removed by a later run, so that a clock that jumps takes no record from a run that goes on.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs

from kvdrift.log.delta.parquet_files import StoredFile
from kvdrift.log.store import DerivedFile
from kvdrift.schema.location import filesystem_of, is_local, join
from kvdrift.transforms.segments import SegmentOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PREFIX = ".derive"
STALE = timedelta(days=1)  # a folder that has not changed for so long, and that no run holds, is removed


@contextmanager
def record_folder(location: str) -> Iterator[str]:
    """Make a folder (path or URL) for one run's records in a store, and remove it after the block."""
    folder = join(location, f"{_PREFIX}-{uuid.uuid4().hex}")
    filesystem, path = filesystem_of(folder)
    filesystem.create_dir(path)
    with _locked(folder):
        try:
            yield folder
        finally:
            filesystem.delete_dir(path)
            _remove_stale(location)


@contextmanager
def _locked(folder: str) -> Iterator[bool]:
    """Lock a local folder in the block; yield whether that could be done: no other process has locked it."""
    if not is_local(folder):
        yield False
        return
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:  # another run has just removed it
        yield False
        return
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except OSError:  # also a file system without locks
        free = False
    try:
        yield free
    finally:
        os.close(opened)


def write_record(group: tuple[int, Sequence[SegmentOutcome]], folder: str) -> int:
    """Write one group's (number, outcomes) into the folder as one file; return the number of outcomes."""
    number, outcomes = group
    filesystem, root = filesystem_of(folder)
    aside = f"{root}/{number}.{uuid.uuid4().hex}.part"
    with filesystem.open_output_stream(aside) as sink:
        sink.write(json.dumps([asdict(outcome) for outcome in outcomes]).encode())
    filesystem.move(aside, f"{root}/{number}.json")
    return len(outcomes)


def read_records(folder: str) -> list[SegmentOutcome]:
    """Return all outcomes recorded in the folder, in the order of group numbers."""
    filesystem, root = filesystem_of(folder)
    found = filesystem.get_file_info(pa.fs.FileSelector(root))
    records = sorted((info for info in found if info.extension == "json"), key=lambda info: int(info.base_name[:-5]))
    outcomes: list[SegmentOutcome] = []
    for info in records:
        with filesystem.open_input_stream(info.path) as source:
            outcomes += [_outcome(**values) for values in json.loads(source.read())]
    return outcomes


def _outcome(files: list[Any], errors: list[str], **values: Any) -> SegmentOutcome:
    derived = [(table, DerivedFile(StoredFile(**file["file"]), tuple(file["units"]))) for table, file in files]
    return SegmentOutcome(files=tuple(derived), errors=tuple(errors), **values)


def _remove_stale(location: str) -> None:
    """Remove the folders that killed runs left in a local store; behind a URL nothing tells that a run was killed."""
    if not is_local(location):
        return
    filesystem, root = filesystem_of(location)
    now = datetime.now(UTC)
    for info in filesystem.get_file_info(pa.fs.FileSelector(root)):
        # A folder that is ahead of the clock is as old as any. A young one may not be locked yet.
        if info.base_name.startswith(_PREFIX) and info.mtime is not None and abs(now - info.mtime) > STALE:
            with _locked(info.path) as free, suppress(OSError):  # another run may be removing it
                if free:
                    filesystem.delete_dir(info.path)
