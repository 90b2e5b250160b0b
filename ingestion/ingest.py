"""``ingest``: check the events that another generator made, append correct events, and report the others.

A unit is a run of consecutive replicates of one (study, model, doc, action) in one file. A unit is accepted or kept out
as a whole: one error keeps its unit out, and the other units go in. All positions of a replicate must therefore be in
one file, unless pieces of replicates are ingested (``kvdrift.transforms.streams.live_files``).
``kvdrift.ingestion.checks`` defines errors.

If the store has some replicates of a unit, their events are compared. If they are equal, only the other replicates go
in. If they differ, the unit is kept out. A key that occurs twice in one file is an error, even if the two rows are
equal. The same events in a second file are no error, since the store has them already. A file with events other than
coupled pairs is not read.

H of a (study, model) is the H of its ``studies`` row. Without such a row, H is that of the stored units. Without stored
units, H is the call's. Without that, H is the position at which most replicates end in the first portion of the file
that has accepted replicates; replicates that stop after both sides have ended do not count. These are completed to H
(``kvdrift.ingestion.event_rows``). If the call gives another H than the store has, the rows of that study and model
stay out.

A document is known if the store or the documents file has it. Its row is appended with its first unit. An action
without a row gets a row with the selector "external", since nothing else is known about the action. The action is the
control if its name is ``full``. The action is prespecified unless the study has a frozen plan that does not name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdrift.ingestion.checks import Anomaly, SortedRows, find_errors, find_remarks
from kvdrift.ingestion.event_rows import EventRows, filled
from kvdrift.ingestion.files import EventFile, FileGroups
from kvdrift.ingestion.formats import NoEventsError
from kvdrift.ingestion.inputs import EventSource, expanded
from kvdrift.ingestion.intake import Comparison, Intake, Refusal
from kvdrift.ingestion.records import DocumentRows, FactRows, read_documents, read_facts_file
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.schema.rows import Flags, Ints
from kvdrift.schema.tables import GROUP_KEY


@dataclass(frozen=True)
class Finding:
    """An error of one unit or of a whole file; ``text`` describes the first of the ``count`` rows that have the error.

    ``key`` has study, model, doc, action, replicate and t of that row, as far as they are known; it is empty for a
    whole file.
    """

    file: str
    kind: str
    text: str
    key: dict[str, Any] = field(default_factory=dict)
    count: int = 1

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in self.key.items())
        more = f" ({self.count} such rows)" if self.count > 1 else ""
        return f"{self.file}: {named}: {self.text}{more}" if named else self.text  # a text without key names the file


@dataclass
class Tally:
    """A count of units and of their events."""

    units: int = 0
    events: int = 0

    def add(self, units: int, events: int) -> None:
        """Count more units and events."""
        self.units += units
        self.events += events


@dataclass
class IngestReport:
    """The result of an ingestion.

    Attributes:
        files: Number of files.
        unread: Number of files that could not be read, or not to the end.
        taken: Units and events that are new in the store. A unit with at least one new replicate counts here; its
            events count here or in ``present``.
        present: Units and events that the store had already, with equal content.
        kept_out: Units with an error, and their events.
        waiting: Replicates that lack positions, and those of their events that came with the files of this call.
        horizons: H of each study and model with units in ``taken`` or ``present``, and where H comes from.
        findings: The errors.
        remarks: Lines about unusual values that are no errors.
    """

    files: int
    unread: int = 0
    taken: Tally = field(default_factory=Tally)
    present: Tally = field(default_factory=Tally)
    kept_out: Tally = field(default_factory=Tally)
    waiting: Tally = field(default_factory=Tally)
    horizons: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, later: IngestReport) -> None:
        """Add the counts of another file, and its first finding if there is none yet.

        Drop the other file's further findings, and its remarks.
        """
        self.files += later.files
        self.unread += later.unread
        for name in ("taken", "present", "kept_out"):
            tally: Tally = getattr(later, name)
            getattr(self, name).add(tally.units, tally.events)
        self.waiting = Tally(later.waiting.units, self.waiting.events + later.waiting.events)
        self.horizons = later.horizons | self.horizons
        self.findings = self.findings or later.findings[:1]


def ingest(
    location: str | Path,
    files: Sequence[str | Path],
    documents: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    facts: str | Path | None = None,
    horizon: int | None = None,
    *,
    revise: bool = False,
) -> IngestReport:
    """Append the events of files to a store; a repeated call changes nothing.

    Args:
        location: Folder or URL of the store; a missing store is made.
        files: Paths, patterns and URLs of files, folders and Delta tables, as ``kvdrift.ingestion.inputs`` says.
        documents: CSV, JSONL or Parquet file of documents; without it the store must know every document.
        progress: Called with the number of events checked so far and the number of events in all files.
        facts: CSV, JSONL or Parquet file with bytes, seconds and engines of the units that the call appends.
        horizon: H of each study and model of which the store has no H; by default the files' rows suggest H.
        revise: Whether the events of an action that differ from the store's become a new revision of the action.

    Returns:
        How many units are new, how many the store had already, and which units were kept out and why.
    """
    document_rows, known = read_about(documents, facts)
    sources = [source for file in files for source in expanded(file)]
    report = IngestReport(len(sources))
    report.remarks += [
        f"{side}: columns ignored: {', '.join(names)}"
        for side, names in ((documents, document_rows.unknown), (facts, known.unknown))
        if names
    ]
    opened = [file for source in sources if (file := open_file(source, report))]
    if not opened and not report.findings:
        raise InputError(f"{', '.join(map(str, files))}: no event logs")
    if not opened:
        return report  # and no store is made
    total, seen = sum(file.rows for file in opened), 0
    store = Store.create(location)
    revised = _differing(opened, Comparison(store, document_rows, horizon)) if revise else ()
    intake = Intake(store, document_rows, horizon, known, revised)
    if progress is not None:
        progress(seen, total)
    for file in opened:
        for rows in _take_file(file, intake, report):
            seen += rows
            if progress is not None:
                progress(seen, total)
    intake.flush()
    report.remarks += intake.revisions()
    if known.unused:
        report.remarks.append(f"{facts}: no appended unit has action {', '.join(known.unused)}")
    return report


def read_about(documents: str | Path | None, facts: str | Path | None) -> tuple[DocumentRows, FactRows]:
    """Read a documents file and a facts file, if given."""
    return (
        DocumentRows() if documents is None else read_documents(Path(documents)),
        FactRows() if facts is None else read_facts_file(Path(facts)),
    )


def open_file(source: EventSource, report: IngestReport) -> EventFile | None:
    """Open a log; report it and return None if it cannot be read, or was found in a folder and is no event log."""
    try:
        return EventFile(source)
    except NoEventsError as error:
        if not source.discovered:
            note_unread(report, source.name, error)
        else:
            report.files -= 1
            report.remarks.append(f"passed over {error}")
    except InputError as error:
        note_unread(report, source.name, error)
    return None


def note_unread(report: IngestReport, path: str, error: InputError) -> None:
    """Report a file that cannot be read, or cannot be read to its end."""
    report.findings.append(Finding(path, "file", str(error)))
    report.unread += 1


def portions_of(file: EventFile, report: IngestReport) -> Iterator[tuple[FileGroups, EventRows, int]]:
    """For each portion yield the file's groups, the rows and the first row's number; report damage, do not raise it."""
    if file.unknown_columns:
        report.remarks.append(f"{file.path}: columns ignored: {', '.join(file.unknown_columns)}")
    first = 0
    try:
        groups = file.groups()
        for rows in file.portions(groups):
            yield groups, rows, first
            first += len(rows)
    except InputError as error:
        note_unread(report, file.path, error)


def _differing(files: Sequence[EventFile], comparison: Comparison) -> set[tuple[str, str]]:
    """Return the (study, action) pairs of which the store has other events than the files."""
    for file in files:
        for _ in _take_file(file, comparison, IngestReport(1)):
            pass
    return comparison.differing


def _take_file(file: EventFile, intake: Intake, report: IngestReport) -> Iterator[int]:
    """Append the correct units of a file and report the others, by portions; yield each portion's number of rows."""
    remarks: dict[str, Finding] = {}  # the first of each kind, with the number of rows of all
    filing: Filing | None = None
    for groups, rows, first in portions_of(file, report):
        filing = filing or Filing(file.path, groups, intake, report)
        for remark in filing.take(rows, first):
            known = remarks.get(remark.kind)
            remarks[remark.kind] = remark if known is None else replace(known, count=known.count + remark.count)
        yield len(rows)
    report.remarks += map(str, remarks.values())


