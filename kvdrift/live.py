"""Studies that still run: their progress for ``kvdrift status --watch``, and pages for ``kvdrift report --live``.

Progress is a table on a terminal, and lines elsewhere. Pages are written again as events come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvdrift.schema.errors import InputError, nearest, printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from kvdrift.flows.pages.live import StudySnapshot
    from kvdrift.log.store import Store
    from kvdrift.report.reading.content import TokenReader

_FOLDER = "live"  # of the preliminary page, in the folder of the study's report
_NAMED = "95% intervals as if the study ended now; preliminary"


def show_live(snapshots: Iterator[list[StudySnapshot]], interval: float) -> None:
    """Show each snapshot until all studies are finished, or Ctrl-C; wait ``interval`` seconds between them."""
    from rich.console import Console

    console = Console(highlight=False)
    with suppress(KeyboardInterrupt):  # a snapshot writes nothing, so an interrupt leaves nothing half done
        (_show_tables if console.is_terminal else _print_lines)(snapshots, interval)


def _show_tables(snapshots: Iterator[list[StudySnapshot]], interval: float) -> None:
    from rich.console import Group
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for current in snapshots:
            live.update(
                Group(*(part for snapshot in current for part in (_title(snapshot), _table(snapshot)))), refresh=True
            )
            if _is_finished(current):
                break
            time.sleep(interval)


def _print_lines(snapshots: Iterator[list[StudySnapshot]], interval: float) -> None:
    printed: dict[tuple[str, str], str] = {}
    for current in snapshots:
        for snapshot in current:
            what = f"{snapshot.study}, {snapshot.model}: {progress_text(snapshot)}"
            moved = f"{what}{_divergence_text(snapshot)}"
            if printed.get((snapshot.study, snapshot.model)) != moved:
                printed[snapshot.study, snapshot.model] = moved
                typer.echo(printable(f"{what}{_pace_text(snapshot)}{_divergence_text(snapshot)}"))
        if _is_finished(current):
            break
        time.sleep(interval)


def _is_finished(snapshots: list[StudySnapshot]) -> bool:
    return bool(snapshots) and all(snapshot.finished for snapshot in snapshots)


def progress_text(snapshot: StudySnapshot) -> str:
    """Return the progress of a study as text: units done of those planned, and trajectories derived."""
    from kvdrift.flows.plan.frozen_plan import interim_look_line

    if not snapshot.work:
        return f"{snapshot.stored:,} units, {snapshot.derived:,} trajectories derived"
    planned = "" if snapshot.planned else ", evaluation not planned yet"
    finished = "; finished" if snapshot.finished else ""
    taken = "" if snapshot.taken is None else f"; {interim_look_line(snapshot.taken)}"
    units = f"{snapshot.done:,} of {snapshot.wanted:,} units{planned}"
    return f"{units}, {snapshot.derived:,} trajectories derived{taken}{finished}"


def _pace_text(snapshot: StudySnapshot) -> str:
    if snapshot.finished:
        return ""
    if snapshot.planned and snapshot.taken is None and snapshot.work and snapshot.done == snapshot.wanted:
        return ", no estimates yet"
    if not snapshot.rate:
        return ""
    left = f", about {_duration(snapshot.seconds_left)} left" if snapshot.work and snapshot.seconds_left else ""
    return f", {snapshot.rate:.2f} units/s{left}"


def _divergence_text(snapshot: StudySnapshot) -> str:
    parts = [
        f"{divergence.action} R = {_share(divergence.mismatch, divergence.mismatch_low, divergence.mismatch_high)}, "
        f"P(tau <= H) = {_share(divergence.probability, divergence.probability_low, divergence.probability_high)}"
        for divergence in snapshot.divergence
    ]
    return f"; preliminary, {snapshot.split}: {'; '.join(parts)}" if parts else ""


def _title(snapshot: StudySnapshot) -> Text:
    """Return a study's progress as a line above its table, whose own title would be as narrow as the table."""
    from rich.text import Text

    return Text(printable(f"{snapshot.study}, {snapshot.model}: {progress_text(snapshot)}{_pace_text(snapshot)}"))


