"""Derive the units of a store that are not derived yet: read their events, write derived files, and commit the files.

Units of coupled pairs become trajectories, steps and moments, units of residual branching become branchings and
branching depths. This module knows the store and the derivation, and not who calls it: the pipeline and the live form
share these functions. Everything here may be repeated: a commit leaves out units whose rows are visible already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.log.delta.durability import side_by_side
from kvdrift.log.units.unit import DERIVED
from kvdrift.schema.errors import UNREADABLE, KvdriftError, OperationError, first_line
from kvdrift.schema.rows import Wide
from kvdrift.schema.tables import EVENTS, GROUP_KEY, SWRB
from kvdrift.schema.windows import Windows
from kvdrift.transforms.derivation import derive_trajectories
from kvdrift.transforms.moments import StudyWindows, derive_moments
from kvdrift.transforms.residual_branches import derive_branchings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvdrift.log.store import DerivedFile, Store

# Application ids of the commits: after COVERED every unit of the events version that it carries is derived, after
# PARTIAL some of that version are still to do.
COVERED = "derive"
PARTIAL = "derive-partial"
NAMED_FAILURES = 3  # how many failures an error line names

SEGMENT_ROWS: Final = 1 << 19
"""The most events of a segment, which a worker holds in memory; a segment becomes one file of each derived table."""

Row = dict[str, Any]

_Item = TypeVar("_Item")

_COUNTED = ("units", "events", "trajectories", "branchings")  # of outcomes and reports
_READ = ("unit", *GROUP_KEY, "action_revision", "first_replicate", "estimator", "event_rows")


@dataclass(frozen=True)
class Segment:
    """Units of one estimator that are derived together: their numbers, and how many events each has.

    Events are read from a version of ``events``. ``tables`` are the derived tables that lack rows of these units.
    """

    events_version: int
    units: tuple[int, ...]
    rows: tuple[int, ...]
    docs: tuple[str, ...]
    tables: tuple[str, ...]


@dataclass(frozen=True)
class SegmentOutcome:
    """The result of deriving a segment: numbers of rows, and written files, which are not visible yet.

    ``segment`` is the number of the segment's first unit. ``errors`` has a line for each unreadable file, and for each
    unit that could not be derived.
    """

    segment: int
    units: int = 0
    events: int = 0
    trajectories: int = 0
    branchings: int = 0
    files: tuple[tuple[str, DerivedFile], ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class DerivationReport:
    """The result of a derivation: its events version, and the numbers of units and rows.

    ``failures`` has a line for each file that could not be read, and for each unit that could not be derived.
    """

    units: int
    events: int
    trajectories: int
    branchings: int
    events_version: int
    seconds: float
    failures: tuple[str, ...] = ()

    @classmethod
    def of(cls, outcomes: Sequence[SegmentOutcome], events_version: int, seconds: float) -> DerivationReport:
        """Return the report of some segments' outcomes."""
        failures = tuple(dict.fromkeys(line for outcome in outcomes for line in outcome.errors))
        counted = {name: sum(getattr(outcome, name) for outcome in outcomes) for name in _COUNTED}
        return cls(**counted, events_version=events_version, seconds=seconds, failures=failures)

    def plus(self, later: DerivationReport) -> DerivationReport:
        """Return this report with a later batch of the same derivation added."""
        counted: dict[str, Any] = {name: getattr(self, name) + getattr(later, name) for name in _COUNTED}
        failures = tuple(dict.fromkeys(self.failures + later.failures))
        seconds = self.seconds + later.seconds
        return replace(later, **counted, seconds=seconds, failures=failures)

    def check(self) -> None:
        """Check that every unit could be derived."""
        if self.failures:
            named = "; ".join(self.failures[:NAMED_FAILURES])
            more = f"; and {len(self.failures) - NAMED_FAILURES} more" if len(self.failures) > NAMED_FAILURES else ""
            raise OperationError(f"not all units could be derived ({self.units} were): {named}{more}")


@dataclass(frozen=True)
class PendingSegments:
    """Units that lack derived rows, in the order of their keys, and the version of ``events`` from which they are read.

    ``whole`` says that no other unit of that version lacks rows.
    """

    segments: list[Segment]
    events_version: int
    whole: bool


def pending(store: Store, most: int = SEGMENT_ROWS) -> PendingSegments:
    """Find the units left to derive, in segments of at most ``most`` events; a larger unit is a segment by itself."""
    waiting = store.pending()
    return PendingSegments(
        segments_of(store, waiting.lacking, waiting.events_version, most), waiting.events_version, waiting.whole
    )


def segments_of(
    store: Store, lacking: Mapping[str, Wide], events_version: int, most: int = SEGMENT_ROWS
) -> list[Segment]:
    """Divide units without derived rows into segments of at most ``most`` events.

    ``lacking`` has, by derived table, the numbers of the units whose rows the table lacks. A unit with more events is a
    segment by itself.
    """
    numbers = np.unique(np.concatenate([*lacking.values()]))
    if not len(numbers):
        return []
    units = store.unit_rows(numbers, _READ).sort_by([(name, "ascending") for name in _READ[1:-2]])
    groups = defaultdict[tuple[str, ...], list[Row]](list)
    lacked = {table: set(lacking_units.tolist()) for table, lacking_units in lacking.items()}
    for unit in units.to_pylist():
        tables = tuple(table for table in DERIVED[unit["estimator"]] if unit["unit"] in lacked[table])
        groups[tables].append(unit)
    return [
        _segment(part, tables, events_version)
        for tables, group_units in groups.items()
        for part in in_parts(group_units, lambda unit: unit["event_rows"], most)
    ]


