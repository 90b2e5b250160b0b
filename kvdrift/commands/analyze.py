"""``kvdrift analyze``: estimates of every study of a store, if they are not up to date."""

from __future__ import annotations

import typer

from kvdrift.options import StoreArgument


def analyze(store: StoreArgument) -> None:
    """Estimate every study of a store whose estimates are not up to date; without a plan, estimates are exploratory.

    First, if the model's tokenizer can be loaded, continuations of documents with answers are scored, and the texts of
    tokens are stored.

    Examples:
        kvdrift analyze stores/quickstart
    """
    from kvdrift.console import ConsoleProgress
    from kvdrift.flows.estimate.stored import estimate_stored
    from kvdrift.log.store import Store
    from kvdrift.log.studies import stored_studies
    from kvdrift.sql.catalog_file import refresh_catalog

    opened = Store.open(store)
    made, written = 0, False
    with ConsoleProgress() as console:
        for study, model in stored_studies(opened):
            console.doing(f"estimating {study}, {model}")
            texts, scored, count = estimate_stored(opened, study, model, console)
            if scored:
                typer.echo(f"{study}, {model}: scored the answers of {scored} pairs")
            made += count
            written = written or bool(texts or scored or count)
            typer.echo(f"{study}, {model}: " + (f"{count} estimates" if count else "estimates are up to date"))
        if written:
            console.doing("writing the catalogue")
            refresh_catalog(opened)
    if made:
        typer.echo(f"the estimates are in {opened.location}; kvdrift report {opened.location} writes the page")
