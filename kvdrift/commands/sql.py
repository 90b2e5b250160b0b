"""``kvdrift sql``: answer SQL queries, as a table to read or a file to keep."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvdrift import completion
from kvdrift.options import StoreArgument
from kvdrift.schema.errors import InputError, nearest, similar_name

if TYPE_CHECKING:
    import pyarrow as pa

    from kvdrift.sql.catalog import Views

QUERY_FORMATS = ("table", "csv", "json", "parquet", "latex")
_ENDINGS = {".csv": "csv", ".json": "json", ".parquet": "parquet", ".tex": "latex", ".txt": "table"}
_SHOWN_ROWS = 200
_NAMES = (("documents", "doc"), ("documents", "stratum"), ("documents", "split"), ("actions", "action"))
_TEXTS = re.compile(r"'([^']+)'")
_DESCRIBE = re.compile(r'\s*desc(?:ribe)?\s+(?:main\.|internal\.)?"?(\w+)"?\s*;?\s*', re.IGNORECASE)


def sql(
    context: typer.Context,
    store: StoreArgument,
    query: Annotated[
        str | None,
        typer.Argument(
            metavar="QUERY",
            help="A query; without it, queries are read from standard input, each up to a semicolon at the end of a "
            "line, until one fails.",
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
        bool,
        typer.Option("--checked", help="Check first that no file is damaged, which reads all files of a local store."),
    ] = False,
) -> None:
    """Answer SQL over a store's tables and views, also while a study is running.

    Views show derived rows: 'kvdrift derive STORE --watch' beside a run keeps them up to date. If units are not derived
    yet, a note on standard error says how many.

    Queries can only read: a statement that writes, or that reaches a file outside the store or the network, is refused.

    Examples:
        kvdrift sql stores/quickstart "from summary"
        kvdrift sql stores/quickstart "from decomposition where split = 'evaluation' order by stratum, mismatch"
        kvdrift sql stores/quickstart "from estimates" -o estimates.parquet
    """
    from kvdrift.log.store import Store
    from kvdrift.sql.catalog import open_views
    from kvdrift.sql.read_only import read_only

    if context.args:
        whole = " ".join([query or "", *context.args]).replace('"', '\\"')
        raise InputError(f'QUERY: several arguments; quote the query: kvdrift sql {store} "{whole}"')
    _check_outside_stores(output)
    output_format = output_format or _format_of(output)
    if output_format not in QUERY_FORMATS:
        raise InputError(f"--format {output_format}: {nearest(output_format, QUERY_FORMATS)}")
    opened = Store.open(store)
    queries = [query] if query is not None else _piped(opened.location, output)
    with read_only(
        open_views(opened, threads=os.cpu_count() or 1, checked_within=0 if checked else None), opened
    ) as views:
        if waiting := opened.all_underived(views.versions).size:
            units = f"{waiting} {'unit' if waiting == 1 else 'units'}"
            derive = f"kvdrift derive {store}, or with --watch beside a run"
            typer.echo(f"note: the views lack {units} whose events are not derived yet; {derive}", err=True)
        for text in queries:
            answer(views, text, output_format, output)


def _piped(location: str, output: Path | None) -> Iterable[str]:
    """Return the queries from standard input, each as soon as it is complete; -o FILE allows only one query."""
    from kvdrift.schema.location import is_local

    if sys.stdin.isatty():
        line = f'QUERY: missing; write kvdrift sql {shlex.quote(location)} "from summary"'
        if is_local(location):
            catalogue = shlex.quote(f"{location}/catalog.duckdb")
            line += f", or for a prompt: duckdb -readonly {catalogue} (pip install duckdb-cli)"
        raise InputError(line)
    if output is None:
        return _statements(sys.stdin)
    queries = list(_statements(sys.stdin))
    if len(queries) != 1:
        raise InputError(f"-o {output}: takes the rows of one query; standard input has {len(queries)} queries")
    return queries


def _statements(lines: Iterable[str]) -> Iterator[str]:
    """Yield the queries among lines: each ends with a semicolon at the end of a line, or with the last line."""
    pending = ""
    for line in lines:
        pending += line
        if pending.rstrip().endswith(";"):
            yield pending
            pending = ""
    if pending.strip():
        yield pending


def answer(views: Views, query: str, output_format: str, output: Path | None) -> None:
    """Write the rows of one query in one of ``QUERY_FORMATS``, to standard output by default.

    Raises:
        InputError: DuckDB refuses the query, or the file cannot be written.
    """
    from kvdrift import formats

    rows = rows_of(views, query)
    if not rows.num_rows and (meant := _misspelt(views, query)):
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
    from kvdrift import formats

    formats.print_table(rows.slice(0, _SHOWN_ROWS))
    if rows.num_rows > _SHOWN_ROWS:
        typer.echo(f"… {rows.num_rows - _SHOWN_ROWS} more rows; --format csv gives them all", err=True)


def _write(output: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise InputError(f"-o {output}: cannot be written ({error.strerror or error})") from error


def rows_of(views: Views, query: str) -> pa.Table:
    """Return the rows of a query; ``describe VIEW`` also gives the meanings of the columns, unlike DuckDB's own."""
    with ThreadPoolExecutor(1, "query") as thread:
        answer = thread.submit(views.table, _with_meanings(query))
        try:
            return answer.result()
        except KeyboardInterrupt:
            views.connection.interrupt()
            answer.exception()  # the connection is free again only once the query has ended
            raise


def _misspelt(views: Views, query: str) -> str:
    """Return suggestions for the texts in a query that gave no rows: known names that the texts resemble.

    Names are those of documents, strata, splits and actions. Empty if each text is a known name, or resembles none.
    """
    known = {name for view, column in _NAMES for name in views.rows(view, (column,))[column].to_pylist()} - {None}
    unknown = dict.fromkeys(text for text in _TEXTS.findall(query) if text not in known)
    meant = [f"'{text}': did you mean '{name}'?" for text in unknown if (name := similar_name(text, known)) is not None]
    return "; ".join(meant)


def _with_meanings(query: str) -> str:
    """Return the query itself, or for ``describe VIEW`` a query that also reads the comments on the columns."""
    from kvdrift.sql.contracts import contracts

    described = _DESCRIBE.fullmatch(query)
    view = contracts().get(described[1]) if described else None
    if view is None:
        return query
    return (
        "select column_name, data_type as column_type, comment as meaning from duckdb_columns() "  # noqa: S608 - our names
        f"where schema_name = '{view.schema}' and table_name = '{view.view}' order by column_index"
    )