def derive_segment(store: Store, segment: Segment) -> SegmentOutcome:
    """Read, derive and write one segment; faults of its events are reported in the outcome, not raised."""
    name = segment.units[0]
    try:
        events, errors = read_events(store, segment)
        rows, failed = _derived(segment, events, declared_windows(store))
        errors += failed
        left = {table: derived for table, derived in rows.items() if derived.num_rows}
        written = side_by_side(lambda table: store.put_derived(table, left[table]), [*left])
    except (OSError, pa.ArrowException, KvdriftError) as error:
        return SegmentOutcome(name, errors=(first_line(error),))
    files = tuple(zip(left, written, strict=True))
    units = {number for _, file in files for number in file.units}
    count = pc.sum(pc.is_in(events["unit"], pa.array(sorted(units), pa.int64()))).as_py() or 0
    trajectories, branchings = (len(rows.get(table, ())) for table in ("trajectories", "branchings"))
    return SegmentOutcome(name, len(units), count, trajectories, branchings, files, tuple(errors))


def read_events(store: Store, segment: Segment) -> tuple[pa.Table, list[str]]:
    """Return the events of a segment's units, with names as dictionaries, and a line for each unreadable file.

    Units with missing events are left out.
    """
    reader = store.rows_of_units("events", segment.events_version)
    events = reader.read(segment.units, segment.docs, EVENTS.columns, sum(segment.rows))
    errors = [*reader.unreadable.values()]
    numbers, counts = np.unique(events["unit"].to_numpy(), return_counts=True)
    there = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    short = [number for number, rows in zip(segment.units, segment.rows, strict=True) if there.get(number, 0) != rows]
    if short:
        events = events.filter(pc.invert(pc.is_in(events["unit"], pa.array(short, pa.int64()))))
        if not errors:
            errors.append(
                f"{store.location}: {len(short)} units lack events; kvdrift verify {store.location} names them"
            )
    return events, errors


def declared_windows(store: Store) -> StudyWindows:
    """Return the windows of the studies that a store declares; a file that was read before is not read again."""
    columns = ("study", "model", *(field.name for field in fields(Windows)))
    return {key: windows for part in store.of_files("studies", columns, _windows) for key, windows in part.items()}


def _windows(studies: pa.Table) -> StudyWindows:
    return {(row["study"], row["model"]): Windows.from_row(row) for row in studies.to_pylist()}


def derived_rows(tables: Sequence[str], events: pa.Table, studies: StudyWindows) -> dict[str, pa.Table]:
    """Derive the events of whole units; return the rows of each of ``tables``, derived tables of one estimator."""
    if set(tables) <= set(DERIVED[SWRB]):
        branched = derive_branchings(events)
        rows = {"branchings": branched.branchings, "branching_depths": branched.depths}
    else:
        derived = derive_trajectories(events)
        rows = {"trajectories": derived.trajectories, "steps": derived.steps}
        if "unit_moments" in tables:
            rows["unit_moments"] = derive_moments(derived.trajectories, derived.steps, studies)
    return {table: rows[table] for table in tables}


def commit(store: Store, outcomes: Iterable[SegmentOutcome], events_version: int, *, covered: bool) -> None:
    """Make written files visible, by one commit for each table.

    ``covered`` says that after these commits no unit of ``events_version`` is left to derive.
    """
    files: dict[str, list[DerivedFile]] = {}
    for outcome in outcomes:
        for table, file in outcome.files:
            files.setdefault(table, []).append(file)
    for table in (table for tables in DERIVED.values() for table in tables if table in files):
        store.commit_derived(table, files[table], COVERED if covered else PARTIAL, events_version)


def _derived(segment: Segment, events: pa.Table, studies: StudyWindows) -> tuple[dict[str, pa.Table], list[str]]:
    """Derive units together, or one by one if a unit cannot be derived; also return a line for each such unit."""
    try:
        return derived_rows(segment.tables, events, studies), []
    except UNREADABLE as error:
        if len(segment.units) == 1:
            return {}, [f"unit {segment.units[0]}: {first_line(error)}"]
    parts, errors = list[dict[str, pa.Table]](), list[str]()
    for number in segment.units:
        unit_events = events.filter(pc.equal(events["unit"], number))
        try:
            parts.append(derived_rows(segment.tables, unit_events, studies))
        except UNREADABLE as error:
            errors.append(f"unit {number}: {first_line(error)}")
    return {table: pa.concat_tables([part[table] for part in parts]) for table in segment.tables if parts}, errors


def in_parts(
    items: Iterable[_Item], rows_of: Callable[[_Item], int], most: int = SEGMENT_ROWS
) -> Iterator[list[_Item]]:
    """Divide consecutive items into parts of at most ``most`` rows; an item with more rows is a part by itself."""
    part, rows = list[_Item](), 0
    for item in items:
        if part and rows + rows_of(item) > most:
            yield part
            part, rows = [], 0
        part.append(item)
        rows += rows_of(item)
    if part:
        yield part


def _segment(units: Sequence[Row], tables: tuple[str, ...], version: int) -> Segment:
    numbers, rows, docs = (tuple(unit[name] for unit in units) for name in ("unit", "event_rows", "doc"))
    return Segment(version, numbers, rows, tuple(dict.fromkeys(docs)), tables)
