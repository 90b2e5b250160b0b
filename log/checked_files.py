"""Whether files are as they were committed: size, digest and page checksums, looked at once a file.

DuckDB checks none of them, and a flipped bit can change what it answers. What was found whole is remembered in the
store by size and time of change, so that the next look reads new files only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from log.appends import DERIVED
from log.parquet_files import StoredFile, content_digest, is_seal_broken
from schema.errors import first_line

MEMORY = ".checked"  # a line for each file in a store's folder: path, size and time of change

# What Arrow raises for bytes that are no Parquet file, or none that it knows.
READ_ERRORS = (pa.ArrowException, OSError, NotImplementedError, KeyError, ValueError)

DERIVED_TABLES = tuple(table for tables in DERIVED.values() for table in tables)

_NAMED_DIGEST = re.compile(r"(?:^|-)([0-9a-f]{16})\.parquet$")  # of events files, and of small tables' not compacted


def damage_of(table: str, file: StoredFile, data: bytes) -> str | None:
    """Say how a file's bytes are other than the ones that were committed, as far as log and name tell."""
    if len(data) != file.size:
        return f"the file has {len(data):,} bytes, must have {file.size:,} as the log says"
    if table in DERIVED_TABLES:
        return "the content does not have the digest that the file holds of itself" if is_seal_broken(data) else None
    named = _NAMED_DIGEST.search(file.path)
    if named and named[1] != (digest := content_digest(data)):
        return f"the content has digest {digest}, must have {named[1]} as its name says"
    return None


def parse(data: bytes) -> tuple[pa.Table, Mapping[bytes, bytes]]:
    """Return the rows and the key-value metadata of a Parquet file, page checksums verified.

    Raises:
        One of ``READ_ERRORS``: it is no Parquet file, or damaged.

    """
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as parquet:
        rows = parquet.read()
        rows.validate(full=True)  # Parquet's reader takes any bytes for text
        return rows, dict(parquet.metadata.metadata or {})


def first_damaged(store: Path, files: Mapping[str, Iterable[StoredFile]]) -> str | None:
    """Read the files, by table, that were not found whole before; say what is wrong with the first that is damaged."""
    memory = store / MEMORY
    known = set(memory.read_text(encoding="utf-8", errors="replace").splitlines()) if memory.is_file() else set[str]()
    found = []
    for table, file in ((table, file) for table, own in files.items() for file in own):
        path = f"{store}/{table}/{file.path}"  # as text: there may be many
        try:
            status = os.stat(path)  # noqa: PTH116
            line = f"{table}/{file.path}\t{status.st_size}\t{status.st_mtime_ns}"
            if line in known and status.st_size == file.size:
                continue
            data = Path(path).read_bytes()
            if damage := damage_of(table, file, data):
                return f"{table}/{file.path}: {damage}"
            parse(data)
        except READ_ERRORS as error:
            return f"{table}/{file.path} cannot be read ({first_line(error)})"
        found.append(line)
    with suppress(OSError), memory.open("a", encoding="utf-8") as lines:  # a store that cannot be written is read anew
        lines.write("".join(f"{line}\n" for line in found))
    return None
