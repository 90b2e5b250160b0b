"""Mending a local store: damaged commits are set aside, and what follows from other rows is made again.

Nothing is deleted: what is taken away lies in ``set-aside/TIME/`` in the store, under the path that it had. A newest
commit that is empty or torn belongs to nobody who was told. Where a commit is lost that another table relies on, an
empty one takes its place, and rows that are still there as whole files are committed again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from log.appends import is_compacted, is_foreign, span_of_path, unit_count

from log.checked_files import DERIVED_TABLES, first_damaged
from log.delta.durability import make_folder, sync
from log.delta.folder import DeltaFolder
from log.delta.parquet_files import StoredFile, replace_file
from log.delta.table_log import RELIED_ON, TableLog, said_of_commit
from log.small_tables import KEYED
from log.store import ESTIMATED_TABLES, Store
from schema.errors import InputError, KvdriftError
from schema.location import is_local
from schema.locking import repaired
from schema.tables import IDENTITIES, TABLES
from sql.catalog import CATALOG_NAME, refresh_catalog
from transforms.segments import COVERED, PARTIAL, commit, derive_segment, pending
from verification.files import read_unnamed
from verification.findings import Fault, counted
from verification.logs import files_of, table_logs
from verification.segments import units_of

MOMENTS = "document_moments"
_BATCH = 256  # segments of one commit


class _Aside:
    """Where files go that are taken out of a store: a folder of their own for each repair."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._folder = store / "set-aside" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")

    def take(self, path: Path) -> None:
        target = self._folder / path.relative_to(self._store)
        while target.exists():  # a table after its log file
            target = target.with_name(f"{target.name}-whole")
        make_folder(target.parent)
        path.rename(target)
        sync(target.parent)
        sync(path.parent)


def repair(store: Store, faults: Sequence[Fault] = ()) -> Iterator[str]:
    """Mend a store; commits of other processes wait until it is done.

    Args:
        store: A local store; its tables may be unreadable.
        faults: What a verification found in files of derived tables and of units, which are then made again.

    Yields:
        A line for each thing that was done.

    Raises:
        InputError: The store is behind a URL, or there is no store.
        OperationError: Another process repairs it, or writes to it for seconds.
        KvdriftError: Something cannot be mended.

    """
    if not is_local(store.location):
        raise InputError(f"{store.location}: only a local store can be repaired; an object store keeps what it accepts")
    if not any(Path(store.location, table, "_delta_log").is_dir() for table in TABLES):
        store.version("events")  # raises what says that it is no store
    with repaired(store.location):
        yield from _repair(store, faults)


def _repair(store: Store, faults: Sequence[Fault]) -> Iterator[str]:
    aside, logs = _Aside(Path(store.location)), table_logs(store)
    relied = {table: max((log.seen().get(table, -1) for log in logs.values()), default=-1) for table in RELIED_ON}
    lost: set[str] = set()
    for table in sorted(TABLES, key="events".__eq__):  # events last: what others say of it is read from them
        if table == "events":
            relied[table] = max(relied[table], _cited_version(store))
        done = list(_mend_log(table, logs[table], relied.get(table, -1), aside))
        if any("stands in" in line for line in done):
            lost.add(table)
        yield from done
    store = Store(store.location)  # what the other one knows of the logs is of before
    store.make_tables()
    yield from _restore_rows(store, lost)
    damaged = [path for path in store.paths("events") if is_compacted(path) and _is_damaged(store, path)]
    yield from _unpack(store, aside, damaged)
    if gone := [path for path in damaged if path in store.paths("events")]:
        yield f"events: {gone[0]} is damaged, and not all files that it replaced are there: nothing else is mended"
        return
    yield from _restore_units(store)
    yield from _project_units(store, aside, faulty=any(fault.where.startswith("units") for fault in faults))
    yield from _identify_again(store)
    yield from _drop_moments(store, aside, lost=MOMENTS in lost)
    yield from _derive_again(store, aside, {fault.where for fault in faults})
    if Path(store.location, CATALOG_NAME).exists():
        try:
            refresh_catalog(store)
            yield f"{CATALOG_NAME}: written again"
        except KvdriftError as error:  # a file is missing that nothing gives again
            yield f"{CATALOG_NAME}: not written again: {error}"


