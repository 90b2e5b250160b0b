"""One events segment of a store -> the files derived from it, and the commit that makes them visible.

A plain segment becomes trajectories and steps, one of residual branching becomes branchings and branching depths.
Knows the store and the derivation, not who calls: the pipeline and the live form share these functions. Everything
here may be repeated: a segment's files have its own relative path, so a second attempt replaces them by the same
bytes, and a commit skips what is visible already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from schema.errors import KvdriftError, OperationError
from schema.location import filesystem_of, join
from schema.store.appends import DERIVED, derived_tables
from schema.tables import EVENTS, SWRB
from transforms.branching import derive_branchings
from transforms.derivation import derive
from transforms.event_columns import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from schema.store.store import Store, StoredFile

COVERED = "derive"  # application transaction: every segment of the events version it carries is derived
PARTIAL = "derive-partial"  # likewise, for a commit after which segments of that version are still to do
NAMED_FAILURES = 3  # how many failed segments an error line names


@dataclass(frozen=True)
class Segment:
    """An events file still to derive."""

    path: str  # relative to the events table, and of the derived files to theirs
    file: str  # absolute path or URL to read
    tables: tuple[str, ...]  # those of its derived tables that lack its file


@dataclass(frozen=True)
class Outcome:
    """What became of a segment: its written files by table, not visible yet; or why there are none."""

    path: str
    events: int = 0
    trajectories: int = 0
    branchings: int = 0
    files: tuple[tuple[str, StoredFile], ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class DerivationReport:
    """What a derivation did: counts of what it derived (0 when nothing was to do) and the events version covered."""

    segments: int
    events: int
    trajectories: int
    branchings: int
    events_version: int
    seconds: float
    failures: tuple[str, ...] = ()  # one line per segment that could not be derived


def pending(store: Store, events_version: int) -> list[Segment]:
    """List the segments visible at ``events_version`` that lack a derived file, each once, sorted by path."""
    paths = sorted(set(store.pending_segments(events_version)))
    if not paths:
        return []
    # A file that is visible already must not be replaced, not even by the same rows: its log entry has its size.
    wanted = {table for path in paths for table in derived_tables(path)}
    visible = {table: set(store.paths(table)) for table in wanted}
    return [
        Segment(
            path=path,
            file=join(store.location, "events", path),
            tables=tuple(table for table in derived_tables(path) if path not in visible[table]),
        )
        for path in paths
    ]


def derive_segment(store: Store, segment: Segment) -> Outcome:
    """Read, derive and write one segment; what is wrong with its file is told in the outcome, not raised."""
    try:
        events = read_events(segment.file)
        rows = derived_rows(segment.path, events)
        files = tuple((table, store.write_parquet(table, segment.path, rows[table])) for table in segment.tables)
    except (OSError, pa.ArrowException, KvdriftError) as error:
        reason = " ".join(str(error).split())  # Arrow's messages may have several lines
        return Outcome(segment.path, error=f"{segment.file}: {reason}")
    trajectories, branchings = (len(rows.get(table, ())) for table in ("trajectories", "branchings"))
    return Outcome(segment.path, events.num_rows, trajectories, branchings, files)


def derived_rows(path: str, events: pa.Table) -> dict[str, pa.Table]:
    """Derive a segment's events; returns the rows of each table that a segment of that path becomes.

    InputError where the events are not such as can be derived.
    """
    if derived_tables(path) == DERIVED[SWRB]:
        branched = derive_branchings(events)
        return {"branchings": branched.branchings, "branching_depths": branched.depths}
    derived = derive(events)
    return {"trajectories": derived.trajectories, "steps": derived.steps}


def read_events(file: str) -> pa.Table:
    """Read the event columns of a Parquet file (path or URL), names as dictionaries, page checksums verified."""
    filesystem, path = filesystem_of(file)
    with (
        filesystem.open_input_file(path) as source,
        pq.ParquetFile(source, read_dictionary=list(NAMES), page_checksum_verification=True) as parquet,
    ):
        # A missing column is left for the derivation to name; one thread, since segments are small and run abreast.
        return parquet.read(columns=list(EVENTS.columns), use_threads=False)


def commit(store: Store, outcomes: Iterable[Outcome], events_version: int, *, covered: bool) -> None:
    """Make the written files visible, one commit per table; ``covered``: nothing of the version is left to do."""
    files: dict[str, list[StoredFile]] = {}
    for outcome in outcomes:
        for table, file in outcome.files:
            files.setdefault(table, []).append(file)
    for table in (table for tables in DERIVED.values() for table in tables if table in files):
        store.commit_files(table, files[table], COVERED if covered else PARTIAL, events_version)


def failure(failures: Sequence[str], segments: int) -> OperationError:
    """Make the one-line error for segments that could not be derived, the first few by name."""
    named = "; ".join(failures[:NAMED_FAILURES])
    more = f"; and {len(failures) - NAMED_FAILURES} more" if len(failures) > NAMED_FAILURES else ""
    return OperationError(f"{len(failures)} of {segments} segments could not be derived: {named}{more}")
