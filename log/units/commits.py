"""Make units visible by two commits: the first commits their events, the second their rows of ``units``.

A commit has application ids. delta-rs refuses the commit if another commit with one of these ids came after the
snapshot from which the commit was made. A commit of units has one id for each group of units: each (study, model, doc,
action, revision, estimator). So only one writer at a time can extend a group; the others check again which units are
still missing.

A writer reads all rows of ``units`` once. The ids in later log files show whether a later commit is of one of the
writer's groups. If none is, the writer need not read the new rows: with a thousand writers, thousands of rows come
between two commits of one writer.

A commit also has the id of each study and model for which its units state a condition that no current unit of the store
states, such as the horizon (``kvdrift.log.units.conditions``). So two writers cannot begin one study with two horizons,
seeds or models: the second commit is refused, and its writer compares its units with those of the first.

If a writer is killed between its two commits, or rows are lost, rows of ``units`` are made again: the footer of an
events file holds a copy of them. If another program has replaced the file, the units are found in the events
themselves, and values that events do not determine are null.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import threading
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.delta.commits import Commit, guards
from kvdrift.log.delta.durability import side_by_side
from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.parquet_files import StoredFile
from kvdrift.log.delta.versions import Snapshot
from kvdrift.log.units import conditions
from kvdrift.log.units.conditions import KEPT_COLUMNS, check_same_entries
from kvdrift.log.units.rows import UnitRows
from kvdrift.log.units.unit import SPAN, Unit, conform_unit, counted_events, group_of, unit_name, unit_number
from kvdrift.schema.errors import UNREADABLE, InputError
from kvdrift.schema.rows import Hashes, row_hashes
from kvdrift.schema.tables import ACTIONS, COUPLED, EVENTS, GROUP_KEY, PLAIN, SWRB, UNITS

FOOTER: Final = "kvdrift.records"


def footer_of(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the footer of an events file, which holds a copy of its units' rows."""
    text = json.dumps([dict(record) for record in records])
    return {FOOTER: base64.b64encode(zlib.compress(text.encode())).decode()}


def records_in(folder: DeltaFolder, path: str) -> list[dict[str, Any]]:
    """Return the copies of units' rows in the footer of an events file; empty if unreadable."""
    try:
        text = folder.footer("events", path)[FOOTER.encode()]
        records = json.loads(zlib.decompress(base64.b64decode(text)))
        return [{name: record[name] for name in UNITS.columns} for record in records]
    except (*UNREADABLE, ValueError, TypeError, KeyError, zlib.error):
        return []


def missing_records(folder: DeltaFolder, rows: UnitRows, units: Snapshot, events: Snapshot) -> list[dict[str, Any]]:
    """Return the rows that ``units`` lacks for visible events; read no file if row counts agree.

    Raises:
        DamagedStoreError: Units with a row have more or fewer events than ``units`` counts.
    """
    counted, there = rows.total(units, "events"), folder.count_rows(events)
    if there == counted:
        return []
    if there < counted:
        raise rows.fewer_events(units, there, counted)
    known, records, lacking = set(rows.counts(units).number.tolist()), dict[int, dict[str, Any]](), list[int]()
    for path, new in rows.unknown(units, events):
        copies = _copies(folder, path, new, known)
        records |= copies
        lacking += [number for number in new if number >= 0 and number not in copies]
    if lacking:
        # The program that merged the file may have appended the rows first, after ``units`` was loaded here.
        newest = folder.read(folder.load("units"), UNITS.columns, where=_numbered(lacking)).to_pylist()
        records |= {row["unit"]: row for row in newest}
        records |= _made_from_events(folder, events, [number for number in lacking if number not in records])
    return [records[number] for number in sorted(records)]


