"""Tables of estimates: each cell has a number with its interval and standing, and a note explains them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvdrift.report.printing.numbers import MISSING, decimals_for, interval, level, scaled
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import ESTIMATE_COLUMNS, FEW_CLUSTERS, Estimate, ReportedEstimates
from kvdrift.schema.study import POOLED
from kvdrift.stats.bootstrap import EXPLORATORY, PRESPECIFIED, SEEN
from kvdrift.stats.quantities import ALL_QUANTITIES, SIMULTANEOUS_OF
from kvdrift.stats.registry import Scale

NOISE_FLOOR = "noise floor"  # printed under the name of an action that differs by rounding or repetition alone

_STANDINGS = {
    PRESPECIFIED: "prespecified primary endpoints, family-adjusted",
    SEEN: "primary endpoints that were planned after their outcomes had been seen, family-adjusted",
    EXPLORATORY: "exploratory, pointwise",
}

_LESS_MARK = "*"
_ABREAST = 6  # differences side by side as columns


@dataclass(frozen=True)
class EstimateColumn:
    """A column of a quantity's estimates; if the quantity is a profile, of those at position, lag or block ``x``.

    ``head`` and ``meaning``, if given, replace the label and the meaning that the quantity has.
    """

    quantity: str
    x: int | None = None
    head: str = ""
    meaning: str = ""

    @property
    def scale(self) -> Scale:
        """The scale on which the values are printed."""
        return ALL_QUANTITIES[self.quantity].scale

    @property
    def column(self) -> Column:
        """The column's head."""
        known = ALL_QUANTITIES[self.quantity]
        return Column(self.head or known.label, self.scale.sign, self.meaning or known.meaning)


@dataclass(frozen=True)
class CellColumn:
    """A column of finished cells, keyed by (stratum, action); a row without a cell gets a dash."""

    column: Column
    cells: Mapping[tuple[str, str], Cell]


def quantity_columns(estimates: Mapping[str, Sequence[Estimate]]) -> tuple[list[Column], list[list[Cell]], str]:
    """Return the columns of a table that has one for each quantity: their heads, their cells, and the note on all.

    ``estimates`` has those of each quantity, one for each row of the table.
    """
    listed = [row for rows in estimates.values() for row in rows]
    mark = marks(listed)
    cells = [estimate_cells(rows, ALL_QUANTITIES[name].scale, mark) for name, rows in estimates.items()]
    return [column.column for column in columns_of(*estimates)], cells, status_note(listed)


def columns_of(*quantities: str) -> list[EstimateColumn]:
    """Return a column for each of some scalar quantities."""
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
    under: Mapping[str, str] = MappingProxyType({}),
    abreast: int = 0,
) -> PrintedTable:
    """Make a table with a row for each action, grouped by stratum; all rows of a column have equally many decimals.

    If a baseline is given, the quantities are contrasts to the baseline. The pooled rows have no heading. ``note``
    precedes the note on the intervals; ``records`` replace the estimates in the CSV file. ``under`` has
    the words below the name of an action; ``abreast`` is that of the table.
    """
    places = [(stratum, action) for stratum in strata for action in actions]
    column_estimates = {
        column: [
            estimates.get(column.quantity, action, baseline, stratum=stratum, x=column.x) for stratum, action in places
        ]
        for column in columns if isinstance(column, EstimateColumn)
    }  # fmt: skip
    listed = [entry for row in zip(*column_estimates.values(), strict=True) for entry in row]
    mark = marks(listed)
    cells = [
        estimate_cells(column_estimates[column], column.scale, mark)
        if isinstance(column, EstimateColumn)
        else [column.cells.get(place, Cell(MISSING)) for place in places]
        for column in columns
    ]
    rows = [
        table_row(Cell(action, under.get(action, "")), *row_cells, group="" if stratum == POOLED else stratum)
        for (stratum, action), row_cells in zip(places, zip(*cells, strict=True), strict=True)
    ]
    records = records or tuple(entry.as_row() for entry in listed) or (dict.fromkeys(ESTIMATE_COLUMNS),)
    heads = (label_column("action"), *(column.column for column in columns))
    return PrintedTable(name, title, heads, tuple(rows), f"{note} {status_note(listed)}".strip(), records, abreast)


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
    """Make two tables, pooled and by stratum: of ``actions`` (default: all), or of the contrasts with the baseline."""
    rows, baseline = (content.others, content.baseline) if contrasts else (actions or content.actions, None)
    under = dict.fromkeys(content.facts.noise_floors, NOISE_FLOOR)
    of: Any = {"baseline": baseline, "note": note, "under": under}
    return tuple(
        action_table(f"{name}{end}", f"{title}{words}", content.estimates, rows, columns, strata=strata, **of)
        for end, words, strata in (("", "", (POOLED,)), ("_by_stratum", ", by stratum", content.facts.strata))
    )


def differences_table(name: str, title: str, content: PageContent, quantities: Sequence[str]) -> PrintedTable:
    """Make a table of differences to the baseline: a row for each other action, a column for each quantity."""
    return action_table(
        name, title, content.estimates, content.others, columns_of(*quantities), baseline=content.baseline,
        note=f"Differences to {content.baseline}.", abreast=_ABREAST,
    )  # fmt: skip


def estimate_cells(entries: Sequence[Estimate], scale: Scale, mark: Mapping[str, str]) -> list[Cell]:
    """Print estimates with their intervals and the paper's numbers, all with the same number of decimals.

    ``mark`` has the mark of each standing, as from ``marks``.
    """
    decimals = decimals_for(entries, scale)
    cells = []
    for entry in entries:
        printed = "" if entry.published is None else f"published {scaled(entry.published, scale, decimals)}"
        point, bounds = scaled(entry.estimate, scale, decimals), interval(entry, scale, decimals)
        less = _LESS_MARK if entry.of_few_clusters or entry.is_skewed else ""
        known = Cell(point, bounds, mark.get(entry.standing, "") + less, printed)
        cells.append(Cell(MISSING) if entry.estimate is None else known)
    return cells


def marks(estimates: Iterable[Estimate]) -> dict[str, str]:
    """Return the mark, such as †, of each standing: prespecified, seen and exploratory.

    Exploratory estimates have no mark if all intervals are exploratory.
    """
    present = {row.standing for row in estimates if row.has_interval}
    return {PRESPECIFIED: "†", SEEN: "§", EXPLORATORY: "‡" if len(present) > 1 else ""}


def status_note(estimates: Iterable[Estimate]) -> str:
    """Write one sentence on the intervals of these estimates: their levels, and which were prespecified."""
    known = [row for row in estimates if row.estimate is not None]
    bounded = [row for row in known if row.has_interval]
    if not bounded:
        return "Points only: intervals are missing." if known else "No estimates."
    mark, parts = marks(bounded), []
    for standing, words in _STANDINGS.items():
        levels = sorted({row.level for row in bounded if row.standing == standing and row.level is not None})
        if levels:
            together = all(row.quantity in SIMULTANEOUS_OF.values() for row in bounded)
            standing_words = "exploratory, simultaneous" if together else words
            parts.append(f"{mark[standing]} {standing_words} {' and '.join(map(level, levels))} intervals".lstrip())
    because = [
        *([f"from fewer than {FEW_CLUSTERS} clusters of documents"] * any(row.of_few_clusters for row in bounded)),
        *(["decided by a few documents"] * any(row.is_skewed for row in bounded)),
    ]
    if because:
        parts.append(f"{_LESS_MARK} {' or '.join(because)}: the interval may hold the truth less often")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."
