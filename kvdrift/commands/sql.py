"""Answers to ad hoc SQL, as a table to read or a file to keep; and a prompt."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import typer
from rich.console import Console
from rich.table import Table

from schema.errors import InputError, KvdriftError
from sql.catalog import Views

FORMATS = ("table", "csv", "json", "parquet", "latex")
_SHOWN_ROWS = 200
_LATEX = str.maketrans({
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}",
})  # fmt: skip


def answer(views: Views, query: str, output_format: str, output: Path | None) -> None:
    """Write the rows of one query in ``output_format`` to ``output`` or standard output; InputError for bad SQL."""
    rows = views.table(query)
    if output_format == "parquet":
        if output is None:
            raise InputError("--format parquet needs -o FILE")
        _writing(output, lambda: pa.parquet.write_table(rows, output))
    elif output_format == "table" and output is None:
        _show(rows)
    else:
        text = {"table": _plain, "csv": _csv, "json": _json, "latex": _latex}[output_format](rows)
        if output is None:
            typer.echo(text, nl=False)
        else:
            _writing(output, lambda: output.write_text(text, encoding="utf-8"))


def prompt(views: Views) -> None:
    """Read queries, each ended by a semicolon, until end of input; errors are said and the prompt goes on."""
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


def _writing(output: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise InputError(f"-o {output}: cannot be written ({error.strerror or error})") from error


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(rows: pa.Table) -> Table:
    table = Table(box=None, pad_edge=False)
    for field in rows.schema:
        numeric = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        table.add_column(field.name, justify="right" if numeric else "left", no_wrap=True)
    for row in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        table.add_row(*(_text(value).replace("[", r"\[") for value in row))
    return table


def _show(rows: pa.Table) -> None:
    # Without a terminal a table is as wide as it needs to be: whoever reads it is a program or a pager.
    console = Console() if sys.stdout.isatty() else Console(width=10_000)
    console.print(_table(rows.slice(0, _SHOWN_ROWS)))
    if rows.num_rows > _SHOWN_ROWS:
        typer.echo(f"… {rows.num_rows - _SHOWN_ROWS} more rows; --format csv gives them all", err=True)


def _plain(rows: pa.Table) -> str:
    text = io.StringIO()
    Console(width=10_000, file=text).print(_table(rows))
    return text.getvalue()


def _csv(rows: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    pa.csv.write_csv(rows, sink, pa.csv.WriteOptions(quoting_style="needed"))
    return str(sink.getvalue().to_pybytes().decode())


def _json(rows: pa.Table) -> str:
    return json.dumps(rows.to_pylist(), default=str, ensure_ascii=False, indent=1) + "\n"


def _latex(rows: pa.Table) -> str:
    kinds = [pa.types.is_integer(f.type) or pa.types.is_floating(f.type) for f in rows.schema]
    lines = [rf"\begin{{tabular}}{{{''.join('r' if numeric else 'l' for numeric in kinds)}}}", r"\toprule"]
    lines += [" & ".join(name.translate(_LATEX) for name in rows.column_names) + r" \\", r"\midrule"]
    for row in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        lines.append(" & ".join(_text(value).translate(_LATEX) for value in row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