def _mend_log(table: str, log: TableLog, relied: int, aside: _Aside) -> Iterator[str]:
    """Set damaged log files aside, and put empty commits where one is missing that a later or another one relies on."""
    faults = log.faults()
    for path, what in faults.items():
        if path.exists():
            aside.take(path)
            yield f"{table}: log file {path.name} {what}: it is set aside"
            if path.name.endswith(".checkpoint.parquet") and (log.folder / "_last_checkpoint").exists():
                aside.take(log.folder / "_last_checkpoint")
    kept = [int(path.name[:20]) for path in log.folder.glob("*") if path.name[:20].isdecimal() and path not in faults]
    last = max([relied, *kept])
    missing = [version for version in range(last + 1) if not log.file(version).exists()]
    for version in missing:
        replace_file(log.file(version), _first_commit(table) if version == 0 else _empty_commit())
        yield f"{table}: log file {log.file(version).name} is lost: an empty commit stands in for it"
    if table == "events" and missing:
        # No estimate and no report of what was there is taken for one of what is there.
        replace_file(log.file(last + 1), _empty_commit())
    if missing:
        sync(log.folder)


def _empty_commit() -> bytes:
    now = int(datetime.now(UTC).timestamp() * 1000)
    info = {"timestamp": now, "operation": "REPAIR", **said_of_commit(0, {})}
    return json.dumps({"commitInfo": info}).encode()


def _first_commit(table: str) -> bytes:
    """The commit that makes a table, as it is in a new store."""
    with tempfile.TemporaryDirectory() as folder:
        DeltaFolder(folder).create(table)
        return TableLog(Path(folder, table)).file(0).read_bytes()


def _cited_version(store: Store) -> int:
    """The newest events version that derived tables, plans and results say they were made from."""
    cited = [-1]
    for table in DERIVED_TABLES:
        with suppress(KvdriftError):  # it is made again, or the check after the repair names it
            cited += [store.covered_version(table, app) or -1 for app in (COVERED, PARTIAL)]
    for table in ("plans", "looks", "results", "calibration"):
        with suppress(KvdriftError):
            newest = pc.max(store.read(table, columns=["events_version"])["events_version"]).as_py()
            cited.append(-1 if newest is None else newest)
    return max(cited)


def _restore_rows(store: Store, lost: set[str]) -> Iterator[str]:
    """Append the rows of small tables that lost a commit from the files that it named."""
    for table in sorted(lost & set(KEYED)):
        named = set(store.paths(table))
        left = [path for path in files_of(store, table) if path not in named]
        found = [reading.rows for reading in (read_unnamed(store, table, path) for path in left) if reading.rows]
        try:
            count = store.append_rows(table, pa.concat_tables(found)) if found else 0
        except InputError as error:
            yield f"{table}: files that no commit names contradict each other and stay so ({error})"
            continue
        yield f"{table}: {counted(count, 'row')} of files that are still there, committed again"


def _is_damaged(store: Store, path: str) -> bool:
    return read_unnamed(store, "events", path).rows is None


def _unpack(store: Store, aside: _Aside, damaged: Collection[str]) -> Iterator[str]:
    """Put the files of units in place of damaged compacted ones, where all of them are still there."""
    if not damaged:
        return
    kept = store.unit_paths_in(set(store.paths("events")).difference(damaged))
    units = set(store.read("units", columns=["path"])["path"].to_pylist()) - kept
    whole = list(_whole_units(store, units))
    if len(whole) < max(len(units), unit_count(damaged)):
        return
    for path in damaged:
        store.rewriting.withdraw_pack(path)
        if (file := Path(store.location, "events", path)).exists():
            aside.take(file)
    yield f"events: {counted(len(damaged), 'damaged compacted file')} set aside"
    yield f"events: {counted(store.adopt_units(whole), 'unit')} of the files that it replaced, committed again"


def _whole_units(store: Store, paths: Collection[str]) -> Iterator[tuple[StoredFile, dict[str, Any]]]:
    """Yield the files of units that are there and whole, with the units' records."""
    for path in sorted(paths):
        reading = read_unnamed(store, "events", path)
        with suppress(InputError):
            for unit, rows in units_of(path, reading):
                size = Path(store.location, "events", path).stat().st_size
                yield StoredFile(path, size, rows.num_rows), unit.record


