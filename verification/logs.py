"""Check the logs of a store's tables, and name files that no commit names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath, PurePosixPath

import pyarrow.fs

from kvdrift.log.delta.commits import added_files
from kvdrift.log.delta.table_log import TableLog, lost_commits
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, KvdriftError
from kvdrift.schema.location import filesystem_of, is_local, join
from kvdrift.schema.locking import TEMPORARY
from kvdrift.schema.tables import TABLES
from kvdrift.verification.files import Fault, Verified, number_of

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
        Fault(table, f"the log ends at version {logs[table].newest()}, must reach {wanted}: {other} relies on that")
        for table, wanted, other in lost_commits(logs)
    ]
    return Verified("tables", number_of(len(TABLES), "table"), "with logs that are whole", tuple(faults))


def check_leftovers(store: Store) -> Verified:
    """Name the files that no commit names, left by a killed writer or by a lost commit. None of them is a fault."""
    # Files are listed before the logs are read: what is committed meanwhile is named by them.
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
    for found in filesystem.get_file_info(pyarrow.fs.FileSelector(root, allow_not_found=True, recursive=True)):
        if found.is_file:
            yield PurePosixPath(found.path).relative_to(root)


def _is_log(path: PurePath) -> bool:
    name = path.name
    return name == "_last_checkpoint" or (
        name[:20].isdecimal() and name[20:] in {".json", ".checkpoint.parquet", ".crc"}
    )


def _temporary(folder: Path) -> Iterator[Path]:
    """Yield the temporary files in the store's folder: of a catalogue, and of the records of derivations."""
    for pattern in (f"{TEMPORARY}*/*", ".derive-*/*"):
        yield from folder.glob(pattern)
