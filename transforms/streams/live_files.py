"""``ingest --pieces`` and ``--watch``: ingest files while another generator writes them, and join parts of replicates.

``kvdrift.ingestion.inputs`` lists the files. A file is taken, that is, its events are ingested, as soon as it can be
opened. Parquet, Arrow IPC files and compressed files show by their end that they are whole: until then they cannot be
opened. A file of another format is taken once it has not changed for ``SETTLED_SECONDS``; a file that cannot be opened
is then reported as damaged. Files are never written, moved or deleted.

A piece is the rows that one file holds of one replicate; ``kvdrift.transforms.streams.assembly`` assembles the pieces.
A whole replicate goes into ``events``, and other rows wait in the store's folder ``pieces``. Rows go into
``events`` first, and the file is remembered afterwards. If the process is killed in between, the next ingestion takes
the file again and finds that its rows are stored.

For each file that brought waiting rows the folder ``pieces`` has one Parquet file, named by the SHA-256 of the content
of that file. The folder thus also records which files were taken, whatever their names: a file none of whose rows wait
leaves an empty file there. A file with findings is not remembered, so that each ingestion reports its
findings again. Rows that contradict others are set aside in the folder ``aside``, and are never read again.
"""

from __future__ import annotations

import fcntl
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvdrift.ingestion.checks import Anomaly, SortedRows, find_errors
from kvdrift.ingestion.event_rows import VALUES, EventRows, converted
from kvdrift.ingestion.files import EventFile
from kvdrift.ingestion.ingest import Filing, Finding, IngestReport, note_unread, open_file, portions_of, read_about
from kvdrift.ingestion.inputs import EventSource, Stamp, expanded
from kvdrift.ingestion.intake import Intake
from kvdrift.ingestion.records import DocumentRows, FactRows
from kvdrift.log.delta.durability import make_folder, replace_durably
from kvdrift.log.store import Store
from kvdrift.schema.errors import DamagedStoreError, InputError, first_line
from kvdrift.schema.location import is_local
from kvdrift.schema.rows import Flags, Ints, run_bounds
from kvdrift.schema.tables import EVENTS, GROUP_KEY, PAIR_COLUMNS
from kvdrift.transforms.streams.assembly import NEW, STORED, WAITING, Assembled, assemble

_SCHEMA = pa.schema([EVENTS.schema.field(name) for name in PAIR_COLUMNS])

Group = tuple[str, str, str, str]  # study, model, doc, action
Replicate = tuple[Group, int]


@contextmanager
def alone(location: str) -> Iterator[None]:
    """Lock a store against other ingestions of pieces during the block; the lock also ends with the process."""
    if not is_local(location):
        raise InputError(f"{location}: pieces of replicates need a store on a local disk; ingest whole replicates")
    make_folder(Path(location, "pieces"))
    with Path(location, "pieces", ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{location}: another 'kvdrift ingest' takes pieces into this store; end it, or wait for it"
            ) from None
        yield


