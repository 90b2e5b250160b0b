"""Check the files of a store's tables, and the tables' logs; name files that no commit names.

Files must be present, whole, and in agreement with the log and the declared schema. A check has counts, faults and
notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq

from kvdrift.log.checked_files import READ_ERRORS, CheckedFiles, named_digest
from kvdrift.log.delta.commits import added_files
from kvdrift.log.delta.parquet_files import StoredFile, conform, content_digest
from kvdrift.log.delta.table_log import TableLog, lost_commits
from kvdrift.log.store import Store
from kvdrift.schema.errors import UNREADABLE, InputError, KvdriftError, first_line
from kvdrift.schema.location import filesystem_of, is_local, join
from kvdrift.schema.locking import TEMPORARY
from kvdrift.schema.tables import TABLES

UnitRecord = dict[str, Any]  # a row of ``units``, by column
_MISSING = "the file is missing or cannot be read, must be there"


@dataclass(frozen=True)
class Fault:
    """A fault in a table, in a file of a table, or at a key: what is wrong, and what would be right.

    ``units`` are numbers of the units whose rows in the table ``where`` are wrong; -1 means rows without a unit.
    """

    where: str
    what: str
    units: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Verified:
    """The result of verifying one subject, which is sound if there are no faults.

    Notes name missing things, such as rows of a store that is still being written; a note is no fault.
    """

    subject: str
    looked_at: str
    holds: str  # the property of everything looked at if there are no faults
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        outcome = number_of(len(self.faults), "fault") if self.faults else self.holds
        return f"{self.subject}: {self.looked_at}, {outcome}"


def number_of(number: int, name: str) -> str:
    """Return a number with its noun: ``1 unit``, ``3,000 units``."""
    return f"{number:,} {name if number == 1 else f'{name}s'}"


@dataclass(frozen=True)
class TableFiles:
    """The result of reading the files of one table.

    Attributes:
        read: The number of files read.
        faults: The faults found.
        damaged: The paths of damaged files, relative to the table.
        rows: The rows of all readable files in the declared schema; none unless requested.
    """

    read: int
    faults: tuple[Fault, ...]
    damaged: frozenset[str]
    rows: pa.Table


def read_files(
    store: Store, table: str, version: int, memory: CheckedFiles, *, within: float = 0.0, with_rows: bool = False
) -> TableFiles:
    """Read the visible files of a table, and check each file's size, digest, page checksums and schema.

    The memory of checked files records whole files and forgets damaged ones. Files that were found whole less than
    ``within`` seconds ago are passed over.
    """
    read, faults, tables = 0, dict[str, Fault](), [TABLES[table].schema.empty_table()]
    for file in store.stored_files(table, version):
        if memory.age(table, file) < within:
            continue
        read += 1
        try:
            data = store.read_bytes(table, file.path)
        except UNREADABLE:
            memory.forget(table, file.path)
            faults[file.path] = Fault(f"{table}/{file.path}", _MISSING)
            continue
        damage = memory.damage(table, file, data)
        try:
            _check_schema(table, file, data)
            if with_rows:
                tables.append(rows_in(table, data))
        except (*UNREADABLE, *READ_ERRORS) as error:
            damage = damage or first_line(error).removeprefix(f"{table}: ")
        if damage:
            memory.forget(table, file.path)
            faults[file.path] = Fault(f"{table}/{file.path}", damage)
    return TableFiles(read, tuple(faults.values()), frozenset(faults), pa.concat_tables(tables))


def _check_schema(table: str, file: StoredFile, data: bytes) -> None:
    """Check that a file has all declared columns, and as many rows as the log says."""
    with pq.ParquetFile(pa.BufferReader(data)) as parquet:
        there, count = parquet.schema_arrow, parquet.metadata.num_rows
    for field in TABLES[table].schema:
        if field.name not in there.names:
            raise InputError(f"column '{field.name}' is missing")
        if _plain(there.field(field.name).type) != _plain(field.type):
            raise InputError(f"column '{field.name}' is {there.field(field.name).type}, must be {field.type}")
    if file.rows is not None and count != file.rows:
        raise InputError(f"the file has {count} rows, must have {file.rows} as the log says")


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return ``string`` for any Arrow type of texts, ``list`` for any of lists, and other types unchanged."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    return kind


def rows_in(table: str, data: bytes) -> pa.Table:
    """Return the rows of a file in the declared schema of its table."""
    declared = TABLES[table]
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as parquet:
        rows = parquet.read(columns=list(declared.columns))
    fields = [declared.schema.field(name).with_nullable(nullable=True) for name in rows.column_names]
    return conform(declared, rows.cast(pa.schema(fields)))


def whole_rows(store: Store, table: str, path: str) -> pa.Table | None:
    """Return the rows of a file, visible or not; None if its schema or the digest in its name shows damage."""
    try:
        data = store.read_bytes(table, path)
        wanted = named_digest(path)
        return rows_in(table, data) if wanted is None or wanted == content_digest(data) else None
    except (*UNREADABLE, *READ_ERRORS):
        return None


def remember(store: Store, memory: CheckedFiles, versions: Mapping[str, int]) -> None:
    """Save which files of a local store were found whole."""
    if is_local(store.location):
        memory.save(f"{table}/{path}" for table, version in versions.items() for path in store.paths(table, version))


def memory_of(store: Store) -> CheckedFiles:
    """Return the memory of a store's checked files; empty for a store behind a URL."""
    return CheckedFiles(Path(store.location))


