"""``kvdrift sql``: answers to ad hoc SQL, as a table to read or a file to keep; and a prompt."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift import completion
from kvdrift.options import StoreArgument
from kvdrift.schema.errors import InputError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

    from kvdrift.sql.catalog import Views

QUERY_FORMATS = ("table", "csv", "json", "parquet", "latex")
_ENDINGS = {".csv": "csv", ".json": "json", ".parquet": "parquet", ".tex": "latex", ".txt": "table"}
_SHOWN_ROWS = 200


def sql(
    context: typer.Context,
    store: StoreArgument,
    query: Annotated[
        str | None,
        typer.Argument(
            metavar="QUERY",
            help="A select, or a command such as .views; without a query, an interactive prompt.",
            autocompletion=completion.views,
        ),
    ] = None,
    output_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="table, csv, json, parquet or latex; by default the format of the ending of -o FILE, or table.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the rows to FILE.")
    ] = None,
    checked: Annotated[
        bool, typer.Option("--checked", help="Check first that no file is damaged; each file is checked once.")
    ] = False,
) -> None:
    """Answer SQL over a store's tables and views, also while a study is running.

    Views show derived rows: 'kvdrift derive STORE --watch' beside a run keeps them up to date. If units are not derived
    yet, a note on standard error says how many.

    Queries can only read: a statement that writes, or that reaches a file outside the store or the network, is refused.
    """
    from kvdrift.log.store import Store
    from kvdrift.queries.prompt import Prompt
    from kvdrift.sql.catalog import open_views
    from kvdrift.sql.read_only import read_only

    if context.args:
        whole = " ".join([query or "", *context.args]).replace('"', '\\"')
        raise InputError(f'QUERY: several arguments; quote the query: kvdrift sql {store} "{whole}"')
    _check_outside_stores(output)
    output_format = output_format or _format_of(output)
    if output_format not in QUERY_FORMATS:
        raise InputError(f"--format {output_format}: {nearest(output_format, QUERY_FORMATS)}")
    command = query is not None and query.lstrip().startswith(".")
    if command and (output or output_format != "table"):
        raise InputError(f"{query}: a command of the prompt prints text; leave --format and -o out")
    opened = Store.open(store)
    with read_only(
        open_views(opened, threads=os.cpu_count() or 1, checked_within=0 if checked else None), opened
    ) as views:
        if waiting := opened.all_underived(views.versions).size:
            units = f"{waiting} {'unit' if waiting == 1 else 'units'}"
            derive = f"kvdrift derive {store}, or with --watch beside a run"
            typer.echo(f"note: the views lack {units} whose events are not derived yet; {derive}", err=True)
        if query is None:
            Prompt(views, _show).read_all()
        elif command:
            Prompt(views, _show).answer(query)
        else:
            answer(views, query, output_format, output)


def answer(views: Views, query: str, output_format: str, output: Path | None) -> None:
    """Write the rows of one query in one of ``QUERY_FORMATS``, to standard output by default.

    Raises:
        InputError: DuckDB refuses the query, or the file cannot be written.
    """
    from kvdrift.queries import formats
    from kvdrift.queries.running import misspelt, rows_of

    rows = rows_of(views, query)
    if not rows.num_rows and (meant := misspelt(views, query)):
        typer.echo(f"note: no rows; {meant}", err=True)
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


def _format_of(output: Path | None) -> str:
    """Return the format that a file's ending names."""
    if output is None:
        return "table"
    if output.suffix.lower() not in _ENDINGS:
        raise InputError(f"-o {output}: its ending names no format; give --format, or one of {', '.join(_ENDINGS)}")
    return _ENDINGS[output.suffix.lower()]


def _check_outside_stores(output: Path | None) -> None:
    """Check that a file to write lies outside every store, since only kvdrift may write there."""
    for folder in () if output is None else Path(os.path.realpath(output)).parents:
        if (folder / "events" / "_delta_log").is_dir():
            raise InputError(f"-o {output}: lies in the store {folder}, where no file may be replaced; name another")


def _show(rows: pa.Table) -> None:
    from kvdrift.queries import formats

    formats.print_table(rows.slice(0, _SHOWN_ROWS))
    if rows.num_rows > _SHOWN_ROWS:
        typer.echo(f"… {rows.num_rows - _SHOWN_ROWS} more rows; --format csv gives them all", err=True)


def _write(output: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise InputError(f"-o {output}: cannot be written ({error.strerror or error})") from error
