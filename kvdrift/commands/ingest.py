"""``kvdrift ingest``: what went in, what was there, what was kept out and why, as lines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import typer

from kvdrift.console import ConsoleProgress
from schema.errors import InputError
from schema.ingestion.ingestion import IngestReport, Tally, ingest

NAMED_FINDINGS = 20  # lines of one kind, before the rest is a count
_WORTH_A_BAR = 500_000  # events


def ingest_files(files: list[Path], location: str, documents: Path | None) -> int:
    """Ingest, print findings to standard error and the summary to standard output; returns the exit code."""
    if not files:
        raise InputError("ingest: name at least one file of events")
    with ConsoleProgress() as console:
        seen = 0

        def progress(done: int, total: int) -> None:
            nonlocal seen
            if total < _WORTH_A_BAR:
                return
            if not done:
                console.begin("ingest", total, "events")
                return
            console.advance(done - seen)
            seen = done

        report = ingest(location, files, documents, progress)
    for line in _lines(report):
        typer.echo(f"kvdrift: {line}", err=True)
    typer.echo(summary(report, location))
    return InputError.exit_code if report.findings else 0


def summary(report: IngestReport, location: str) -> str:
    """What became of the files, and what to type next."""
    unread = f", {report.unread} not or not wholly readable" if report.unread else ""
    lines = [
        f"files:         {report.files}{unread}",
        f"went in:       {_count(report.taken)}",
        f"already there: {_count(report.present)}",
        f"kept out:      {_count(report.kept_out)}",
    ]
    if not report.taken.units:
        lines.append("nothing new: the store is as it was")
    if report.taken.units or report.present.units:
        lines.append(f"next:          kvdrift derive {location}")
    return "\n".join(lines)


def _lines(report: IngestReport) -> list[str]:
    """One line per finding, at most ``NAMED_FINDINGS`` of a kind and then their number; then the remarks."""
    lines = []
    said: Counter[str] = Counter()
    for finding in report.findings:
        said[finding.kind] += 1
        if said[finding.kind] <= NAMED_FINDINGS:
            lines.append(str(finding))
    lines += [
        f"and {count - NAMED_FINDINGS} more findings of the kind '{kind}'"
        for kind, count in said.items()
        if count > NAMED_FINDINGS
    ]
    return lines + [f"note: {remark}" for remark in report.remarks]


def _count(tally: Tally) -> str:
    return f"{tally.units:,} units, {tally.events:,} events"
