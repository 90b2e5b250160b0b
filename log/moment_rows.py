"""The table ``document_moments``, and which files of trajectories and documents its rows were made from.

A commit that completes the rows says at which versions of both tables, and by a digest which files these had and what
computed them: a log that lost commits and went on has other files at the same version, and another release of kvdrift
may have another moment.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import pyarrow as pa

from log.commits import Commit, transactions
from log.compaction.members import originals
from log.delta.folder import DeltaFolder
from log.delta.snapshot import Snapshot
from log.parquet_files import StoredFile, content_digest, encode_parquet
from schema.errors import InputError

TABLE = "document_moments"
MADE_FROM = ("trajectories", "documents")


def append_moments(
    folder: DeltaFolder, rows: pa.Table, version: int, covered: Mapping[str, int] | None, definition: str
) -> bool:
    """Append rows, unless the table has gone on since a version of its own; return whether it did not.

    ``covered`` has a version by table: with these rows all moments of these versions are there, as ``definition`` says.
    There may be none, where only files were rewritten.
    """
    marks: list[tuple[str, int]] = []
    for table, at in () if covered is None else ((table, covered[table]) for table in MADE_FROM):
        marks += [(_version_id(table), at), (_files_id(table), _digest(definition, folder.load(table, at).paths()))]

    committed = False

    def attempt(loaded: Snapshot) -> Commit | None:
        nonlocal committed
        committed = loaded.version == version
        if not committed:
            return None
        files = []
        if rows.num_rows:
            data = encode_parquet(rows)
            files.append(StoredFile(f"{content_digest(data)}.parquet", len(data), rows.num_rows))
            folder.put(TABLE, files[0].path, data)
        return Commit(files, transactions([(TABLE, version + 1), *marks]))

    folder.commit(TABLE, attempt)
    return committed


def covered_versions(folder: DeltaFolder) -> dict[str, int | None]:
    """Return the versions of the tables that moments are made from at which all of these are there."""
    loaded = folder.load(TABLE)
    return {table: loaded.transaction_version(_version_id(table)) for table in MADE_FROM}


def files_since(folder: DeltaFolder, versions: Mapping[str, int], definition: str) -> dict[str, list[str]] | None:
    """Return the files that tables have at versions and that no moments cover, as relative paths by table.

    Returns:
        None where there are no moments of this definition, or some of what they cover is not there.

    """
    loaded, found = folder.load(TABLE, versions[TABLE]), {}
    for table in MADE_FROM:
        version, digest = (loaded.transaction_version(of(table)) for of in (_version_id, _files_id))
        if version is None or version > versions[table]:
            return None
        try:
            before = folder.load(table, version).paths()
        except InputError:  # a log that is shorter now
            return None
        present = folder.load(table, versions[table]).paths() if version != versions[table] else before
        gone, new = set(before).difference(present), set(present).difference(before)
        if gone:  # into compacted files, unless they are lost
            try:
                covered = originals(folder, table, gone)
            except InputError:  # nothing says any more what they were
                return None
            if not covered <= originals(folder, table, new):
                return None
            new = {path for path in new if not originals(folder, table, [path]) <= covered}
        if _digest(definition, before) != digest:
            return None
        found[table] = sorted(new)
    return found


def _version_id(table: str) -> str:
    return f"kvdrift.moments-{table}"


def _files_id(table: str) -> str:
    return f"kvdrift.moments-{table}-files"


def _digest(definition: str, paths: Sequence[str]) -> int:
    """The first 60 bits of a SHA-256: what fits a transaction's version. The names of files have digests of content."""
    return int(hashlib.sha256(json.dumps([definition, *paths]).encode()).hexdigest()[:15], 16)