class Filing:
    """Checks a file's rows by portions, and offers correct units to a store; ``control`` marks groups of controls."""

    def __init__(self, file: str, groups: FileGroups, intake: Intake, report: IngestReport) -> None:
        self._file, self._groups, self._intake, self._report = file, groups, intake, report
        self._unnamed = np.array([not all(map(_is_name, names)) for names in groups.names], dtype=np.bool_)
        self.control = np.array([intake.is_control(str(n[0]), str(n[3])) for n in groups.names], dtype=np.bool_)
        models = [(str(names[0]), str(names[1])) for names in groups.names]
        self._models = sorted(set(models))  # (study, model)
        place = {model: number for number, model in enumerate(self._models)}
        self._model_of_group = np.array([place[model] for model in models], dtype=np.int32)
        self._origins = {model: intake.horizon_origin(*model) for model in self._models}
        self._contradicted = np.array([self._contradicts(*model) for model in self._models], dtype=np.bool_)

    def take(self, rows: EventRows, first: int) -> list[Finding]:
        """Offer the correct units of a portion to the store and report the others; return the remarks.

        ``first`` is the number of the portion's first row in the file, from 0.
        """
        rows = self.named(rows, first)
        if not len(rows):
            return []
        ordered = SortedRows.of(rows)
        horizon = self._horizons(ordered)[self._model_of_group]
        wrong = np.zeros(len(ordered.unit_first) - 1, dtype=np.bool_)
        for error in find_errors(ordered, horizon, self.control):
            wrong[ordered.unit_of(error.rows)] = True
            self._report.findings += self.by_unit(ordered, error)
        for unit, group in enumerate(ordered.unit_group.tolist()):
            start, end = ordered.unit_first[unit : unit + 2].tolist()
            if wrong[unit]:
                self._report.kept_out.add(1, end - start)
            else:
                self._offer(ordered, group, start, end, horizon)
        return self._remarks(ordered, wrong)

    def named(self, rows: EventRows, first: int) -> EventRows:
        """Return the rows that can be checked; keep out and report the other rows.

        The others are rows with a null or empty name, and rows of a study and model of which the store has another H
        than the call gave. ``first`` is the number of the portion's first row in the file, from 0.
        """
        other = self._contradicted[self._model_of_group[rows.group]]
        self._report.kept_out.add(0, int(other.sum()))
        rows = rows.take(~other) if other.any() else rows
        unnamed = self._unnamed[rows.group]
        if not unnamed.any():
            return rows
        at = int(np.argmax(unnamed))
        names = dict(zip(GROUP_KEY, self._groups.names[rows.group[at]], strict=True))
        wrong = next(name for name, value in names.items() if not _is_name(value))
        kind = "null" if names[wrong] is None else "empty"
        key = {"row": first + at + 1, **{name: value for name, value in names.items() if _is_name(value)}}
        count = int(unnamed.sum())
        self._report.findings.append(Finding(self._file, kind, f"{wrong} is {kind}", key, count))
        self._report.kept_out.add(0, count)
        return rows.take(~unnamed)

    def _contradicts(self, study: str, model: str) -> bool:
        """Tell whether the store has another H than the call gave; if so, report it."""
        requested, known = self._intake.requested_horizon, self._intake.horizon(study, model)
        if requested in {None, known}:
            return False
        text = f"the horizon given is {requested}, but the store has {known}; give {known} or none"
        self._report.findings.append(Finding(self._file, "horizon", text, {"study": study, "model": model}))
        return True

    def _horizons(self, ordered: SortedRows) -> Ints:
        """Return H of each group's (study, model): the known H, else the H that these rows suggest, else 0."""
        known = [self._intake.horizon(*model) for model in self._models]
        for model in np.unique(self._model_of_group[ordered.unit_group]).tolist():
            if known[model] is None:
                known[model] = ordered.suggested_horizon(self._model_of_group == model)
        return np.array([horizon or 0 for horizon in known], dtype=np.int32)

    def _offer(self, ordered: SortedRows, group: int, start: int, end: int, horizons: Ints) -> None:
        study, model, doc, action = (str(name) for name in self._groups.names[group])
        rows, horizon = filled(ordered.rows.take(slice(start, end)), horizons), int(horizons[group])
        report = self._report

        def answered(answer: int | Refusal) -> None:
            """Count the outcome of the commit for the unit."""
            if isinstance(answer, Refusal):
                key = self._key(rows, group, answer.at)
                report.findings.append(Finding(self._file, answer.kind, answer.text, key, answer.count))
                report.kept_out.add(1, end - start)
                return
            report.horizons.setdefault((study, model), (horizon, self._origins[study, model]))
            new = answer * horizon
            (report.taken if new else report.present).add(1, 0)
            report.taken.add(0, new)
            report.present.add(0, len(rows) - new)

        self._intake.offer((study, model, doc, action), rows, horizon, answered)

    def by_unit(self, ordered: SortedRows, error: Anomaly) -> list[Finding]:
        """Return one finding for each unit that has the error; the finding names the unit's first such row."""
        units, first, counts = np.unique(ordered.unit_of(error.rows), return_index=True, return_counts=True)
        findings = []
        for unit, row, count in zip(units.tolist(), error.rows[first].tolist(), counts.tolist(), strict=True):
            key = self._key(ordered.rows, int(ordered.unit_group[unit]), row)
            if error.position is not None:
                key["t"] = error.position(row)
            findings.append(Finding(self._file, error.kind, error.say(row), key, count))
        return findings

    def _remarks(self, ordered: SortedRows, wrong: Flags) -> list[Finding]:
        """Return one finding for each kind of remark about units without errors; ``wrong`` marks units with errors."""
        remarks = []
        for remark in find_remarks(ordered, self.control):
            rows = remark.rows[~wrong[ordered.unit_of(remark.rows)]]
            if rows.size:
                row = int(rows[0])
                key = self._key(ordered.rows, int(ordered.rows.group[row]), row)
                remarks.append(Finding(self._file, remark.kind, remark.say(row), key, int(rows.size)))
        return remarks

    def _key(self, rows: EventRows, group: int, row: int | None) -> dict[str, Any]:
        """Return the key of a row, or of a group if ``row`` is None.

        A replicate or t that is null or no int32 is left out.
        """
        key: dict[str, Any] = dict(zip(GROUP_KEY, self._groups.names[group], strict=True))
        for name in ("replicate", "t") if row is not None else ():
            if not rows.is_flawed(name)[row]:
                key[name] = int(getattr(rows, name)[row])
        return key


def _is_name(name: str | None) -> bool:
    """Tell whether a name has at least one visible character."""
    return name is not None and bool(name.strip())