@dataclass(frozen=True)
class SmallTable:
    """A table read whole: ``rows`` of all readable files; ``readable`` tells whether all were readable."""

    check: Verified
    rows: pa.Table
    readable: bool


def check_small_table(store: Store, table: str, version: int, memory: CheckedFiles) -> SmallTable:
    """Check that all files of a table are whole and in the declared schema, and that its keys are unique."""
    files = read_files(store, table, version, memory, with_rows=True)
    rows = files.rows
    repeated = [
        Fault(row_name(table, key), f"{count} rows have this key, must be 1") for key, count in _repeated(table, rows)
    ]
    looked_at = f"{number_of(files.read, 'file')}, {number_of(rows.num_rows, 'row')}"
    check = Verified(table, looked_at, "whole and unique", (*files.faults, *repeated))
    return SmallTable(check, rows, not files.damaged)


def _repeated(table: str, rows: pa.Table) -> list[tuple[dict[str, Any], int]]:
    counts = rows.group_by(list(TABLES[table].key)).aggregate([([], "count_all")])
    again = counts.filter(pc.greater(counts["count_all"], 1)).to_pylist()
    return [(row, row.pop("count_all")) for row in again]


def row_name(table: str, key: Mapping[str, Any]) -> str:
    """Return a row's name for fault lines: ``plans (study=a, model=b)``."""
    return f"{table} ({', '.join(f'{name}={value}' for name, value in key.items() if value is not None)})"


NAMED_LEFTOVERS = 10  # of one table, before the rest is a count


def table_logs(store: Store) -> dict[str, TableLog]:
    """Return the logs of a local store's tables; empty for a store behind a URL."""
    return {table: TableLog(Path(store.location, table)) for table in TABLES} if is_local(store.location) else {}


def check_logs(store: Store) -> Verified:
    """Check that every commit is whole, and that no commit is lost on which another table relies."""
    refused, faults = {}, []
    logs = table_logs(store)
    for table in TABLES:
        damage = logs[table].faults() or logs[table].breaks() if table in logs else {}
        faults += [Fault(f"{table}/_delta_log/{path.name}", f"the log file {what}") for path, what in damage.items()]
        try:
            store.version(table)
        except KvdriftError as error:
            refused[table] = error
            if not damage:
                faults.append(Fault(table, str(error).removeprefix(f"{store.location}: ")))
    if len(refused) == len(TABLES) and all(isinstance(error, InputError) for error in refused.values()):
        raise refused["events"]
    faults += [
        Fault(table, f"the log ends at version {logs[table].newest()}, must reach {wanted}: table {other} relies on it")
        for table, wanted, other in lost_commits(logs)
    ]
    return Verified("tables", number_of(len(TABLES), "table"), "with logs that are whole", tuple(faults))


def check_leftovers(store: Store) -> Verified:
    """Note the files that no commit names, left by a killed writer or by a lost commit. Such a file is no fault."""
    # Files are listed before the logs are read, so that the logs name every file that is committed meanwhile.
    listed = {table: sorted(files_of(store, table)) for table in TABLES}
    if is_local(store.location):
        listed["."] = sorted(str(p.relative_to(store.location)) for p in _temporary(Path(store.location)))
    notes, total = [], 0
    for table, paths in listed.items():
        named = set() if table == "." else named_files(store, table)
        left = [path for path in paths if path not in named]
        total += len(left)
        where = "" if table == "." else f"{table}/"
        notes += [f"{where}{path}: no commit names this file" for path in left[:NAMED_LEFTOVERS]]
        if len(left) > NAMED_LEFTOVERS:
            notes.append(f"and {number_of(len(left) - NAMED_LEFTOVERS, 'more file')} of {table}")
    return Verified("leftovers", number_of(total, "file"), "that no commit names", (), tuple(notes))


def files_of(store: Store, table: str) -> Iterator[str]:
    """Yield the paths of a table's files, relative to its folder, without the files of its log."""
    for relative in _everything_below(join(store.location, table)):
        if not (relative.parts[0] == "_delta_log" and _is_log(relative)):
            yield str(relative)


def named_files(store: Store, table: str) -> set[str]:
    """Return all files that a table's commits name, at its latest version or before."""
    return set(store.paths(table)) | added_files(join(store.location, table))


def _everything_below(folder: str) -> Iterator[PurePath]:
    filesystem, root = filesystem_of(folder)
    for entry in filesystem.get_file_info(pyarrow.fs.FileSelector(root, allow_not_found=True, recursive=True)):
        if entry.is_file:
            yield PurePosixPath(entry.path).relative_to(root)


def _is_log(path: PurePath) -> bool:
    name = path.name
    return name == "_last_checkpoint" or (
        name[:20].isdecimal() and name[20:] in {".json", ".checkpoint.parquet", ".crc"}
    )


def _temporary(folder: Path) -> Iterator[Path]:
    """Yield the files in the store's temporary folders: those of a catalogue being written, and of derivations."""
    yield from folder.glob(f"{TEMPORARY}*/*")
