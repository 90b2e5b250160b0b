"""``kvdrift forget``: remove a document from a store for good."""

from __future__ import annotations

from typing import Annotated

import typer

from kvdrift import completion
from kvdrift.options import StoreArgument


def forget(
    store: StoreArgument,
    document: Annotated[
        str,
        typer.Option(
            metavar="ID", help="The document to remove.", autocompletion=completion.of_store("documents", "doc")
        ),
    ],
    study: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Remove the document from this study only; by default from all studies."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove the document; without this option nothing is changed.")
    ] = False,
) -> None:
    """Remove a document for good: no file of the store has its id, its prompt or its events afterwards.

    Earlier versions of the tables are deleted, too, and so are reports, estimates, files set aside, and the record of
    past runs. kvdrift run makes estimates and reports again from the documents that are left; so do kvdrift analyze and
    kvdrift report. The document does not come back, even if its source still has it. Copies of the store elsewhere stay
    as they are.

    Examples:
        kvdrift forget stores/my-study --document p17 --yes
    """
    from kvdrift.flows.run.forgetting import find_removal, remove_document
    from kvdrift.log.store import Store
    from kvdrift.schema.errors import InputError

    removal = find_removal(Store.open(store), document, study)
    studies = sorted({key[0] for key in removal.keys})
    what = f"document '{document}' of {', '.join(studies)}: {removal.units:,} units, {removal.events:,} events"
    if not yes:
        raise InputError(
            f"{store}: {what} would be removed for good, with all earlier versions of the store; add --yes"
        )
    remove_document(Store.create(store), removal, typer.echo)
    typer.echo(f"removed {what}; kvdrift run or kvdrift analyze estimates again from the documents that are left")
