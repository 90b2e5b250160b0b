"""A table of plain cells without markup, for the page, a CSV file and a LaTeX file.

In LaTeX it is a ``table`` float that needs the package ``booktabs`` and nothing else. Under each row of numbers stands
a row with their intervals, and a row with the paper's numbers if there are any. Text is escaped; Greek and the other
signs of the page become math, so pdflatex takes them.
"""

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


_SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "\u00a0": "~", "–": "--", "—": "---", "’": "'", "“": "``", "”": "''",
    "…": r"\ldots{}", "−": "$-$", "·": r"$\cdot$", "×": r"$\times$", "±": r"$\pm$", "≤": r"$\le$", "≥": r"$\ge$",
    "≠": r"$\neq$", "→": r"$\to$", "∈": r"$\in$", "∅": r"$\emptyset$", "τ": r"$\tau$", "δ": r"$\delta$",
    "ε": r"$\varepsilon$", "λ": r"$\lambda$", "Δ": r"$\Delta$", "Π": r"$\Pi$", "Σ": r"$\Sigma$", "Ē": r"$\bar{E}$",
    "C̄": r"$\bar{C}$", "₀": "$_0$", "₁": "$_1$", "₂": "$_2$", "₃": "$_3$", "†": r"$^{\dagger}$", "‡": r"$^{\ddagger}$",
    "§": r"$^{\S}$",
    "²": "$^2$", "›": r"$\triangleright$", "✓": r"$\surd$",
}  # fmt: skip
_SIGN = re.compile("|".join(map(re.escape, sorted(_SIGNS, key=len, reverse=True))))
_TWO_FORMULAS = re.compile(r"(?<!\\)\$\$")  # neighbouring formulas become one
_MANY_COLUMNS = 7


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
    """A table, as printed on the page and written to files."""

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
        """Split a table too wide for the page into parts, one below the other, that each have the first column."""
        if not self.abreast or len(self.columns) <= 1 + self.abreast:
            return [self]
        starts = range(1, len(self.columns), self.abreast)
        return [
            replace(
                self,
                name=self.name if part == 1 else f"{self.name}-{first}",
                title=self.title if part == 1 else f"{self.title}, part {part}",
                columns=(self.columns[0], *self.columns[first : first + self.abreast]),
                rows=tuple(
                    replace(row, cells=(row.cells[0], *row.cells[first : first + self.abreast])) for row in self.rows
                ),
                note=self.note if first == starts[-1] else "",
            )
            for part, first in enumerate(starts, 1)
        ]

    def write_csv(self, folder: Path) -> None:
        """Write ``NAME.csv``: one estimate on a line, unrounded; without estimates, the cells as they are printed."""
        if self.records:
            write_records(folder / f"{self.name}.csv", self.records)
            return
        heads = [f"{column.head} ({column.unit})" if column.unit else column.head for column in self.columns]
        lines = [dict(zip(heads, (cell.text for cell in row.cells), strict=True)) for row in self.rows]
        write_records(folder / f"{self.name}.csv", lines, heads)


def write_records(path: Path, records: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write records as CSV; None is an empty field, floats keep every digit.

    Texts that a spreadsheet would take for a formula get an apostrophe in front, since other people may have chosen
    the names.
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


def escape(text: str) -> str:
    """Escape text for LaTeX; a sign without a known command is kept, for engines that read Unicode."""
    return _TWO_FORMULAS.sub("", _SIGN.sub(lambda sign: _SIGNS[sign[0]], text))


def write_tex(table: PrintedTable, folder: Path) -> None:
    """Write a table in LaTeX to the file ``NAME.tex`` of a folder, NAME being the table's name."""
    (folder / f"{table.name}.tex").write_text(latex(table), encoding="utf-8", newline="\n")


def latex(table: PrintedTable) -> str:
    """Return the table as a LaTeX float, with its title and note as the caption."""
    kinds = "".join("l" if column.left else "r" for column in table.columns)
    size = r"\scriptsize" if len(kinds) > _MANY_COLUMNS else r"\small"
    lines = [
        "% Needs \\usepackage{booktabs}.",
        r"\begin{table}[t]",
        rf"\centering{size}\setlength{{\tabcolsep}}{{4pt}}",
        rf"\begin{{tabular}}{{@{{}}{kinds}@{{}}}}",
        r"\toprule",
        _line([escape(column.head) for column in table.columns]),
    ]
    if any(column.unit for column in table.columns):
        lines.append(_line([escape(column.unit) for column in table.columns]))
    lines.append(r"\midrule")
    group = ""
    for row in table.rows:
        if row.group and row.group != group:
            lines += [r"\addlinespace"] if group else []
            lines.append(rf"\multicolumn{{{len(kinds)}}}{{@{{}}l}}{{\textit{{{escape(row.group)}}}}} \\")
            group = row.group
        lines += _row(row.cells, [column.left for column in table.columns])
    caption = ". ".join(part for part in (escape(table.title), escape(table.note)) if part)
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", rf"\label{{tab:{table.name}}}"]
    return "\n".join([*lines, r"\end{table}", ""])


def _row(cells: Sequence[Cell], left: Sequence[bool]) -> list[str]:
    """Return a row's lines in LaTeX: numbers, intervals, published numbers; words under a label follow the label."""
    beside = [f" ({cell.under})" if label and cell.under else "" for cell, label in zip(cells, left, strict=True)]
    first = [_guarded(escape(cell.text + cell.mark + words)) for cell, words in zip(cells, beside, strict=True)]
    intervals = ["" if label else cell.under for cell, label in zip(cells, left, strict=True)]
    small = [texts for texts in (intervals, [cell.published for cell in cells]) if any(texts)]
    return [
        _line(first),
        *(_line([rf"{{\scriptsize {escape(text)}}}" if text else "" for text in texts]) for texts in small),
    ]


def _guarded(text: str) -> str:
    """Put braces around a cell that begins with a bracket or star, which LaTeX would read as a line break's option."""
    return f"{{{text}}}" if text.startswith(("[", "*")) else text


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
