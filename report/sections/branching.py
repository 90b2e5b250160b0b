"""The sections on windows after the first mismatch and on residual branching (SWRB), the other estimator of R.

A window of L positions leaves an interval in which R lies. Points are those of the views ``identified_interval``,
``action_ordering``, ``swrb_risk``, ``swrb_efficiency`` and ``swrb_windows``, intervals those of ``estimates``; only a
difference divided by its standard error is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvdrift.report.figures.canvas import (
    INK,
    QUIET,
    ActionStyle,
    Axes,
    Figure,
    action_styles,
    legend_line,
    new_figure,
    shown,
)
from kvdrift.report.figures.strokes import (
    BAND,
    WIDTH,
    action_legend,
    log_axis,
    mark,
    percent_axis,
    position_axis,
    zero_line,
)
from kvdrift.report.printing.estimate_tables import CellColumn, EstimateColumn, action_table, action_tables, columns_of
from kvdrift.report.printing.numbers import MISSING, count, decimals_of, fixed, level
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate, ReportedEstimates, ViewRow
from kvdrift.report.sections.findings import sentence
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.schema.study import POOLED
from kvdrift.schema.windows import Windows

ACROSS = 3  # panels in a row


PAYS, LOSES, OPEN = "pays", "does not pay", "undecided"
_MASS = "swrb_divergence_probability"
_RISKS = (_MASS, "plain_mismatch", "swrb_mismatch", "swrb_occurrence", "swrb_occupation")
_GAINS = (_MASS, "variance_ratio", "evaluation_ratio", "second_ratio", "efficiency", "efficiency_in_seconds")
_COSTS = (
    _MASS, "plain_variance", "swrb_variance", "plain_evaluations", "swrb_evaluations", "plain_seconds", "swrb_seconds",
)  # fmt: skip
_PANELS = (
    ("efficiency", "a  By kernel-pair evaluations", "efficiency (log scale)"),
    ("efficiency_in_seconds", "b  By decoding time", ""),
)


def ordered_from(orderings: Sequence[ViewRow]) -> int | None:
    """Return the least depth from which on the larger R of an action and the baseline is sure; None if there is none.

    The rows are one action's of view ``action_ordering``, by rising depth, the length L of the window.
    """
    least_depth = None
    for row in reversed(orderings):
        if not row["ordered"]:
            break
        least_depth = int(row["depth"])
    return least_depth


def depth_section(content: PageContent) -> Section:
    """Make the section: the range of R that a window of each depth leaves."""
    intervals = by_depth(content.pooled("identified_interval"), content.actions)
    if not intervals:
        return Section("depth", "What a short window cannot tell")
    orderings = by_depth(content.pooled("action_ordering", baseline=content.baseline), content.actions)
    title = "Identified interval of R by depth"
    tables = [depth_table(intervals, content.windows, "identified_interval", title)]
    tables += [ordering_table(orderings, content)] if orderings else []
    shows = _order_by_depth(orderings, content)
    words = "Identified interval of R and of its contrasts by depth of the branch window"
    drawing = Drawing("depth", words, partial(depth_figure, intervals, orderings, content))
    return Section("depth", "What a short window cannot tell", tuple(tables), (drawing,), shows)


def _order_by_depth(orderings: Mapping[str, Sequence[ViewRow]], content: PageContent) -> str:
    known = {action: first for action, rows in orderings.items() if (first := ordered_from(rows)) is not None}
    never = [action for action in orderings if action not in known]
    if not known:
        return sentence(f"The order of R against {content.baseline} is", {"certain at no depth": never})
    soonest, latest = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    same = known[soonest] == known[latest]
    to = "" if same else f" ({soonest}) to L = {count(known[latest])} ({latest})"
    name = f"The order of R against {content.baseline} is certain from L = {count(known[soonest])}{to} on"
    return sentence(f"{name}, and", {"at no depth": never}) or f"{name}."


def by_depth(rows: Sequence[ViewRow], actions: Sequence[str]) -> dict[str, list[ViewRow]]:
    """Return each action's rows sorted by depth, in the order of ``actions``; actions without rows are left out."""
    ordered = sorted(rows, key=lambda row: int(row["depth"]))
    by_action = {action: [row for row in ordered if row["action"] == action] for action in actions}
    return {action: action_rows for action, action_rows in by_action.items() if action_rows}


