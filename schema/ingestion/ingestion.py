"""``ingest``: events that another generator made, validated and appended; what is wrong is named and stays out.

The unit of acceptance is a run of consecutive replicates of one (study, model, doc, action) in one file: it goes in
whole, or one error anywhere in it keeps it out whole, and the others go in. So a replicate's positions must lie in one
file. Replicates that the store holds already are compared with it: where they are the same only the others go in, where
they are not the run is kept out. A key that one file has twice is an error, whether its two rows are equal or not; the
same events in a second file are there already. ``schema.ingestion.checks`` says what an error is. A file with events of
another kind than coupled pairs is not read.

H of a (study, model) is that of its ``studies`` row, else that of its stored units, else of its first accepted ones:
the position at which most replicates of the window that they are in end.

A document is known when the store has it or the documents file does; its row is appended with its first unit. An action
without a row gets one with selector "external", and nothing else known of it. It is the control if its name is
``full``; it is prespecified unless the study has a frozen plan that does not name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from schema.errors import InputError
from schema.ingestion.checks import Problem, Window, find_errors, find_remarks
from schema.ingestion.documents import DocumentRows, read_documents
from schema.ingestion.files import NAMES, EventFile, EventRows, Ints, Layout
from schema.ingestion.intake import Intake, Refusal
from schema.store.store import Store


@dataclass(frozen=True)
class Finding:
    """What is wrong with one unit, or with a whole file: kind, first offending key, and how many rows have it."""

    file: str
    kind: str
    text: str  # what is wrong at the first offending key
    key: dict[str, Any] = field(default_factory=dict)  # study .. t, as far as the finding has them
    count: int = 1

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in self.key.items())
        more = f" ({self.count} such rows)" if self.count > 1 else ""
        return f"{self.file}: {named}: {self.text}{more}" if named else self.text  # of a whole file, named in the text


@dataclass
class Tally:
    """A count of units and of their events."""

    units: int = 0
    events: int = 0

    def add(self, units: int, events: int) -> None:
        """Count more."""
        self.units += units
        self.events += events


@dataclass
class IngestReport:
    """What an ingestion did. A unit of which only some replicates were new counts as taken; its events count apart."""

    files: int
    unread: int = 0  # files of which nothing, or not all, could be read
    taken: Tally = field(default_factory=Tally)
    present: Tally = field(default_factory=Tally)  # there already, with equal content
    kept_out: Tally = field(default_factory=Tally)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # worth a line, but nothing was kept out for it


def ingest(
    location: str | Path,
    files: Sequence[str | Path],
    documents: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> IngestReport:
    """Append the events of ``files`` to the store at ``location``, which is made where missing.

    Args:
        location: folder or URL of the store.
        files: Parquet or Arrow IPC files, or folders of them.
        documents: CSV, JSONL or Parquet file of documents; without it the store must know every document.
        progress: called with the events looked at so far and the events of all files.

    Returns:
        What went in, what was there, what was kept out and why. Repeating the call changes nothing.

    Raises:
        InputError: the documents file cannot be taken, a folder has no files, or the store cannot be opened or written.

    """
    given = DocumentRows() if documents is None else read_documents(Path(documents))
    paths = [path for file in files for path in _expanded(Path(file))]
    report = IngestReport(len(paths))
    if given.unknown:
        report.remarks.append(f"{documents}: columns ignored: {', '.join(given.unknown)}")
    opened = []
    for path in paths:
        try:
            opened.append(EventFile(path))
        except InputError as error:
            report.findings.append(Finding(str(path), "file", str(error)))
            report.unread += 1
    if not opened:
        return report  # and no store is made
    total, seen = sum(file.rows for file in opened), 0
    intake = Intake(Store.create(location), given)
    if progress is not None:
        progress(seen, total)
    for file in opened:
        for rows in _take_file(file, intake, report):
            seen += rows
            if progress is not None:
                progress(seen, total)
    intake.flush()
    return report


def _expanded(path: Path) -> list[Path]:
    """A file itself; of a folder all files, but for those hidden as Spark and Delta hide theirs."""
    if not path.is_dir():
        return [path]
    inside = [file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file()]
    found = [path / file for file in inside if not any(part[0] in "._" for part in file.parts)]
    if not found:
        raise InputError(f"{path}: no files in this folder")
    return found


def _take_file(file: EventFile, intake: Intake, report: IngestReport) -> Iterator[int]:
    """Take what is right in a file and report the rest; yields the rows of each window when they are done."""
    name = str(file.path)
    if file.unknown_columns:
        report.remarks.append(f"{name}: columns ignored: {', '.join(file.unknown_columns)}")
    remarks: dict[str, Finding] = {}
    first = 0
    windows = None
    while True:
        try:  # around the reading alone: what the store says is not the file's
            if windows is None:
                source = _Source(name, file.layout(), intake)
                windows = file.windows(source.layout)
            rows = next(windows, None)
        except InputError as error:
            report.findings.append(Finding(name, "file", str(error)))
            report.unread += 1
            break
        if rows is None:
            break
        for remark in source.take(rows, first, report):
            before = remarks.setdefault(remark.kind, remark)
            if before is not remark:
                remarks[remark.kind] = _more(before, remark.count)
        first += len(rows)
        yield len(rows)
    report.remarks += map(str, remarks.values())


def _more(finding: Finding, count: int) -> Finding:
    return Finding(finding.file, finding.kind, finding.text, finding.key, finding.count + count)


class _Source:
    """One file on its way into a store."""

    def __init__(self, name: str, layout: Layout, intake: Intake) -> None:
        self.layout = layout
        self._name, self._intake = name, intake
        self._unnamed = np.array([None in group for group in layout.groups], dtype=np.bool_)
        self._control = np.array([intake.is_control(str(g[0]), str(g[3])) for g in layout.groups], dtype=np.bool_)
        pairs = [(str(group[0]), str(group[1])) for group in layout.groups]
        self._pairs = sorted(set(pairs))  # (study, model)
        place = {pair: number for number, pair in enumerate(self._pairs)}
        self._pair = np.array([place[pair] for pair in pairs], dtype=np.int32)  # of each group

    def take(self, rows: EventRows, first: int, report: IngestReport) -> list[Finding]:
        """Take a window whose first row is the file's row ``first``, from 0; returns its remarks."""
        rows = self._named(rows, first, report)
        if not len(rows):
            return []
        window = Window.of(rows)
        horizon = self._horizons(window)[self._pair]
        errors = find_errors(window, horizon)
        wrong = np.zeros(len(window.unit_first) - 1, dtype=np.bool_)
        for error in errors:
            wrong[window.unit_of(error.rows)] = True
            report.findings += self._by_unit(window, error)
        for unit, group in enumerate(window.unit_group.tolist()):
            start, end = window.unit_first[unit : unit + 2].tolist()
            outcome = None if wrong[unit] else self._offer(window, group, start, end, int(horizon[group]))
            if isinstance(outcome, int):
                new = outcome * int(horizon[group])
                (report.taken if new else report.present).add(1, 0)
                report.taken.add(0, new)
                report.present.add(0, end - start - new)
                continue
            report.kept_out.add(1, end - start)
            if outcome is not None:
                key = self._key(window, group, None if outcome.at is None else start + outcome.at)
                report.findings.append(Finding(self._name, outcome.kind, outcome.text, key, outcome.count))
        return self._remarks(window, wrong)

    def _named(self, rows: EventRows, first: int, report: IngestReport) -> EventRows:
        """The rows but those without a study, model, doc or action: they belong to no unit."""
        unnamed = self._unnamed[rows.group]
        if not unnamed.any():
            return rows
        at = int(np.argmax(unnamed))
        names = dict(zip(NAMES, self.layout.groups[rows.group[at]], strict=True))
        null = next(name for name, value in names.items() if value is None)
        key = {"row": first + at + 1, **{name: value for name, value in names.items() if value is not None}}
        count = int(unnamed.sum())
        report.findings.append(Finding(self._name, "null", f"{null} is null", key, count))
        report.kept_out.add(0, count)
        return rows.take(~unnamed)

    def _horizons(self, window: Window) -> Ints:
        """H of each (study, model) of the file: the known one, else what this window says, else 0."""
        known = [self._intake.horizon(*pair) for pair in self._pairs]
        for pair in np.unique(self._pair[window.unit_group]).tolist():
            if known[pair] is None:
                known[pair] = window.common_last_position(self._pair == pair)
        return np.array([horizon or 0 for horizon in known], dtype=np.int32)

    def _offer(self, window: Window, group: int, start: int, end: int, horizon: int) -> int | Refusal:
        study, model, doc, action = (str(name) for name in self.layout.groups[group])
        return self._intake.offer((study, model, doc, action), window.rows.take(slice(start, end)), horizon)

    def _by_unit(self, window: Window, problem: Problem) -> list[Finding]:
        """One finding for each unit that has the problem, named by its first row."""
        units, first, counts = np.unique(window.unit_of(problem.rows), return_index=True, return_counts=True)
        found = []
        for unit, row, count in zip(units.tolist(), problem.rows[first].tolist(), counts.tolist(), strict=True):
            key = self._key(window, int(window.unit_group[unit]), row)
            if problem.position is not None:
                key["t"] = problem.position(row)
            found.append(Finding(self._name, problem.kind, problem.say(row), key, count))
        return found

    def _remarks(self, window: Window, wrong: npt.NDArray[np.bool_]) -> list[Finding]:
        """One for each kind, about the units that are right."""
        remarks = []
        for remark in find_remarks(window, self._control):
            rows = remark.rows[~wrong[window.unit_of(remark.rows)]]
            if rows.size:
                row = int(rows[0])
                key = self._key(window, int(window.rows.group[row]), row)
                remarks.append(Finding(self._name, remark.kind, remark.say(row), key, int(rows.size)))
        return remarks

    def _key(self, window: Window, group: int, row: int | None) -> dict[str, Any]:
        key: dict[str, Any] = dict(zip(NAMES, self.layout.groups[group], strict=True))
        if row is not None:
            key |= {"replicate": int(window.rows.replicate[row]), "t": int(window.rows.t[row])}
        return key
