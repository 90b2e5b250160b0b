"""A table as the page, a CSV file and a LaTeX file take it: plain cells, no markup."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from report.printing.numbers import MISSING, decimals_for, interval, level, scaled
from report.reading.content import PageContent
from report.reading.estimates import ESTIMATE_COLUMNS, FEW_CLUSTERS, PRIMARY, Estimate, ReportedEstimates
from schema.study import POOLED
from stats.intervals import EXPLORATORY, SEEN
from stats.quantities import ALL_QUANTITIES
from stats.registry import DIFFERENCE, Scale

_STANDINGS = {
    PRIMARY: "prespecified primary endpoints, family-adjusted",
    SEEN: "primary endpoints that were planned after their outcomes had been seen, family-adjusted",
    EXPLORATORY: "exploratory, pointwise",
}

FEW_MARK = "*"
_ABREAST = 6  # quantities that stand side by side as columns
_ACROSS = 4  # actions that stand side by side as columns
NOISE_FLOOR = "noise floor"  # under the name of an action that numerics alone move

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


@dataclass(frozen=True)
class EstimateColumn:
    """A column of estimates: a quantity, of a profile at ``x``; head and meaning are the quantity's unless given."""

    quantity: str
    x: int | None = None
    head: str = ""
    meaning: str = ""

    @property
    def scale(self) -> Scale:
        """How its values are printed."""
        return ALL_QUANTITIES[self.quantity].scale

    @property
    def column(self) -> Column:
        """Its head."""
        known = ALL_QUANTITIES[self.quantity]
        return Column(self.head or known.label, self.scale.sign, self.meaning or known.meaning)


@dataclass(frozen=True)
class CellColumn:
    """A column of ready cells by stratum and action, missing ones as a dash."""

    column: Column
    cells: Mapping[tuple[str, str], Cell]


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


def columns_of(*quantities: str) -> list[EstimateColumn]:
    """Columns of scalar quantities."""
    return [EstimateColumn(quantity) for quantity in quantities]


def action_table(
    name: str,
    title: str,
    estimates: ReportedEstimates,
    actions: Sequence[str],
    columns: Sequence[EstimateColumn | CellColumn],
    *,
    baseline: str | None = None,
    strata: Sequence[str] = (POOLED,),
    note: str = "",
    records: tuple[dict[str, Any], ...] = (),
) -> PrintedTable:
    """A table with a row for each action, grouped by stratum; a column has one count of decimals for all its rows.

    With a baseline the columns' quantities are contrasts to it. The pooled rows have no heading. ``note`` stands before
    the note on the intervals; ``records`` are what the CSV file has in place of the estimates.
    """
    places = [(stratum, action) for stratum in strata for action in actions]
    found = {
        column: [estimates.get(column.quantity, action, baseline, stratum=own, x=column.x) for own, action in places]
        for column in columns if isinstance(column, EstimateColumn)
    }  # fmt: skip
    listed = [entry for row in zip(*found.values(), strict=True) for entry in row]
    mark = marks(listed)
    cells = [
        estimate_cells(found[column], column.scale, mark)
        if isinstance(column, EstimateColumn)
        else [column.cells.get(place, Cell(MISSING)) for place in places]
        for column in columns
    ]
    rows = [
        table_row(action, *own, group="" if stratum == POOLED else stratum)
        for (stratum, action), own in zip(places, zip(*cells, strict=True), strict=True)
    ]
    records = records or tuple(entry.as_row() for entry in listed) or (dict.fromkeys(ESTIMATE_COLUMNS),)
    heads = (label_column("action"), *(column.column for column in columns))
    return PrintedTable(name, title, heads, tuple(rows), f"{note} {status_note(listed)}".strip(), records)


def action_tables(
    name: str,
    title: str,
    content: PageContent,
    columns: Sequence[EstimateColumn | CellColumn],
    *,
    actions: Sequence[str] | None = None,
    contrasts: bool = False,
    note: str = "",
) -> tuple[PrintedTable, ...]:
    """The table of all actions or of ``actions``, or of all contrasts with the baseline; and ``NAME_by_stratum``."""
    rows, baseline = (content.others, content.baseline) if contrasts else (actions or content.actions, None)
    floors = content.facts.noise_floors
    return tuple(
        _with_floors(
            action_table(full, title, content.estimates, rows, columns, baseline=baseline, strata=strata, note=note),
            floors,
        )
        for full, strata in ((name, (POOLED,)), (f"{name}_by_stratum", content.facts.strata))
    )


