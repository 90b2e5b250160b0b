"""Find the event logs that a call names: files, folders, Delta tables, patterns, and URLs of all of these.

A folder stands for the files below it, and a pattern such as ``runs/*.parquet`` for the files that match it. Files are
left out if their name, or that of a folder on the way, begins with "." or "_", which Spark and Delta hide. A folder
with a Delta log is one source: the rows of all files of the table's newest version, and no rows of other files.

A folder named ``COLUMN=VALUE``, as Hive, Spark and Arrow write it, gives the files below it a column of the group key
that they lack.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs

from kvdrift.log.delta.versions import live_files
from kvdrift.schema.errors import InputError, reading
from kvdrift.schema.location import absolute, check_regular, filesystem_of, is_local, join
from kvdrift.schema.tables import GROUP_KEY

_DELTA_LOG: Final = "_delta_log"
_HIVE: Final = pyarrow.dataset.partitioning(pa.schema([(name, pa.string()) for name in GROUP_KEY]), flavor="hive")

Stamp = tuple[int, int, int]  # of a file: inode, size, time of the last change in nanoseconds; 0 if unknown


@dataclass(frozen=True)
class Place:
    """A file or folder on a disk or behind a URL, and the columns that a file's rows get from elsewhere."""

    location: str  # path or URL, for messages
    path: str = field(compare=False)  # in its file system
    filesystem: pa.fs.FileSystem | None = field(compare=False)  # None: this machine's
    columns: tuple[tuple[str, Any], ...] = ()  # stated by the names of folders, or by a Delta log
    compression: str | None = None  # gzip or zstd

    @classmethod
    def of(cls, text: str) -> Place:
        """Return the place that a path or a URL names."""
        if is_local(text):
            path = str(Path(text))
            return cls(path, path, None)
        url = text.rstrip("/")
        filesystem, path = filesystem_of(url)
        return cls(url, path, filesystem)

    def open(self, *, mapped: bool = False) -> pa.NativeFile:
        """Open a file, for random access unless it is compressed; ``mapped`` maps a file on a disk into memory."""
        if self.filesystem is not None:
            source = self.filesystem.open_input_file(self.path)
        else:
            source = pa.memory_map(self.path) if mapped else pa.OSFile(self.path)
        return pa.CompressedInputStream(source, self.compression) if self.compression else source

    def check(self) -> None:
        """Refuse a pipe, a device, and a file that is not there."""
        with reading(f"{self.location}: cannot be read"):
            if self.filesystem is None:
                check_regular(Path(self.path))
            kind = self.kind()
        if kind != pa.fs.FileType.File:
            raise InputError(f"{self.location}: no such file")

    def below(self, relative: str) -> Place:
        """Return a place below a folder."""
        if self.filesystem is None:
            return Place.of(str(Path(self.path, relative)))
        return Place(join(self.location, relative), join(self.path, relative), self.filesystem) if relative else self

    def kind(self) -> pa.fs.FileType:
        """Tell whether the place is a file, a folder, or not there."""
        if self.filesystem is not None:
            return self.filesystem.get_file_info(self.path).type
        path = Path(self.path)
        if not path.exists():
            return pa.fs.FileType.NotFound
        return pa.fs.FileType.Directory if path.is_dir() else pa.fs.FileType.File

    def parents(self) -> Iterator[Place]:
        """Yield the folders above, the nearest first."""
        path = Path(self.path)
        for parent in path.absolute().parents if self.filesystem is None else path.parents[:-1]:
            yield Place(str(parent), str(parent), self.filesystem)

    def is_table(self) -> bool:
        """Tell whether the folder has a Delta log."""
        return bool(self.below(_DELTA_LOG).kind() == pa.fs.FileType.Directory)

    def files(self) -> list[tuple[str, ...]]:
        """Return the files below, each as the parts of its path from here, sorted."""
        if self.filesystem is None:
            below = (path.relative_to(self.path) for path in Path(self.path).rglob("*") if path.is_file())
        else:
            selector = pa.fs.FileSelector(self.path, recursive=True, allow_not_found=True)
            infos = self.filesystem.get_file_info(selector)
            below = (Path(i.path).relative_to(self.path) for i in infos if i.type == pa.fs.FileType.File)
        return sorted(path.parts for path in below)

    def sources(self, *, discovered: bool) -> list[EventSource]:
        """Return the sources that the place stands for; ``discovered`` tells that a pattern matched the place."""
        if self.kind() != pa.fs.FileType.Directory:
            return [EventSource(self.log_file(), discovered=discovered)]
        files = self.files()
        tables = {file[: file.index(_DELTA_LOG)] for file in files if _DELTA_LOG in file}
        tables = {table for table in tables if not any(table[:end] in tables for end in range(len(table)))}
        others = [file for file in files if not _is_hidden(file) and not any(file[: len(t)] == t for t in tables)]
        sources = [EventSource(self.below("/".join(file)).log_file(), discovered=True) for file in others]
        for table in tables:
            folder = self.below("/".join(table))
            sources.append(EventSource(folder, is_table=True, discovered=discovered or table != ()))
        return sorted(sources, key=lambda source: source.name)

    def log_file(self) -> Place:
        """Return the file with the columns that its folders' names state, as ``COLUMN=VALUE``."""
        return self.with_columns(pyarrow.dataset.get_partition_keys(_HIVE.parse(self.location)))

    def with_columns(self, columns: dict[str, Any]) -> Place:
        """Return the file with columns that its rows get."""
        return replace(self, columns=tuple(sorted(columns.items())))