def _restore_units(store: Store) -> Iterator[str]:
    """Commit the units again that ``events`` has lost and that rows of ``units`` or derived rows are of."""
    visible = store.unit_paths()
    was_there = {path for table in DERIVED_TABLES for path in store.paths(table)}
    with suppress(InputError):  # where files of ``units`` are damaged, derived rows tell
        was_there |= set(store.read("units", columns=["path"])["path"].to_pylist())
    lost = sorted(path for path in was_there - visible if span_of_path(path) is not None)
    with suppress(InputError):  # their rows in damaged files of ``units`` are made again after this
        store.adopt_units(list(_whole_units(store, lost)))
    if back := store.unit_paths().intersection(lost):
        yield f"events: {counted(len(back), 'unit')} of files that are still there, committed again"
    for path in sorted(set(lost) - store.unit_paths()):
        yield f"events: {path} is lost, and what was made from it goes"


def _project_units(store: Store, aside: _Aside, *, faulty: bool) -> Iterator[str]:
    """Make the rows of ``units`` again from the records in the events files, where they are not those."""
    if any(map(is_foreign, store.paths("events"))):
        return  # rewritten by another program: the records are lost
    units = store.unit_paths()
    try:
        rows = sorted(store.read("units", columns=["path"])["path"].to_pylist())
        if not faulty and not set(rows) - units and len(set(rows)) == len(rows):
            if count := store.reconcile():
                yield f"units: {counted(count, 'row')} made again from the events files"
            if store.read("units", columns=["path"]).num_rows == len(units):
                return
    except InputError:
        pass
    aside.take(Path(store.location, "units"))
    again = Store(store.location)
    again.make_tables()
    yield f"units: set aside, and {counted(again.reconcile(), 'row')} made from the events files"


def _drop_moments(store: Store, aside: _Aside, *, lost: bool) -> Iterator[str]:
    """Set the stored moments aside where rows of theirs are lost; the next derivation computes them again."""
    folder = Path(store.location, MOMENTS)
    damaged = first_damaged(folder.parent, {MOMENTS: store.stored_files(MOMENTS)}) is not None
    if lost or damaged:
        aside.take(folder)
        Store(store.location).make_tables()
        yield f"{MOMENTS}: set aside, to be computed again"


def _identify_again(store: Store) -> Iterator[str]:
    """Append the identities that are lost, from the units that they made."""
    key = list(IDENTITIES.key)
    with suppress(InputError):  # a damaged file is named by the check after the repair
        known = {tuple(row.values()) for row in store.read("identities", columns=key).to_pylist()}
        made = store.read("units", columns=IDENTITIES.columns)
        rows = {tuple(row[name] for name in key): row for row in made.to_pylist() if row["selector_sha256"] is not None}
        lost = [row for of, row in rows.items() if of not in known]
        if lost and store.append_rows("identities", pa.Table.from_pylist(lost, schema=IDENTITIES.schema)):
            yield f"identities: {counted(len(lost), 'row')} made again from the units"


def _derive_again(store: Store, aside: _Aside, faulty: Collection[str]) -> Iterator[str]:
    """Take rows away whose events are lost or whose files are damaged, and derive what lacks rows.

    Estimates are made again by the next run or analysis.
    """
    events, units = set(store.paths("events")), store.unit_paths()
    for table in (*DERIVED_TABLES, *ESTIMATED_TABLES):
        gone = []
        for file in store.stored_files(table):
            path = Path(store.location, table, file.path)
            whole = path.is_file() and path.stat().st_size == file.size and f"{table}/{file.path}" not in faulty
            ahead = table in DERIVED_TABLES and file.path not in events | units and not is_foreign(file.path)
            if not whole or ahead:
                gone.append(file.path)
        if gone:
            store.withdraw_files(table, gone)
            for path in (Path(store.location, table, name) for name in gone):
                if path.exists():
                    aside.take(path)
            yield f"{table}: {counted(len(gone), 'file')} damaged or without events, set aside"
    if any(map(is_foreign, events)):
        return
    derived, version = 0, store.version("events")
    todo = pending(store, version)
    for start in range(0, len(todo), _BATCH):
        outcomes = [derive_segment(store, segment) for segment in todo[start : start + _BATCH]]
        commit(store, outcomes, version, covered=start + _BATCH >= len(todo) and not any(o.error for o in outcomes))
        derived += sum(outcome.error is None for outcome in outcomes)
        yield from (f"derive: {outcome.error}" for outcome in outcomes if outcome.error)
    if derived:
        yield f"derived: rows of {counted(derived, 'unit')}, made again from events"
