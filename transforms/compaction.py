"""Many files of a store made few: events are put together and derived again, all other tables are rewritten.

Nothing is read differently afterwards. Every step is a commit of its own that changes no row, so a kill costs one of
them, and the next compaction goes on from there. The files that were replaced stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from log.appends import DERIVED, derived_tables
from log.compaction.packs import GATHERED_ROWS, LIVE_ROWS
from schema.errors import OperationError
from schema.location import join
from schema.progress import SILENT, Progress
from schema.tables import TABLES
from transforms.segments import Segment, commit, derive_segment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from log.store import Store

FILES_OF_A_SIZE = 16  # beside a live derivation

_OF_EVENTS = ("events", *(table for tables in DERIVED.values() for table in tables))


@dataclass(frozen=True)
class FileCount:
    """The visible files of a table: how many, and their size in bytes."""

    files: int
    size: int


@dataclass(frozen=True)
class CompactedTable:
    """What a compaction made of a table that it changed."""

    table: str
    before: FileCount
    after: FileCount


def compact(store: Store, progress: Progress = SILENT) -> list[CompactedTable]:
    """Put the files of all tables together; safe beside writers, readers and another compaction.

    Args:
        store: A store, which is upgraded if it is old.
        progress: Who is told how far the work is.

    Returns:
        The tables that have fewer files now.

    Raises:
        InputError: The store cannot be written, or another program has rewritten a table.
        OperationError: Files are damaged; they are left as they are, and all others are put together.

    """
    store.make_tables()
    store.reconcile()
    before = _count_files(store)
    packs, damaged = store.rewriting.plan_packs(), _align(store)
    progress.begin("compact", sum(len(pack.sources) for pack in packs), "files of events")
    for pack in packs:
        damaged += store.rewriting.pack_events(pack).damaged
        damaged += _align(store)
        progress.advance(len(pack.sources))
    for table in TABLES:
        if table not in _OF_EVENTS:
            store.rewriting.compact_rows(table)
    if damaged:
        more = f" and {len(damaged) - 1} more files" if len(damaged) > 1 else ""
        raise OperationError(f"{store.location}: {damaged[0]}{more}: kvdrift verify {store.location}")
    after = _count_files(store)
    found = [CompactedTable(table, before[table], after[table]) for table in TABLES]
    return [one for one in found if one.after.files < one.before.files]


def put_together(store: Store, segments: Sequence[Segment]) -> tuple[list[Segment], set[str]]:
    """Put segments of units that are not derived yet together, so that many are derived at the cost of one.

    Args:
        store: The store.
        segments: Segments that are pending.

    Returns:
        The segments in their place, and the paths of those that are gone into them; damaged ones stay as they are.

    Raises:
        InputError: The store cannot be written.

    """
    whole = [segment.path for segment in segments if segment.tables == derived_tables(segment.path)]
    found, gone = list[Segment](), set[str]()
    for pack in store.rewriting.packs_of(set(whole), LIVE_ROWS) if len(whole) > 1 else ():
        packed = store.rewriting.pack_events(pack)
        if packed.file is not None:
            path, replaced = packed.file.path, {file.path for file in packed.replaced}
            tables = derived_tables(path)
            found.append(Segment(path, join(store.location, "events", path), tables, len(replaced)))
            gone |= replaced
    return found, gone


def gather(store: Store, rows: int = GATHERED_ROWS) -> None:
    """Put files together of which there are many, small ones first; the cost is that of what came since.

    What reads a growing store then opens some hundred files at most, however many units it has. Files that are damaged
    or not derived stay as they are.

    Args:
        store: The store.
        rows: Of what is put together at once; files of half of it stay as they are.

    Raises:
        InputError: The store cannot be written, or another program has rewritten a table.

    """
    store.rewriting.gather_rows("units", FILES_OF_A_SIZE, rows)
    for pack in store.rewriting.plan_tiers(FILES_OF_A_SIZE, rows):
        store.rewriting.pack_events(pack)
        _align(store)


def _align(store: Store) -> list[str]:
    """Derive what was put together, in place of what its units were derived into; return a line for each failure."""
    version, failures = store.version("events"), []
    for path, tables in store.rewriting.unaligned_packs().items():
        outcome = derive_segment(store, Segment(path, join(store.location, "events", path), tables))
        commit(store, [outcome], version, covered=False)
        failures += [outcome.error] if outcome.error else []
    return failures


def _count_files(store: Store) -> Mapping[str, FileCount]:
    found = {table: store.stored_files(table) for table in TABLES}
    return {table: FileCount(len(files), sum(file.size for file in files)) for table, files in found.items()}
