r"""A table as LaTeX: a ``table`` float that needs the package ``booktabs`` and nothing else.

Under each row of numbers stands a row with their intervals, and one with the paper's numbers where there are any.
Units stand in the head. Text is escaped; Greek and the other signs of this page become math, so pdflatex takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvdrift.report.printing.tables import Cell, PrintedTable

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
_LONGEST = 2  # in characters: C with a combining bar
_MANY_COLUMNS = 7


def escape(text: str) -> str:
    """Escape text for LaTeX; a sign without a known command is kept, for engines that read Unicode."""
    written: list[str] = []
    place = 0
    while place < len(text):
        part = text[place : place + _LONGEST]
        if part not in _SIGNS:
            part = text[place]
        sign = _SIGNS.get(part, part)
        if sign.startswith("$") and written and written[-1].startswith("$"):  # join neighbouring math to one formula
            written[-1] = written[-1][:-1] + sign[1:]
        else:
            written.append(sign)
        place += len(part)
    return "".join(written)


def write_tex(table: PrintedTable, folder: Path) -> None:
    """Write ``NAME.tex``."""
    (folder / f"{table.name}.tex").write_text(latex(table), encoding="utf-8", newline="\n")


def latex(table: PrintedTable) -> str:
    """Return the table as a float with its title and note as caption."""
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
    """Return a row with its intervals and published numbers under it; words under a label go in the label's line."""
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
