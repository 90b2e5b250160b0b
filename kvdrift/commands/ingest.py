"""``kvdrift ingest``: check events that another generator made, and append them to a store."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift.schema.errors import InputError, printable

if TYPE_CHECKING:
    from kvdrift.console import ConsoleProgress
    from kvdrift.ingestion.ingest import IngestReport, Tally

NAMED_FINDINGS = 20  # findings of one kind that are printed; the rest are counted
_WORTH_A_BAR = 500_000  # events
_MANY_FILES = 16  # in pieces


def ingest(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES...",
            help="Files of events (Parquet, Arrow IPC, CSV, JSON Lines), folders of them, Delta tables, patterns in "
            "quotes, or URLs.",
        ),
    ],
    store: Annotated[str, typer.Option(metavar="DIR", help="Folder or URL of the store; a missing store is made.")],
    documents: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV, JSONL or Parquet file with columns doc, stratum, split, and any others of table documents.",
        ),
    ] = None,
    facts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV, JSONL or Parquet file with facts of actions: column action, and any of bytes, seconds, engine.",
        ),
    ] = None,
    pieces: Annotated[bool, typer.Option("--pieces", help="Take replicates whose rows are in several files.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep taking new files of the folders until interrupted; implies --pieces.")
    ] = False,
    horizon: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="H",
            help="The number of positions of a replicate; by default, the number that most replicates have.",
        ),
    ] = None,
    revise: Annotated[
        bool,
        typer.Option("--revise", help="Take events that differ from the store's as a new revision of their actions."),
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two checks for new files with --watch.")
    ] = 1.0,
) -> None:
    """Check the events that another generator made, and append those without errors.

    With --pieces the rows of a replicate may be in several files, in any order: the replicate is appended once all its
    positions have come. With --watch files are taken as they appear.

    Examples:
        kvdrift ingest events.parquet --store stores/other --documents documents.csv
        kvdrift ingest 'runs/**/*.csv.gz' --store stores/other --documents documents.csv --horizon 128
        kvdrift ingest drop/ --store stores/other --documents documents.csv --watch --horizon 128
    """
    if (pieces or watch) and revise:
        raise InputError("--revise compares whole files: leave out --pieces and --watch")
    from kvdrift.console import ConsoleProgress

    with ConsoleProgress() as console:
        if watch:
            report = _watch(store, files, documents, facts, horizon, interval)
        elif pieces:
            from kvdrift.transforms.streams.live_files import ingest_pieces

            console.doing("taking files")
            progress = _bar(console, "files", _MANY_FILES)
            report = ingest_pieces(
                store, files, documents, horizon, taken=lambda _, taken: _print(taken), progress=progress, facts=facts
            )
        else:
            from kvdrift.ingestion.ingest import ingest as ingested

            progress = _bar(console, "events", _WORTH_A_BAR)
            report = ingested(store, files, documents, progress, facts, horizon, revise=revise)
    if not (watch or pieces):  # otherwise the findings of a file are printed after the file
        _print(report)
    typer.echo(summary(report, store))
    raise typer.Exit(InputError.exit_code if report.findings else 0)


def _bar(console: ConsoleProgress, unit: str, least: int) -> Callable[[int, int], None]:
    """Return a listener of (done, total) that shows a progress bar if the total is at least ``least``."""
    seen = 0

    def progress(done: int, total: int) -> None:
        nonlocal seen
        if total >= least and not done:
            console.begin("ingest", total, unit)
        elif total >= least:
            console.advance(done - seen)
            seen = done

    return progress


def _print(report: IngestReport) -> None:
    for line in _lines(report):
        typer.echo(f"kvdrift: {printable(line)}", err=True)


def _watch(
    store: str, files: list[str], documents: Path | None, facts: Path | None, horizon: int | None, interval: float
) -> IngestReport:
    """Take files that may hold pieces of replicates as they appear, until interrupted."""
    from kvdrift.transforms.streams.live_files import ingest_pieces

    stopped = threading.Event()

    def taken(path: str, report: IngestReport) -> None:
        _print(report)
        added = f"{_count(report.taken)} were added" if report.taken.units else "nothing was added"
        typer.echo(printable(f"{path}: {added}, {_replicates(report)} wait for positions"), err=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    wait = lambda: not stopped.wait(interval)  # noqa: E731 - read where it is used
    return ingest_pieces(store, files, documents, horizon, taken=taken, wait=wait, facts=facts)


def _replicates(report: IngestReport) -> str:
    return f"{report.waiting.units:,} replicates"


def summary(report: IngestReport, location: str) -> str:
    """Return a line about the files taken, and the next command."""
    unread = f", {report.unread} not readable, or not to the end" if report.unread else ""
    lines = [
        f"files:         {report.files}{unread}",
        f"went in:       {_count(report.taken)}",
        f"already there: {_count(report.present)}",
        f"kept out:      {_count(report.kept_out)}",
    ]
    for (study, model), (horizon, origin) in report.horizons.items():
        lines.append(printable(f"horizon:       {horizon} ({study}, {model}), {origin}"))
    if report.waiting.units:
        lines.append(f"waiting:       {_replicates(report)} that lack positions")
    if not report.taken.units:
        lines.append("nothing new: the store is unchanged")
    if report.taken.units or report.present.units:
        lines.append(f"next:          kvdrift derive {location}")
    return "\n".join(lines)


def _lines(report: IngestReport) -> list[str]:
    """Return a line for each finding, at most ``NAMED_FINDINGS`` of a kind and then a count; the remarks follow."""
    lines = []
    counts: Counter[str] = Counter()
    for finding in report.findings:
        counts[finding.kind] += 1
        if counts[finding.kind] <= NAMED_FINDINGS:
            lines.append(str(finding))
    lines += [
        f"and {count - NAMED_FINDINGS} more findings of the kind '{kind}'"
        for kind, count in counts.items()
        if count > NAMED_FINDINGS
    ]
    return lines + [f"note: {remark}" for remark in report.remarks]


def _count(tally: Tally) -> str:
    return f"{tally.units:,} units, {tally.events:,} events"
