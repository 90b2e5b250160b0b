"""The figures: entry into divergence, the gap and its three terms, the two clocks. They draw what is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from report.canvas import INK, QUIET, ActionStyle, new_figure, shown
from report.estimates import Estimate, Estimates
from report.facts import Windows
from report.numbers import MISSING, decimals_for, fixed, interval, point
from report.quantities import POOLED, Unit

WIDTH = 9.0
_BAND = 0.16
_LEAST_SPAN = 10.0  # percentage points on the branch clock
_TERMS = (
    ("exposure_term", "exposure: apart for longer", "#3e8191", ""),
    ("rate_term", "rate: apart more often while exposed", "#e3bd85", "////"),
    ("occurrence_term", "occurrence: the first mismatch itself", "#343a46", ""),
)


def entry_cdf(estimates: Estimates, styles: dict[str, ActionStyle], windows: Windows) -> Figure:
    """P(τ ≤ t) of each action against t."""
    figure = new_figure(WIDTH, 3.7)
    axes = figure.add_subplot()
    for action, style in styles.items():
        _curve(axes, estimates.profile("entry_cdf", action), style)
    _percent_axis(axes, "diverged by position t (% of continuations)")
    axes.set_ylim(0, 100)
    _position_axis(axes, windows.horizon, "generation position t (tokens)")
    _action_legend(figure, styles)
    return figure


@dataclass(frozen=True)
class GapBar:
    """One bar of the gap figure."""

    label: str
    action: str
    baseline: str
    stratum: str = POOLED


def gap_terms(estimates: Estimates, bars: Sequence[GapBar]) -> Figure:
    """Each gap as a stacked bar of its terms, with the gap's interval; gap and exposure share in print beside it."""
    figure = new_figure(WIDTH, 1.35 + 0.42 * len(bars))
    axes, beside = figure.subplots(1, 2, width_ratios=(3, 1.15))
    for place, bar in enumerate(bars):
        _stack(axes, estimates, bar, place)
    axes.use_sticky_edges = False  # room beyond the longest bar
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("gap in token mismatch to the baseline (percentage points)")
    beside.set_axis_off()
    beside.set_xlim(0, 1)
    beside.set_ylim(len(bars) - 0.4, -0.6)
    beside.text(0, -0.62, "gap, pp", va="bottom", color=QUIET)
    beside.text(1, -0.62, "exposure share", va="bottom", ha="right", color=QUIET)
    for place, bar in enumerate(bars):
        gap = estimates.get("gap", bar.action, bar.baseline, stratum=bar.stratum)
        share = estimates.get("exposure_share", bar.action, bar.baseline, stratum=bar.stratum)
        beside.text(0, place, _with_interval(gap), va="center")
        beside.text(1, place, _share(share), va="center", ha="right", fontweight="bold")
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label) for _, label, colour, hatch in _TERMS
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


def two_clocks(estimates: Estimates, styles: dict[str, ActionStyle], baseline: str, windows: Windows) -> Figure:
    """Left the generation clock, right the branch clock; above the curves, below what each comes to."""
    figure = new_figure(WIDTH, 6.6)
    grid = figure.subplots(2, 2, height_ratios=(3, 2))
    _generation_curves(grid[0, 0], estimates, styles, windows)
    _branch_curves(grid[0, 1], estimates, styles, windows)
    others = [action for action in styles if action != baseline]
    if others:
        _block_points(grid[1, 0], estimates, {action: styles[action] for action in others}, windows, baseline)
    else:
        _block_points(grid[1, 0], estimates, styles, windows, None)
    _late_minus_early(grid[1, 1], estimates, styles)
    _action_legend(figure, styles, marker=True)
    return figure


def _generation_curves(axes: Axes, estimates: Estimates, styles: dict[str, ActionStyle], windows: Windows) -> None:
    for action, style in styles.items():
        forced = estimates.profile("generation_f", action)
        axes.plot(*_points(forced), color=style.colour, linestyle=style.dashes, linewidth=0.8, alpha=0.8)
        _curve(axes, estimates.profile("generation_delta", action), style)
    axes.set_title("a  Generation clock")
    _percent_axis(axes, "total variation (%)")
    axes.set_ylim(bottom=0)
    _position_axis(axes, windows.horizon, "generation position t (tokens)")
    sample = [
        Line2D([], [], color=QUIET, linewidth=1.8, label="δ, each on its own history"),
        Line2D([], [], color=QUIET, linewidth=0.8, label="f, forced along the reference"),
    ]
    _headroom(axes, 0.24)
    axes.legend(handles=sample, loc="upper right", fontsize=8, borderaxespad=0.2)


def _branch_curves(axes: Axes, estimates: Estimates, styles: dict[str, ActionStyle], windows: Windows) -> None:
    bound = windows.cohort_bound
    for action, style in styles.items():
        _curve(axes, estimates.profile("branch_delta", action), style)
    low, high = axes.get_ylim()
    room = max(0.0, _LEAST_SPAN - (high - low)) / 2  # a flat curve should look flat
    axes.set_ylim(max(0.0, low - room), high + room)
    axes.set_title("b  Branch clock")
    _percent_axis(axes, "total variation (%)")
    if windows.early_last >= 1:
        for first, last in ((1, windows.early_last), (windows.late_first, bound)):
            axes.axvspan(first - 0.5, last + 0.5, color="#111827", alpha=0.06, linewidth=0)
        _headroom(axes, 0.1)
        top = axes.get_xaxis_transform()
        early, late = (1 + windows.early_last) / 2, (windows.late_first + bound) / 2
        axes.text(early, 0.985, "early", transform=top, ha="center", va="top", color=QUIET, fontsize=8)
        axes.text(late, 0.985, "late", transform=top, ha="center", va="top", color=QUIET, fontsize=8)
    _position_axis(axes, max(bound, 2), "lag after the first mismatch (tokens)")


