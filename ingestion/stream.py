"""``ingest --pieces`` and ``--watch``: take files while another generator writes them, even with partial replicates.

Files are Parquet or Arrow IPC. Files whose names begin with "." or "_" are passed over. A file is taken as soon as it
can be opened. Both formats end in a footer, so a file that is still being written cannot be opened. A file that cannot
be opened is reported as damaged once it has not changed for ``SETTLED_SECONDS``. Files are never written, moved or
deleted. ``ingestion.pieces`` says what a piece is and how pieces are put together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ingestion.checks import Anomaly, SortedRows, find_errors
from ingestion.documents import DocumentRows
from ingestion.facts import FactRows
from ingestion.event_rows import EventRows
from ingestion.files import EventFile, FileGroups
from ingestion.ingest import Filing, expanded, note_unread, portions_of, read_about
from ingestion.intake import Intake
from ingestion.pieces import (
    NEW,
    STORED,
    WAITING,
    Group,
    Pieces,
    Taking,
    alone,
    digest_of,
    merge,
    rows_of,
    table_of,
)
from ingestion.report import IngestReport
from log.store import Store
from schema.errors import InputError
from schema.rows import Flags, Ints

SETTLED_SECONDS = 10.0
_OF_WHOLE = {"duplicate", "gap", "horizon"}  # errors of whole replicates that are no errors of a piece

Stamp = tuple[int, int, int]  # of a file: inode, size, time of the last change


class Stream:
    """A store that takes in files one after the other, with whole replicates or pieces of replicates."""

    def __init__(
        self, store: Store, documents: DocumentRows, horizon: int | None = None, facts: FactRows | None = None
    ) -> None:
        """Read a store on a local disk and its waiting rows; ``Intake`` describes the other arguments."""
        self._intake, self._pieces = Intake(store, documents, horizon, facts), Pieces(store.location)
        self._pieces.done(one for one in self._pieces.replicates if self._intake.has(*one))

    @property
    def waiting(self) -> int:
        """The number of replicates that wait for more positions."""
        return len(self._pieces.replicates)

    def take(self, file: EventFile, digest: str, is_same: Callable[[], bool] = lambda: True) -> IngestReport:
        """Take a file with this digest, unless a file of equal content was taken before without a finding.

        ``is_same`` tells whether the file is unchanged since the digest was computed. A changed file is taken, but not
        remembered, so that it is taken again.
        """
        report = IngestReport(1)
        report.waiting.units = self.waiting
        if self._pieces.has_taken(digest):
            report.present.add(0, file.rows)
            return report
        touched = set[tuple[Group, int]]()
        with self._pieces.taking(digest) as taking:
            for groups, rows, first in portions_of(file, report):
                filing = Filing(str(file.path), groups, self._intake, report)
                touched |= self._merge(filing, groups, filing.named(rows, first), report, taking)
            self._intake.flush()
            taking.settled = not report.findings and is_same()
        self._pieces.done(one for one in touched if self._intake.has(*one))
        report.waiting.units = self.waiting
        return report

    def _merge(
        self, filing: Filing, groups: FileGroups, rows: EventRows, report: IngestReport, taking: Taking
    ) -> set[tuple[Group, int]]:
        """Merge the rows of a portion with earlier rows, and return the replicates that have become whole."""
        names: list[Group] = [tuple(map(str, group)) for group in groups.names]  # type: ignore[misc]
        horizon = np.array([self._intake.horizon(name[0], name[1]) or 0 for name in names], np.int32)
        rows = self._right(filing, rows, horizon, report)
        if not len(rows):
            return set()
        parts = [(NEW, rows), *self._there(rows, names)]
        origin = np.repeat([of for of, _ in parts], [len(part) for _, part in parts])
        merged = merge(EventRows.concatenated([part for _, part in parts]), origin, horizon)
        report.present.add(0, merged.collapsed)
        if len(merged.whole):
            filing.take(merged.whole, 0)
        if len(merged.waiting):
            taking.wait(table_of(merged.waiting, names))
            report.waiting.add(0, len(merged.waiting))
        if len(merged.conflicting):
            kept = taking.set_aside(table_of(merged.conflicting, names))
            given = SortedRows.of(merged.conflicting)
            says = f"the row contradicts an earlier row; this file's rows of the replicate are in {kept}"
            error = Anomaly("conflict", np.flatnonzero(merged.conflict), lambda _: says)
            report.findings += filing.by_unit(given, error)
            report.kept_out.add(len(given.unit_first) - 1, len(merged.conflicting))
        pairs = np.unique(np.stack([merged.whole.group, merged.whole.replicate]), axis=1).T.tolist()
        return {(names[place], replicate) for place, replicate in pairs}

    def _there(self, rows: EventRows, names: list[Group]) -> Iterator[tuple[int, EventRows]]:
        """Yield the stored rows of the given replicates, and all waiting rows of their groups, each with its origin."""
        places = {names[place]: place for place in np.unique(rows.group).tolist()}
        for key, place in places.items():
            for table in self._intake.stored(key, rows.replicate[rows.group == place]):
                values = {name: table[name].to_numpy() for name in table.column_names}
                count = table.num_rows
                yield STORED, EventRows(np.full(count, place, np.int32), flaws=np.zeros(count, np.uint16), **values)
        for table in self._pieces.of_groups(list(places)):
            yield WAITING, rows_of(table, places)

    def _right(self, filing: Filing, rows: EventRows, horizon: Ints, report: IngestReport) -> EventRows:
        """Return the rows of the replicates without an error, and report the other replicates."""
        if not len(rows):
            return rows
        given = SortedRows.of(rows)
        errors = [error for error in find_errors(given, horizon, filing.control) if error.kind not in _OF_WHOLE]
        bound = horizon[given.rows.group]
        unknown, late = np.flatnonzero(bound == 0), np.flatnonzero((given.rows.t > bound) & (bound > 0))
        if unknown.size:
            errors.append(Anomaly("horizon", unknown, lambda _: "the horizon is unknown; give --horizon"))
        if late.size:
            errors.append(
                Anomaly("position", late, lambda row: f"t is {given.rows.t[row]}, but the horizon is {bound[row]}")
            )
        wrong: Flags = np.zeros(len(given.pair_first), np.bool_)
        for error in errors:
            wrong[np.searchsorted(given.pair_first, error.rows, side="right") - 1] = True
            report.findings += filing.by_unit(given, error)
        out = np.repeat(wrong, given.pair_last - given.pair_first + 1)
        report.kept_out.add(len(np.unique(given.unit_of(np.flatnonzero(out)))), int(out.sum()))
        return given.rows.take(~out)


def ingest_pieces(
    location: str | Path,
    files: Sequence[str | Path],
    documents: str | Path | None = None,
    horizon: int | None = None,
    *,
    taken: Callable[[Path, IngestReport], None] = lambda *_: None,
    progress: Callable[[int, int], None] = lambda *_: None,
    wait: Callable[[], bool] | None = None,
    facts: str | Path | None = None,
) -> IngestReport:
    """Append the events of files that may hold pieces of replicates; return all counts and the first finding.

    Args:
        location: Folder of the store; a missing store is made.
        files: Parquet or Arrow IPC files, or folders of them.
        documents: As for ``ingest``.
        horizon: H for each study and model of which the store has no H.
        taken: Called with the path and the report of each file that was taken.
        progress: Called with the number of files done and the number of all files; not called if ``wait`` is given.
        wait: Waits for a while and returns whether to look for new files. Without ``wait`` files are taken once.
        facts: As for ``ingest``.
    """
    given, known = read_about(documents, facts)
    store, total, seen = Store.create(location), IngestReport(0), dict[Path, Stamp]()
    with alone(store.location):
        stream = Stream(store, given, horizon, known)
        total.waiting.units = stream.waiting
        while True:
            paths = [path for file in files for path in expanded(Path(file), may_be_empty=wait is not None)]
            seen = {path: seen[path] for path in paths if path in seen}
            for number, path in enumerate(paths):
                if wait is None:
                    progress(number, len(paths))
                stamp = _stamp_of(path)
                if seen.get(path) == stamp:
                    continue
                report = _taken(stream, path, stamp, patient=wait is not None)
                if report is not None:
                    seen[path] = stamp
                    total.add(report)
                    taken(path, report)
            if wait is None:
                progress(len(paths), len(paths))
            if wait is None or not wait():
                return total


def _taken(stream: Stream, path: Path, stamp: Stamp, *, patient: bool) -> IngestReport | None:
    """Take a file and return its report; None if the file cannot be opened and may still be in writing."""
    try:
        file, digest = EventFile(path), digest_of(path)
    except InputError as error:
        if patient and time.time() - stamp[2] / 1e9 < SETTLED_SECONDS:
            return None
        report = IngestReport(1)
        note_unread(report, path, error)
        return report
    return stream.take(file, digest, lambda: _stamp_of(path) == stamp)


def _stamp_of(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:  # opening the file will report the error
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns
