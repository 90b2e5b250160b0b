"""A table of plain cells without markup, for the page, a CSV file and a LaTeX file."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvdrift.report.printing.numbers import MISSING

_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.])")  # signs that begin a formula in a spreadsheet; +0.5 is a number


@dataclass(frozen=True)
class Cell:
    """One cell: its text, a quieter line under the text, a mark of its standing, and the paper's number."""

    text: str
    under: str = ""
    mark: str = ""
    published: str = ""


@dataclass(frozen=True)
class Column:
    """A column's head: symbol, unit, meaning in words, and whether cells are aligned left, as words are."""

    head: str
    unit: str = ""
    meaning: str = ""
    left: bool = False


@dataclass(frozen=True)
class TableRow:
    """One row; ``group`` is a heading, printed above the row if it differs from the previous row's."""

    cells: tuple[Cell, ...]
    group: str = ""


@dataclass(frozen=True)
class PrintedTable:
    """One table."""

    name: str  # the name of its files
    title: str
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    note: str = ""
    # rows of the CSV file, in place of the printed cells
    records: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    abreast: int = 0  # how many columns stand side by side on the page, besides the first; 0 for all

    @property
    def parts(self) -> list[PrintedTable]:
        """Split the table for the page into parts one below the other, each with the first column."""
        if not self.abreast or len(self.columns) <= 1 + self.abreast:
            return [self]
        starts = range(1, len(self.columns), self.abreast)
        return [
            replace(
                self,
                name=self.name if first == 1 else f"{self.name}-{first}",
                title=self.title if first == 1 else f"{self.title}, continued",
                columns=(self.columns[0], *self.columns[first : first + self.abreast]),
                rows=tuple(
                    replace(row, cells=(row.cells[0], *row.cells[first : first + self.abreast])) for row in self.rows
                ),
                note=self.note if first == starts[-1] else "",
            )
            for first in starts
        ]

    def write_csv(self, folder: Path) -> None:
        """Write the table's numbers unrounded: one estimate on a line, or the cells of a table without estimates."""
        if self.records:
            write_records(folder / f"{self.name}.csv", self.records)
            return
        heads = [f"{column.head} ({column.unit})" if column.unit else column.head for column in self.columns]
        lines = [dict(zip(heads, (cell.text for cell in row.cells), strict=True)) for row in self.rows]
        write_records(folder / f"{self.name}.csv", lines, heads)


def write_records(path: Path, records: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write records as CSV; None is an empty field, floats keep every digit.

    Texts that a spreadsheet would take for a formula get an apostrophe in front, since names may come from others.
    """
    names = list(columns or (records[0] if records else ()))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _as_text(value) for name, value in record.items()} for record in records)
    path.write_text(text.getvalue(), encoding="utf-8", newline="\n")


def _as_text(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def table_row(*cells: Cell | str, group: str = "") -> TableRow:
    """Make a row from cells or texts; an empty text becomes a dash."""
    return TableRow(tuple(cell if isinstance(cell, Cell) else Cell(cell or MISSING) for cell in cells), group)


def label_column(head: str) -> Column:
    """Return a left-aligned column of words."""
    return Column(head, left=True)
