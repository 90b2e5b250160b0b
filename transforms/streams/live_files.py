"""``ingest --pieces`` and ``--watch``: take files while another generator writes them, even with partial replicates.

``kvdrift.ingestion.inputs`` says which files there are. A file is taken as soon as it can be opened. Parquet, Arrow IPC
files and compressed files show by their end that they are whole: until then they cannot be opened. A file of another
format is taken once it has not changed for ``SETTLED_SECONDS``; a file that cannot be opened is then reported as
damaged. Files are never written, moved or deleted.

A piece is the rows that one file holds of one replicate; ``kvdrift.transforms.streams.assembly`` says how pieces are
put together. A whole replicate goes into ``events``, and other rows wait in the store's folder ``pieces``. Rows go into
``events`` first, and the file is remembered afterwards. If the process is killed in between, the next ingestion takes
the file again and finds that its rows are stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvdrift.ingestion.checks import Anomaly, SortedRows, find_errors
from kvdrift.ingestion.event_rows import EventRows, converted
from kvdrift.ingestion.files import EventFile
from kvdrift.ingestion.ingest import Filing, Finding, IngestReport, note_unread, open_file, portions_of, read_about
from kvdrift.ingestion.inputs import EventSource, Stamp, expanded
from kvdrift.ingestion.intake import Intake
from kvdrift.ingestion.records import DocumentRows, FactRows
from kvdrift.ingestion.waiting_rows import Group, Replicate, Taking, WaitingRows, alone, rows_of, table_of
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.schema.rows import Flags, Ints, run_bounds
from kvdrift.schema.tables import GROUP_KEY
from kvdrift.transforms.streams.assembly import NEW, STORED, WAITING, Assembled, assemble

SETTLED_SECONDS = 10.0
_ASIDE = "are set aside in"
_OF_WHOLE = {"duplicate", "gap", "horizon"}  # errors of whole replicates that are no errors of a piece

Part = tuple[int, EventRows]  # origin of rows, and the rows


class LiveIntake:
    """A store that takes in files one after the other, with whole replicates or pieces of replicates."""

    def __init__(
        self, store: Store, documents: DocumentRows, horizon: int | None = None, facts: FactRows | None = None
    ) -> None:
        """Read a store on a local disk and its waiting rows; ``Intake`` describes the other arguments."""
        self._intake, self._rows = Intake(store, documents, horizon, facts), WaitingRows(store.location)

    def settle(self) -> IngestReport:
        """Forget waiting rows of replicates that the store has by now; set aside and report those that differ."""
        report = IngestReport(0)
        stored = {replicate for replicate in self._rows.replicates if self._intake.has(*replicate)}
        names = sorted({group for group, _ in stored})
        for file, table in self._rows.of_groups(names):
            rows = rows_of(table, names)
            rows = rows.take(np.lexsort((rows.replicate, rows.group)))
            for first, end in run_bounds(rows.group, rows.replicate):
                own = rows.take(slice(first, end))
                group, number = names[int(own.group[0])], int(own.replicate[0])
                parts = [(NEW, own), *self._stored(own, names)] if (group, number) in stored else []
                if parts and len(differing := _assembled(parts, self._horizons(names)).conflicting):
                    path = self._rows.set_aside(file, table_of(differing, names))
                    says = f"rows that waited contradict the store; they {_ASIDE} {path}"
                    key = dict(zip(GROUP_KEY, group, strict=True)) | {"replicate": number}
                    report.findings.append(Finding(str(path), "conflict", says, key))
        self._rows.forget(stored)
        report.waiting.units = len(self._rows.replicates)
        return report

    def take(self, file: EventFile, digest: str, is_same: Callable[[], bool] = lambda: True) -> IngestReport:
        """Take a file with this digest, unless a file of equal content was taken before without a finding.

        ``is_same`` tells whether the file is unchanged since the digest was computed. A changed file is taken, but not
        remembered, so that it is taken again.
        """
        if self._rows.has_taken(digest):
            report = IngestReport(1)
            report.present.add(0, file.rows)
        else:
            report = self._take(file, digest, is_same)
            settled = self.settle().findings if report.findings else []  # the store may have refused a replicate
            if any(finding.kind == "conflict" and _ASIDE not in finding.text for finding in report.findings):
                # Another writer was faster. Rows are compared with what it brought, and units without it go in.
                first, report = report, self._take(file, digest, is_same)
                report.present = first.present
                report.taken.add(first.taken.units, first.taken.events)
                report.waiting.add(0, first.waiting.events)
                settled += self.settle().findings if report.findings else []
            report.findings += settled
        report.waiting.units = len(self._rows.replicates)
        return report

    def _take(self, file: EventFile, digest: str, is_same: Callable[[], bool]) -> IngestReport:
        report, whole, filing = IngestReport(1), set[Replicate](), None
        with self._rows.taking(digest) as taking:
            for groups, rows, first in portions_of(file, report):
                filing = filing or Filing(file.path, groups, self._intake, report)
                names: list[Group] = [tuple(map(str, group)) for group in groups.names]  # type: ignore[misc]
                whole.update(self._take_portion(filing, names, filing.named(rows, first), report, taking))
            self._intake.flush()
            taking.settled = not report.findings and is_same()
        if not report.findings:
            self._rows.forget(whole)
        return report

    def _take_portion(
        self, filing: Filing, names: list[Group], rows: EventRows, report: IngestReport, taking: Taking
    ) -> Iterator[Replicate]:
        """Assemble the rows of a portion with earlier rows, and yield the replicates that have become whole."""
        horizon = self._horizons(names)
        rows = self._right(filing, rows, horizon, report)
        if not len(rows):
            return
        groups = {names[place] for place in np.unique(rows.group).tolist()}
        waiting = [(WAITING, rows_of(table, names)) for _, table in self._rows.of_groups(groups)]
        found = _assembled([(NEW, rows), *self._stored(rows, names), *waiting], horizon)
        report.present.add(0, found.collapsed)
        if len(found.whole):
            filing.take(found.whole, 0)
        if len(found.waiting):
            taking.wait(table_of(found.waiting, names))
            report.waiting.add(0, len(found.waiting))
        if len(found.conflicting):
            kept = taking.set_aside(table_of(found.conflicting, names))
            given = SortedRows.of(found.conflicting)
            says = f"the row contradicts an earlier row; this file's rows of the replicate {_ASIDE} {kept}"
            error = Anomaly("conflict", np.flatnonzero(found.conflict), lambda _: says)
            report.findings += filing.by_unit(given, error)
            report.kept_out.add(len(given.unit_first) - 1, len(found.conflicting))
        for first, _ in run_bounds(found.whole.group, found.whole.replicate):
            yield names[int(found.whole.group[first])], int(found.whole.replicate[first])

    def _horizons(self, names: list[Group]) -> Ints:
        return np.array([self._intake.horizon(study, model) or 0 for study, model, _, _ in names], np.int32)

    def _stored(self, rows: EventRows, names: list[Group]) -> Iterator[Part]:
        """Yield the stored rows of the replicates of ``rows``, which are in key order."""
        for first, end in run_bounds(rows.group):
            place = int(rows.group[first])
            for table in self._intake.stored(names[place], rows.replicate[first:end]):
                yield STORED, converted(table, np.full(table.num_rows, place, np.int32))

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
    taken: Callable[[str, IngestReport], None] = lambda *_: None,
    progress: Callable[[int, int], None] = lambda *_: None,
    wait: Callable[[], bool] | None = None,
    facts: str | Path | None = None,
) -> IngestReport:
    """Append the events of files that may hold pieces of replicates; return all counts and the first finding.

    Args:
        location: Folder of the store; a missing store is made.
        files: As for ``ingest``.
        documents: As for ``ingest``.
        horizon: H for each study and model of which the store has no H.
        taken: Called with the name and the report of each file that was taken; before, with the store's folder of
            waiting rows if these contradict the store.
        progress: Called with the number of files done and the number of all files; not called if ``wait`` is given.
        wait: Waits for a while and returns whether to look for new files. Without ``wait`` files are taken once.
        facts: As for ``ingest``.
    """
    given, known = read_about(documents, facts)
    store, total, seen = Store.create(location), IngestReport(0), dict[EventSource, Stamp]()
    with alone(store.location):
        intake = LiveIntake(store, given, horizon, known)
        before = intake.settle()
        total.add(before)
        if before.findings:
            taken(str(Path(location, "pieces")), before)
        while True:
            sources = [source for file in files for source in expanded(file, may_be_empty=wait is not None)]
            seen = {source: seen[source] for source in sources if source in seen}
            for number, source in enumerate(sources):
                if wait is None:
                    progress(number, len(sources))
                stamp = source.stamp()
                if seen.get(source) == stamp:
                    continue
                report = _taken(intake, source, stamp, patient=wait is not None)
                if report is not None:
                    seen[source] = stamp
                    total.add(report)
                    taken(source.name, report)
            if wait is None:
                progress(len(sources), len(sources))
            if wait is None or not wait():
                return total


def _taken(intake: LiveIntake, source: EventSource, stamp: Stamp, *, patient: bool) -> IngestReport | None:
    """Take a log and return its report; None if the log may still be in writing."""
    report = IngestReport(1)
    file = open_file(source, report)
    if patient and (file is None or not file.ends) and time.time() - stamp[2] / 1e9 < SETTLED_SECONDS:
        return None
    if file is None:
        return report
    try:
        digest = file.digest()
    except InputError as error:
        note_unread(report, source.name, error)
        return report
    return intake.take(file, digest, lambda: source.stamp() == stamp)


def _assembled(parts: list[Part], horizon: Ints) -> Assembled:
    origin = np.repeat(np.array([origin for origin, _ in parts], np.int32), [len(rows) for _, rows in parts])
    return assemble(EventRows.concatenated([rows for _, rows in parts]), origin, horizon)
