"""``kvdrift analyze``: estimates of every study of a store, where they are not up to date."""

from __future__ import annotations

import typer

from kvdrift.options import StoreArgument
from schema.errors import InputError


def analyze(store: StoreArgument) -> None:
    """Bootstrap every study of a store whose estimates are not up to date; without a plan, as exploratory."""
    from flows.analysis.stored import analyze_stored
    from kvdrift.console import ConsoleProgress
    from schema.store.store import Store

    opened = Store.open(store)
    studies = {(row["study"], row["model"]) for row in opened.read("documents", columns=["study", "model"]).to_pylist()}
    if not studies:
        raise InputError(f"{opened.location}: the store holds no study yet")
    with ConsoleProgress() as console:
        for study, model in sorted(studies):
            count = analyze_stored(opened, study, model, progress=console)
            typer.echo(f"{study}, {model}: " + (f"{count} estimates" if count else "estimates are up to date"))
