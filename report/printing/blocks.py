"""A table as the page and a CSV file take it: plain cells, no markup."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report.printing.numbers import MISSING, decimals_for, interval, level, point, published
from report.reading.estimates import ESTIMATE_COLUMNS, Estimate
from report.reading.quantities import EXPLORATORY, PRIMARY, QUANTITIES, Unit

_STANDINGS = {
    PRIMARY: "prespecified primary endpoints, family-adjusted",
    EXPLORATORY: "exploratory, pointwise",
}


@dataclass(frozen=True)
class Cell:
    """One cell: its text, a quieter line under it, a mark for its standing in the plan, and the paper's number."""

    text: str
    under: str = ""
    mark: str = ""
    left: bool = False
    published: str = ""


@dataclass(frozen=True)
class Column:
    """A column's head: symbol, unit, and what it means in words."""

    head: str
    unit: str = ""
    meaning: str = ""
    left: bool = False


@dataclass(frozen=True)
class Row:
    """One row; ``group`` is a heading that stands above it where it differs from the row before."""

    cells: tuple[Cell, ...]
    group: str = ""


@dataclass(frozen=True)
class Table:
    """One table with its name (also that of its CSV file), title and note."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""
    records: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    def write_csv(self, folder: Path) -> None:
        """Write the table's numbers unrounded: one estimate per line, or the cells of a table without estimates."""
        if self.records:
            write_records(folder / f"{self.name}.csv", self.records)
            return
        heads = [f"{column.head} ({column.unit})" if column.unit else column.head for column in self.columns]
        lines = [dict(zip(heads, (cell.text for cell in row.cells), strict=True)) for row in self.rows]
        write_records(folder / f"{self.name}.csv", lines, heads)


def write_records(path: Path, records: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write records as CSV; None is an empty field, floats keep every digit."""
    names = list(columns or (records[0] if records else ()))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    path.write_text(text.getvalue(), encoding="utf-8", newline="\n")


def text_cell(text: str) -> Cell:
    """A left-aligned cell of words."""
    return Cell(text or MISSING, left=True)


def label_column(head: str) -> Column:
    """A left-aligned column of words."""
    return Column(head, left=True)


def quantity_column(quantity: str, head: str = "") -> Column:
    """The head of a column of estimates."""
    known = QUANTITIES[quantity]
    return Column(head or known.symbol, known.unit.sign, known.label)


def estimate_table(
    name: str,
    title: str,
    labels: Sequence[Column],
    columns: Sequence[Column],
    rows: Sequence[tuple[str, Sequence[Cell], Sequence[Estimate | Cell]]],
    *,
    note: str = "",
) -> Table:
    """A table of estimates: ``rows`` are (group, label cells, one estimate or cell per column).

    A column has one count of decimals for all its rows, so that numbers line up.
    """
    units = [_unit_of(column) for column in columns]
    by_column = [[row[2][place] for row in rows] for place in range(len(columns))]
    decimals = [
        decimals_for((entry for entry in entries if isinstance(entry, Estimate)), unit)
        for entries, unit in zip(by_column, units, strict=True)
    ]
    listed = [entry for _, _, entries in rows for entry in entries if isinstance(entry, Estimate)]
    mark = marks(listed)
    shown = []
    for group, label, entries in rows:
        cells = [
            estimate_cell(entry, unit, places, mark[entry.standing]) if isinstance(entry, Estimate) else entry
            for entry, unit, places in zip(entries, units, decimals, strict=True)
        ]
        shown.append(Row((*label, *cells), group))
    return Table(
        name=name,
        title=title,
        columns=(*labels, *columns),
        rows=tuple(shown),
        note=f"{note} {status_note(listed)}".strip(),
        records=tuple(estimate.as_row() for estimate in listed) or (dict.fromkeys(ESTIMATE_COLUMNS),),
    )


def estimate_cell(estimate: Estimate, unit: Unit, decimals: int, mark: str = "") -> Cell:
    """An estimate with its interval under it."""
    if estimate.estimate is None:
        return Cell(MISSING)
    beside = published(estimate, unit, decimals)
    return Cell(point(estimate, unit, decimals), interval(estimate, unit, decimals), mark, published=beside)


def marks(estimates: Iterable[Estimate]) -> dict[str, str]:
    """The mark for each standing in one table: primary always has one, exploratory where others stand beside it."""
    present = {row.standing for row in estimates if row.has_interval}
    return {PRIMARY: "†", EXPLORATORY: "‡" if len(present) > 1 else ""}


def status_note(estimates: Iterable[Estimate]) -> str:
    """One sentence on the intervals of these estimates: levels, and what was prespecified."""
    known = [row for row in estimates if row.estimate is not None]
    if not known:
        return "No estimates."
    bounded = [row for row in known if row.has_interval]
    if not bounded:
        return "Points only: intervals are missing."
    mark = marks(bounded)
    parts = []
    for standing, words in _STANDINGS.items():
        rows = [row for row in bounded if row.standing == standing]
        if rows:
            parts.append(f"{mark[standing]} {words} {_levels(rows)}".lstrip())
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _levels(rows: list[Estimate]) -> str:
    levels = sorted({row.level for row in rows if row.level is not None})
    return f"{' and '.join(level(value) for value in levels)} intervals"


def _unit_of(column: Column) -> Unit:
    return next((unit for unit in Unit if unit.sign == column.unit), Unit.TOKENS)
