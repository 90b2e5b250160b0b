"""Rows in the formats of ``kvdrift sql``: a table to read, CSV, JSON, Parquet, LaTeX."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from rich.console import Console
from rich.table import Table

from kvdrift.report.printing.tables import escape
from kvdrift.schema.errors import InputError

_UNBOUNDED = 10_000  # columns of text: wider than any table


def print_table(rows: pa.Table) -> None:
    """Print rows as a table: as wide as the terminal, or, for programs and pagers, as wide as the rows need."""
    console = Console() if sys.stdout.isatty() else Console(width=_UNBOUNDED)
    console.print(_table(rows))


def write_parquet(rows: pa.Table, path: Path) -> None:
    """Write rows as a Parquet file."""
    _check_names(rows)
    pa.parquet.write_table(rows, path)


def table_text(rows: pa.Table) -> str:
    """Return rows as a table of plain text."""
    text = io.StringIO()
    Console(width=_UNBOUNDED, file=text).print(_table(rows))
    return text.getvalue()


def csv_text(rows: pa.Table) -> str:
    """Return rows as CSV, names in the first line; lists and structs are JSON in one field.

    A text is in quotes only if it is empty, which distinguishes it from null, or has a comma, a quote or a line break.
    """
    fields = [_csv_fields(rows.column(number)) for number in range(rows.num_columns)]
    lines = pc.binary_join_element_wise(*fields, ",", null_handling="replace", null_replacement="").to_pylist()
    names = _csv_fields(pa.chunked_array([pa.array(rows.column_names, pa.string())])).to_pylist()
    return "\n".join([",".join(names), *lines, ""])


def _csv_fields(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_nested(column.type):
        texts = pa.chunked_array(
            [[None if value is None else _json(value) for value in column.to_pylist()]], pa.string()
        )
    else:
        texts = column.cast(pa.string())
    quotes = pc.match_substring_regex(texts, '^$|[,"\r\n]')
    return pc.if_else(quotes, pc.binary_join_element_wise('"', pc.replace_substring(texts, '"', '""'), '"', ""), texts)


def json_text(rows: pa.Table) -> str:
    """Return rows as a JSON list of objects."""
    _check_names(rows)
    return _json(rows.to_pylist(), indent=1) + "\n"


def latex_text(rows: pa.Table) -> str:
    """Return rows as a LaTeX tabular with the rules of booktabs."""
    columns = "".join("r" if _is_numeric(field.type) else "l" for field in rows.schema)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    lines += [" & ".join(map(escape, rows.column_names)) + r" \\", r"\midrule"]
    for row in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        lines.append(" & ".join(escape(_text(value)) for value in row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


TEXTS: dict[str, Callable[[pa.Table], str]] = {
    "table": table_text, "csv": csv_text, "json": json_text, "latex": latex_text,
}  # fmt: skip


def _check_names(rows: pa.Table) -> None:
    names = rows.column_names
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise InputError(
            f"{names.count(repeated[0])} columns are called '{repeated[0]}': rename one, as in: select x as y"
        )


def _table(rows: pa.Table) -> Table:
    table = Table(box=None, pad_edge=False)
    for field in rows.schema:
        table.add_column(field.name, justify="right" if _is_numeric(field.type) else "left", no_wrap=True)
    for row in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        table.add_row(*(_text(value).replace("[", r"\[") for value in row))
    return table


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, default=str, ensure_ascii=False, indent=indent)


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
