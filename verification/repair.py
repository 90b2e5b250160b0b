"""Repair a local store: set damaged commits aside, and make rows again that follow from other rows.

Nothing is deleted: files are moved to ``set-aside/TIME/`` in the store, under their former paths. A newest commit that
is empty or torn was never acknowledged. If a commit is lost on which another table relies, an empty commit takes its
place, and rows in files that are still whole are committed again.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.delta.commits import REPAIR
from kvdrift.log.delta.durability import make_folder, sync
from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.parquet_files import replace_file
from kvdrift.log.delta.table_log import RELIED_ON, TableLog, empty_commit
from kvdrift.log.small_tables import KEYED
from kvdrift.log.store import ESTIMATED_TABLES, Store
from kvdrift.log.units.commits import record_from
from kvdrift.log.units.unit import DERIVED_TABLES, NUMBERED, in_order, unit_name
from kvdrift.schema.errors import UNREADABLE, InputError, KvdriftError
from kvdrift.schema.location import is_local
from kvdrift.schema.locking import repaired
from kvdrift.schema.rows import run_begins
from kvdrift.schema.tables import EVENTS, IDENTITIES, TABLES
from kvdrift.sql.catalog_file import CATALOG_NAME, refresh_catalog
from kvdrift.transforms.segments import COVERED, PARTIAL, commit, derive_segment, in_parts, pending
from kvdrift.verification.files import (
    Fault,
    UnitRecord,
    files_of,
    memory_of,
    number_of,
    read_files,
    remember,
    table_logs,
    whole_rows,
)
from kvdrift.verification.units import checked_events, rows_by_unit

_BATCH = 256  # segments of one commit


class _Aside:
    """The folder of one repair, into which files are moved out of a store."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._folder = store / "set-aside" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")

    def take(self, path: Path) -> None:
        target = self._folder / path.relative_to(self._store)
        while target.exists():  # a log file of the same version that was set aside before
            target = target.with_name(f"{target.name}-whole")
        make_folder(target.parent)
        path.rename(target)
        sync(target.parent)
        sync(path.parent)


def repair(store: Store, faults: Sequence[Fault] = ()) -> Iterator[str]:
    """Repair a local store, whose tables may be unreadable; yield a line of text for each step done.

    Commits of other processes wait until the repair has ended. ``faults`` are those that a verification found; derived
    rows that they name as wrong are derived again.
    """
    if not is_local(store.location):
        raise InputError(
            f"{store.location}: only a local store can be repaired; an object store keeps every object that it accepted"
        )
    if not any(Path(store.location, table, "_delta_log").is_dir() for table in TABLES):
        store.version("events")  # raises the error that says that this is no store
    with repaired(store.location):
        yield from _repair(store, faults)


def _repair(store: Store, faults: Sequence[Fault]) -> Iterator[str]:
    aside, logs = _Aside(Path(store.location)), table_logs(store)
    relied = {table: max((log.seen().get(table, -1) for log in logs.values()), default=-1) for table in RELIED_ON}
    lost: set[str] = set()
    for table in sorted(TABLES, key="events".__eq__):  # events last: the other tables say how far it must reach
        if table == "events":
            relied[table] = max(relied[table], _cited_version(store))
        lines, stood_in = _mend_log(table, logs[table], relied.get(table, -1), aside)
        if stood_in:
            lost.add(table)
        yield from lines
    store = Store(store.location)  # the former object knows the logs before their repair
    store.make_tables()
    yield from _restore_rows(store, lost)
    damaged = _take_damaged(store, aside)
    for table, count in damaged.items():
        yield f"{table}: {number_of(count, 'damaged file')} set aside"
    yield from _mend_events(store, logs["events"], without_rows="units" in damaged)
    yield from _mend_units(store)
    yield from _identify_again(store)
    yield from _derive_again(store, faults)
    if Path(store.location, CATALOG_NAME).exists():
        try:
            refresh_catalog(store)
            yield f"{CATALOG_NAME}: written again"
        except KvdriftError as error:  # a lost file cannot be restored
            yield f"{CATALOG_NAME}: not written again: {error}"