def records_of(
    folder: DeltaFolder, events: Snapshot, path: str, numbers: Collection[int], known: Collection[int]
) -> dict[int, dict[str, Any]]:
    """Return by number the rows that ``units`` lacks for the units ``numbers``, which have events in the file ``path``.

    ``known`` are the numbers of units that have a row. The number -1 marks events of no unit, and gets no row.
    """
    copies = _copies(folder, path, numbers, known)
    lacking = [number for number in numbers if number >= 0 and number not in copies]
    return copies | _made_from_events(folder, events, lacking)


def _copies(
    folder: DeltaFolder, path: str, numbers: Collection[int], known: Collection[int]
) -> dict[int, dict[str, Any]]:
    """Return rows of ``units`` as a file's footer has them, by number, for those of ``numbers`` not in ``known``."""
    copies = {record["unit"]: record for record in records_in(folder, path) if record["unit"] not in known}
    return {number: copies[number] for number in numbers if number in copies}


def _made_from_events(folder: DeltaFolder, events: Snapshot, numbers: Collection[int]) -> dict[int, dict[str, Any]]:
    """Return rows of ``units`` made from events alone, by number; none for units that are not whole."""
    if not numbers:
        return {}
    rows = folder.read(events, EVENTS.columns, where=_numbered(numbers))
    made = {number: record_from(rows.filter(pc.equal(rows["unit"], number))) for number in numbers}
    return {number: record for number, record in made.items() if record is not None}


def _numbered(numbers: Collection[int]) -> pc.Expression:
    return pc.field("unit").isin(pa.array(numbers, pa.int64()))


def record_from(events: pa.Table) -> dict[str, Any] | None:
    """Return a unit's row made from its events alone; None unless the events are exactly one whole unit.

    Values that events do not determine are null.
    """
    if not events.num_rows:
        return None
    first = events.slice(0, 1).to_pylist()[0]
    replicates = events["replicate"].unique().to_numpy()
    record = dict.fromkeys(UNITS.columns) | {
        **{name: first[name] for name in (*GROUP_KEY, "action_revision")},
        "estimator": PLAIN if first["kind"] == COUPLED else SWRB,
        "first_replicate": int(replicates.min()),
        "replicates": len(replicates),
        "horizon": int(pc.max(events["t"]).as_py()),
        "unit": first["unit"],
    }
    return record | counted_events(events) if unit_number(record) == first["unit"] else None


