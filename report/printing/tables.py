"""A table as the page, a CSV file and a LaTeX file take it: plain cells, no markup."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from report.printing.numbers import MISSING

_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.])")  # but +0.5 is a number


@dataclass(frozen=True)
class Cell:
    """One cell: its text, a quieter line under it, a mark for its standing in the plan, and the paper's number."""

    text: str
    under: str = ""
    mark: str = ""
    published: str = ""


@dataclass(frozen=True)
class Column:
    """A column's head: symbol, unit, what it means in words, and whether its cells are aligned left, as words are."""

    head: str
    unit: str = ""
    meaning: str = ""
    left: bool = False


@dataclass(frozen=True)
class TableRow:
    """One row; ``group`` is a heading that stands above it where it differs from the row before."""

    cells: tuple[Cell, ...]
    group: str = ""


@dataclass(frozen=True)
class PrintedTable:
    """One table.

    Attributes:
        name: that of its files.
        records: what its CSV file has in place of the printed cells.
        abreast: how many columns stand abreast on the page beside the first one; 0 for all of them.

    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    note: str = ""
    records: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    abreast: int = 0

    @property
    def parts(self) -> list[PrintedTable]:
        """The table as it stands on the page: itself, or parts one below the other that have the first column each."""
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
        """Write the table's numbers unrounded: one estimate per line, or the cells of a table without estimates."""
        if self.records:
            write_records(folder / f"{self.name}.csv", self.records)
            return
        heads = [f"{column.head} ({column.unit})" if column.unit else column.head for column in self.columns]
        lines = [dict(zip(heads, (cell.text for cell in row.cells), strict=True)) for row in self.rows]
        write_records(folder / f"{self.name}.csv", lines, heads)


def write_records(path: Path, records: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write records as CSV; None is an empty field, floats keep every digit.

    A text that a spreadsheet would take for a formula gets an apostrophe in front: names may be of others.
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
    """A row whose cells may be texts; an empty text is a dash."""
    return TableRow(tuple(cell if isinstance(cell, Cell) else Cell(cell or MISSING) for cell in cells), group)


def label_column(head: str) -> Column:
    """A left-aligned column of words."""
    return Column(head, left=True)
