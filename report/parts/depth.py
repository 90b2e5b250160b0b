"""The section on branch windows of depth L: the identified interval of R, and whether two actions are ordered.

The rows are those of the views ``identified_interval`` and ``action_ordering``, pooled; nothing is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvdrift.report.printing.canvas import (
    ActionStyle,
    Axes,
    Figure,
    Line2D,
    action_styles,
    legend_line,
    new_figure,
    shown,
)
from kvdrift.report.printing.numbers import count, decimals_of, fixed, interval, level
from kvdrift.report.printing.palette import QUIET
from kvdrift.report.printing.section import Drawing, Section
from kvdrift.report.printing.strokes import BAND, WIDTH, percent_axis, position_axis, zero_line
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.source import ViewRow
from kvdrift.schema.windows import Windows
from kvdrift.stats.registry import Scale

_FEW = 5
ACROSS = 3  # panels in a row

TEMPLATE = """
{% if tables %}
{% call figure("depth") %}<b>How deep a window must be.</b> The first L positions of each branch, τ included, determine R only up to the shaded interval. At its lower edge all later positions agree, and at its upper edge all of them differ.{% if content.others %} The last panels have the same interval for the differences to {{ content.baseline }}. Where a band excludes 0 (from the marker on), the order of the two actions is certain.{% endif %} At L = {{ windows.horizon }} R is known.{% endcall %}
<p class="how">The error of the midpoint is at most the half-width, and no estimate from the same window has a smaller bound. The realized tail is the part of R beyond the window. The enclosure also counts the sampling of documents.{% if both %} {{ both }}{% endif %}</p>
{{ table(tables.identified_interval) }}
{% if tables.action_ordering is defined %}
<p class="how">An interval on one side of 0 orders the two actions, whatever happens beyond the window.</p>
{{ table(tables.action_ordering) }}
{% endif %}
{% else %}{{ absent("identified intervals") }}{% endif %}
"""  # noqa: E501


@dataclass(frozen=True)
class Depths:
    """The pooled rows of both views by action, in the order of depths."""

    intervals: dict[str, list[ViewRow]]
    orderings: dict[str, list[ViewRow]]

    def ordered_from(self, action: str) -> int | None:
        """Return the least depth from which on action and baseline are ordered at all depths; None if there is none."""
        found = None
        for row in reversed(self.orderings.get(action, [])):
            if not row["ordered"]:
                break
            found = int(row["depth"])
        return found


def section(content: PageContent) -> Section:
    """Make the section: the range of R that a window of each depth leaves."""
    depths = read_depths(content)
    if not depths.intervals:
        return Section("depth", "What a short window cannot tell", TEMPLATE)
    name, title = "identified_interval", "Identified interval of R by depth"
    ordering = (ordering_table(depths, content),) if depths.orderings else ()
    tables = (depth_table(depths.intervals, content.windows, name, title), *ordering)
    words = "Identified interval of R and of its contrasts by depth of the branch window"
    drawing = Drawing("depth", words, partial(depth_figure, depths, content))
    values = {"both": enclosure_sentence(content, depths)}
    return Section("depth", "What a short window cannot tell", TEMPLATE, tables, (drawing,), values)


def enclosure_sentence(content: PageContent, depths: Depths) -> str:
    """Explain why the enclosure of R at full depth is wider than R's interval; empty if either is missing."""
    action = next(iter(depths.intervals))
    row, risk = depths.intervals[action][-1], content.estimates.get("mismatch", action)
    if row["depth"] != content.windows.horizon or not risk.has_interval:
        return ""
    return (
        f"At L = {count(row['depth'])} the enclosure is for the same R as the interval in the other sections, and is "
        f"wider: under {action}, {_range(row, 'enclosure')} beside {interval(risk, Scale.PERCENT, 1)}. The enclosure "
        "supposes only that R is between 0 and 1, and is valid for any number of documents. The interval follows from "
        "the differences between the documents of this study, and its level is approximate. Compare actions by "
        "intervals; use the enclosure if the level must be guaranteed."
    )


def read_depths(content: PageContent) -> Depths:
    """Read the rows of the page's actions, and of their contrasts to the baseline."""
    intervals = by_depth(content.pooled("identified_interval"), content.actions)
    return Depths(intervals, by_depth(content.pooled("action_ordering", baseline=content.baseline), content.actions))


def by_depth(rows: Sequence[ViewRow], actions: Sequence[str]) -> dict[str, list[ViewRow]]:
    """Return the rows of each action by depth, in the order of ``actions``; actions without rows are left out."""
    ordered = sorted(rows, key=lambda row: int(row["depth"]))
    found = {action: [row for row in ordered if row["action"] == action] for action in actions}
    return {action: own for action, own in found.items() if own}


