"""``kvdrift report --live``: pages of studies that still run, written again as events come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import typer

from kvdrift.flows.estimate.live import LiveStore, StudyLook
from kvdrift.flows.pages.reports import end_preliminary, page_folder, write_preliminary
from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.live.display import progress_text
from kvdrift.log.store import Store
from kvdrift.log.studies import model_revisions
from kvdrift.report.reading.content import TokenReader
from kvdrift.schema.errors import InputError, nearest
from kvdrift.transforms.pipeline import run_derivation

_FOLDER = "live"  # in the folder of the study's report


def write_live_pages(location: str, output: Path | None, study: str | None, interval: float) -> None:
    """Derive new events and rewrite the pages of a store's unfinished studies, until all studies are finished.

    A page is rewritten when more of its study is derived. The preliminary page is not the report, which is made at the
    study's end in another folder; from then on the preliminary page links to the report. Ctrl-C ends this quietly.
    ``output`` is the folder of the page, or of the pages' folders if there are several; in the report's by default.
    """
    with suppress(KeyboardInterrupt):
        _write_until_finished(location, output, study, interval)


def _write_until_finished(location: str, output: Path | None, study: str | None, interval: float) -> None:
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
                folder = _folder(store, look, output, pages)
                page = write_preliminary(store, *own, folder, _said(look), token_text=readers[own])
                typer.echo(f"preliminary: {page} ({progress_text(look)})")
        if looks and all(look.finished for look in looks):
            for look in looks:
                report = page_folder(store, look.study, look.model, pages) / "index.html"
                end_preliminary(_folder(store, look, output, pages), look.study, report, location)
            typer.echo(f"finished: kvdrift report {location} has the report")
            return
        time.sleep(interval)


def _folder(store: Store, look: StudyLook, output: Path | None, pages: Sequence[tuple[str, str]]) -> Path:
    """Return the folder of a look's page, arranged as ``kvdrift report`` arranges the studies' pages."""
    folder = page_folder(store, look.study, look.model, pages, output)
    return folder if output is not None else folder / _FOLDER


def _said(look: StudyLook) -> str:
    return f"The study is still running: {progress_text(look)}, at {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC."
