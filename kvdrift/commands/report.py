"""``kvdrift report``: the pages of a store's studies, or one page of several stores."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from kvdrift.options import seconds_of
from kvdrift.schema.errors import InputError, nearest

REPORT_FORMATS = ("html", "latex")


def report(
    stores: Annotated[list[str], typer.Argument(metavar="STORE...", help="Folders or URLs of one or several stores.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="The folder to write; by default STORE/report/NAME, or a folder in reports/ for a comparison and for "
            "a store behind a URL.",
        ),
    ] = None,
    study: Annotated[str | None, typer.Option(metavar="NAME", help="Report only this study.")] = None,
    output_format: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORMAT", help="html; or latex, which also writes every table as a .tex file."
        ),
    ] = "html",
    live: Annotated[
        bool, typer.Option("--live", help="While a study runs: derive new events and update a preliminary page.")
    ] = False,
    side_by_side: Annotated[
        bool, typer.Option("--side-by-side", help="Write only a page that compares the studies of one store.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the pages as JSON, each with its verdict: sentence, badges and reasons."),
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates with --live.")] = 30.0,
    prune: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Write nothing, and delete the pages of studies that were not run, estimated or reported within AGE, "
            "such as 12h or 90d.",
        ),
    ] = None,
) -> None:
    """Write the report of a store's studies, one page each, or one page that compares several stores.

    A leaderboard compares several stores, or the studies of one store with --side-by-side: for example models, or
    versions of a selector. If two studies share documents, the page has the differences of their actions over the
    shared documents.
    Studies that differ only in temperature have a figure of divergence against temperature.

    With --live a running study has a page of its present results, in the folder live of its report. The page says that
    it is preliminary, recommends nothing and reloads itself. The command ends when all studies are finished.

    With --prune only files of pages are deleted, which kvdrift report writes again from the store. Other files in their
    folders stay, and so do the answers of gates.

    Examples:
        kvdrift report stores/quickstart
        kvdrift report stores/quickstart -o pages --format latex
        kvdrift report stores/quickstart --json
        kvdrift report stores/one stores/other -o compared
        kvdrift report stores/quickstart --side-by-side
        kvdrift report stores/quickstart --prune 90d
    """
    # A report shows tokens as text if the tokenizer is on this machine; nothing is downloaded for that.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if output_format not in REPORT_FORMATS:
        raise InputError(f"--format {output_format}: {nearest(output_format, REPORT_FORMATS)}")
    if as_json and (len(stores) > 1 or side_by_side or live or prune is not None):
        raise InputError("--json: takes one store; leave out other stores, --side-by-side, --live and --prune")
    if prune is not None:
        if len(stores) > 1 or side_by_side or live or output is not None or output_format != "html":
            raise InputError("--prune: takes one store, and --study if you like; leave other options out")
        _prune(stores[0], seconds_of(prune, "--prune"), study)
        return
    if live:
        if len(stores) > 1 or side_by_side or output_format != "html":
            raise InputError(
                "--live: takes one store and writes HTML; leave out other stores, --side-by-side and --format"
            )
        from kvdrift.live import write_live_pages

        with suppress(KeyboardInterrupt):
            write_live_pages(stores[0], output, study, interval)
        return
    from kvdrift.console import ConsoleProgress
    from kvdrift.report.page import VERDICT

    latex = output_format == "latex"
    if len(stores) > 1 or side_by_side:
        typer.echo(f"report: {_compare(stores, output, study, latex=latex)}")
        return
    with ConsoleProgress() as console:
        console.doing("reading the store, and drawing figures")
        pages = report_pages(stores[0], output, study, latex=latex)
    if as_json:
        verdicts = [json.loads(page.with_name(VERDICT).read_text(encoding="utf-8")) for page in pages]
        rows = [{"page": str(page), "verdict": verdict} for page, verdict in zip(pages, verdicts, strict=True)]
        typer.echo(json.dumps(rows, ensure_ascii=False, indent=1))
        return
    for page in pages:
        typer.echo(f"report: {page}")


def _prune(location: str, seconds: float, study: str | None) -> None:
    from kvdrift.flows.pages.reports import prune_pages
    from kvdrift.log.store import Store

    pruned = False
    for page in prune_pages(Store.open(location), seconds, study):
        pruned = True
        files = f"{page.files:,} {'file' if page.files == 1 else 'files'}"
        typer.echo(f"deleted: {page.folder} ({files}, {page.bytes / 1e6:,.1f} MB)")
    if not pruned:
        typer.echo("nothing to delete: no page is that old")


def _compare(stores: list[str], output: Path | None, study: str | None, *, latex: bool) -> Path:
    from kvdrift.console import ConsoleProgress
    from kvdrift.flows.pages.side_by_side import comparison_folder, write_comparison

    if latex:
        raise InputError("--format latex: a comparison writes only CSV tables; leave out --format")
    with ConsoleProgress() as console:
        studies = None if study is None else [study]
        return write_comparison(stores, output or comparison_folder(stores), studies, console)


def report_pages(location: str, output: Path | None, study: str | None, *, latex: bool) -> list[Path]:
    """Write the report of each study of a store, or only of ``study``; return the paths of the pages.

    ``output`` is the folder of the page, or the parent of the pages' folders if there are several; by default pages are
    in the store, or those of a store behind a URL in ``reports`` in the working folder.
    """
    from kvdrift.flows.pages.reports import model_in_path, page_beside, page_folder, write_report
    from kvdrift.generator.transformer.files.tokenizer import token_reader
    from kvdrift.log.store import Store
    from kvdrift.log.studies import model_revisions, stored_studies

    store = Store.open(location)
    chosen, revisions, pages = stored_studies(store, study), model_revisions(store), []
    for pair in chosen:
        name, model = pair
        text, beside = token_reader(model, revision=revisions.get(pair)), model_in_path(name, model, chosen)
        pages.append(
            write_report(
                store, name, model, page_folder(store, name, model, chosen, output), token_text=text, latex=latex,
                beside=page_beside(store, name, beside),
            )
        )  # fmt: skip
    return pages
