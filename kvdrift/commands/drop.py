"""``kvdrift drop``: remove an action from the views; its units stay in the log."""

from __future__ import annotations

from typing import Annotated

import typer

from kvdrift import completion
from kvdrift.options import StoreArgument


def drop(
    store: StoreArgument,
    action: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The action to drop.", autocompletion=completion.of_store("actions", "action")
        ),
    ],
    study: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The action's study, if several studies have an action of this name."),
    ] = None,
) -> None:
    """Drop an action that no plan names: only the view revisions shows it. Its events stay in the log.

    Examples:
        kvdrift drop stores/my-study --action recent-quarter
    """
    from kvdrift.flows.run.comparison import drop_action
    from kvdrift.log.store import Store
    from kvdrift.sql.catalog_file import refresh_catalog

    Store.open(store)  # refuses a folder without a store, which the next line would make into a store
    opened = Store.create(store)
    units = drop_action(opened, action, study)
    refresh_catalog(opened)
    typer.echo(f"dropped action '{action}': {units} units are superseded and stay in the log")
