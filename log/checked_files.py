"""Check that files are as they were committed: their sizes, digests and page checksums.

DuckDB checks none of these, so a flipped bit can change the answer of a query. A file's size and time prove nothing,
since a failing disk changes neither. So a check always reads the file. A file that the store wrote is named by the
digest of its content. For a file of another program, the first check remembers the digest, and later checks compare it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from kvdrift.log.delta.parquet_files import StoredFile, content_digest, replace_file
from kvdrift.log.units.unit import NUMBERED
from kvdrift.schema.errors import first_line

MEMORY: Final = ".checked"
"""The name of the store's file with a line for each checked file: path, digest, and time of the last check."""

WEEK: Final = 7 * 24 * 3600.0
"""Seconds after which a large table's file is read again before an estimate."""

# The errors of Arrow for bytes that are no Parquet file, or of an unknown kind.
READ_ERRORS = (pa.ArrowException, OSError, NotImplementedError, KeyError, ValueError)

_NAMED = re.compile(r"[0-9a-f]{16}\.parquet")  # how the store names the files that it writes


class _Check(NamedTuple):
    digest: str
    at: float  # seconds since 1970


class CheckedFiles:
    """Remembers which files of a local store were found whole, and when."""

    def __init__(self, store: Path) -> None:
        self._file = store / MEMORY
        self._checks: dict[str, _Check] = {}
        with suppress(OSError, ValueError):
            for line in self._file.read_text(encoding="utf-8").splitlines():
                path, digest, at = line.split("\t")
                self._checks[path] = _Check(digest, float(at))

    def age(self, table: str, file: StoredFile) -> float:
        """Return how many seconds ago a file was found whole; infinity if it never was.

        It is also infinity if the recorded time lies in the future: the clock was wrong then, or is wrong now.
        """
        check = self._checks.get(f"{table}/{file.path}")
        age = -1.0 if check is None else time.time() - check.at
        return age if age >= 0 else float("inf")

    def damage(self, table: str, file: StoredFile, data: bytes) -> str | None:
        """Return how a file's bytes differ from those that were committed or first read; None if the file is whole.

        A whole file is recorded with the present time. A damaged file is forgotten, so that no later check counts the
        file as whole.
        """
        digest, check = content_digest(data), self._checks.get(f"{table}/{file.path}")
        self.forget(table, file.path)
        if len(data) != file.size:
            return f"the file has {len(data):,} bytes, must have {file.size:,} as the log says"
        if (wanted := named_digest(file.path)) and wanted != digest:
            return f"the content has digest {digest}, must have {wanted} as its name says"
        if check is not None and check.digest != digest:
            return f"the content has digest {digest}, had {check.digest} when it was read first"
        try:
            read_pages(data)
        except READ_ERRORS as error:
            return f"the file cannot be read ({first_line(error)}), must be Parquet with right page checksums"
        self._checks[f"{table}/{file.path}"] = _Check(digest, time.time())
        return None

    def forget(self, table: str, path: str) -> None:
        """Forget that a file was found whole; its digest is kept and still compared."""
        if check := self._checks.get(f"{table}/{path}"):
            self._checks[f"{table}/{path}"] = check._replace(at=0.0)

    def save(self, visible: Iterable[str]) -> None:
        """Save the results for the files ``visible``, each ``TABLE/PATH``; save nothing if the store is read-only."""
        there = set(visible)
        lines = [f"{path}\t{check.digest}\t{int(check.at)}\n" for path, check in self._checks.items() if path in there]
        with suppress(OSError):
            replace_file(self._file, "".join(lines).encode())


def named_digest(path: str) -> str | None:
    """Return the digest that a file's name states; None if its name states none."""
    return path.removesuffix(".parquet") if _NAMED.fullmatch(path) else None


def read_pages(data: bytes) -> None:
    """Read all pages of a Parquet file one part at a time, and verify their checksums."""
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as parquet:
        for batch in parquet.iter_batches():
            batch.validate(full=True)  # Parquet's reader takes any bytes for text


def first_damaged(store: Path, files: Mapping[str, Iterable[StoredFile]], within: float = 0.0) -> str | None:
    """Read files of a local store, given by table; return the fault of the first damaged file, None if all are whole.

    A file of a large table (a row for each event, replicate or position) is passed over if it was found whole less than
    ``within`` seconds ago and its size is unchanged. All other files are small and always read.
    """
    memory, visible = CheckedFiles(store), list[str]()
    try:
        for table, table_files in files.items():
            for file in table_files:
                named = f"{table}/{file.path}"
                visible.append(named)
                path, recent = Path(store, named), table in NUMBERED and memory.age(table, file) < within
                try:
                    if recent and path.stat().st_size == file.size:
                        continue
                    damage = memory.damage(table, file, path.read_bytes())
                except OSError as error:
                    return f"{named} cannot be read ({first_line(error)})"
                if damage:
                    return f"{named}: {damage}"
    finally:
        memory.save(visible)
    return None