def _block_points(
    axes: Axes, estimates: Estimates, styles: dict[str, ActionStyle], windows: Windows, baseline: str | None
) -> None:
    quantity = "generation_gap" if baseline else "generation_block_delta"
    for place, (action, style) in enumerate(styles.items()):
        rows = estimates.profile(quantity, action, baseline)
        shift = 0.09 * (place - (len(styles) - 1) / 2)
        _dots(axes, [(row.x or 0) + shift for row in rows], rows, style, joined=True)
    labels = [f"{first}–{last}" if last >= first else MISSING for first, last in windows.blocks]
    axes.set_xticks((1, 2, 3), labels)
    axes.set_xlim(0.6, 3.4)
    axes.set_xlabel("block of generation positions (tokens)")
    axes.grid(visible=False, axis="x")
    if baseline:
        axes.set_title(f"c  Gap in δ to {shown(baseline)}")
        axes.set_ylabel("gap (percentage points)")
        axes.axhline(0, color=INK, linewidth=0.8)
    else:
        axes.set_title("c  δ by block")
        axes.set_ylabel("total variation (%)")
        axes.set_ylim(bottom=0)


def _late_minus_early(axes: Axes, estimates: Estimates, styles: dict[str, ActionStyle]) -> None:
    for place, (action, style) in enumerate(styles.items()):
        row = estimates.get("late_minus_early", action)
        if row.estimate is None:
            continue
        width = [[0.0], [0.0]] if not row.has_interval else _errors([row])
        axes.errorbar([row.estimate * 100], [place], xerr=width, fmt=style.marker, color=style.colour, capsize=3)
    axes.set_yticks(range(len(styles)), [shown(action) for action in styles])
    axes.set_ylim(len(styles) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_title("d  Late minus early on the branch")
    axes.set_xlabel("late − early δ (percentage points)")


def _stack(axes: Axes, estimates: Estimates, bar: GapBar, place: int) -> None:
    right, left = 0.0, 0.0
    for quantity, _, colour, hatch in _TERMS:
        value = estimates.get(quantity, bar.action, bar.baseline, stratum=bar.stratum).estimate
        if value is None:
            continue
        width = 100 * value
        start = right if width >= 0 else left
        axes.barh(place, width, left=start, height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        right, left = (right + width, left) if width >= 0 else (right, left + width)
    gap = estimates.get("gap", bar.action, bar.baseline, stratum=bar.stratum)
    if gap.estimate is not None and gap.has_interval:
        axes.errorbar([gap.estimate * 100], [place], xerr=_errors([gap]), color=INK, linewidth=1.2, capsize=3.5)


def _curve(axes: Axes, rows: list[Estimate], style: ActionStyle) -> None:
    axes.plot(*_points(rows), color=style.colour, linestyle=style.dashes)
    banded = [row for row in rows if row.low is not None and row.high is not None]
    if banded:
        axes.fill_between(
            [row.x or 0 for row in banded],
            [100 * (row.low or 0.0) for row in banded],
            [100 * (row.high or 0.0) for row in banded],
            color=style.colour, alpha=_BAND, linewidth=0,
        )  # fmt: skip


def _dots(axes: Axes, places: list[float], rows: list[Estimate], style: ActionStyle, *, joined: bool) -> None:
    values = [100 * (row.estimate or 0.0) for row in rows]
    axes.plot(places, values, color=style.colour, linestyle=style.dashes if joined else "none", marker=style.marker,
              markersize=4.5, linewidth=1.2)  # fmt: skip
    for place, value, row in zip(places, values, rows, strict=True):
        if row.has_interval:
            axes.errorbar([place], [value], yerr=_errors([row]), color=style.colour, linewidth=1.2, capsize=3)


def _points(rows: list[Estimate]) -> tuple[list[int], list[float]]:
    return [row.x or 0 for row in rows], [100 * (row.estimate or 0.0) for row in rows]


def _errors(rows: list[Estimate]) -> list[list[float]]:
    """Distances from the points to both ends, never below zero: a percentile interval may leave its point outside."""
    below = [max(0.0, 100 * ((row.estimate or 0.0) - (row.low or 0.0))) for row in rows]
    above = [max(0.0, 100 * ((row.high or 0.0) - (row.estimate or 0.0))) for row in rows]
    return [below, above]


def _with_interval(row: Estimate) -> str:
    decimals = decimals_for([row], Unit.POINTS)
    return f"{point(row, Unit.POINTS, decimals)} {interval(row, Unit.POINTS, decimals)}".rstrip()


def _share(row: Estimate) -> str:
    return MISSING if row.estimate is None else f"{fixed(100 * row.estimate, 1)}%"


def _percent_axis(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))


def _headroom(axes: Axes, share: float) -> None:
    """Room for words above the curves; no tick above 100%."""
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= min(high, 100)])
    axes.set_ylim(low, min(high, 102.0) + share * (min(high, 102.0) - low))


def _position_axis(axes: Axes, last: int, label: str) -> None:
    ticks = sorted({1, *(round(last * part / 4) for part in (1, 2, 3)), last})
    axes.set_xticks([tick for tick in ticks if tick >= 1])
    axes.set_xlim(1, last)
    axes.set_xlabel(label)


def _action_legend(figure: Figure, styles: dict[str, ActionStyle], *, marker: bool = False) -> None:
    handles = [style.handle(action, marker=marker) for action, style in styles.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 4), handlelength=3.4)