@dataclass(frozen=True)
class EventSource:
    """A log as a call names or finds it: a file, or the folder of a Delta table."""

    file: Place
    is_table: bool = False
    discovered: bool = False  # in a folder or by a pattern, where files that are no event logs are passed over

    @property
    def name(self) -> str:
        """The path or URL, for messages."""
        return self.file.location

    def files(self) -> tuple[Place, ...]:
        """Return the files whose rows are the log's; of a Delta table, the files of its newest version."""
        if not self.is_table:
            return (self.file,)
        return tuple(self.file.below(path).with_columns(columns) for path, columns in live_files(self.name))

    def stamp(self) -> Stamp:
        """Return a value that differs once the log has changed; zeros if the log is not there."""
        filesystem, path = self.file.filesystem, self.file.path
        try:
            if self.is_table:
                folder = pa.fs.FileSelector(join(path, _DELTA_LOG))
                commits = (filesystem or pa.fs.LocalFileSystem()).get_file_info(folder)
                return 0, len(commits), max((commit.mtime_ns or 0 for commit in commits), default=0)
            if filesystem is None:
                status = Path(path).stat()
                return status.st_ino, status.st_size, status.st_mtime_ns
            info = filesystem.get_file_info(path)
        except OSError:  # opening the log will report the error
            return 0, 0, 0
        return 0, info.size or 0, info.mtime_ns or 0


def expanded(location: str | Path, *, may_be_empty: bool = False) -> list[EventSource]:
    """Return the sources that a path, a pattern or a URL stands for, in the order of their names.

    Raises:
        InputError: A folder or pattern has no files, unless ``may_be_empty``; a URL cannot be read; or a file or folder
            is a part of a Delta table, whose log decides which rows count.
    """
    text = str(location)
    if text.startswith("file://"):
        text = absolute(text)
    with reading(f"{text}: cannot be read"):
        is_pattern = glob.has_magic(text) and not (is_local(text) and Path(text).exists())
        places = _matching(text) if is_pattern else [Place.of(text)]
        _refuse_parts_of_tables(places)
        sources = [source for match in places for source in match.sources(discovered=is_pattern)]
    if not sources and not may_be_empty:
        raise InputError(f"{text}: {'no file matches this pattern' if is_pattern else 'no files in this folder'}")
    return list(dict.fromkeys(sources))


def _matching(text: str) -> list[Place]:
    """Return the files and folders that match a pattern, without hidden ones."""
    parts = text.rstrip("/").split("/")
    first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    start, pattern = Place.of("/".join(parts[:first]) or "/" * bool(first)), parts[first:]
    if start.filesystem is None:
        matches = {path.relative_to(start.path).parts for path in Path(start.path).glob("/".join(pattern))}
    else:
        prefixes = {file[:end] for file in start.files() for end in range(len(file) + 1)}
        matches = {prefix for prefix in prefixes if _matches(prefix, pattern)}
    return [start.below("/".join(match)) for match in sorted(matches) if not _is_hidden(match)]


def _refuse_parts_of_tables(places: list[Place]) -> None:
    below: dict[Place, Place] = {}  # a place below each folder
    for place in places:
        for parent in place.parents():
            below.setdefault(parent, place)
    for folder, place in below.items():
        if folder.is_table():
            raise InputError(
                f"{place.location}: is a part of the Delta table {folder.location}; give the table's folder"
            )


def _is_hidden(parts: Sequence[str]) -> bool:
    return any(part[0] in "._" for part in parts)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Tell whether the parts of a path match the parts of a pattern; ``**`` stands for any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or (bool(parts) and _matches(parts[1:], pattern))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
