"""Merge the small files of a table into fewer files sorted by key, without changing any row.

Each step is a separate commit, so that a kill loses one step. Replaced files stay until they are deleted
(``delete_replaced``, or Delta's own vacuum).

Files are merged once there are many of one size. Each row is then rewritten once per size, and the number of files
stays small.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.delta.commits import Commit, replaced_files, transactions
from kvdrift.log.delta.folder import READABLE_SINCE, DeltaFolder
from kvdrift.log.delta.parquet_files import ROW_GROUP_ROWS, StoredFile
from kvdrift.log.delta.versions import Snapshot
from kvdrift.log.units.commits import ROW_GROUP_ROWS as SMALL_ROW_GROUP_ROWS
from kvdrift.log.units.unit import NUMBERED
from kvdrift.schema.errors import UNREADABLE
from kvdrift.schema.location import is_local, join
from kvdrift.schema.tables import TABLES

PACK_ROWS: Final = 1 << 22
"""The most rows of a merged file, limited by the memory for sorting."""

GATHERED_ROWS: Final = 1 << 20
"""The most rows of a file into which small files are merged while a store grows."""


class Tiers(NamedTuple):
    """Classes of files by their number of rows, with powers of ``base`` as boundaries.

    A file with fewer than ``small`` rows counts as a file of ``small`` rows. The files of a class are merged once there
    are more than ``base``.
    """

    base: int
    small: int


_LARGE, _SMALL = Tiers(16, 1), Tiers(4, 1)  # every command opens all files of small tables, and few rows are rewritten
_REMOTE = Tiers(4, 1 << 14)  # behind a URL each file is some requests
_LARGE_BYTES = 1 << 26  # compressed; a small table's file of at least half of it stays


@dataclass(frozen=True)
class Rewritten:
    """The number of files that were replaced by merging, and a line for each damaged file, which stays unchanged."""

    replaced: int = 0
    damaged: tuple[str, ...] = ()


def gather(folder: DeltaFolder, table: str, most: int = GATHERED_ROWS) -> int:
    """Merge the files of each class of ``Tiers`` that has too many, small files first; return how many were replaced.

    A merged file has at most ``most`` rows. Damaged files, and files with at least half of ``most`` rows, stay.
    """
    count, tiers = 0, _LARGE if table in NUMBERED else _SMALL
    for sources in too_many(folder.load(table).files(), most, tiers if is_local(folder.location) else _REMOTE):
        for part in cut(sources, most):
            count += put_together(folder, table, part).replaced
    return count


def compact(folder: DeltaFolder, table: str, done: Callable[[int], None]) -> Rewritten:
    """Merge all small files of a table, in the order of their keys; ``done`` gets the number of files of each merge."""
    loaded = folder.load(table)
    small = [file for file in loaded.files() if (file.rows or 0) < PACK_ROWS // 2 and file.size < _LARGE_BYTES // 2]
    replaced, damaged = 0, list[str]()
    for part in cut(by_first_rows(folder, loaded, small), PACK_ROWS):
        rewritten = put_together(folder, table, part)
        replaced += rewritten.replaced
        damaged += rewritten.damaged
        done(len(part))
    return Rewritten(replaced, tuple(damaged))


def too_many(files: Iterable[StoredFile], most: int, tiers: Tiers = _LARGE) -> list[list[StoredFile]]:
    """Return the files of each class of ``tiers`` that has more than ``tiers.base`` files, small files first.

    Files with at least half of ``most`` rows are left out.
    """
    sizes = defaultdict[int, list[StoredFile]](list)
    for file in files:
        if (rows := file.rows or 0) < most // 2:
            sizes[int(math.log(max(rows, tiers.small), tiers.base))].append(file)
    return [sizes[size] for size in sorted(sizes) if len(sizes[size]) > tiers.base]


def put_together(folder: DeltaFolder, table: str, sources: Sequence[StoredFile]) -> Rewritten:
    """Write the rows of some files as one file, sorted by key, by one commit.

    Damaged files stay. Nothing is replaced if another compaction has replaced one of the files meanwhile.
    """
    loaded = folder.load(table)
    paths = {file.path for file in sources} & set(loaded.paths())
    read, damaged = _read_whole(folder, loaded, sorted(paths))
    if len(read) < 2:
        return Rewritten(0, tuple(damaged))
    together = sorted_by_key(table, pa.concat_tables(read.values()))
    small = table not in NUMBERED
    file = folder.put_rows(table, together, row_group=SMALL_ROW_GROUP_ROWS if small else ROW_GROUP_ROWS)
    replaced = [*read]

    def attempt(latest: Snapshot) -> Commit | None:
        return Commit([file], [], replaced) if set(replaced) <= set(latest.paths()) else None

    made = folder.commit(table, attempt, alone=True) if replaced != [file.path] else 0
    return Rewritten(len(replaced) if made else 0, tuple(damaged))


def _read_whole(folder: DeltaFolder, loaded: Snapshot, paths: list[str]) -> tuple[dict[str, pa.Table], list[str]]:
    """Read files by path, with texts as dictionaries; also return a line for each file that cannot be read."""
    names, read, damaged = TABLES[loaded.table].columns, dict[str, pa.Table](), list[str]()
    for path in paths:
        try:
            read[path] = folder.read(loaded, names, paths=[path], coded=True)
        except UNREADABLE as error:
            damaged.append(f"{loaded.table}/{path}: {error}")
    return read, damaged


def sorted_by_key(table: str, rows: pa.Table) -> pa.Table:
    """Sort rows by the key of their table; nulls come first."""
    rows, key = rows.unify_dictionaries().combine_chunks(), dict[str, pa.Array]()
    for name in TABLES[table].key:
        column = rows[name].combine_chunks()
        if pa.types.is_dictionary(column.type):
            column = pa.array(np.argsort(pc.sort_indices(column.dictionary))).take(column.indices)
        if column.null_count:
            key[f"{name} is known"] = column.is_valid()
        key[name] = column
    order = pc.sort_indices(pa.table(key), sort_keys=[(name, "ascending") for name in key]).to_numpy()
    return rows if np.all(order[1:] > order[:-1]) else rows.take(pa.array(order))


def by_first_rows(folder: DeltaFolder, loaded: Snapshot, files: Sequence[StoredFile]) -> list[StoredFile]:
    """Sort visible files by the least values that they have in the text columns of the table's key."""
    declared = TABLES[loaded.table]
    names = [name for name in declared.key if declared.schema.field(name).type == pa.string()]

    def least(file: StoredFile) -> list[str]:
        return [(folder.bounds_of(loaded.table, file.path, name) or ("",))[0] for name in names]

    return sorted(files, key=least)


def cut(files: Iterable[StoredFile], most: int) -> Iterator[list[StoredFile]]:
    """Divide files, in order, into parts to merge: of at most ``most`` rows and 64 MiB, or of a single file."""
    part: list[StoredFile] = []
    rows = size = 0
    for file in files:
        if part and (rows + (file.rows or 0) > most or size + file.size > _LARGE_BYTES):
            yield part
            part, rows, size = [], 0, 0
        part.append(file)
        rows, size = rows + (file.rows or 0), size + file.size
    if part:
        yield part


def delete_replaced(folder: DeltaFolder, table: str, age: timedelta) -> tuple[int, int]:
    """Delete the files of a table that were replaced at least ``age`` ago, after a commit that records the deletion.

    Temporary files of killed writers are deleted too. Returns the number of deleted replaced files, and their bytes.
    """
    folder.sweep(table)
    version, replaced = replaced_files(join(folder.location, table), age)
    sizes = folder.sizes(table, replaced.difference(folder.load(table).paths()))
    if not sizes:
        return 0, 0
    folder.commit(table, lambda _: Commit([], transactions([(READABLE_SINCE, version)])), alone=True)
    folder.delete(table, sizes)
    return len(sizes), sum(sizes.values())
