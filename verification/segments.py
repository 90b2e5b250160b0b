"""Units and what is derived from them: events files one after the other, each beside its derived files.

A unit's file carries its record in its footer and its digest in its name, so every one of them can be held against
itself; its derived files are held against what the derivation makes of it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from log.appends import (
    Span,
    conform_unit,
    derived_tables,
    is_compacted,
    is_foreign,
    span_of_path,
    unit_count,
    unit_name,
    unit_path,
)  # fmt: skip
from log.compaction.members import Member

from log.checked_files import DERIVED_TABLES
from log.store import Store, Unit
from schema.errors import InputError
from schema.progress import Progress
from schema.tables import GROUP_KEY, TABLES
from transforms.segments import COVERED, derived_rows
from verification.files import Reading, TableFiles, UnitRecord
from verification.findings import Check, Fault, counted

# A derivation elsewhere may add up in another order: a sum of n terms that are not negative is then off by at most
# n 2^-53 of itself, and the longest sums here have 2 H terms.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Segments:
    """Outcome for the events table and what is derived from it."""

    checks: list[Check]
    records: dict[str, UnitRecord]  # of the events files that have a right one, by path
    units: set[str]  # paths of the units in the events files that could be read
    readable: bool  # whether all files could be read


@dataclass
class _Tally:
    """What is counted and found of one subject while the files go by."""

    units: int = 0
    rows: int = 0
    faults: list[Fault] = field(default_factory=list)
    pending: int = 0


def covered_versions(store: Store) -> dict[str, int]:
    """The events version through which each derived table says that it is derived, -1 where it says nothing.

    To be asked before the versions that are looked at are chosen: what is covered then is in them.
    """
    versions = {table: store.covered_version(table, COVERED) for table in DERIVED_TABLES}
    return {table: -1 if version is None else version for table, version in versions.items()}


def check_segments(
    store: Store,
    versions: Mapping[str, int],
    covered: Mapping[str, int],
    controls: Collection[tuple[str, str]],
    progress: Progress,
) -> Segments:
    """Check events, each derived table and the controls: every events file is read with its derived files.

    ``versions`` of the tables are looked at, ``covered`` is ``covered_versions`` from before, and ``controls`` are the
    (study, action) of full-retention controls.
    """
    return _Walk(store, versions, covered, frozenset(controls)).outcome(progress)


class _Walk:
    """One pass over the events files, with what it has found so far."""

    def __init__(
        self,
        store: Store,
        versions: Mapping[str, int],
        covered: Mapping[str, int],
        controls: frozenset[tuple[str, str]],
    ) -> None:
        self._events = TableFiles(store, "events", versions["events"])
        self._derived = {table: TableFiles(store, table, versions[table]) for table in DERIVED_TABLES}
        self._covered = {
            table: set(store.paths("events", version)) if version >= 0 else set[str]()
            for table, version in covered.items()
        }
        self._controls = controls
        self._tally = {table: _Tally() for table in ("events", *DERIVED_TABLES)}
        self._control_faults: list[Fault] = []
        self._control_replicates = 0
        self._records: dict[str, UnitRecord] = {}
        self._units: set[str] = set()
        self._readable = True
        self._in_packs: set[str] = set()  # units in compacted files that a derived table has in files of their own
        self._spans: dict[str, list[tuple[Span, str]]] = {}

    def outcome(self, progress: Progress) -> Segments:
        progress.begin("verify", unit_count(path for path in self._events.by_path if not is_foreign(path)), "units")
        for path in self._events.by_path:
            self._check_segment(path)
            progress.advance(0 if is_foreign(path) else unit_count([path]))
        self._check_overlaps()
        for table, files in self._derived.items():
            for path in sorted(files.by_path.keys() - self._events.by_path.keys() - self._in_packs):
                fault = "the file is derived from no events file that is there, must have the path of one"
                self._tally[table].faults.append(Fault(f"{table}/{path}", fault))
        checks = [
            self._events_check(),
            *(self._derived_check(table) for table in DERIVED_TABLES),
            self._control_check(),
        ]
        return Segments(checks, self._records, self._units, self._readable)

    def _check_segment(self, path: str) -> None:
        own = self._tally["events"]
        reading = self._read(self._events, path)
        if is_foreign(path):
            own.faults.append(Fault(reading.where, "another program has rewritten the file, must be one of kvdrift"))
            return
        named = [unit.path for unit in reading.units] if is_compacted(path) else [path]
        self._units.update(named)
        for name in named:
            if span := span_of_path(name):
                self._spans.setdefault(span.group, []).append((span, name))
        whole = self._whole_units(path, reading)
        for unit, rows in whole:
            record = self._records[unit.path] = unit.record
            if (record["study"], record["action"]) in self._controls:
                self._control_replicates += record["replicates"]
                self._control_faults += _control_faults(reading.where, rows)
        derived = None
        if whole and len(whole) == len(named) and reading.rows is not None:
            derived = derived_rows(path, reading.rows)
        for table in derived_tables(path):
            if is_compacted(path) and path not in self._derived[table].by_path:
                # Its units are derived, but not yet put together.
                self._in_packs.update(named)
                for unit, rows in whole:
                    self._check_derived(table, unit.path, derived_rows(unit.path, rows))
            else:
                self._check_derived(table, path, derived)

    def _whole_units(self, path: str, reading: Reading) -> list[tuple[Member, pa.Table]]:
        """The units in the file, with complete records and their rows, that path and rows are those of."""
        found = []
        try:
            found = units_of(path, reading)
        except InputError as error:
            self._tally["events"].faults.append(Fault(reading.where, str(error).removeprefix("events: ")))
        return found

    def _check_overlaps(self) -> None:
        """No replicate of a group is in two units."""
        for spans in self._spans.values():
            ordered = sorted(spans, key=lambda item: (item[0].first, item[0].count, item[1]))
            reaching, reaching_path = ordered[0]
            for span, path in ordered[1:]:
                if span.overlaps(reaching):
                    twice = f"[{span.first}, {min(span.first + span.count, reaching.first + reaching.count)})"
                    what = f"replicates {twice} are in events/{reaching_path} too, must be in one unit"
                    self._tally["events"].faults.append(Fault(f"events/{path}", what))
                if span.first + span.count > reaching.first + reaching.count:
                    reaching, reaching_path = span, path

    def _check_derived(self, table: str, path: str, derived: Mapping[str, pa.Table] | None) -> None:
        own, files = self._tally[table], self._derived[table]
        if path not in files.by_path:
            if path in self._covered[table]:
                what = f"the file is not in the log, must be there: {table} says that its events are derived"
                own.faults.append(Fault(f"{table}/{path}", what))
            else:
                own.pending += unit_count([path])
            return
        reading = self._read(files, path)
        if derived is None or reading.rows is None:
            return
        if difference := first_difference(table, reading.rows, derived[table]):
            own.faults.append(Fault(reading.where, difference))

    def _read(self, files: TableFiles, path: str) -> Reading:
        own, reading = self._tally[files.table], files.read(path)
        own.units += 0 if is_foreign(path) else unit_count([path])
        own.rows += 0 if reading.rows is None else reading.rows.num_rows
        own.faults += reading.faults
        self._readable &= reading.rows is not None
        return reading

    def _events_check(self) -> Check:
        own = self._tally["events"]
        what = f"{counted(own.units, 'unit')}, {counted(own.rows, 'row')}"
        return Check("events", what, "whole and unique", tuple(own.faults))

    def _derived_check(self, table: str) -> Check:
        own = self._tally[table]
        notes = (f"{table}: {counted(own.pending, 'unit')} still to derive",) if own.pending else ()
        what = f"{counted(own.rows, 'row')} of {counted(own.units, 'unit')}"
        return Check(table, what, "as their events give", tuple(own.faults), notes)

    def _control_check(self) -> Check:
        what = counted(self._control_replicates, "replicate")
        return Check("controls", what, "exactly 0", tuple(self._control_faults))


def units_of(path: str, reading: Reading) -> list[tuple[Member, pa.Table]]:
    """Return the units of a file with complete records, each with its rows; none where it has no rows or no records.

    Raises:
        InputError: The paths or the rows are not those of the units.

    """
    if not reading.units or reading.rows is None:
        return []
    found, begin = [], 0
    for unit in reading.units:
        rows = reading.rows.slice(begin, unit.rows)
        begin += unit.rows
        record, _ = conform_unit(Unit(unit.record, rows))
        wanted = unit_path(record, unit.path.rpartition("-")[2].removesuffix(".parquet"))
        if wanted != unit.path:
            raise InputError(f"the path is not that of {unit_name(record)} in the footer, must be {wanted}")
        found.append((replace(unit, record=record), rows))
    if begin != reading.rows.num_rows:
        raise InputError(f"the units in the footer have {begin} rows, must have {reading.rows.num_rows} as the file")
    if is_compacted(path) and unit_count([path]) != len(found):
        raise InputError(f"the footer has {len(found)} units, must have {unit_count([path])} as the name says")
    return found


def _control_faults(where: str, events: pa.Table) -> list[Fault]:
    faults = []
    for name in ("delta", "f", "weight"):
        moved = events.filter(pc.not_equal(events[name], 0))
        if moved.num_rows:
            first = moved.slice(0, 1).to_pylist()[0]
            what = (
                f"{name} of a full-retention control is {first[name]:.3g} at replicate {first['replicate']}, "
                f"t {first['t']}{_and_more(moved.num_rows - 1)}, must be exactly 0"
            )
            faults.append(Fault(where, what))
    return faults


def first_difference(table: str, stored: pa.Table, derived: pa.Table) -> str | None:
    """How a derived file's rows differ from what its events give, the first column that does; None where none does.

    Both are of the table's declared schema, sorted by key. Double columns may differ by ``ROUNDING`` of their value.
    """
    if stored.num_rows != derived.num_rows:
        return f"the file has {stored.num_rows} rows, must have {derived.num_rows} as its events give"
    for name in TABLES[table].columns:
        if stored[name].equals(derived[name]):
            continue
        differ = _differ(stored[name], derived[name])
        if not differ.any():
            continue
        row = int(np.argmax(differ))
        within = TABLES[table].key[len((*GROUP_KEY, "action_revision")) :]
        key = [f"{part} {derived[part][row]}" for part in within]
        return (
            f"{name} is {_text(stored[name][row])} at {', '.join(key)}{_and_more(int(differ.sum()) - 1)}, "
            f"must be {_text(derived[name][row])} as its events give"
        )
    return None


def _differ(stored: pa.ChunkedArray, derived: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    if pa.types.is_float64(stored.type):
        values, wanted = stored.to_numpy(), derived.to_numpy()  # null is NaN
        close = np.abs(values - wanted) <= ROUNDING * np.abs(wanted)
        differ: npt.NDArray[np.bool_] = ~(close | (np.isnan(values) & np.isnan(wanted)))
        return differ
    pairs = zip(stored.to_pylist(), derived.to_pylist(), strict=True)
    return np.array([value != wanted for value, wanted in pairs])


def _text(value: pa.Scalar) -> str:
    found = value.as_py()
    return "null" if found is None else repr(found)


def _and_more(others: int) -> str:
    return f" and {others:,} more" if others else ""
