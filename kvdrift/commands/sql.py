"""``kvdrift sql``: answers to ad hoc SQL, as a table to read or a file to keep; and a prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift.options import StoreArgument
from schema.errors import InputError, KvdriftError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

    from sql.catalog import Views

QUERY_FORMATS = ("table", "csv", "json", "parquet", "latex")
_SHOWN_ROWS = 200


def sql(
    store: StoreArgument,
    query: Annotated[str | None, typer.Argument(metavar="QUERY", help="A select; without it, a prompt.")] = None,
    output_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="table, csv, json, parquet or latex.")
    ] = "table",
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to FILE.")] = None,
    checked: Annotated[
        bool, typer.Option("--checked", help="Check first that no file is damaged, once a file.")
    ] = False,
) -> None:
    """Answer SQL over a store's tables and views, also while a study is running.

    Queries read: what writes, or reaches a file outside the store or the network, is refused.
    """
    from schema.store.store import Store
    from sql.catalog import open_views
    from sql.read_only import read_only

    if output_format not in QUERY_FORMATS:
        raise InputError(f"--format {output_format}: {nearest(output_format, QUERY_FORMATS)}")
    opened = Store.open(store)
    with read_only(open_views(opened, threads=os.cpu_count() or 1, checked=checked), opened) as views:
        if query is None:
            prompt(views)
        else:
            answer(views, query, output_format, output)


def answer(views: Views, query: str, output_format: str, output: Path | None) -> None:
    """Write the rows of one query in one of ``QUERY_FORMATS``, to standard output by default.

    Raises:
        InputError: DuckDB refuses the query, or the file cannot be written.

    """
    from kvdrift import formats

    rows = views.table(query)
    if output_format == "parquet":
        if output is None:
            raise InputError("--format parquet needs -o FILE")
        _write(output, lambda: formats.write_parquet(rows, output))
    elif output_format == "table" and output is None:
        _show(rows)
    else:
        text = formats.TEXTS[output_format](rows)
        if output is None:
            typer.echo(text, nl=False)
        else:
            _write(output, lambda: output.write_text(text, encoding="utf-8"))


def prompt(views: Views) -> None:
    """Read queries, each ended by a semicolon, until end of input; print errors and go on."""
    typer.echo("tables as they are now; end a query with ';', leave with Ctrl-D", err=True)
    pending = ""
    while True:
        try:
            line = input("kvdrift> " if not pending else "      -> ") if sys.stdin.isatty() else next(sys.stdin, None)
        except EOFError:
            line = None
        if line is None:
            break
        pending += line.rstrip("\n") + "\n"
        if pending.rstrip().endswith(";"):
            _try(views, pending)
            pending = ""
    if pending.strip():
        _try(views, pending)


def _try(views: Views, query: str) -> None:
    try:
        _show(views.table(query))
    except KvdriftError as error:
        typer.echo(f"kvdrift: {error}", err=True)


def _show(rows: pa.Table) -> None:
    from kvdrift import formats

    formats.print_table(rows.slice(0, _SHOWN_ROWS))
    if rows.num_rows > _SHOWN_ROWS:
        typer.echo(f"… {rows.num_rows - _SHOWN_ROWS} more rows; --format csv gives them all", err=True)


def _write(output: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise InputError(f"-o {output}: cannot be written ({error.strerror or error})") from error
