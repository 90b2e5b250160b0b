"""``kvdrift compact``: many small files of a store made few."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvdrift.options import StoreArgument

if TYPE_CHECKING:
    from transforms.compaction import CompactedTable, FileCount


def compact(store: StoreArgument) -> None:
    """Put the small files of a store together, so that it opens as quickly with many units as with few.

    No row changes, and what reads or writes the store meanwhile is not disturbed. What is not derived yet is derived
    first. The small files stay where they are, for what reads earlier versions.
    """
    from kvdrift.console import ConsoleProgress
    from schema.store.store import Store
    from sql.catalog import refresh_catalog
    from sql.materialization import keep_up_moments
    from transforms.compaction import compact as compacted
    from transforms.pipeline import run_derivation

    opened = Store.open(store)
    derived = run_derivation(store)
    if derived.segments:
        typer.echo(f"derived {derived.segments} segments, {derived.events} events")
    with ConsoleProgress() as console:
        keep_up_moments(opened)
        tables = compacted(opened, console)
        keep_up_moments(opened)
        refresh_catalog(opened)
    for line in map(_line, tables):
        typer.echo(line)
    if not tables:
        typer.echo("nothing to compact")


def _line(done: CompactedTable) -> str:
    return f"{done.table}: {_counted(done.before)} -> {_counted(done.after)}"


def _counted(count: FileCount) -> str:
    return f"{count.files:,} file{'s' if count.files != 1 else ''}, {count.size / 1e6:,.1f} MB"
