"""Units of ``events`` put together in large files, sorted by their keys, each with the records of its units.

A file and what is derived from it have one path, as those of a unit have. So a pack is committed in ``events`` first,
and then derived like any other file, in place of what its units had been derived into.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from log.appends import DERIVED, compacted_path, estimator_of, is_compacted
from log.checked_files import READ_ERRORS, damage_of
from log.commits import Commit, transactions
from log.compaction.derived import own_paths
from log.compaction.members import Member, members_in, units_footer
from log.delta.folder import DeltaFolder
from log.delta.snapshot import Snapshot
from log.parquet_files import StoredFile, content_digest, encode_parquet
from schema.errors import DamagedStoreError, KvdriftError, first_line
from schema.tables import EVENTS, GROUP_KEY

PACK_ROWS = 1 << 22  # of one file: what is sorted in memory at once
GATHERED_ROWS = 1 << 18  # of one file that many become while a store is derived live
LIVE_ROWS = 1 << 15  # the same within the live derivation, which holds no more and waits no longer than these take
UNIT_KEY = (*GROUP_KEY, "action_revision", "first_replicate")
_WORDS = (*GROUP_KEY, "kind")  # dictionaries in memory; files of older versions lack the last


@dataclass(frozen=True)
class Pack:
    """Files of ``events``, of one estimator, to be made one.

    Attributes:
        sources: The files as the log has them.

    """

    estimator: str
    sources: tuple[StoredFile, ...]


@dataclass(frozen=True)
class Packed:
    """What became of a pack.

    Attributes:
        file: The file in place of the others; None where there is none.
        replaced: The files that it replaced.
        damaged: A line for each file that could not be read; it stays as it is.

    """

    file: StoredFile | None
    replaced: tuple[StoredFile, ...] = ()
    damaged: tuple[str, ...] = ()


def plan_packs(folder: DeltaFolder, order: Mapping[str, int]) -> list[Pack]:
    """Find out which files of ``events`` are worth putting together: those of units, and small ones of earlier packs.

    Args:
        folder: The store's tables.
        order: The place of each unit in the order of keys, by its path.

    Raises:
        InputError: Another program has rewritten the table.

    """
    events = folder.load("events")
    own_paths(folder, events)
    small = [file for file in events.files() if not is_compacted(file.path) or file.rows < PACK_ROWS // 2]
    found = []
    for estimator in DERIVED:
        sources = [file for file in small if estimator_of(file.path) == estimator]
        sources.sort(key=lambda file: (-1 if is_compacted(file.path) else order.get(file.path, len(order)), file.path))
        found += [Pack(estimator, files) for files in _cut(sources, PACK_ROWS) if len(files) > 1]
    return found


def packs_of(folder: DeltaFolder, paths: Collection[str], rows: int) -> list[Pack]:
    """Make packs of some files of ``events``, of so many rows at most; those that are not visible are left out."""
    files = [file for file in folder.load("events").files() if file.path in paths]
    by_estimator = {
        estimator: [file for file in files if estimator_of(file.path) == estimator] for estimator in DERIVED
    }
    return [Pack(estimator, cut) for estimator, own in by_estimator.items() for cut in _cut(own, rows) if len(cut) > 1]


def plan_tiers(folder: DeltaFolder, most: int, rows: int) -> list[Pack]:
    """Find out which files of ``events`` of one size are too many; those that are not derived do not count.

    Args:
        folder: The store's tables.
        most: How many files of one size there may be; see ``tiers``.
        rows: Of a pack, at most.

    Raises:
        InputError: Another program has rewritten the table.

    """
    events = folder.load("events")
    if len(own_paths(folder, events)) <= most:
        return []
    derived = [set.intersection(*(set(folder.load(table).paths()) for table in tables)) for tables in DERIVED.values()]
    own = [
        [file.path for file in files if any(file.path in of for of in derived)]
        for files in tiers(events.files(), most, rows)
    ]
    return [pack for paths in own for pack in packs_of(folder, paths, rows)]


def tiers(files: Iterable[StoredFile], most: int, rows: int) -> list[list[StoredFile]]:
    """Choose the files of each size that more than ``most`` have, small ones first; sizes are powers of it, in rows.

    Files of half of ``rows`` and more are large enough.

    Where these are put together whenever there are some, each row is rewritten once for each size, and the files that
    are left are few.
    """
    sizes = defaultdict[int, list[StoredFile]](list)
    for file in files:
        if file.rows < rows // 2:
            sizes[int(math.log(max(file.rows, 1), most))].append(file)
    return [sizes[size] for size in sorted(sizes) if len(sizes[size]) > most]


def _cut(sources: list[StoredFile], most: int) -> Iterator[tuple[StoredFile, ...]]:
    files: list[StoredFile] = []
    rows = 0
    for file in sources:
        if files and rows + file.rows > most:
            yield tuple(files)
            files, rows = [], 0
        files.append(file)
        rows += file.rows
    if files:
        yield tuple(files)


def pack_events(folder: DeltaFolder, pack: Pack) -> Packed:
    """Write a pack's rows as one file and commit it in place of the others.

    Returns:
        What was done; nothing where another compaction has replaced one of the files meanwhile.

    Raises:
        InputError: The store cannot be written.

    """
    damaged, sources = [], []
    members: list[tuple[Member, pa.Table]] = []
    for source in pack.sources:
        try:
            members += _read_members(folder, source)
            sources.append(source)
        except (KvdriftError, *READ_ERRORS) as error:
            damaged.append(f"events/{source.path}: {first_line(error)}")
    if len(sources) < 2:
        return Packed(None, (), tuple(damaged))
    file = put_pack(folder, pack.estimator, members)
    replaced = [source.path for source in sources]
    if not folder.commit("events", lambda loaded: rewriting(loaded, file, replaced), alone=True):
        return Packed(None, (), tuple(damaged))
    return Packed(file, tuple(sources), tuple(damaged))


def put_pack(folder: DeltaFolder, estimator: str, members: list[tuple[Member, pa.Table]]) -> StoredFile:
    """Write units of one estimator, each with its rows, as one file; it is not visible yet.

    Raises:
        InputError: The store cannot be written.

    """
    members = sorted(members, key=lambda item: tuple(item[0].record[name] for name in UNIT_KEY))
    rows = pa.concat_tables([rows for _, rows in members]).unify_dictionaries()
    data = encode_parquet(rows, units_footer([member for member, _ in members]))
    path = compacted_path(estimator, len(members), content_digest(data))
    folder.put("events", path, data)
    return StoredFile(path, len(data), rows.num_rows)


def rewriting(loaded: Snapshot, file: StoredFile, replaced: list[str]) -> Commit | None:
    """Make the commit of a file in place of others; None where one of them is not visible any more."""
    if not set(replaced) <= set(loaded.paths()):
        return None
    return Commit([file], transactions(loaded.marks_of_rewriting().items()), replaced)


def _read_members(folder: DeltaFolder, file: StoredFile) -> list[tuple[Member, pa.Table]]:
    """Read the units of a file of events, each with its rows, in the declared schema with words as dictionaries.

    Raises:
        DamagedStoreError: The file is not as it was committed.
        One of ``READ_ERRORS``: it cannot be read.

    """
    data = folder.read_bytes("events", file.path)
    if damage := damage_of("events", file, data):
        raise DamagedStoreError(damage)
    with pq.ParquetFile(
        pa.BufferReader(data), read_dictionary=list(GROUP_KEY), page_checksum_verification=True
    ) as parquet:
        rows = _declared(parquet.read(use_threads=False))
        members = members_in(file.path, rows.num_rows, parquet.metadata.metadata or {})
    if members is None or sum(member.rows for member in members) != rows.num_rows:
        raise DamagedStoreError("the footer has no unit record, must have those of all its units")
    found, begin = [], 0
    for member in members:
        found.append((member, rows.slice(begin, member.rows)))
        begin += member.rows
    return found


def _declared(rows: pa.Table) -> pa.Table:
    """Put rows of any schema version into the declared columns."""
    columns, fields = [], []
    for name, default in {**dict.fromkeys(EVENTS.columns), **EVENTS.defaults}.items():
        kind = EVENTS.schema.field(name).type
        coded = pa.dictionary(pa.int32(), pa.string()) if name in _WORDS else kind
        if name not in rows.column_names:
            column = pa.repeat(pa.scalar(default, kind), rows.num_rows)
        else:
            column = rows.column(name)
        columns.append(column.dictionary_encode() if name in _WORDS and column.type == kind else column)
        fields.append(EVENTS.schema.field(name).with_type(coded))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))