def _table(snapshot: StudySnapshot) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(caption=f"{snapshot.split}: {_NAMED}" if snapshot.split else None)
    for name in ("action", "development", "evaluation", "documents", "R", "P(tau <= H)"):
        table.add_column(name, justify="left" if name == "action" else "right")
    diverged = {divergence.action: divergence for divergence in snapshot.divergence}
    for action in dict.fromkeys([*(work.action for work in snapshot.work), *diverged]):
        counts = {work.split: f"{work.done:,} / {work.wanted:,}" for work in snapshot.work if work.action == action}
        shares = diverged.get(action)
        table.add_row(
            Text(printable(action)), counts.get("development", ""), counts.get("evaluation", ""),
            "" if shares is None else f"{shares.documents:,}",
            "" if shares is None else _share(shares.mismatch, shares.mismatch_low, shares.mismatch_high),
            "" if shares is None else _share(shares.probability, shares.probability_low, shares.probability_high),
        )  # fmt: skip
    return table


def _share(value: float, low: float | None, high: float | None) -> str:
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _duration(seconds: float | None) -> str:
    whole = round(seconds or 0)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole / 3600:.1f} h"


def write_live_pages(location: str, output: Path | None, study: str | None, interval: float) -> None:
    """Derive new events and rewrite the pages of a store's unfinished studies, until all studies are finished.

    A page is rewritten when more of its study is derived. The preliminary page is not the report, which is made at the
    study's end in another folder; from then on the preliminary page links to the report.
    ``output`` is the folder of the page, or the parent of the pages' folders if there are several; by default a page is
    in the folder ``live`` of its report's folder.
    """
    from kvdrift.flows.pages.live import LiveStore, end_preliminary, write_preliminary
    from kvdrift.flows.pages.reports import page_folder
    from kvdrift.generator.transformer.files.tokenizer import token_reader
    from kvdrift.log.store import Store
    from kvdrift.log.studies import model_revisions
    from kvdrift.transforms.pipeline import run_derivation

    store = Store.open(location)
    live = LiveStore(store)
    readers: dict[tuple[str, str], TokenReader | None] = {}
    shown: dict[tuple[str, str], int] = {}
    while True:
        if store.all_underived().size:
            run_derivation(location)
        all_snapshots = live.snapshots()
        snapshots = [snapshot for snapshot in all_snapshots if study in {None, snapshot.study}]
        pages = [(snapshot.study, snapshot.model) for snapshot in snapshots]
        if all_snapshots and not snapshots:
            raise InputError(
                f"no study '{study}' in {location}; {nearest(str(study), {known.study for known in all_snapshots})}"
            )
        for snapshot in snapshots:
            study_key = (snapshot.study, snapshot.model)
            if snapshot.finished or snapshot.derived in {0, shown.get(study_key)}:
                continue
            shown[study_key] = snapshot.derived
            if study_key not in readers:
                readers[study_key] = token_reader(snapshot.model, revision=model_revisions(store).get(study_key))
            folder = live_folder(store, snapshot, output, pages)
            at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
            sentence = f"The study is still running: {progress_text(snapshot)}, at {at}."
            page = write_preliminary(store, *study_key, folder, sentence, token_text=readers[study_key])
            typer.echo(f"preliminary: {page} ({progress_text(snapshot)})")
        if _is_finished(snapshots):
            for snapshot in snapshots:
                report = page_folder(store, snapshot.study, snapshot.model, pages) / "index.html"
                end_preliminary(live_folder(store, snapshot, output, pages), snapshot.study, report, location)
            typer.echo(f"finished: kvdrift report {location} writes the report")
            return
        time.sleep(interval)


def live_folder(store: Store, snapshot: StudySnapshot, output: Path | None, pages: Sequence[tuple[str, str]]) -> Path:
    """Return the folder of a snapshot's page: as ``kvdrift report -o`` names it, or ``live`` in the report's folder.

    ``pages`` has the (study, model) pair of every page of the call.
    """
    from kvdrift.flows.pages.reports import page_folder

    folder = page_folder(store, snapshot.study, snapshot.model, pages, output)
    return folder if output is not None else folder / _FOLDER