def _with_floors(table: PrintedTable, floors: Sequence[str]) -> PrintedTable:
    """The table with its noise floors marked as such."""
    rows = tuple(
        replace(row, cells=(replace(row.cells[0], under=NOISE_FLOOR), *row.cells[1:]))
        if row.cells[0].text in floors
        else row
        for row in table.rows
    )
    return replace(table, rows=rows)


def contrast_rows_table(
    name: str,
    title: str,
    estimates: ReportedEstimates,
    quantities: Sequence[str],
    actions: Sequence[str],
    baseline: str,
) -> PrintedTable:
    """A table of contrasts: a row for each and a column for each action, or, of many actions, the other way round."""
    series = [[estimates.get(quantity, action, baseline) for action in actions] for quantity in quantities]
    listed = [entry for entries in series for entry in entries]
    mark = marks(listed)
    known = [ALL_QUANTITIES[quantity] for quantity in quantities]
    meanings = [ALL_QUANTITIES[quantity.removesuffix(DIFFERENCE)].meaning for quantity in quantities]
    cells = [estimate_cells(entries, one.scale, mark) for entries, one in zip(series, known, strict=True)]
    abreast = 0
    if len(actions) > _ACROSS:
        abreast = _ABREAST
        columns = (
            label_column("action"),
            *(Column(one.label, one.scale.sign, of) for one, of in zip(known, meanings, strict=True)),
        )
        rows = [table_row(action, *own) for action, *own in zip(actions, *cells, strict=True)]
    else:
        columns = (label_column("quantity"), label_column("unit"), *(Column(action) for action in actions))
        rows = [
            table_row(Cell(one.label, of), Cell(one.scale.sign), *own)
            for one, of, own in zip(known, meanings, cells, strict=True)
        ]
    note = f"Differences to {baseline}. {status_note(listed)}"
    records = tuple(entry.as_row() for entry in listed)
    return PrintedTable(name, title, columns, tuple(rows), note, records, abreast)


def estimate_cells(entries: Sequence[Estimate], scale: Scale, mark: Mapping[str, str]) -> list[Cell]:
    """Estimates with their intervals and the paper's numbers under them, all to the same count of decimals."""
    decimals = decimals_for(entries, scale)
    cells = []
    for entry in entries:
        printed = "" if entry.published is None else f"published {scaled(entry.published, scale, decimals)}"
        point, bounds = scaled(entry.estimate, scale, decimals), interval(entry, scale, decimals)
        few = FEW_MARK if entry.of_few_clusters else ""
        known = Cell(point, bounds, mark.get(entry.standing, "") + few, printed)
        cells.append(Cell(MISSING) if entry.estimate is None else known)
    return cells


def marks(estimates: Iterable[Estimate]) -> dict[str, str]:
    """The mark for each standing in one table: planned ones have one, exploratory where others stand beside it."""
    present = {row.standing for row in estimates if row.has_interval}
    return {PRIMARY: "†", SEEN: "§", EXPLORATORY: "‡" if len(present) > 1 else ""}


def status_note(estimates: Iterable[Estimate]) -> str:
    """One sentence on the intervals of these estimates: levels, and what was prespecified."""
    known = [row for row in estimates if row.estimate is not None]
    bounded = [row for row in known if row.has_interval]
    if not bounded:
        return "Points only: intervals are missing." if known else "No estimates."
    mark, parts = marks(bounded), []
    for standing, words in _STANDINGS.items():
        levels = sorted({row.level for row in bounded if row.standing == standing and row.level is not None})
        if levels:
            parts.append(f"{mark[standing]} {words} {' and '.join(map(level, levels))} intervals".lstrip())
    if any(row.of_few_clusters for row in bounded):
        parts.append(f"{FEW_MARK} fewer than {FEW_CLUSTERS} clusters of documents, whose interval may cover less")
    if any(row.low == row.high for row in bounded):
        parts.append("an interval of no width is over documents that are all alike, and says nothing of others")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."
