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

    from kvdrift.flows.pages.live import StudyLook
    from kvdrift.log.store import Store
    from kvdrift.report.reading.content import TokenReader

_FOLDER = "live"  # of the preliminary page, in the folder of the study's report
_NAMED = "95% intervals as if the study ended now; preliminary"


def show_live(looks: Iterator[list[StudyLook]], interval: float) -> None:
    """Show each look until all studies are finished, or Ctrl-C; wait ``interval`` seconds between them."""
    from rich.console import Console

    console = Console(highlight=False)
    with suppress(KeyboardInterrupt):  # a look writes nothing, so an interrupt leaves nothing half done
        (_show_tables if console.is_terminal else _print_lines)(looks, interval)


def _show_tables(looks: Iterator[list[StudyLook]], interval: float) -> None:
    from rich.console import Group
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for found in looks:
            live.update(Group(*(part for look in found for part in (_title(look), _table(look)))), refresh=True)
            if _is_finished(found):
                break
            time.sleep(interval)


def _print_lines(looks: Iterator[list[StudyLook]], interval: float) -> None:
    said: dict[tuple[str, str], str] = {}
    for found in looks:
        for look in found:
            what = f"{look.study}, {look.model}: {progress_text(look)}"
            moved = f"{what}{_divergence_text(look)}"
            if said.get((look.study, look.model)) != moved:
                said[look.study, look.model] = moved
                typer.echo(printable(f"{what}{_pace_text(look)}{_divergence_text(look)}"))
        if _is_finished(found):
            break
        time.sleep(interval)


def _is_finished(looks: list[StudyLook]) -> bool:
    return bool(looks) and all(look.finished for look in looks)


def progress_text(look: StudyLook) -> str:
    """Return the progress of a study as text: units done of those planned, and trajectories derived."""
    from kvdrift.flows.plan.frozen_plan import look_line

    if not look.work:
        return f"{look.stored:,} units, {look.derived:,} trajectories derived"
    planned = "" if look.planned else ", evaluation not planned yet"
    finished = "; finished" if look.finished else ""
    taken = "" if look.taken is None else f"; {look_line(look.taken)}"
    return f"{look.done:,} of {look.wanted:,} units{planned}, {look.derived:,} trajectories derived{taken}{finished}"


def _pace_text(look: StudyLook) -> str:
    if look.finished:
        return ""
    if look.planned and look.taken is None and look.work and look.done == look.wanted:
        return ", no estimates yet"
    if not look.rate:
        return ""
    left = f", about {_duration(look.seconds_left)} left" if look.work and look.seconds_left else ""
    return f", {look.rate:.2f} units/s{left}"


def _divergence_text(look: StudyLook) -> str:
    parts = [
        f"{one.action} R = {_share(one.mismatch, one.mismatch_low, one.mismatch_high)}, "
        f"P(tau <= H) = {_share(one.probability, one.probability_low, one.probability_high)}"
        for one in look.divergence
    ]
    return f"; preliminary, {look.split}: {'; '.join(parts)}" if parts else ""


def _title(look: StudyLook) -> Text:
    """Return a study's progress as a line above its table, whose own title would be as narrow as the table."""
    from rich.text import Text

    return Text(printable(f"{look.study}, {look.model}: {progress_text(look)}{_pace_text(look)}"))


def _table(look: StudyLook) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(caption=f"{look.split}: {_NAMED}" if look.split else None)
    for name in ("action", "development", "evaluation", "documents", "R", "P(tau <= H)"):
        table.add_column(name, justify="left" if name == "action" else "right")
    diverged = {one.action: one for one in look.divergence}
    for action in dict.fromkeys([*(work.action for work in look.work), *diverged]):
        counts = {work.split: f"{work.done:,} / {work.wanted:,}" for work in look.work if work.action == action}
        one = diverged.get(action)
        table.add_row(
            Text(printable(action)), counts.get("development", ""), counts.get("evaluation", ""),
            "" if one is None else f"{one.documents:,}",
            "" if one is None else _share(one.mismatch, one.mismatch_low, one.mismatch_high),
            "" if one is None else _share(one.probability, one.probability_low, one.probability_high),
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
    study's end in another folder; from then on the preliminary page links to the report. Ctrl-C ends this quietly.
    ``output`` is the folder of the page, or of the pages' folders if there are several; in the report's by default.
    """
    with suppress(KeyboardInterrupt):
        _write_until_finished(location, output, study, interval)


def _write_until_finished(location: str, output: Path | None, study: str | None, interval: float) -> None:
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
        found = live.look()
        looks = [look for look in found if study in {None, look.study}]
        pages = [(look.study, look.model) for look in looks]
        if found and not looks:
            raise InputError(f"no study '{study}' in {location}; {nearest(str(study), {one.study for one in found})}")
        for look in looks:
            if look.derived and shown.get((look.study, look.model)) != look.derived and not look.finished:
                own = (look.study, look.model)
                shown[own] = look.derived
                if own not in readers:
                    readers[own] = token_reader(look.model, revision=model_revisions(store).get(own))
                folder = live_folder(store, look, output, pages)
                page = write_preliminary(store, *own, folder, _said(look), token_text=readers[own])
                typer.echo(f"preliminary: {page} ({progress_text(look)})")
        if looks and all(look.finished for look in looks):
            for look in looks:
                report = page_folder(store, look.study, look.model, pages) / "index.html"
                end_preliminary(live_folder(store, look, output, pages), look.study, report, location)
            typer.echo(f"finished: kvdrift report {location} has the report")
            return
        time.sleep(interval)


def live_folder(store: Store, look: StudyLook, output: Path | None, pages: Sequence[tuple[str, str]]) -> Path:
    """Return the folder of a look's page, arranged as ``kvdrift report`` arranges the studies' pages."""
    from kvdrift.flows.pages.reports import page_folder

    folder = page_folder(store, look.study, look.model, pages, output)
    return folder if output is not None else folder / _FOLDER


def _said(look: StudyLook) -> str:
    return f"The study is still running: {progress_text(look)}, at {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC."
