"""``kvdrift analyze``: estimates of every study of a store, where they are not up to date."""

from __future__ import annotations

import typer

from kvdrift.options import StoreArgument
from schema.errors import InputError


def analyze(store: StoreArgument) -> None:
    """Bootstrap every study of a store whose estimates are not up to date; without a plan, as exploratory.

    Continuations of documents with answers are scored first, and tokens get their texts, if the model's tokenizer can
    be loaded.
    """
    from flows.analysis.stored import analyze_stored
    from flows.generation.tokens import record_tokens
    from flows.scores import score_stored
    from kvdrift.console import ConsoleProgress
    from log.store import Store
    from log.studies import model_revisions
    from sql.catalog_file import refresh_catalog

    opened = Store.open(store)
    studies = {(row["study"], row["model"]) for row in opened.read("documents", columns=["study", "model"]).to_pylist()}
    if not studies:
        raise InputError(f"{opened.location}: the store holds no study yet")
    revisions, made, written = model_revisions(opened), 0, False
    with ConsoleProgress() as console:
        for study, model in sorted(studies):
            console.doing(f"estimating {study}, {model}")
            revision = revisions.get((study, model))
            texts = record_tokens(opened, study, model, revision=revision, progress=console)
            if scored := score_stored(opened, study, model, revision=revision, progress=console):
                typer.echo(f"{study}, {model}: scored the answers of {scored} pairs")
            count = analyze_stored(opened, study, model, progress=console)
            made += count
            written = written or bool(texts or scored or count)
            typer.echo(f"{study}, {model}: " + (f"{count} estimates" if count else "estimates are up to date"))
        if written:
            console.doing("writing the catalogue")
            refresh_catalog(opened)
    if made:
        typer.echo(f"the estimates are in {opened.location}; kvdrift report {opened.location} writes the page")
