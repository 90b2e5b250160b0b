"""The figures of entry into divergence and of the two clocks. They draw what is given; open markers are the paper's."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from report.printing.canvas import QUIET, ActionStyle, new_figure, shown
from report.printing.numbers import MISSING
from report.printing.strokes import (
    WIDTH,
    across,
    action_legend,
    curve,
    headroom,
    percent_axis,
    points,
    position_axis,
    published_points,
    upright,
    zero_line,
)
from report.reading.estimates import Estimate, Estimates
from report.reading.quantities import POOLED
from schema.windows import Windows

_LEAST_SPAN = 10.0  # percentage points on the branch clock
_EVERY = 8  # lags between two open markers on a curve
_STEP = 0.62  # of a stratum's height, for its actions


def entry_cdf(estimates: Estimates, styles: dict[str, ActionStyle], windows: Windows) -> Figure:
    """P(τ ≤ t) of each action against t."""
    figure = new_figure(WIDTH, 3.7)
    axes = figure.add_subplot()
    published = False
    for action, style in styles.items():
        rows = estimates.profile("entry_cdf", action)
        curve(axes, rows, style)
        published_points(axes, rows, style)
        published = published or any(row.published is not None for row in rows)
    percent_axis(axes, "diverged by position t (% of continuations)")
    axes.set_ylim(0, 101)  # a curve at 100% is seen whole
    position_axis(axes, windows.horizon, "generation position t (tokens)")
    action_legend(figure, styles, published=published)
    return figure


def two_clocks(estimates: Estimates, styles: dict[str, ActionStyle], baseline: str, windows: Windows) -> Figure:
    """Left the generation clock, right the branch clock; above the curves, below what each comes to."""
    figure = new_figure(WIDTH, 6.6)
    grid = figure.subplots(2, 2, height_ratios=(3, 2))
    _generation_curves(grid[0, 0], estimates, styles, windows)
    _branch_curves(grid[0, 1], estimates, styles, windows)
    others = {action: style for action, style in styles.items() if action != baseline}
    if others:
        _block_points(grid[1, 0], estimates, others, windows, baseline)
    else:
        _block_points(grid[1, 0], estimates, styles, windows, None)
    _late_minus_early(grid[1, 1], estimates, styles)
    action_legend(figure, styles, marker=True, published=estimates.have_published)
    return figure


def clocks_by_stratum(
    estimates: Estimates, styles: dict[str, ActionStyle], baseline: str, strata: Sequence[str]
) -> Figure:
    """Both clocks in each stratum and pooled: Δg of each contrast, late − early of each action, all and pre-EOS."""
    others = {action: style for action, style in styles.items() if action != baseline}
    rows = [POOLED, *strata]
    figure = new_figure(WIDTH, 1.5 + len(rows) * max(0.34, 0.13 * len(styles) + 0.1))
    panels: list[tuple[str, str, str | None, dict[str, ActionStyle]]] = [
        ("late_minus_early", "Late − early δ", None, styles),
        ("late_minus_early_pre_eos", "Late − early δ, pre-EOS", None, styles),
    ]
    if others:
        panels.insert(0, ("generation_gap_change", f"Δg, gap in δ to {shown(baseline)}", baseline, others))
    grid = figure.subplots(1, len(panels), sharey=True)
    for axes, letter, (quantity, title, base, drawn) in zip(grid, "abc", panels, strict=False):
        for place, stratum in enumerate(rows):
            _stratum(axes, [estimates.get(quantity, action, base, stratum=stratum) for action in drawn], place, drawn)
        axes.axhline(0.5, color=QUIET, linewidth=0.7)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.set_title(f"{letter}  {title}")
        axes.set_xlabel("percentage points")
        zero_line(axes, upright=True)
    both = [end for axes in grid[-2:] for end in axes.get_xlim()]  # all lags and pre-EOS on one scale
    for axes in grid[-2:]:
        axes.set_xlim(min(both), max(both))
    grid[0].set_yticks(range(len(rows)), [shown(stratum) for stratum in rows])
    grid[0].set_ylim(len(rows) - 0.5, -0.5)
    action_legend(figure, styles, marker=True, published=estimates.have_published)
    return figure


def _stratum(axes: Axes, entries: list[Estimate], place: int, styles: dict[str, ActionStyle]) -> None:
    step = _STEP / max(len(styles), 2)
    for turn, (row, style) in enumerate(zip(entries, styles.values(), strict=True)):
        across(axes, row, place + step * (turn - (len(styles) - 1) / 2), style)


def _generation_curves(axes: Axes, estimates: Estimates, styles: dict[str, ActionStyle], windows: Windows) -> None:
    for action, style in styles.items():
        forced = estimates.profile("generation_f", action)
        axes.plot(*points(forced), color=style.colour, linestyle=style.dashes, linewidth=0.8, alpha=0.8)
        curve(axes, estimates.profile("generation_delta", action), style)
    axes.set_title("a  Generation clock")
    percent_axis(axes, "total variation (%)")
    axes.set_ylim(bottom=0)
    position_axis(axes, windows.horizon, "generation position t (tokens)")
    sample = [
        Line2D([], [], color=QUIET, linewidth=1.8, label="δ, each on its own history"),
        Line2D([], [], color=QUIET, linewidth=0.8, label="f, forced along the reference"),
    ]
    headroom(axes, 0.24)
    axes.legend(handles=sample, loc="upper right", fontsize=8, borderaxespad=0.2)


def _branch_curves(axes: Axes, estimates: Estimates, styles: dict[str, ActionStyle], windows: Windows) -> None:
    bound = windows.cohort_bound
    for action, style in styles.items():
        rows = estimates.profile("branch_delta", action)
        curve(axes, rows, style)
        published_points(axes, rows, style, every=_EVERY)
    low, high = axes.get_ylim()
    room = max(0.0, _LEAST_SPAN - (high - low)) / 2  # a flat curve should look flat
    axes.set_ylim(max(0.0, low - room), high + room)
    axes.set_title("b  Branch clock")
    percent_axis(axes, "total variation (%)")
    if windows.early_last >= 1:
        for first, last in ((1, windows.early_last), (windows.late_first, bound)):
            axes.axvspan(first - 0.5, last + 0.5, color="#111827", alpha=0.06, linewidth=0)
        headroom(axes, 0.1)
        top = axes.get_xaxis_transform()
        early, late = (1 + windows.early_last) / 2, (windows.late_first + bound) / 2
        axes.text(early, 0.985, "early", transform=top, ha="center", va="top", color=QUIET, fontsize=8)
        axes.text(late, 0.985, "late", transform=top, ha="center", va="top", color=QUIET, fontsize=8)
    position_axis(axes, max(bound, 2), "lag after the first mismatch (tokens)")


def _block_points(
    axes: Axes, estimates: Estimates, styles: dict[str, ActionStyle], windows: Windows, baseline: str | None
) -> None:
    quantity = "generation_gap" if baseline else "generation_block_delta"
    for place, (action, style) in enumerate(styles.items()):
        rows = estimates.profile(quantity, action, baseline)
        shift = 0.09 * (place - (len(styles) - 1) / 2)
        upright(axes, [(row.x or 0) + shift for row in rows], rows, style)
    labels = [f"{first}–{last}" if last >= first else MISSING for first, last in windows.blocks]
    axes.set_xticks((1, 2, 3), labels)
    axes.set_xlim(0.6, 3.4)
    axes.set_xlabel("block of generation positions (tokens)")
    axes.grid(visible=False, axis="x")
    if baseline:
        axes.set_title(f"c  Gap in δ to {shown(baseline)}")
        axes.set_ylabel("gap (percentage points)")
        zero_line(axes, upright=False)
    else:
        axes.set_title("c  δ by block")
        axes.set_ylabel("total variation (%)")
        axes.set_ylim(bottom=0)


def _late_minus_early(axes: Axes, estimates: Estimates, styles: dict[str, ActionStyle]) -> None:
    for place, (action, style) in enumerate(styles.items()):
        across(axes, estimates.get("late_minus_early", action), place - 0.11, style)
        across(axes, estimates.get("late_minus_early_pre_eos", action), place + 0.2, style, pale=True)
    axes.set_yticks(range(len(styles)), [shown(action) for action in styles])
    axes.set_ylim(len(styles) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    zero_line(axes, upright=True)
    axes.set_title("d  Late minus early on the branch")
    axes.set_xlabel("late − early δ (percentage points)")