def _mend_log(table: str, log: TableLog, relied: int, aside: _Aside) -> tuple[list[str], bool]:
    """Set damaged log files aside, and write empty commits in place of missing ones on which other commits rely.

    ``relied`` is the newest version of the table on which another table relies, -1 for none. Return a line for each
    step done, and whether commits were missing.
    """
    faults, lines = log.faults(), list[str]()
    for path, what in faults.items():
        if path.exists():
            aside.take(path)
            lines.append(f"{table}: log file {path.name} {what}: it is set aside")
            if path.name.endswith(".checkpoint.parquet") and (log.folder / "_last_checkpoint").exists():
                aside.take(log.folder / "_last_checkpoint")
    kept = [int(path.name[:20]) for path in log.folder.glob("*") if path.name[:20].isdecimal() and path not in faults]
    last = max([relied, *kept])
    missing = [version for version in range(log.oldest(), last + 1) if not log.file(version).exists()]
    for version in missing:
        replace_file(log.file(version), _first_commit(table, log) if version == 0 else empty_commit())
        lines.append(f"{table}: log file {log.file(version).name} is lost: an empty commit stands in for it")
    if table == "events" and missing:
        # A new version of events: estimates and reports of the lost rows are then out of date.
        replace_file(log.file(last + 1), empty_commit())
    if missing:
        sync(log.folder)
    return lines, bool(missing)


def _first_commit(table: str, log: TableLog) -> bytes:
    """Return a commit that makes a table, in place of a lost first commit.

    It has the table's id if a later commit names the id: with another id, the later commit would belong to another
    store.
    """
    with tempfile.TemporaryDirectory() as folder:
        DeltaFolder(folder).create(table)
        actions = [json.loads(line) for line in TableLog(Path(folder, table)).file(0).read_bytes().splitlines()]
    table_id = log.table_id()
    for action in actions:
        if "commitInfo" in action:
            action["commitInfo"]["operation"] = REPAIR  # the next commit was made from another file
        elif "metaData" in action and table_id is not None:
            action["metaData"]["id"] = table_id
    return "\n".join(map(json.dumps, actions)).encode()


def _cited_version(store: Store) -> int:
    """Return the newest events version that derived tables, plans and results cite."""
    cited = [-1]
    for table in DERIVED_TABLES:
        with suppress(KvdriftError):  # the table is made again, or the check after the repair names it
            cited += [store.covered_version(table, app) or -1 for app in (COVERED, PARTIAL)]
    for table in ("plans", "looks", "results", "calibration"):
        with suppress(KvdriftError):
            newest = pc.max(store.read(table, columns=["events_version"])["events_version"]).as_py()
            cited.append(-1 if newest is None else newest)
    return max(cited)


def _restore_rows(store: Store, lost: set[str]) -> Iterator[str]:
    """Append rows of small tables again from the files that lost commits named."""
    for table in sorted(lost & {*KEYED, "prompts"}):
        named = set(store.paths(table))
        left = [path for path in files_of(store, table) if path not in named]
        whole_tables = [rows for path in left if (rows := whole_rows(store, table, path)) is not None]
        rows = pa.concat_tables(whole_tables) if whole_tables else TABLES[table].schema.empty_table()
        try:
            count = store.append_prompts(rows.to_pylist()) if table == "prompts" else store.append_rows(table, rows)
        except UNREADABLE as error:
            yield f"{table}: files that no commit names contradict each other and stay as they are ({error})"
            continue
        yield f"{table}: {number_of(count, 'row')} of files that are still there, committed again"


def _take_damaged(store: Store, aside: _Aside) -> dict[str, int]:
    """Hide damaged files whose rows may be found elsewhere or made again, and set the files aside.

    Return the number of damaged files of each table that had some.
    """
    memory, versions, counts = memory_of(store), store.versions(), dict[str, int]()
    for table in (*NUMBERED, "units", *ESTIMATED_TABLES):
        if damaged := sorted(read_files(store, table, versions[table], memory).damaged):
            store.withdraw_files(table, damaged)
            for path in (Path(store.location, table, name) for name in damaged):
                if path.exists():
                    aside.take(path)
            counts[table] = len(damaged)
    remember(store, memory, store.versions())
    return counts