def selected_depths(windows: Windows) -> list[int]:
    """Return the depths of the tables: 1, H/8, H/4, H/2 and H."""
    return sorted({1, *(windows.horizon // part for part in (8, 4, 2, 1))} - {0})


def depth_table(intervals: Mapping[str, Sequence[ViewRow]], windows: Windows, name: str, title: str) -> PrintedTable:
    """Make the table of the interval of R at selected depths: ends, midpoint, half-width, realized tail, enclosure."""
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
        Column("realized tail", "pp", "mismatches beyond the window: R less the least R"),
        Column("enclosure", "%", "Hoeffding enclosure that counts the sampling of documents as well"),
    )
    levels = sorted({row["level"] for row in listed})
    note = f"The enclosure holds with probability {' and '.join(level(value) for value in levels)}." if levels else ""
    return PrintedTable(name, title, columns, tuple(lines), note, tuple(listed))


def ordering_table(orderings: Mapping[str, Sequence[ViewRow]], content: PageContent) -> PrintedTable:
    """Make the table of the range of R(action) − R(baseline) by depth, and the depth that makes its sign certain."""
    wanted, baseline = selected_depths(content.windows), content.baseline
    lines = []
    for action, rows in orderings.items():
        at = {row["depth"]: row for row in rows}
        cells = [_range(at[depth], "contrast") if depth in at else Cell("") for depth in wanted]
        first = ordered_from(rows)
        lines.append(table_row(action, *cells, "never" if first is None else f"L = {count(first)}"))
    columns = (
        label_column("action"),
        *(Column(f"L = {count(depth)}", "pp") for depth in wanted),
        Column("ordered from", "", "least depth from which on the interval excludes 0"),
    )
    listed = tuple(row for rows in orderings.values() for row in rows)
    note = f"The range of R(action) − R({baseline}) given the window, on the documents of both actions."
    return PrintedTable("action_ordering", f"Order against {baseline} by depth", columns, tuple(lines), note, listed)


def _range(row: ViewRow, name: str) -> str:
    return f"[{fixed(100 * row[f'{name}_low'], 1)}, {fixed(100 * row[f'{name}_high'], 1)}]"


def depth_figure(
    intervals: Mapping[str, Sequence[ViewRow]], orderings: Mapping[str, Sequence[ViewRow]], content: PageContent
) -> Figure:
    """Draw a panel for each action with the interval of its R by depth, and one for each contrast with the baseline."""
    styles, windows = action_styles(content.actions), content.windows
    others = {action: style for action, style in styles.items() if action in orderings}
    above, below = (math.ceil(panels / ACROSS) for panels in (len(styles), len(others)))
    figure = new_figure(WIDTH, 0.5 + 2.3 * (above + below))
    grid = figure.subplots(above + below, ACROSS, squeeze=False)
    window_panels(grid[:above], intervals, styles, windows)
    for axes, (action, style) in zip(grid[above:].flat, others.items(), strict=False):
        interval_band(axes, orderings[action], "contrast_low", "contrast_high", style)
        if (first := ordered_from(orderings[action])) is not None:
            axes.plot([first], [0], marker=style.marker, color=style.colour, markersize=6, zorder=4, clip_on=False)
        zero_line(axes, upright=False)
        axes.set_title(f"{shown(action)} − {content.baseline}")
        percent_axis(axes, "difference in R (pp)")
        position_axis(axes, windows.horizon, "depth L (tokens)")
    drawn = list(grid[above:].flat)[: len(others)]
    for axes in drawn:  # differences, too, have one scale
        axes.set_ylim(min(panel.get_ylim()[0] for panel in drawn), max(panel.get_ylim()[1] for panel in drawn))
    for axes in grid[above:].flat[len(others) :]:
        axes.set_visible(False)
    edges = [
        legend_line("least R", color=QUIET, linewidth=1.8), legend_line("most R", color=QUIET, linewidth=0.9)
    ]  # fmt: skip
    figure.legend(handles=edges, loc="outside upper left", ncols=2)
    return figure


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


def branching_section(content: PageContent) -> Section | None:
    """Make the section on residual branching; None if no unit is of residual branching."""
    risks = {row["action"]: row for row in content.residual_risks}
    actions = [action for action in content.actions if action in risks]
    if not actions:
        return None
    estimates, strata = content.estimates, content.facts.strata
    windows = by_depth(content.pooled("swrb_windows"), actions)
    title = "What residual branching gains"
    of_windows = "Identified interval of R by depth, by residual branching"
    tables = (
        risk_table(estimates, {action: risks[action] for action in actions}),
        *action_tables("swrb_efficiency", title, content, _gain_columns(content, actions), actions=actions),
        action_table("swrb_costs", "One replicate of each estimator", estimates, actions, columns_of(*_COSTS)),
        depth_table(windows, content.windows, "swrb_windows", of_windows),
    )
    styles = {action: style for action, style in action_styles(content.actions).items() if action in actions}
    drawings = []
    if len(actions) * len(strata) > 1 and estimates.known("efficiency"):
        words = "Efficiency of residual branching by the share of pairs that diverge, by evaluations and by time"
        drawings.append(Drawing("swrb_efficiency", words, partial(gain_figure, estimates, styles, strata)))
    groups: dict[str, list[str]] = {PAYS: [], LOSES: [], f"is {OPEN}": []}
    for action in actions:
        pays = verdict(estimates.get("efficiency", action))
        groups[f"is {OPEN}" if pays == OPEN else pays].append(action)
    shows = sentence("By kernel-pair evaluations, residual branching", groups)
    return Section("branching", "Residual branching", tables, tuple(drawings), shows)


def verdict(efficiency: Estimate) -> str:
    """Return whether residual branching pays: its efficiency's interval is above 1, below 1, or includes 1."""
    if efficiency.low is None or efficiency.high is None:
        return OPEN
    return PAYS if efficiency.low > 1 else LOSES if efficiency.high < 1 else OPEN


def risk_table(estimates: ReportedEstimates, risks: Mapping[str, ViewRow]) -> PrintedTable:
    """Make the table of R by both estimators on the same documents, and their difference in standard errors."""

    def cells(name: str, unit: str, meaning: str, cell: Callable[[ViewRow], Cell]) -> CellColumn:
        return CellColumn(Column(name, unit, meaning), {(POOLED, action): cell(row) for action, row in risks.items()})

    apart = "the difference over its standard error; values within ±2 are expected by chance"
    columns: list[EstimateColumn | CellColumn] = [
        cells("documents", "", "documents with SWRB replicates", lambda row: Cell(count(row["documents"]))),
        cells("replicates", "", "SWRB replicates on all these documents", lambda row: Cell(count(row["replicates"]))),
        *columns_of(*_RISKS),
        cells("difference", "pp", "R (SWRB) − R (coupled), with its standard error given the documents",
              lambda row: _difference(row)[0]),
        cells("in std errors", "", apart, lambda row: _difference(row)[1]),
    ]  # fmt: skip
    note = "Both columns of R estimate the same number on the same documents."
    title, records = "R by coupled pairs and by residual branching", tuple(risks.values())
    return action_table("swrb_risk", title, estimates, list(risks), columns, note=note, records=records)


def _gain_columns(content: PageContent, actions: Sequence[str]) -> list[EstimateColumn | CellColumn]:
    verdicts = {
        (stratum, action): Cell(verdict(content.estimates.get("efficiency", action, stratum=stratum)))
        for stratum in (POOLED, *content.facts.strata) for action in actions
    }  # fmt: skip
    meaning = "by evaluations: pays if the interval of the efficiency is above 1, does not pay if it is below 1"
    return [*columns_of(*_GAINS), CellColumn(Column("verdict", "", meaning), verdicts)]


def _difference(row: ViewRow) -> tuple[Cell, Cell]:
    if row["plain_mismatch"] is None:
        return Cell(MISSING), Cell(MISSING)
    difference, error = row["mismatch"] - row["plain_mismatch"], row["monte_carlo_error"]
    places = decimals_of([difference], 100.0)
    if not error:  # the error is unknown or 0
        return Cell(fixed(100 * difference, places)), Cell(MISSING)
    return Cell(fixed(100 * difference, places), f"± {fixed(100 * error, places)}"), Cell(fixed(difference / error, 1))


def gain_figure(estimates: ReportedEstimates, styles: Mapping[str, ActionStyle], strata: Sequence[str]) -> Figure:
    """Draw efficiency against the share of pairs that diverge: pooled with intervals, single strata pale."""
    figure = new_figure(WIDTH, 3.7)
    known = [panel for panel in _PANELS if estimates.known(panel[0])]
    grid = figure.subplots(1, len(known), sharey=True, squeeze=False)[0]
    for axes, (quantity, title, label) in zip(grid, known, strict=True):
        for action, style in styles.items():
            for stratum in (*strata, POOLED):
                share, gain = (estimates.get(name, action, stratum=stratum) for name in (_MASS, quantity))
                if (gain.estimate or 0.0) > 0:
                    mark(axes, share, gain, style, pale=stratum != POOLED, factor=1.0)
        log_axis(axes)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set(xlim=(-3, 103), title=title, xlabel="mean M: pairs that diverge (%)", ylabel=label)
    action_legend(figure, dict(styles), marker=True)
    return figure
