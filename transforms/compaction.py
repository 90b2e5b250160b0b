"""``kvdrift compact``: merge the files of all tables of a store into as few files as possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schema.errors import OperationError
from schema.progress import SILENT, Progress
from schema.tables import TABLES

if TYPE_CHECKING:
    from log.store import Store


@dataclass(frozen=True)
class FileCount:
    """The number of a table's visible files, and their size in bytes."""

    files: int
    size: int


@dataclass(frozen=True)
class CompactedTable:
    """A table that a compaction changed, with its files before and after."""

    table: str
    before: FileCount
    after: FileCount


def compact(store: Store, progress: Progress = SILENT) -> list[CompactedTable]:
    """Merge the files of all tables; return the tables that have fewer files than before. An old store is upgraded.

    It is safe beside writers, readers and another compaction.
    """
    store.make_tables()
    store.reconcile()
    before, damaged = _count_files(store), list[str]()
    progress.begin("compact", sum(count.files for count in before.values()), "files")
    for table in TABLES:
        damaged += store.compact(table, progress.advance).damaged
    if damaged:
        more = f" and {len(damaged) - 1} more files" if len(damaged) > 1 else ""
        raise OperationError(f"{store.location}: {damaged[0]}{more}: kvdrift verify {store.location}")
    after = _count_files(store)
    found = [CompactedTable(table, before[table], after[table]) for table in TABLES]
    return [one for one in found if one.after.files < one.before.files]


def _count_files(store: Store) -> Mapping[str, FileCount]:
    found = {table: store.stored_files(table) for table in TABLES}
    return {table: FileCount(len(files), sum(file.size for file in files)) for table, files in found.items()}