class WaitingRows:
    """The rows of incomplete replicates that wait in a local store's folder ``pieces``, for one ingestion at a time."""

    def __init__(self, location: str) -> None:
        """Read which replicates wait, and which files hold their rows."""
        self._folder = Path(location, "pieces")
        self._held = {
            path.stem: _replicates_of(_read(path, [*GROUP_KEY, "replicate"])) for path in self._folder.glob("*.parquet")
        }

    @property
    def replicates(self) -> set[Replicate]:
        """The replicates that lack positions."""
        return set().union(*self._held.values())

    def has_taken(self, digest: str) -> bool:
        """Tell whether a file with this digest was taken before without a finding."""
        return digest in self._held

    def of_groups(self, groups: Collection[Group]) -> Iterator[tuple[str, pa.Table]]:
        """For each file with rows of these groups, yield its name and its rows of their documents, of any group."""
        docs = pa.array(sorted({group[2] for group in groups}), pa.string())
        for name, held in sorted(self._held.items()):
            if any(group in groups for group, _ in held):
                yield name, _read(self._path(name), PAIR_COLUMNS, where=pc.field("doc").isin(docs))

    @contextmanager
    def taking(self, name: str) -> Iterator[Taking]:
        """Yield a writer that keeps the rows of a file under its digest, ``name``; after an error it keeps none."""
        taking = Taking(self._folder, name)
        try:
            yield taking
            if taking.finish():
                self._held[taking.name] = taking.held
        finally:
            taking.close()

    def set_aside(self, name: str, rows: pa.Table) -> Path:
        """Set rows of a file of waiting rows aside, and return the path of the file that keeps them."""
        with self.taking(_free(self._folder / "aside", name)) as taking:
            taking.settled = False
            return taking.set_aside(rows)

    def forget(self, replicates: Collection[Replicate]) -> None:
        """Forget some replicates, and the rows of each file of waiting rows that has no other replicates left.

        Such a file is replaced by an empty one, or removed if the file that brought its rows had findings.
        """
        for name in [name for name, held in self._held.items() if not held.isdisjoint(replicates)]:
            self._held[name] -= set(replicates)
            if self._held[name]:
                continue
            if name.isalnum():
                with self.taking(name):
                    pass
            else:  # its file had findings and is not remembered
                del self._held[name]
                self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.parquet"


class Taking:
    """Writes the rows that a file brings: those that wait, and those that are set aside.

    ``held`` are the replicates whose rows wait, in a file called ``name``. ``settled`` says that the file that brings
    the rows has no finding, so that it is remembered.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder, self._aside, self.name = folder, folder / "aside", digest
        self._part = f".{digest}.part"
        self.held = set[Replicate]()
        self.settled = True
        self._writers: dict[Path, pq.ParquetWriter] = {}

    def wait(self, rows: pa.Table) -> None:
        """Add rows of replicates that lack positions."""
        self._write(self._folder, rows)
        self.held |= _replicates_of(rows)

    def set_aside(self, rows: pa.Table) -> Path:
        """Add rows that contradict others, and return the path of the file that keeps them."""
        self._write(self._aside, rows)
        return self._aside / f"{self.name}.parquet"

    def finish(self) -> bool:
        """Move the written files into place; return whether the folder ``pieces`` has received one.

        A file in ``pieces`` has waiting rows, or is empty and records that a file was taken.
        """
        if self.settled and self._folder not in self._writers:
            self._write(self._folder, _SCHEMA.empty_table())
        for writer in self._writers.values():
            writer.close()
        if self._aside in self._writers:
            replace_durably(self._aside / self._part, self._aside / f"{self.name}.parquet")
        if self._folder not in self._writers:
            return False
        if not self.settled:
            self.name = _free(self._folder, self.name)
        replace_durably(self._folder / self._part, self._folder / f"{self.name}.parquet")
        return True

    def close(self) -> None:
        """Close the written files, and remove those that ``finish`` has not moved into place."""
        for folder, writer in self._writers.items():
            writer.close()
            (folder / self._part).unlink(missing_ok=True)

    def _write(self, folder: Path, rows: pa.Table) -> None:
        if folder not in self._writers:
            make_folder(folder)
            path = folder / self._part
            self._writers[folder] = pq.ParquetWriter(path, _SCHEMA, compression="zstd", write_page_checksum=True)
        self._writers[folder].write_table(rows)


def _free(folder: Path, name: str) -> str:
    """Return the first of the names "name-0", "name-1", … that no file of a folder has."""
    names = (f"{name}-{number}" for number in itertools.count())
    return next(name for name in names if not (folder / f"{name}.parquet").exists())


def _read(path: Path, columns: Sequence[str], where: pc.Expression | None = None) -> pa.Table:
    try:
        return pq.read_table(path, columns=list(columns), filters=where, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        moved = f"move it away, and ingest again the file whose SHA-256 begins with {path.stem[:12]}"
        raise DamagedStoreError(f"{path}: cannot be read ({first_line(error)}): {moved}") from None


def _replicates_of(rows: pa.Table) -> set[Replicate]:
    keys = rows.group_by([*GROUP_KEY, "replicate"]).aggregate([])
    return {((study, model, doc, action), replicate) for study, model, doc, action, replicate in _rows(keys)}


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table as tuples."""
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


