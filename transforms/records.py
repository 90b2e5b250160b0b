"""Small result records on their way from a runner's workers back to the driver: one JSON file per group.

They go through the store, the one place that every worker and the driver reach, in a folder of their own run. A
record's name is its group's number: a group that a runner tries twice leaves one record.
"""

from __future__ import annotations

import json
import uuid
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow.fs

from schema.location import filesystem_of, join
from schema.store.store import StoredFile
from transforms.segments import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDER = ".derive"  # in the store, beside its tables
STALE = timedelta(days=1)  # a run's folder that old was left by a killed one


@contextmanager
def record_folder(location: str) -> Iterator[str]:
    """Make a folder (absolute path or URL) for one run's records in the store; it goes, with them, at the end."""
    filesystem, root = filesystem_of(join(location, FOLDER))
    run = uuid.uuid4().hex
    filesystem.create_dir(f"{root}/{run}", recursive=True)
    try:
        yield join(location, FOLDER, run)
    finally:
        filesystem.delete_dir(f"{root}/{run}")
        _remove_stale(filesystem, root)


def write_record(group: tuple[int, Sequence[Outcome]], folder: str) -> int:
    """Put one group's (number, outcomes) in the folder at once; returns the number of outcomes."""
    number, outcomes = group
    filesystem, root = filesystem_of(folder)
    aside = f"{root}/{number}.{uuid.uuid4().hex}.part"
    with filesystem.open_output_stream(aside) as sink:
        sink.write(json.dumps([asdict(outcome) for outcome in outcomes]).encode())
    filesystem.move(aside, f"{root}/{number}.json")
    return len(outcomes)


def read_records(folder: str) -> list[Outcome]:
    """All outcomes recorded in the folder, in order of group number."""
    filesystem, root = filesystem_of(folder)
    found = filesystem.get_file_info(pyarrow.fs.FileSelector(root))
    records = sorted((info for info in found if info.extension == "json"), key=lambda info: int(info.base_name[:-5]))
    outcomes: list[Outcome] = []
    for info in records:
        with filesystem.open_input_stream(info.path) as source:
            outcomes += [_outcome(**values) for values in json.loads(source.read())]
    return outcomes


def _outcome(files: list[Any], **values: Any) -> Outcome:
    return Outcome(files=tuple((table, StoredFile(**file)) for table, file in files), **values)


def _remove_stale(filesystem: pyarrow.fs.FileSystem, root: str) -> None:
    before = datetime.now(UTC) - STALE
    folders = filesystem.get_file_info(pyarrow.fs.FileSelector(root))
    for info in folders:
        if info.mtime is not None and info.mtime < before:
            filesystem.delete_dir(info.path)
    if not folders:
        filesystem.delete_dir(root)