def _mend_events(store: Store, log: TableLog, *, without_rows: bool) -> Iterator[str]:
    """Restore the events of units of which ``events`` has too few rows or too many.

    ``without_rows`` says that rows of ``units`` are lost, too; copies of these rows then tell which units there were.
    """
    known = known_units(store)
    lost, back = broken_units(store, known), 0
    sought = lost | (known.copies.keys() - rows_by_unit(store, "events")[0].keys() if without_rows else set())
    for units in whole_copies(store, known, sought) if sought else ():
        numbers = {record["unit"] for record, _ in units}
        store.withdraw_units("events", numbers)
        if units:
            back += store.adopt_units(pa.concat_tables([rows for _, rows in units]), [record for record, _ in units])
        lost -= numbers
    if back:
        yield f"events: {number_of(back, 'unit')} of files that are still there, committed again"
    if not lost:
        return
    for table in (*NUMBERED, "units"):
        store.withdraw_units(table, lost)
    # A new version of events: estimates and reports of the lost rows are then out of date.
    replace_file(log.file(log.newest() + 1), empty_commit())
    sync(log.folder)
    for number in sorted(lost):
        record = known.record(number)
        name = f"unit {unit_name(record)}" if record else f"a unit without a row, number {number}"
        yield f"events: {name} is lost, and its derived rows are removed"


def _mend_units(store: Store) -> Iterator[str]:
    """Restore lost rows of ``units`` from copies or from events, each row once."""
    rows = Counter(store.read("units", columns=["unit"])["unit"].to_pylist())
    if twice := {number: 1 for number, count in rows.items() if count > 1}:
        kept = {row["unit"]: row for row in store.read("units").to_pylist() if row["unit"] in twice}
        store.withdraw_units("units", twice)
        store.append_records([*kept.values()])
        yield f"units: {number_of(len(twice), 'row')} that were there twice, now once"
    lacking = rows_by_unit(store, "events")[0].keys() - rows.keys()
    copies = known_units(store).copies if lacking else {}
    count = store.append_records([copies[number] for number in lacking if number in copies]) + store.reconcile()
    if count:
        yield f"units: {number_of(count, 'row')} made again"


def _identify_again(store: Store) -> Iterator[str]:
    """Append lost rows of ``identities`` again, made from the columns of ``units`` that repeat them."""
    key = list(IDENTITIES.key)
    with suppress(*UNREADABLE):  # a damaged file is named by the check after the repair
        known = {tuple(row.values()) for row in store.read("identities", columns=key).to_pylist()}
        made = store.read("units", columns=IDENTITIES.columns)
        rows = {tuple(row[name] for name in key): row for row in made.to_pylist() if row["selector_sha256"] is not None}
        lost = [row for of, row in rows.items() if of not in known]
        if lost and store.append_rows("identities", pa.Table.from_pylist(lost, schema=IDENTITIES.schema)):
            yield f"identities: {number_of(len(lost), 'row')} made again from the units"


def _derive_again(store: Store, faults: Sequence[Fault]) -> Iterator[str]:
    """Hide wrong derived rows, and derive all missing rows. The next run makes the estimates again."""
    units = store.unit_counts()
    for table in DERIVED_TABLES:
        expected = dict(zip(units.number.tolist(), units.rows_in(table).tolist(), strict=True))
        there, _ = rows_by_unit(store, table)
        wrong = {number for number, rows in there.items() if rows != expected.get(number, 0)}
        wrong |= {number for fault in faults if fault.where == table for number in fault.units}
        if store.withdraw_units(table, wrong):
            yield f"{table}: rows of {number_of(len(wrong), 'unit')} that differ from the events, hidden"
    derived, work = 0, pending(store)
    for start in range(0, len(work.segments), _BATCH):
        outcomes = [derive_segment(store, segment) for segment in work.segments[start : start + _BATCH]]
        failed = [line for outcome in outcomes for line in outcome.errors]
        last = start + _BATCH >= len(work.segments)
        commit(store, outcomes, work.events_version, covered=work.whole and last and not failed)
        derived += sum(outcome.units for outcome in outcomes)
        yield from (f"derive: {line}" for line in failed)
    if derived:
        yield f"derived: rows of {number_of(derived, 'unit')}, made again from events"