def rows_of(table: pa.Table, names: Sequence[Group]) -> EventRows:
    """Return the waiting rows in ``table`` of the groups ``names``; a group's number is its place in ``names``."""
    places: dict[tuple[Any, ...], int] = {name: place for place, name in enumerate(names)}
    group = np.fromiter((places.get(name, -1) for name in _rows(table.select(GROUP_KEY))), np.int32, table.num_rows)
    return converted(table, group).take(group >= 0)


def table_of(rows: EventRows, names: Sequence[Group]) -> pa.Table:
    """Return rows as a table of waiting rows; a row's group number is the place of its group in ``names``."""
    columns = [
        pa.DictionaryArray.from_arrays(pa.array(rows.group), pa.array([group[place] for group in names], pa.string()))
        for place in range(len(GROUP_KEY))
    ]
    return pa.Table.from_arrays(
        [*columns, *(pa.array(getattr(rows, name)) for name in VALUES)], names=[*GROUP_KEY, *VALUES]
    ).cast(_SCHEMA)


SETTLED_SECONDS = 10.0
_ASIDE = "are set aside in"
_OF_WHOLE = {"duplicate", "gap", "horizon"}  # errors of whole replicates that are no errors of a piece

Part = tuple[int, EventRows]  # origin of rows, and the rows


