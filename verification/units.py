"""Check units, their events in whatever files these are, and the rows derived from the events.

The row of a unit has the number and the digest of its events, so its events can be checked. Derived rows are compared
with a new derivation of the events.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.compaction import sorted_by_key
from kvdrift.log.store import Store, Unit
from kvdrift.log.units.unit import (
    DERIVED,
    DERIVED_TABLES,
    NUMBERED,
    OF_STORE,
    conform_unit,
    group_of,
    unit_name,
    unit_number,
)
from kvdrift.schema.errors import UNREADABLE, InputError
from kvdrift.schema.progress import Progress
from kvdrift.schema.tables import EVENTS, GROUP_KEY, TABLES, UNIT_MOMENTS
from kvdrift.transforms.segments import COVERED, declared_windows, derived_rows, in_parts
from kvdrift.verification.files import Fault, SmallTable, TableFiles, UnitRecord, Verified, number_of

# A derivation on another machine may add up in another order. A sum of n terms of one sign then differs by at most
# n 2^-53 of its value; the longest sums here have 2 H terms. EOS gaps have terms of both signs of at most 1 / H each:
# their sums differ by at most n 2^-53.
ROUNDING = 1e-12
_OF_THE_UNIT = (*GROUP_KEY, "action_revision", "unit")


def covered_versions(store: Store) -> dict[str, int]:
    """Return the events version up to which each derived table is declared complete; -1 without a declaration.

    Call this before choosing the versions to check, so that these include everything covered.
    """
    versions = {table: store.covered_version(table, COVERED) for table in DERIVED_TABLES}
    return {table: -1 if version is None else version for table, version in versions.items()}


def units_at(store: Store, version: int) -> set[int]:
    """Return the numbers of the units whose events were visible at a version of ``events``."""
    return {n for path in store.paths("events", version) for n in store.rows_by_unit("events", path, version)}


def rows_by_unit(
    store: Store, table: str, version: int | None = None, without: Collection[str] = ()
) -> tuple[Counter[int], bool]:
    """Count the rows of each unit in all files of a table; also return whether every file was read.

    The files at the paths ``without`` are not read. The number -1 stands for rows without a unit.
    """
    counts, readable = Counter[int](), not without
    version = store.version(table) if version is None else version  # the same for all files
    for path in store.paths(table, version):
        try:
            counts.update({} if path in without else store.rows_by_unit(table, path, version))
        except UNREADABLE:
            readable = False
    return counts, readable


def checked_events(record: UnitRecord, events: pa.Table) -> pa.Table:
    """Check that events are exactly a unit's, and return them as ``conform_unit`` does; ``record`` is the unit's row.

    Raises:
        InputError: The events differ from the unit's; the message is to follow the unit's name.
    """
    wanted = record["event_rows"]
    if events.num_rows != wanted:
        raise InputError(f"has {events.num_rows:,} of {wanted:,} rows")
    declared = {name: value for name, value in record.items() if name not in OF_STORE}
    derived, rows = conform_unit(Unit(declared, events.drop_columns("unit")))
    digest = record["events_sha256"]
    if digest != derived["events_sha256"]:
        raise InputError(f"its events have SHA-256 {derived['events_sha256']}, must have {digest} as in units")
    return rows


def by_unit(rows: pa.Table, numbers: Sequence[int]) -> Iterator[pa.Table]:
    """Yield a table for each unit in ``numbers``: its rows, in their order in ``rows``."""
    units = rows["unit"].to_numpy()
    order = np.argsort(units, kind="stable")
    rows, units = rows.take(pa.array(order)), units[order]
    for begin, end in zip(np.searchsorted(units, numbers), np.searchsorted(units, numbers, side="right"), strict=True):
        yield rows.slice(begin, end - begin)


def first_difference(table: str, stored: pa.Table, derived: pa.Table) -> str | None:
    """Return how stored rows differ from derived rows, in the first column that differs; None if they are equal.

    Both are of the table's declared schema, sorted by key. Doubles, in lists too, may differ by up to ``ROUNDING``
    times their value; those of ``unit_moments`` also by up to ``ROUNDING`` itself.
    """
    if stored.num_rows != derived.num_rows:
        return f"there are {stored.num_rows} rows, must be {derived.num_rows} as its events give"
    for name in TABLES[table].columns:
        if stored[name].equals(derived[name]):
            continue
        differ = _differ(stored[name], derived[name], 1.0 if table == UNIT_MOMENTS.name else 0.0)
        if not differ.any():
            continue
        row = int(np.argmax(differ))
        key = [f"{part} {derived[part][row]}" for part in TABLES[table].key if part not in _OF_THE_UNIT]
        at = f" at {', '.join(key)}" if key else ""
        return (
            f"{name} is {_text(stored[name][row])}{at}{and_more(int(differ.sum()) - 1)}, "
            f"must be {_text(derived[name][row])} as its events give"
        )
    return None


def _differ(stored: pa.ChunkedArray, derived: pa.ChunkedArray, least: float) -> npt.NDArray[np.bool_]:
    if pa.types.is_float64(stored.type):
        return _beyond_rounding(stored.to_numpy(), derived.to_numpy(), least)  # null is NaN
    pairs = zip(stored.to_pylist(), derived.to_pylist(), strict=True)
    if pa.types.is_list(stored.type):
        each = ((np.array(values), np.array(wanted)) for values, wanted in pairs)
        return np.array([a.shape != b.shape or _beyond_rounding(a, b, least).any() for a, b in each])
    return np.array([value != wanted for value, wanted in pairs])


def _beyond_rounding(
    values: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64], least: float
) -> npt.NDArray[np.bool_]:
    close = np.abs(values - wanted) <= ROUNDING * np.maximum(np.abs(wanted), least)
    return ~(close | (np.isnan(values) & np.isnan(wanted)))


def _text(value: pa.Scalar) -> str:
    plain = value.as_py()
    return "null" if plain is None else repr(plain)


def and_more(others: int) -> str:
    """Return text such as ``" and 3 more"``; empty if there are no others."""
    return f" and {others:,} more" if others else ""


_ORDER: Final = (*GROUP_KEY, "action_revision", "estimator", "first_replicate")


class UnitWalk:
    """One pass over all units in the order of their keys, some hundred thousand events at a time.

    Attributes:
        records: The rows of ``units`` by number, including rows that are not written yet.
    """

    def __init__(
        self, store: Store, units: SmallTable, versions: Mapping[str, int], covered: Mapping[str, int],
        files: Mapping[str, TableFiles], controls: Collection[tuple[str, str]],
    ) -> None:  # fmt: skip
        """Take the versions and files to check by table, and the (study, action) of full-retention controls.

        ``covered`` is the events version up to which each derived table is declared complete; -1 if it is not declared.
        """
        self._store, self._units, self._versions = store, units, versions
        self._complete, self._files, self._controls = covered, files, controls
        self._stored: dict[int, UnitRecord] = {row["unit"]: row for row in units.rows.to_pylist()}
        damaged = {table: files[table].damaged for table in NUMBERED}
        counts = {table: rows_by_unit(store, table, versions[table], damaged[table]) for table in NUMBERED}
        self._rows = {table: counts for table, (counts, _) in counts.items()}
        self._readable = {table: readable for table, (_, readable) in counts.items()}
        self._faults = defaultdict[str, list[Fault]](list)
        for table in NUMBERED:
            self._faults[table] += files[table].faults
        self._missing = self._missing_records()
        self.records = self._stored | self._missing
        self._readers = {table: store.rows_of_units(table, versions[table]) for table in NUMBERED}
        for table, reader in self._readers.items():  # rows that damaged files lack would be blamed on units
            reader.unreadable.update(dict.fromkeys(damaged[table], "damaged"))
        self._studies = declared_windows(store)
        self._control_replicates = 0

    @property
    def readable(self) -> bool:
        """Whether all files of units, events and derived rows could be read, once they are checked."""
        return self._units.readable and all(self._readable.values())

    def checks(self, progress: Progress) -> list[Verified]:
        """Check all units, their events and their derived rows."""
        progress.begin("verify", len(self.records), "units")
        records = sorted(self.records.values(), key=lambda record: tuple(record[name] for name in _ORDER))
        for chunk in in_parts(records, lambda record: record["event_rows"]):
            self._check_chunk(chunk)
            progress.advance(len(chunk))
        for table, reader in self._readers.items():
            for path, why in reader.unreadable.items():
                self._readable[table] = False
                if path not in self._files[table].damaged:
                    self._faults[table].append(Fault(f"{table}/{path}", why.removeprefix(f"{self._store.location}: ")))
        notes = self._underived()
        self._check_overlaps()
        return [
            self._table_check("events", "whole and unique"),
            *(self._table_check(table, "as their events give", notes[table]) for table in DERIVED_TABLES),
            Verified(
                "controls",
                number_of(self._control_replicates, "replicate"),
                "exactly 0",
                tuple(self._faults["controls"]),
            ),
            self._units_check(),
        ]

    def _missing_records(self) -> dict[int, UnitRecord]:
        """Return the rows that ``units`` lacks for existing events; events that belong to no unit become a fault."""
        version, missing = self._versions["events"], dict[int, UnitRecord]()
        for path in set(self._store.paths("events", version)) - self._files["events"].damaged:
            known = self._stored | missing
            try:
                new = {n for n in self._store.rows_by_unit("events", path, version) if n not in known}
                missing |= self._store.records_of(path, new, known, version) if new else {}
            except UNREADABLE:  # the file has a fault that says so
                continue
        none = {n: rows for n, rows in self._rows["events"].items() if n not in self._stored | missing}
        if (rows := sum(none.values())) and self._readable["events"] and self._units.readable:
            self._faults["events"].append(
                Fault("events", f"{number_of(rows, 'row')} of no unit, must be of a unit in table units")
            )
        return missing

    def _check_chunk(self, chunk: Sequence[UnitRecord]) -> None:
        numbers, docs = [record["unit"] for record in chunk], {record["doc"] for record in chunk}
        events = self._readers["events"].read(numbers, docs, EVENTS.columns).cast(EVENTS.schema)
        whole: dict[str, list[UnitRecord]] = defaultdict(list)
        for record, unit_events in zip(chunk, by_unit(events, numbers), strict=True):
            if unit_events.num_rows != record["event_rows"] and self._readers["events"].unreadable:
                continue  # the missing events are in files that have faults
            try:
                rows = checked_events(record, unit_events)
            except UNREADABLE as error:
                what = f"unit {unit_name(record)}: {str(error).removeprefix('events: ')}"
                self._faults["events"].append(Fault("events", what))
                rows = unit_events if unit_events.num_rows == record["event_rows"] else None
            else:
                whole[record["estimator"]].append(record)
            if rows is not None and (record["study"], record["action"]) in self._controls:
                self._control_replicates += record["replicates"]
                self._faults["controls"] += _control_faults(record, rows)
        for estimator, records in whole.items():
            in_records = pc.is_in(events["unit"], pa.array([record["unit"] for record in records], pa.int64()))
            self._check_derived(estimator, records, events.filter(in_records))

    def _check_derived(self, estimator: str, records: Sequence[UnitRecord], events: pa.Table) -> None:
        try:
            again = derived_rows(DERIVED[estimator], events, self._studies)
        except UNREADABLE as error:
            first = f"unit {unit_name(records[0])}{and_more(len(records) - 1)}"
            self._faults["events"].append(Fault("events", f"{first}: cannot be derived ({error})"))
            return
        docs = {record["doc"] for record in records}
        for table, derived in again.items():
            there = {record["unit"]: record for record in records if record["unit"] in self._rows[table]}
            stored = self._readers[table].read([*there], docs, TABLES[table].columns).cast(TABLES[table].schema)
            stored = sorted_by_key(table, stored)
            if len(there) < len(records):
                derived = derived.filter(pc.is_in(derived["unit"], pa.array([*there], pa.int64())))  # noqa: PLW2901
            if first_difference(table, stored, derived) is None:
                continue
            parts = zip(there.items(), by_unit(stored, [*there]), by_unit(derived, [*there]), strict=True)
            for (number, record), stored_rows, wanted in parts:
                if stored_rows.num_rows < wanted.num_rows and self._readers[table].unreadable:
                    continue
                if difference := first_difference(table, stored_rows, wanted):
                    what = f"unit {unit_name(record)}: {difference}"
                    self._faults[table].append(Fault(table, what, (number,)))

    def _underived(self) -> dict[str, tuple[str, ...]]:
        """Return notes on units that are not derived yet; record a fault for rows that must exist and are missing."""
        notes: dict[str, tuple[str, ...]] = dict.fromkeys(DERIVED_TABLES, ())
        for estimator, tables in DERIVED.items():
            units = {number for number, record in self.records.items() if record["estimator"] == estimator}
            for table in tables:
                if not self._readable[table]:
                    continue
                known = self._units.readable and self._readable["events"]
                if known and (lost := self._rows[table].keys() - self.records.keys()):
                    rows = sum(self._rows[table][number] for number in lost)
                    what = f"{number_of(rows, 'row')} of {number_of(len(lost), 'unit')} that events do not have"
                    self._faults[table].append(Fault(table, f"{what}, must be of units that are stored", tuple(lost)))
                lacking = units - self._rows[table].keys()
                due = self._covered(table) & lacking if lacking else set[int]()
                for number in sorted(due):
                    what = f"unit {unit_name(self.records[number])} has no rows, must have them"
                    what += f": {table} says that its events are derived"
                    self._faults[table].append(Fault(table, what, (number,)))
                if lacking - due:
                    notes[table] = (f"{table}: {number_of(len(lacking - due), 'unit')} still to derive",)
        return notes

    def _covered(self, table: str) -> set[int]:
        try:
            version = self._complete[table]
            return units_at(self._store, version) if version >= 0 else set()
        except UNREADABLE:  # the files of that version are not all there
            return set()

    def _check_overlaps(self) -> None:
        """Check that no replicate of a document, action, revision and estimator is in two units."""
        groups = defaultdict[str, list[UnitRecord]](list)
        for record in self.records.values():
            groups[group_of(record)].append(record)
        for group in groups.values():
            group.sort(key=lambda record: (record["first_replicate"], record["replicates"]))
            reaching = group[0]
            for record in group[1:]:
                end = reaching["first_replicate"] + reaching["replicates"]
                if record["first_replicate"] < end:
                    what = f"unit {unit_name(record)} repeats replicates of {unit_name(reaching)}, must not"
                    self._faults["events"].append(Fault("events", what))
                reaching = max(reaching, record, key=lambda unit: unit["first_replicate"] + unit["replicates"])

    def _table_check(self, table: str, holds: str, notes: tuple[str, ...] = ()) -> Verified:
        counts = self._rows[table]
        numbers = counts.keys() | (self._missing.keys() if table == "events" else set())
        units, rows = number_of(len(numbers - {-1}), "unit"), number_of(counts.total(), "row")
        looked_at = f"{units}, {rows}" if table == "events" else f"{rows} of {units}"
        return Verified(table, looked_at, holds, tuple(self._faults[table]), notes)

    def _units_check(self) -> Verified:
        """Check that each row of ``units`` has the number that follows from its key; note rows not written yet."""
        faults = list(self._units.check.faults)
        for number, record in self._stored.items():
            if (wanted := unit_number(record)) != number:
                what = f"unit is {number}, must be {wanted} as its key gives"
                faults.append(Fault("units", f"unit {unit_name(record)}: {what}"))
        lacking = len(self._missing) if self._units.readable else 0
        notes = (f"units: {number_of(lacking, 'row')} still to be made from their events",) if lacking else ()
        return Verified("units", self._units.check.looked_at, "one to each unit of events", tuple(faults), notes)


def _control_faults(record: UnitRecord, events: pa.Table) -> Iterator[Fault]:
    for name in ("delta", "f", "weight"):
        moved = events.filter(pc.not_equal(events[name], 0))
        if moved.num_rows:
            first = moved.slice(0, 1).to_pylist()[0]
            what = (
                f"{name} of a full-retention control is {first[name]:.3g} at replicate {first['replicate']}, "
                f"t {first['t']}{and_more(moved.num_rows - 1)}, must be exactly 0"
            )
            yield Fault("events", f"unit {unit_name(record)}: {what}")