def selected_depths(windows: Windows) -> list[int]:
    """Return the depths of the tables: 1, H/8, H/4, H/2 and H; all depths if the horizon is at most 5."""
    if windows.horizon <= _FEW:
        return list(range(1, windows.horizon + 1))
    return sorted({1, *(windows.horizon // part for part in (8, 4, 2, 1))} - {0})


def depth_table(intervals: Mapping[str, Sequence[ViewRow]], windows: Windows, name: str, title: str) -> PrintedTable:
    """Make the table of identified intervals at selected depths, with minimax point, risk and realized tail."""
    wanted = set(selected_depths(windows))
    listed = [row for rows in intervals.values() for row in rows]
    ends = ("lower", "upper", "midpoint", "half_width", "realized_tail")
    shown_rows = [row for row in listed if row["depth"] in wanted]
    places = {end: decimals_of([row[end] for row in shown_rows], 100.0) for end in ends}
    lines = [
        table_row(
            count(row["depth"]),
            *(fixed(100 * row[end], places[end]) for end in ends),
            _range(row, "enclosure"),
            group=row["action"],
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
    return PrintedTable(name, title, columns, tuple(lines), note, tuple(listed))


def ordering_table(depths: Depths, content: PageContent) -> PrintedTable:
    """Make the table of the range of R(action) − R(baseline) by depth, and the depth that makes its sign certain."""
    wanted, baseline = selected_depths(content.windows), content.baseline
    lines = []
    for action, rows in depths.orderings.items():
        at = {row["depth"]: row for row in rows}
        cells = [_range(at[depth], "contrast") if depth in at else Cell("") for depth in wanted]
        first = depths.ordered_from(action)
        lines.append(table_row(action, *cells, "never" if first is None else f"L = {count(first)}"))
    columns = (
        label_column("action"),
        *(Column(f"L = {count(depth)}", "pp") for depth in wanted),
        Column("ordered from", "", "least depth from which on the interval excludes 0"),
    )
    listed = tuple(row for rows in depths.orderings.values() for row in rows)
    note = f"The range of R(action) − R({baseline}) given the window, on the documents of both actions."
    return PrintedTable("action_ordering", f"Order against {baseline} by depth", columns, tuple(lines), note, listed)


def _range(row: ViewRow, name: str) -> str:
    return f"[{fixed(100 * row[f'{name}_low'], 1)}, {fixed(100 * row[f'{name}_high'], 1)}]"


def depth_figure(depths: Depths, content: PageContent) -> Figure:
    """Draw a panel for each action with the interval of its R by depth, and one for each contrast with the baseline."""
    styles, windows = action_styles(content.actions), content.windows
    others = {action: style for action, style in styles.items() if depths.orderings.get(action)}
    above, below = window_lines(len(styles)), window_lines(len(others))
    figure = new_figure(WIDTH, 0.5 + 2.3 * (above + below))
    grid = figure.subplots(above + below, ACROSS, squeeze=False)
    window_panels(grid[:above], depths.intervals, styles, windows)
    for axes, (action, style) in zip(grid[above:].flat, others.items(), strict=False):
        interval_band(axes, depths.orderings[action], "contrast_low", "contrast_high", style)
        if (first := depths.ordered_from(action)) is not None:
            axes.plot([first], [0], marker=style.marker, color=style.colour, markersize=6, zorder=4, clip_on=False)
        zero_line(axes, upright=False)
        axes.set_title(f"{shown(action)} − {content.baseline}")
        percent_axis(axes, "difference in R (pp)")
        position_axis(axes, windows.horizon, "depth L (tokens)")
    drawn = list(grid[above:].flat)[: len(others)]
    for axes in drawn:  # differences, too, have one scale
        axes.set_ylim(min(one.get_ylim()[0] for one in drawn), max(one.get_ylim()[1] for one in drawn))
    for axes in grid[above:].flat[len(others) :]:
        axes.set_visible(False)
    figure.legend(handles=edges(), loc="outside upper left", ncols=2)
    return figure


def edges(of: str = "") -> list[Line2D]:
    """Return the legend entries of both ends of an interval."""
    return [
        legend_line(f"least R{of}", color=QUIET, linewidth=1.8), legend_line(f"most R{of}", color=QUIET, linewidth=0.9)
    ]  # fmt: skip


def window_lines(panels: int) -> int:
    """Return the number of rows of a figure with so many panels."""
    return math.ceil(panels / ACROSS)


def window_panels(
    grid: Any, intervals: Mapping[str, Sequence[ViewRow]], styles: Mapping[str, ActionStyle], windows: Windows
) -> None:
    """Draw the interval of R by depth, a panel for each action on one scale; hide unused panels."""
    most = max((100 * row["upper"] for action in styles for row in intervals.get(action, [])), default=100.0)
    for axes, (action, style) in zip(grid.flat, styles.items(), strict=False):
        interval_band(axes, intervals.get(action, []), "lower", "upper", style)
        axes.set_title(shown(action))
        axes.set_ylim(0, min(101.0, 1.15 * most) or 1.0)
        percent_axis(axes, "R (%)")
        position_axis(axes, windows.horizon, "depth L (tokens)")
    for axes in grid.flat[len(styles) :]:
        axes.set_visible(False)


def interval_band(axes: Axes, rows: Sequence[ViewRow], low: str, high: str, style: ActionStyle) -> None:
    """Draw intervals by depth as a shaded band with a stronger line at the lower edge."""
    depth = [row["depth"] for row in rows]
    least, most = ([100 * row[end] for row in rows] for end in (low, high))
    axes.fill_between(depth, least, most, color=style.colour, alpha=BAND, linewidth=0)
    axes.plot(depth, least, color=style.colour, linestyle=style.dashes, linewidth=1.8)
    axes.plot(depth, most, color=style.colour, linestyle=style.dashes, linewidth=0.9)