def as_rows(records: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return records as rows of ``units``."""
    return pa.Table.from_pylist([dict(record) for record in records], schema=UNITS.schema)


class ContradictionError(InputError):
    """The store has units with other events than the given units."""

    def __init__(self, line: str, units: Sequence[tuple[Mapping[str, Any], pa.Table]] = ()) -> None:
        """Take the message, and the record and the given events of each unit that contradicts the store."""
        super().__init__(line)
        self.units = units

    @classmethod
    def of(cls, units: Sequence[tuple[Mapping[str, Any], pa.Table]], difference: str) -> Self:
        """Return the error about units; ``difference`` says how the first unit differs from the store."""
        return cls(f"unit {unit_name(units[0][0])}: {difference}", units)


_READ = tuple(dict.fromkeys((*SPAN, *KEPT_COLUMNS, "events_sha256")))
ROW_GROUP_ROWS = 1 << 13  # of small tables, of which a writer reads the rows of a few units


class Base(NamedTuple):
    """Snapshots of ``units`` and ``events`` that were read in full; ``events`` is no older than ``units``."""

    units: Snapshot
    events: Snapshot


class Touched:
    """Follows the application ids of the commits since a base; safe for threads."""

    def __init__(self, folder: DeltaFolder) -> None:
        self._folder = folder
        self._base: Base | None = None
        self._seen: dict[str, int] = {}  # version by table
        self._ids = set[str]()
        self._at_work = threading.Lock()

    def begin(self, base: Base) -> None:
        """Remember the snapshots that were read in full, and follow later commits from there."""
        with self._at_work:
            self._base, self._ids = base, set()
            self._seen = {snapshot.table: snapshot.version for snapshot in base}

    def base_of(self, groups: Collection[str], now: Collection[Snapshot]) -> Base | None:
        """Return the base if all commits after it, up to ``now``, only appended units and have no id in ``groups``.

        If not, forget the base and return None.
        """
        with self._at_work:
            if self._base is not None and not (all(map(self._follow, now)) and self._ids.isdisjoint(groups)):
                self._base = None
            return self._base

    def _follow(self, now: Snapshot) -> bool:
        """Read the commits of a table up to a version; tell whether all of these commits only appended units."""
        since = self._seen[now.table]
        ids_of_versions = side_by_side(
            lambda version: self._ids_of(now.table, version), range(since + 1, now.version + 1)
        )
        self._seen[now.table] = max(now.version, since)
        self._ids.update(*(ids for ids in ids_of_versions if ids is not None))
        return None not in ids_of_versions

    def _ids_of(self, table: str, version: int) -> set[str] | None:
        """Return a commit's application ids; None if it does anything but append units, or its file is gone."""
        lines = self._folder.log_lines(table, version)
        if not lines or any(line.startswith((b'{"remove"', b'{"metaData"')) for line in lines):
            return None
        ids = {json.loads(line)["txn"]["appId"] for line in lines if line.startswith(b'{"txn"')}
        return ids or None


class UnitCommits:
    """Commits units, and first appends the rows of ``units`` that a killed writer left out."""

    def __init__(self, folder: DeltaFolder, rows: UnitRows) -> None:
        self._folder, self._rows = folder, rows
        self._touched = Touched(folder)
        self._healed = False  # whether ``units`` is known to have a row for every visible unit

    def append(self, units: Sequence[Unit]) -> set[int]:
        """Append units; ``Store.add_units`` describes arguments, result and errors."""
        by_unit: dict[int, tuple[dict[str, Any], pa.Table]] = {}
        for unit in units:
            record, events = conform_unit(unit)
            first, _ = by_unit.setdefault(record["unit"], (record, events))
            if first["events_sha256"] != record["events_sha256"]:
                raise InputError(f"unit {unit_name(record)} is given twice, with different events")
        rows = [EVENTS.schema.empty_table(), *(events for _, events in by_unit.values())]
        return self.append_complete([record for record, _ in by_unit.values()], pa.concat_tables(rows))

    def append_complete(self, records: Sequence[dict[str, Any]], rows: pa.Table) -> set[int]:
        """Append units, each given once by a complete record, as ``append`` does; ``rows`` are all their events."""
        if not self._healed:
            self.reconcile()
        new: list[dict[str, Any]] = []
        written: dict[tuple[int, ...], StoredFile] = {}
        before = self._folder.load("units")

        def attempt(events: Snapshot) -> Commit | None:
            nonlocal before
            # The rows are older than the events, so every unit with a row has its events.
            units, before = before, self._folder.load("units")
            base = self._base(units, events, records)
            missing = missing_records(self._folder, self._rows, base.units, base.events)
            stored, taken = self._stored(base.units, missing, records)
            new[:] = [record for record in records if record["unit"] not in taken]
            if other := other_content(stored, records):
                unit_rows = [(record, _of_units(rows, [record["unit"]])) for record in other]
                raise ContradictionError.of(unit_rows, "the store has other events")
            _check_overlaps(stored, records)
            check_same_entries(new, stored)
            if not new:
                return None
            begun = self.check_conditions(base.units, missing, new)
            numbers = tuple(record["unit"] for record in new)
            if numbers not in written:
                unit_rows = rows if len(new) == len(records) else _of_units(rows, numbers)
                written[numbers] = self._folder.put_rows("events", unit_rows, footer_of(new))
            return Commit([written[numbers]], [*guards_of(new), *guards((group, 0) for group in begun)])

        self._healed = False  # until the rows are appended
        self._folder.commit("events", attempt)
        self.append_rows(new)
        self._healed = True
        return {record["unit"] for record in new}

    def stored(self, records: Sequence[Mapping[str, Any]]) -> set[int]:
        """Return the numbers of the given units (by their values in ``SPAN``) that are durably stored."""
        if not self._healed:
            self.reconcile()
        known = self._known(self._folder.load("units"), records, [unit_number(record) for record in records])
        self._folder.make_durable("units")
        return known

    def adopt(self, events: pa.Table, records: Sequence[Mapping[str, Any]]) -> int:
        """Make lost events of whole units, of which the store has no events, visible again; return the number of units.

        ``records`` are the rows of ``units`` of these units; rows that the table lacks are appended.
        """
        file = self._folder.put_rows("events", events, footer_of(records))
        self._folder.commit("events", lambda _: Commit([file], guards_of(records)), alone=True)
        self.append_rows(records)
        return len(records)

    def reconcile(self) -> int:
        """Append the rows that a killed writer did not append; return how many."""
        units = self._folder.load("units")  # first, so that every unit with a row has its events
        missing = missing_records(self._folder, self._rows, units, self._folder.load("events"))
        count = self.append_rows(missing)
        self._healed = True
        return count

    def append_rows(self, records: Sequence[Mapping[str, Any]]) -> int:
        """Append those of the records that ``units`` lacks; return how many."""
        new: list[Mapping[str, Any]] = []

        def attempt(units: Snapshot) -> Commit | None:
            there = self._known(units, records, [record["unit"] for record in records])
            new[:] = [record for record in records if record["unit"] not in there]
            if not new:
                return None
            rows = as_rows(new)
            file = self._folder.put_rows("units", rows, row_group=ROW_GROUP_ROWS)
            self._rows.remember(file.path, rows)
            self._folder.made_of_file("units", file.path, rows, conditions.facts_of)
            return Commit([file], guards_of(new))

        if records:
            self._folder.commit("units", attempt)
        return len(new)

    def _base(self, units: Snapshot, events: Snapshot, of: Sequence[Mapping[str, Any]]) -> Base:
        """Return snapshots, maybe older than those given, with all units that the records ``of`` are compared with.

        These are the units in the records' groups, and those that first state a condition of the records' studies.
        """
        ids = {group_of(record) for record in of} | {_study_id(*pair) for pair in _studies_of(of)}
        base = self._touched.base_of(ids, (units, events))
        if base is None:
            base = Base(units, events)
            self._touched.begin(base)
        return base

    def check_conditions(
        self, units: Snapshot, missing: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        """Raise UnlikeUnitsError if ``new`` units differ from their study in a condition, such as the horizon.

        Return the id of each study and model for which ``new`` units state a condition that no current unit states.
        ``missing`` are the rows that ``units`` lacks.
        """
        pairs = _studies_of(new)
        parts = self._folder.of_files(units, conditions.COMPARED, conditions.facts_of).values()
        every = frozenset().union(*parts, conditions.facts_of_records(missing))
        stored = frozenset(fact for fact in every if fact[:2] in pairs)
        new_facts = conditions.facts_of_records(new)
        if any(revision for _, _, _, revision, *_ in stored | new_facts):
            actions = self._folder.read(self._folder.load("actions"), ACTIONS.columns)
            stored = conditions.current_facts(stored, actions)
        studies = self._folder.load("studies")
        rows = self._folder.of_files(studies, conditions.DECLARED, pa.Table.to_pylist).values()
        declared = [row for row in itertools.chain(*rows) if (row["study"], row["model"]) in pairs]
        conditions.check_conditions(stored | new_facts, declared)
        added = conditions.known(new_facts) - conditions.known(stored)
        return [_study_id(*pair) for pair in sorted({(study, model) for study, model, _ in added})]

    def _stored(
        self, units: Snapshot, missing: Sequence[dict[str, Any]], of: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], set[int]]:
        """Return the rows of stored units with documents and actions of the records ``of``, and a set of unit numbers.

        ``missing`` are the rows that ``units`` lacks, since they are not written yet. The numbers are those of stored
        units: of all ``missing`` ones, and of those in ``of`` that have a row.
        """
        taken = self._rows.known(units, [record["unit"] for record in of])
        taken |= {record["unit"] for record in missing}
        stored = self._rows_of(units, of)
        wanted = {group_of(record) for record in of}
        return [*stored, *(record for record in missing if group_of(record) in wanted)], taken

    def _known(self, units: Snapshot, of: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> set[int]:
        """Return which of the unit ``numbers`` have rows in ``units``; ``of`` are the records of these units."""
        base = self._touched.base_of({group_of(record) for record in of}, (units,))
        return self._rows.known(units if base is None else base.units, numbers)

    def _rows_of(self, units: Snapshot, of: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of ``units`` whose study, model, document and action each occur in some record."""
        names = {name: [row[name] for row in of] for name in GROUP_KEY}
        wanted = _hashes(pa.table(names, schema=pa.schema([(name, pa.string()) for name in names])))
        files = {file.path: file for file in units.files()}
        small = [path for path, file in files.items() if (file.rows or 0) <= ROW_GROUP_ROWS]
        # The hashes of groups are kept by file, so a writer of new units reads no row.
        groups = self._folder.of_files(units, GROUP_KEY, _hashes, small)
        paths = [path for path in files if path not in groups or np.isin(groups[path], wanted).any()]
        if not paths or not of:
            return []
        same = [pc.field(name).isin(pa.array(sorted({*values}), pa.string())) for name, values in names.items()]
        first, last = min(names["doc"]), max(names["doc"])
        # Large files are sorted, so by these bounds Arrow skips row groups.
        where = (pc.field("doc") >= first) & (pc.field("doc") <= last) & same[0] & same[1] & same[2] & same[3]
        rows: list[dict[str, Any]] = self._folder.read(units, _READ, where=where, paths=paths).to_pylist()
        return rows


def _hashes(rows: pa.Table) -> Hashes:
    return row_hashes(rows.columns)


def guards_of(records: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the transactions by which simultaneous commits of the same groups of units refuse each other."""
    return guards((group_of(record), record["first_replicate"] + record["replicates"]) for record in records)


def _studies_of(records: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    return {(record["study"], record["model"]) for record in records}


def _study_id(study: str, model: str) -> str:
    """Return the application id of commits that first state a condition of a study and model."""
    return f"kvdrift.study-{hashlib.sha256(json.dumps([study, model]).encode()).hexdigest()[:15]}"


def _of_units(rows: pa.Table, numbers: Sequence[int]) -> pa.Table:
    return rows.filter(pc.is_in(rows["unit"], pa.array(numbers, pa.int64())))


def other_content(stored: Iterable[Mapping[str, Any]], units: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the given units that are stored with other events."""
    there = {unit_number(unit): unit["events_sha256"] for unit in stored}
    return [unit for unit in units if there.get(unit["unit"], unit["events_sha256"]) != unit["events_sha256"]]


def _check_overlaps(stored: Iterable[Mapping[str, Any]], units: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError if a given unit shares a replicate with a different unit, given or stored."""
    new = {unit["unit"] for unit in units}
    groups = defaultdict[str, dict[tuple[int, int], Mapping[str, Any]]](dict)
    for unit in (*stored, *units):
        begin = unit["first_replicate"]
        groups[group_of(unit)][begin, begin + unit["replicates"]] = unit
    for spans in groups.values():
        for first, second in itertools.pairwise(sorted(spans)):
            if second[0] < first[1]:
                span, (begin, end) = (second, first) if unit_number(spans[second]) in new else (first, second)
                raise InputError(
                    f"unit {unit_name(spans[span])} overlaps the replicates [{begin}, {end}) "
                    "of another unit of the same document and action, stored or given"
                )