class LiveIntake:
    """A store that takes in files one after the other, with whole replicates or pieces of replicates."""

    def __init__(
        self, store: Store, documents: DocumentRows, horizon: int | None = None, facts: FactRows | None = None
    ) -> None:
        """Read a local store and its rows of incomplete replicates; ``Intake`` describes the other arguments."""
        self._intake, self._rows = Intake(store, documents, horizon, facts), WaitingRows(store.location)

    def settle(self) -> IngestReport:
        """Forget the waiting rows of replicates that are stored by now; set aside and report conflicting rows."""
        report = IngestReport(0)
        stored = {replicate for replicate in self._rows.replicates if self._intake.has(*replicate)}
        names = sorted({group for group, _ in stored})
        for file, table in self._rows.of_groups(names):
            rows = rows_of(table, names)
            rows = rows.take(np.lexsort((rows.replicate, rows.group)))
            for first, end in run_bounds(rows.group, rows.replicate):
                replicate_rows = rows.take(slice(first, end))
                group, number = names[int(replicate_rows.group[0])], int(replicate_rows.replicate[0])
                parts = (
                    [(NEW, replicate_rows), *self._stored(replicate_rows, names)] if (group, number) in stored else []
                )
                if parts and len(differing := _assembled(parts, self._horizons(names)).conflicting):
                    path = self._rows.set_aside(file, table_of(differing, names))
                    says = f"rows that waited contradict the store; they {_ASIDE} {path}"
                    key = dict(zip(GROUP_KEY, group, strict=True)) | {"replicate": number}
                    report.findings.append(Finding(str(path), "conflict", says, key))
        self._rows.forget(stored)
        report.waiting.units = len(self._rows.replicates)
        return report

    def take(self, file: EventFile, digest: str, is_same: Callable[[], bool] = lambda: True) -> IngestReport:
        """Ingest a file with the digest ``digest``, unless a file of equal content was ingested without a finding.

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
                # Another writer has stored some of these replicates. The file's rows are compared with these, and its
                # other units are appended.
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
        """Assemble the rows of a file's portion with earlier rows, and yield the replicates that have become whole."""
        horizon = self._horizons(names)
        rows = self._right(filing, rows, horizon, report)
        if not len(rows):
            return
        groups = {names[place] for place in np.unique(rows.group).tolist()}
        waiting = [(WAITING, rows_of(table, names)) for _, table in self._rows.of_groups(groups)]
        assembled = _assembled([(NEW, rows), *self._stored(rows, names), *waiting], horizon)
        report.present.add(0, assembled.collapsed)
        if len(assembled.whole):
            filing.take(assembled.whole, 0)
        if len(assembled.waiting):
            taking.wait(table_of(assembled.waiting, names))
            report.waiting.add(0, len(assembled.waiting))
        if len(assembled.conflicting):
            kept = taking.set_aside(table_of(assembled.conflicting, names))
            conflicting = SortedRows.of(assembled.conflicting)
            says = f"the row contradicts an earlier row; this file's rows of the replicate {_ASIDE} {kept}"
            error = Anomaly("conflict", np.flatnonzero(assembled.conflict), lambda _: says)
            report.findings += filing.by_unit(conflicting, error)
            report.kept_out.add(len(conflicting.unit_first) - 1, len(assembled.conflicting))
        for first, _ in run_bounds(assembled.whole.group, assembled.whole.replicate):
            yield names[int(assembled.whole.group[first])], int(assembled.whole.replicate[first])

    def _horizons(self, names: list[Group]) -> Ints:
        return np.array([self._intake.horizon(study, model) or 0 for study, model, _, _ in names], np.int32)

    def _stored(self, rows: EventRows, names: list[Group]) -> Iterator[Part]:
        """Yield the rows that the store has of the replicates of ``rows``; ``rows`` must be in key order."""
        for first, end in run_bounds(rows.group):
            place = int(rows.group[first])
            for table in self._intake.stored(names[place], rows.replicate[first:end]):
                yield STORED, converted(table, np.full(table.num_rows, place, np.int32))

    def _right(self, filing: Filing, rows: EventRows, horizon: Ints, report: IngestReport) -> EventRows:
        """Return the rows of the replicates whose rows are all valid, and report the other replicates."""
        if not len(rows):
            return rows
        ordered = SortedRows.of(rows)
        errors = [error for error in find_errors(ordered, horizon, filing.control) if error.kind not in _OF_WHOLE]
        bound = horizon[ordered.rows.group]
        unknown, late = np.flatnonzero(bound == 0), np.flatnonzero((ordered.rows.t > bound) & (bound > 0))
        if unknown.size:
            errors.append(Anomaly("horizon", unknown, lambda _: "the horizon is unknown; give --horizon"))
        if late.size:
            errors.append(
                Anomaly("position", late, lambda row: f"t is {ordered.rows.t[row]}, but the horizon is {bound[row]}")
            )
        wrong: Flags = np.zeros(len(ordered.pair_first), np.bool_)
        for error in errors:
            wrong[np.searchsorted(ordered.pair_first, error.rows, side="right") - 1] = True
            report.findings += filing.by_unit(ordered, error)
        out = np.repeat(wrong, ordered.pair_last - ordered.pair_first + 1)
        report.kept_out.add(len(np.unique(ordered.unit_of(np.flatnonzero(out)))), int(out.sum()))
        return ordered.rows.take(~out)


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
        taken: Called with the name and the report of each file that was taken; before the first file also with the
            store's folder of waiting rows, if some of these contradict the store.
        progress: Called with the number of files done and the number of all files; not called if ``wait`` is given.
        wait: Waits for a while and returns whether to list new files. Without ``wait`` files are taken once.
        facts: As for ``ingest``.
    """
    document_rows, known = read_about(documents, facts)
    store, total, seen = Store.create(location), IngestReport(0), dict[EventSource, Stamp]()
    with alone(store.location):
        intake = LiveIntake(store, document_rows, horizon, known)
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
    """Ingest a source of events and return the report; None if it is left for later.

    With ``patient`` a source is left for later while a generator may still be writing it. ``stamp`` tells whether the
    source changes meanwhile.
    """
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
