"""A store as source and sink of Beam pipelines: read events as units are committed, write derived rows and replicates.

A commit leaves out units and replicates that the store has. So a bundle that a runner tries again changes nothing, and
every unit and derived row is stored exactly once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Duration, Timestamp

from kvdrift.ingestion.ingest import ingest
from kvdrift.log.store import Store
from kvdrift.log.units.unit import DERIVED
from kvdrift.schema.errors import InputError, OperationError
from kvdrift.schema.tables import GROUP_KEY, PLAIN
from kvdrift.transforms.moments import derive_moments
from kvdrift.transforms.segments import (
    SegmentOutcome,
    commit,
    declared_windows,
    derive_segment,
    pending,
    read_events,
    segments_of,
)
from kvdrift.transforms.streams.replicates import DeadLetter, DerivedReplicates, WholeReplicates

_UNTIL_STOPPED: Final = (1 << 62) - 1
_NAMES: Final = (*GROUP_KEY, "replicate")


class ReadEvents(beam.PTransform):
    """Read the events of a store's units of coupled pairs, not of residual branching, as tables of whole units.

    The source can be split by versions of table ``units``. Its watermark is the time at which a version was read.

    Args:
        location: Folder or URL of the store, as workers see it.
        after: The version of ``units`` whose units were read before; -1 for none.
        follow: Whether to go on with units that are committed later, until the pipeline is stopped. Otherwise the
            source ends with the latest version at the time the pipeline is made.
        poll: Seconds between two checks for later units.
    """

    def __init__(self, location: str | Path, *, after: int = -1, follow: bool = False, poll: float = 1.0) -> None:
        super().__init__()
        self._location, self._after, self._follow, self._poll = str(location), after, follow, poll

    def expand(self, begin: Any) -> Any:
        """Return the PCollection of tables of events."""
        end = _UNTIL_STOPPED if self._follow else Store.open(self._location).version("units") + 1
        reader = _FollowVersions(self._poll) if self._follow else ReadVersions(self._poll)
        start = begin | beam.Create([(self._location, self._after + 1, max(end, self._after + 1))])
        return start | "Read" >> beam.ParDo(reader).with_output_types(pa.Table)


class _Versions(RestrictionProvider):
    """Tells Beam the range of versions of ``units`` that an element names, so that Beam can split and track it."""

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def initial_restriction(self, element: tuple[str, int, int]) -> OffsetRange:
        return OffsetRange(element[1], element[2])

    def restriction_size(self, _: Any, restriction: OffsetRange) -> int:
        return int(restriction.size())


class ReadVersions(beam.DoFn):
    """Map (location, first version, end) to tables of the events of units that these versions added."""

    def __init__(self, poll: float) -> None:
        self._poll = poll

    def process(
        self,
        element: tuple[str, int, int],
        tracker: Any = beam.DoFn.RestrictionParam(_Versions()),
        watermark: Any = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider()),
    ) -> Iterator[Any]:
        """Yield the events of units that existing versions added; defer the versions that do not exist yet."""
        store = Store.open(element[0])
        restriction = tracker.current_restriction()
        first, end = restriction.start, restriction.stop
        while first < end:
            now, last = Timestamp.of(time.time()), min(store.version("units"), end - 1)
            if last < first:
                watermark.set_watermark(now)
                tracker.defer_remainder(Duration.of(self._poll))
                return
            if not tracker.try_claim(last):
                return
            for table in _units_of_versions(store, first, last):
                yield TimestampedValue(table, now)
            watermark.set_watermark(now)
            first = last + 1


@beam.DoFn.unbounded_per_element()
class _FollowVersions(ReadVersions):
    """Map (location, first version, end) to tables of events, as versions add units; the end is never reached."""


def _units_of_versions(store: Store, first: int, last: int) -> Iterator[pa.Table]:
    """Yield the events of the units of coupled pairs that versions ``first`` to ``last`` of ``units`` added."""
    before = _plain_units(store, first - 1) if first else np.zeros(0, np.int64)
    new = np.setdiff1d(_plain_units(store, last), before)
    for segment in segments_of(store, dict.fromkeys(DERIVED[PLAIN], new), store.version("events")):
        events, errors = read_events(store, segment)
        if errors:
            raise OperationError(errors[0])
        yield events


def _plain_units(store: Store, version: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    rows = store.read("units", version, ["unit", "estimator"])
    return rows.filter(pc.equal(rows["estimator"], PLAIN))["unit"].to_numpy()


class WriteDerived(beam.PTransform):
    """Write ``DerivedReplicates`` of a store's own events to the store; emit the number of new units of each element.

    Each element must have whole units, like the tables of ``ReadEvents``. An element is one commit to each table.
    ``location`` is that of the store as workers see it.
    """

    def __init__(self, location: str | Path) -> None:
        super().__init__()
        self._location = str(location)

    def expand(self, derived: Any) -> Any:
        """Return the PCollection of numbers of new units."""
        return derived | "Write" >> beam.Map(write_derived, self._location)


def write_derived(derived: DerivedReplicates, location: str) -> int:
    """Commit derived rows of whole units; return the number of units that had no derived rows before.

    Raises:
        InputError: A row has no unit, or an element has only a part of a unit's rows.
    """
    store = Store.open(location)
    _check_whole_units(store, derived)
    lacking = len(store.all_underived())
    moments = derive_moments(derived.trajectories, derived.steps, declared_windows(store))
    tables = {"unit_moments": moments, "trajectories": derived.trajectories, "steps": derived.steps}
    files = tuple((name, store.put_derived(name, rows)) for name, rows in tables.items() if rows.num_rows)
    commit(store, [SegmentOutcome(0, files=files)], store.version("events"), covered=False)
    return lacking - len(store.all_underived())


def _check_whole_units(store: Store, derived: DerivedReplicates) -> None:
    counted = derived.steps.group_by("unit").aggregate([([], "count_all")])
    rows = store.unit_rows(counted["unit"].fill_null(-1).to_numpy(), ["unit", "event_rows"])
    expected = dict(zip(rows["unit"].to_pylist(), rows["event_rows"].to_pylist(), strict=True))
    for unit, steps in zip(counted["unit"].to_pylist(), counted["count_all"].to_pylist(), strict=True):
        if expected.get(unit) != steps:
            held = "the store has no such unit" if unit not in expected else f"the unit has {expected[unit]} events"
            raise InputError(
                f"{store.location}: {steps} derived rows of unit {unit}, but {held}; "
                "an element must have all rows of each of its units"
            )


class WriteReplicates(beam.PTransform):
    """Write ``WholeReplicates`` of another generator to a store; emit a ``DeadLetter`` for refused rows.

    Events are checked as ``kvdrift ingest`` checks them. Replicates that the store has with equal content change
    nothing. An element is one commit.

    Args:
        location: Folder or URL of the store, as workers see it; a missing store is made.
        documents: CSV, JSONL or Parquet file of documents, as workers see it; without it the store must know the
            documents.
    """

    def __init__(self, location: str | Path, documents: str | Path | None = None) -> None:
        super().__init__()
        self._location, self._documents = str(location), None if documents is None else str(documents)

    def expand(self, whole: Any) -> Any:
        """Return the PCollection of ``DeadLetter``."""
        return whole | "Write" >> beam.FlatMap(write_replicates, self._location, self._documents)


def write_replicates(whole: WholeReplicates, location: str, documents: str | None) -> list[DeadLetter]:
    """Append whole replicates as units and derive them.

    Returns the dead letters of ``whole``, and one for each finding, which names the unit that was kept out.
    """
    letters = list(whole.letters)
    if not whole.events.num_rows:
        return letters
    studies = whole.events.group_by("study").aggregate([("t", "max")])
    for study, horizon in zip(studies["study"].to_pylist(), studies["t_max"].to_pylist(), strict=True):
        study_events = whole.events.filter(pc.equal(whole.events["study"], study))
        with TemporaryDirectory() as folder:
            path = Path(folder, "replicates.parquet")
            pq.write_table(study_events.drop_columns(["unit", "action_revision"]), path)
            report = ingest(location, [path], documents, horizon=horizon)
        for finding in report.findings:
            named = [pc.equal(study_events[name], finding.key[name]) for name in finding.key if name in _NAMES]
            rows = study_events.filter(functools.reduce(pc.and_, named)) if named else study_events
            letters.append(DeadLetter(finding.text, rows))
    store = Store.open(location)
    work = pending(store)
    outcomes = [derive_segment(store, segment) for segment in work.segments]
    commit(store, outcomes, work.events_version, covered=False)
    if errors := [line for outcome in outcomes for line in outcome.errors]:
        raise OperationError(errors[0])
    return letters
