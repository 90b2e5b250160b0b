"""``kvdrift compact``: merge the many small files of a store into few."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift.options import StoreArgument

if TYPE_CHECKING:
    from kvdrift.log.store import Store


_WEEK = 7


def compact(
    store: StoreArgument,
    vacuum: Annotated[
        bool, typer.Option("--vacuum", help="Also delete files that were replaced at least --keep-days ago.")
    ] = False,
    keep_days: Annotated[float, typer.Option(min=0, help="Days that --vacuum keeps replaced files.")] = _WEEK,
) -> None:
    """Merge the small files of a store, so that it opens as quickly with many units as with few.

    No row changes, and other processes may read and write the store meanwhile. New events are derived first. The small
    files stay, since readers of earlier versions need them; --vacuum later deletes them, and these versions with them.

    Examples:
        kvdrift compact stores/quickstart
        kvdrift compact stores/quickstart --vacuum
    """
    from kvdrift.console import ConsoleProgress
    from kvdrift.log.store import Store
    from kvdrift.sql.catalog_file import refresh_catalog
    from kvdrift.transforms.compaction import compact as compacted
    from kvdrift.transforms.pipeline import run_derivation

    opened = Store.open(store)
    with ConsoleProgress() as console:
        console.doing("deriving new events")
        derived = run_derivation(store, progress=console.derived)
        tables = compacted(opened, console)
        console.doing("writing the catalogue")
        refresh_catalog(opened)
    if derived.units:
        typer.echo(f"derived {derived.units} units, {derived.events} events")
    for table, (before, after) in tables.items():
        typer.echo(f"{table}: {_counted(*before)} -> {_counted(*after)}")
    if not tables:
        typer.echo("nothing to compact")
    if vacuum:
        _delete(opened, keep_days)


def _delete(store: Store, days: float) -> None:
    from kvdrift.schema.tables import TABLES

    replaced = f"replaced at least {days:g} days ago"
    deleted = 0
    for table in TABLES:
        files, size = store.delete_replaced(table, timedelta(days=days))
        deleted += files
        if files:
            typer.echo(f"{table}: {_counted(files, size)} deleted, {replaced}")
    if not deleted:
        typer.echo(f"nothing to delete: no file was {replaced}")


def _counted(files: int, size: int) -> str:
    return f"{files:,} file{'s' if files != 1 else ''}, {size / 1e6:,.1f} MB"
