"""What a branch window of depth L leaves open: the identified interval of R, and whether two actions are ordered.

The rows are those of the views ``identified_interval`` and ``action_ordering``, pooled; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from report.printing.blocks import Cell, Column, Table, label_column, text_cell
from report.printing.blocks import Row as Line
from report.printing.canvas import QUIET, ActionStyle, new_figure, shown
from report.printing.numbers import count, decimals_of, fixed, level
from report.printing.strokes import BAND, WIDTH, action_legend, percent_axis, position_axis, zero_line
from report.reading.quantities import POOLED
from report.reading.source import Row, StudyRows
from schema.windows import Windows

_FEW = 5


@dataclass(frozen=True)
class Depths:
    """The pooled rows of both views, by action and depth."""

    intervals: dict[str, list[Row]]
    orderings: dict[str, list[Row]]

    def ordered_from(self, action: str) -> int | None:
        """The least depth from which on the action and the baseline are ordered at every depth; None if never."""
        found = None
        for row in reversed(self.orderings.get(action, [])):
            if not row["ordered"]:
                break
            found = int(row["depth"])
        return found


def read_depths(source: StudyRows, split: str, actions: Sequence[str], baseline: str) -> Depths:
    """The rows of ``actions``, and of their contrasts to ``baseline``."""
    where = {"split": split, "stratum": POOLED}
    intervals, orderings = (
        sorted(source.of(view, **where, **extra), key=lambda row: int(row["depth"]))
        for view, extra in (("identified_interval", {}), ("action_ordering", {"baseline": baseline}))
    )
    return Depths(by_action(intervals, actions), by_action(orderings, actions))


def selected_depths(windows: Windows) -> list[int]:
    """The depths of the tables: 1, H/8, H/4, H/2, H; all of them where they are so few."""
    if windows.horizon <= _FEW:
        return list(range(1, windows.horizon + 1))
    return sorted({1, *(windows.horizon // part for part in (8, 4, 2, 1))} - {0})


def depth_table(
    intervals: Mapping[str, Sequence[Row]],
    windows: Windows,
    *,
    name: str = "identified_interval",
    title: str = "Identified interval of R by depth",
) -> Table:
    """Of each action at selected depths: the identified interval, its minimax point and risk, what the tail was."""
    wanted = set(selected_depths(windows))
    listed = [row for rows in intervals.values() for row in rows]
    ends = ("lower", "upper", "midpoint", "half_width", "realized_tail")
    shown_rows = [row for row in listed if row["depth"] in wanted]
    places = {end: decimals_of([row[end] for row in shown_rows], 100.0) for end in ends}
    lines = [
        Line(
            (
                Cell(count(row["depth"])),
                *(Cell(fixed(100 * row[end], places[end])) for end in ends),
                Cell(f"[{fixed(100 * row['enclosure_low'], 1)}, {fixed(100 * row['enclosure_high'], 1)}]"),
            ),
            row["action"],
        )
        for row in shown_rows
    ]
    columns = (
        Column("depth L", "tokens", "length of the window from the first mismatch on"),
        Column("least R", "%", "mismatch inside the window, every position after it an agreement"),
        Column("most R", "%", "every position after the window a mismatch"),
        Column("midpoint", "%", "the minimax point"),
        Column("half-width", "pp", "the midpoint’s absolute risk"),
        Column("realized tail", "pp", "what lay beyond the window: R less the least R"),
        Column("enclosure", "%", "Hoeffding enclosure that counts the sampling of documents as well"),
    )
    levels = sorted({row["level"] for row in listed})
    note = f"The enclosure holds with probability {' and '.join(level(value) for value in levels)}." if levels else ""
    return Table(name, title, columns, tuple(lines), note, tuple(listed))


def ordering_table(depths: Depths, baseline: str, windows: Windows) -> Table:
    """What R(action) − R(baseline) can be at selected depths, and from which depth on its sign is certain."""
    wanted = selected_depths(windows)
    lines = []
    for action, rows in depths.orderings.items():
        at = {row["depth"]: row for row in rows}
        cells = [
            Cell(f"[{fixed(100 * at[depth]['contrast_low'], 1)}, {fixed(100 * at[depth]['contrast_high'], 1)}]")
            if depth in at
            else Cell("")
            for depth in wanted
        ]
        first = depths.ordered_from(action)
        lines.append(Line((text_cell(action), *cells, Cell("never" if first is None else f"L = {count(first)}"))))
    columns = (
        label_column("action"),
        *(Column(f"L = {count(depth)}", "pp") for depth in wanted),
        Column("ordered from", "", "least depth from which on the interval excludes 0"),
    )
    listed = tuple(row for rows in depths.orderings.values() for row in rows)
    note = f"Every value of R(action) − R({baseline}) that fits the window; on the documents both have."
    return Table("action_ordering", f"Order against {baseline} by depth", columns, tuple(lines), note, listed)


def depth_figure(depths: Depths, styles: dict[str, ActionStyle], baseline: str, windows: Windows) -> Figure:
    """Left the interval of each action's R by depth, right that of each contrast with the baseline."""
    figure = new_figure(WIDTH, 3.9)
    others = {action: style for action, style in styles.items() if depths.orderings.get(action)}
    grid = figure.subplots(1, 2 if others else 1, squeeze=False)[0]
    for action, style in styles.items():
        interval_band(grid[0], depths.intervals.get(action, []), "lower", "upper", style)
    grid[0].set_title("a  R that fits a window of depth L")
    percent_axis(grid[0], "R (%)")
    position_axis(grid[0], windows.horizon, "depth L (tokens)")
    sample = [
        Line2D([], [], color=QUIET, linewidth=1.8, label="least R"),
        Line2D([], [], color=QUIET, linewidth=0.9, label="most R"),
    ]
    grid[0].legend(handles=sample, loc="upper right", fontsize=8)
    if others:
        axes = grid[1]
        for action, style in others.items():
            rows = depths.orderings[action]
            interval_band(axes, rows, "contrast_low", "contrast_high", style)
            first = depths.ordered_from(action)
            if first is not None:
                axes.plot([first], [0], marker=style.marker, color=style.colour, markersize=6, zorder=4, clip_on=False)
        zero_line(axes, upright=False)
        axes.set_title(f"b  R less that of {shown(baseline)}")
        percent_axis(axes, "difference in R (percentage points)")
        position_axis(axes, windows.horizon, "depth L (tokens)")
    action_legend(figure, styles, marker=True)
    return figure


def interval_band(axes: Axes, rows: Sequence[Row], low: str, high: str, style: ActionStyle) -> None:
    """Intervals by depth as a shaded band, its lower edge the stronger line."""
    depth = [row["depth"] for row in rows]
    least, most = ([100 * row[end] for row in rows] for end in (low, high))
    axes.fill_between(depth, least, most, color=style.colour, alpha=BAND, linewidth=0)
    axes.plot(depth, least, color=style.colour, linestyle=style.dashes, linewidth=1.8)
    axes.plot(depth, most, color=style.colour, linestyle=style.dashes, linewidth=0.9)


def by_action(rows: Sequence[Row], actions: Sequence[str]) -> dict[str, list[Row]]:
    """Rows of each action that has some, in the order of ``actions``."""
    found = {action: [row for row in rows if row["action"] == action] for action in actions}
    return {action: own for action, own in found.items() if own}
