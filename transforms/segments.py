"""One events segment of a store -> the files derived from it, and the commit that makes them visible.

A segment is an events file. A plain one becomes trajectories and steps, one of residual branching becomes branchings
and branching depths. This module knows the store and the derivation, and not who calls it: the pipeline and the live
form share these functions. Everything here may be repeated: a derived file has the relative path of its segment, so a
second attempt replaces it by the same bytes, and a commit leaves out what is visible already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from log.appends import DERIVED, derived_tables
from log.durability import side_by_side
from schema.errors import KvdriftError, OperationError
from schema.location import filesystem_of, join
from schema.tables import EVENTS, GROUP_KEY, SWRB
from transforms.branching import derive_branchings
from transforms.derivation import derive_trajectories

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from log.store import Store, StoredFile

# Application ids of the commits: after COVERED every segment of the events version that it carries is derived, after
# PARTIAL some of that version are still to do.
COVERED = "derive"
PARTIAL = "derive-partial"
NAMED_FAILURES = 3  # how many failed segments an error line names


@dataclass(frozen=True)
class Segment:
    """An events file that lacks a derived file.

    Attributes:
        path: Its path relative to the events table; its derived files have the same path relative to their tables.
        file: Its absolute path or URL.
        tables: Those of its derived tables that lack its file.
        sources: How many pending files it was put together from.

    """

    path: str
    file: str
    tables: tuple[str, ...]
    sources: int = 1


@dataclass(frozen=True)
class SegmentOutcome:
    """What became of a segment: how many rows, and the tables' files written for them, which are not visible yet.

    ``sources`` is that of the segment.
    ``error`` is why nothing could be derived, on one line; None if something was.
    """

    path: str
    events: int = 0
    trajectories: int = 0
    branchings: int = 0
    files: tuple[tuple[str, StoredFile], ...] = ()
    error: str | None = None
    sources: int = 1


@dataclass(frozen=True)
class DerivationReport:
    """What a derivation did: how many segments of which events version became how many rows.

    ``failures`` has a line for each segment that could not be derived.
    """

    segments: int
    events: int
    trajectories: int
    branchings: int
    events_version: int
    seconds: float
    failures: tuple[str, ...] = ()

    @classmethod
    def of(cls, outcomes: Sequence[SegmentOutcome], events_version: int, seconds: float) -> DerivationReport:
        """Count the outcomes of segments."""
        failures = tuple(outcome.error for outcome in outcomes if outcome.error)
        return cls(
            segments=sum(outcome.sources for outcome in outcomes if not outcome.error),
            events=sum(outcome.events for outcome in outcomes),
            trajectories=sum(outcome.trajectories for outcome in outcomes),
            branchings=sum(outcome.branchings for outcome in outcomes),
            events_version=events_version,
            seconds=seconds,
            failures=failures,
        )

    def plus(self, later: DerivationReport) -> DerivationReport:
        """Add the report of a later batch of the same derivation."""
        return DerivationReport(
            segments=self.segments + later.segments,
            events=self.events + later.events,
            trajectories=self.trajectories + later.trajectories,
            branchings=self.branchings + later.branchings,
            events_version=later.events_version,
            seconds=self.seconds + later.seconds,
            failures=self.failures + later.failures,
        )

    def check(self) -> None:
        """Check that every segment could be derived.

        Raises:
            OperationError: Some could not; the line names the first few.

        """
        if self.failures:
            named = "; ".join(self.failures[:NAMED_FAILURES])
            more = f"; and {len(self.failures) - NAMED_FAILURES} more" if len(self.failures) > NAMED_FAILURES else ""
            segments = self.segments + len(self.failures)
            raise OperationError(f"{len(self.failures)} of {segments} segments could not be derived: {named}{more}")


def pending(store: Store, events_version: int) -> list[Segment]:
    """List the segments visible at ``events_version`` that lack a derived file, sorted by path."""
    found = store.pending_tables(events_version)
    return [Segment(path, join(store.location, "events", path), tables) for path, tables in found.items()]


def derive_segment(store: Store, segment: Segment) -> SegmentOutcome:
    """Read, derive and write one segment; what is wrong with its file is part of the outcome and is not raised."""
    try:
        events = read_events(segment.file)
        rows = derived_rows(segment.path, events)
        written = side_by_side(lambda table: store.write_parquet(table, segment.path, rows[table]), segment.tables)
        files = tuple(zip(segment.tables, written, strict=True))
    except (OSError, pa.ArrowException, KvdriftError) as error:
        reason = " ".join(str(error).split())  # Arrow's messages may have several lines
        return SegmentOutcome(segment.path, error=f"{segment.file}: {reason}")
    trajectories, branchings = (len(rows.get(table, ())) for table in ("trajectories", "branchings"))
    return SegmentOutcome(segment.path, events.num_rows, trajectories, branchings, files, sources=segment.sources)


def derived_rows(path: str, events: pa.Table) -> dict[str, pa.Table]:
    """Derive a segment's events: the rows of each table that a segment of this path, plain or branched, becomes.

    Raises:
        InputError: The events cannot be derived.

    """
    if derived_tables(path) == DERIVED[SWRB]:
        branched = derive_branchings(events)
        return {"branchings": branched.branchings, "branching_depths": branched.depths}
    derived = derive_trajectories(events)
    return {"trajectories": derived.trajectories, "steps": derived.steps}


def read_events(file: str) -> pa.Table:
    """Read the event columns of a Parquet file (path or URL), names as dictionaries, page checksums verified."""
    filesystem, path = filesystem_of(file)
    with filesystem.open_input_file(path) as source:
        footer = pq.read_metadata(source)
        names = [name for name in (*GROUP_KEY, "kind") if name in footer.schema.names]
        parquet = pq.ParquetFile(source, metadata=footer, read_dictionary=names, page_checksum_verification=True)
        # A missing column is left for the derivation to name; one thread, since segments are small and run abreast.
        return parquet.read(columns=list(EVENTS.columns), use_threads=False)


def commit(store: Store, outcomes: Iterable[SegmentOutcome], events_version: int, *, covered: bool) -> None:
    """Make written files visible, by one commit for each table.

    ``covered`` says that no segment of ``events_version``, at which they were listed, is left to do.
    """
    files: dict[str, list[StoredFile]] = {}
    for outcome in outcomes:
        for table, file in outcome.files:
            files.setdefault(table, []).append(file)
    for table in (table for tables in DERIVED.values() for table in tables if table in files):
        store.commit_files(table, files[table], COVERED if covered else PARTIAL, events_version)