class Known(NamedTuple):
    """Rows of ``units`` by number: the visible rows, and copies of rows in other files of the store."""

    rows: Mapping[int, UnitRecord]
    copies: Mapping[int, UnitRecord]

    def record(self, number: int) -> UnitRecord | None:
        """Return the row of a unit, or a copy of the row; None if there is neither."""
        return self.rows.get(number) or self.copies.get(number)


def known_units(store: Store) -> Known:
    """Return the known rows of ``units``; the visible files of ``units`` must be whole."""
    rows = {row["unit"]: row for row in store.read("units").to_pylist()}
    copies: dict[int, UnitRecord] = {}
    for path in _others(store, "units"):
        if (unit_rows := whole_rows(store, "units", path)) is not None:
            copies |= {row["unit"]: row for row in unit_rows.to_pylist()}
    for path in (*store.paths("events"), *_others(store, "events")):
        copies = {record["unit"]: record for record in store.copied_records(path)} | copies
    return Known(rows, copies)


def broken_units(store: Store, known: Known) -> set[int]:
    """Return the units with too few or too many events, of all units with a row in ``units`` or with derived rows."""
    there, _ = rows_by_unit(store, "events")
    wanted = set(known.rows)
    for table in DERIVED_TABLES:
        wanted |= rows_by_unit(store, table)[0].keys()
    return {number for number in wanted - {-1} if not _is_there(known.record(number), there[number])}


def _is_there(record: UnitRecord | None, rows: int) -> bool:
    return rows > 0 if record is None else rows == record["event_rows"]


def whole_copies(store: Store, known: Known, numbers: Collection[int]) -> Iterator[list[tuple[UnitRecord, pa.Table]]]:
    """Search every file of ``events`` in the store, visible or not, for all rows of some units.

    Yields lists of (row of ``units``, all events of the unit), each list with some hundred thousand events.
    """
    paths, rows = defaultdict[int, list[str]](list), Counter[int]()
    for path in (*store.paths("events"), *_others(store, "events")):
        counts = Counter(_events_in(store, path)["unit"].to_pylist())
        for number in counts.keys() & set(numbers):
            paths[number].append(path)
            rows[number] += counts[number]
    for part in in_parts(sorted(paths, key=lambda number: (paths[number], number)), rows.__getitem__):
        yield _whole(store, known, part, paths)


def _whole(
    store: Store, known: Known, numbers: list[int], paths: Mapping[int, list[str]]
) -> list[tuple[UnitRecord, pa.Table]]:
    wanted, tables = pa.array(numbers, pa.int64()), list[pa.Table]()
    for path in dict.fromkeys(path for number in numbers for path in paths[number]):
        rows = _events_in(store, path)
        tables.append(rows.filter(pc.is_in(rows["unit"], wanted)))
    together, whole = pa.concat_tables(tables), []
    for number in numbers:
        events = _once(together.filter(pc.equal(together["unit"], number)))
        record = known.record(number) or record_from(events)
        try:
            if record is not None:
                whole.append((record, checked_events(record, events)))
        except UNREADABLE:
            continue  # rows are missing, or are not those of the unit
    return whole


def _once(events: pa.Table) -> pa.Table:
    """Return events without repeated rows, since a merged file repeats the rows of the files that it replaced."""
    ordered = in_order(events)
    columns = [ordered[name].to_numpy() for name in ("replicate", "t")]
    kinds = ordered["kind"].combine_chunks().dictionary_encode().indices.to_numpy()
    return ordered.filter(pa.array(run_begins(*columns, kinds))) if ordered.num_rows else ordered


def _events_in(store: Store, path: str) -> pa.Table:
    """Return the rows of a file of ``events`` that have a unit; none if the file is damaged."""
    rows = whole_rows(store, "events", path)
    return EVENTS.schema.empty_table() if rows is None else rows.filter(pc.is_valid(rows["unit"]))


def _others(store: Store, table: str) -> list[str]:
    """Return the files in a table's folder that are not visible."""
    return sorted(set(files_of(store, table)) - set(store.paths(table)))
