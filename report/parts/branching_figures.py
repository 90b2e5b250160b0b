"""The figures of residual branching: where it pays, what it sees by depth of a window, how it does on known risks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from report.parts.branching import Branching
from report.parts.branching_systems import Systems
from report.parts.depth import Depths, interval_band, selected_depths
from report.printing.canvas import INK, QUIET, ActionStyle, new_figure
from report.printing.numbers import significant
from report.printing.strokes import (
    WIDTH,
    action_legend,
    errors,
    log_axis,
    percent_axis,
    position_axis,
    published_handle,
)
from report.reading.estimates import Estimates
from report.reading.quantities import POOLED
from schema.tables import PLAIN, SWRB
from schema.windows import Windows

_STYLES = {PLAIN: ("#d55e00", "s", "coupled pairs"), SWRB: ("#0072b2", "o", "SWRB")}
_MASS = "swrb_divergence_probability"
_PANELS = (
    ("efficiency", "a  By kernel-pair evaluations", "efficiency (log scale)"),
    ("efficiency_in_seconds", "b  By decoding time", ""),
)


def gain_figure(estimates: Estimates, styles: dict[str, ActionStyle], strata: Sequence[str]) -> Figure:
    """Efficiency against the share of pairs that diverge: pooled with intervals, strata pale; above 1 it pays."""
    figure = new_figure(WIDTH, 3.7)
    known = [panel for panel in _PANELS if estimates.known(panel[0])]
    grid = figure.subplots(1, len(known), sharey=True, squeeze=False)[0]
    for axes, (quantity, title, label) in zip(grid, known, strict=True):
        for action, style in styles.items():
            for stratum in strata:
                _gain(axes, estimates, quantity, action, stratum, style)
            _gain(axes, estimates, quantity, action, POOLED, style)
        log_axis(axes)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set_xlim(-3, 103)
        axes.set_title(title)
        axes.set_xlabel("mean M: pairs that diverge (%)")
        axes.set_ylabel(label)
    action_legend(figure, styles, marker=True)
    return figure


def windows_figure(branching: Branching, depths: Depths, styles: dict[str, ActionStyle], windows: Windows) -> Figure:
    """The interval of each action's R by depth from residual branching, coupled pairs' ends as open markers."""
    figure = new_figure(WIDTH, 3.7)
    axes = figure.add_subplot()
    wanted = set(selected_depths(windows))
    for action, style in styles.items():
        interval_band(axes, branching.windows.get(action, []), "lower", "upper", style)
        rows = [row for row in depths.intervals.get(action, []) if row["depth"] in wanted]
        for end in ("lower", "upper"):
            axes.plot([row["depth"] for row in rows], [100 * row[end] for row in rows], linestyle="none",
                      marker=style.marker, markersize=6, markerfacecolor="none", markeredgecolor=style.colour,
                      markeredgewidth=1.1, clip_on=False, zorder=4)  # fmt: skip
    percent_axis(axes, "R that fits the window (%)")
    position_axis(axes, windows.horizon, "depth L (tokens)")
    sample = [
        Line2D([], [], color=QUIET, linewidth=1.8, label="least R, SWRB"),
        Line2D([], [], color=QUIET, linewidth=0.9, label="most R, SWRB"),
        Line2D([], [], linestyle="none", marker="o", markerfacecolor="none", markeredgecolor=QUIET,
               label="both, coupled pairs"),
    ]  # fmt: skip
    axes.legend(handles=sample, loc="upper right", fontsize=8)
    action_legend(figure, styles)
    return figure


def systems_figure(systems: Systems) -> Figure:
    """Left estimates against exact risks, right the sorted variance ratios with their median; open is the paper's.

    Systems without replicates of residual branching have the left panel alone.
    """
    figure = new_figure(WIDTH, 4.1)
    grid = figure.subplots(1, 2 if systems.ratios else 1, squeeze=False)[0]
    _risks(grid[0], systems)
    if systems.ratios:
        _ratios(grid[1], systems)
    used = {estimator for one in (*systems.own, *systems.published) for estimator in one.estimates}
    handles = [
        Line2D([], [], linestyle="none", marker=marker, color=colour, markersize=5.5, label=label)
        for estimator, (colour, marker, label) in _STYLES.items() if estimator in used
    ]  # fmt: skip
    if systems.published:
        handles.append(published_handle())
    dashed = "identity; median" if systems.ratios else "identity"
    handles.append(Line2D([], [], color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)), label=dashed))
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    return figure


def _gain(axes: Axes, estimates: Estimates, quantity: str, action: str, stratum: str, style: ActionStyle) -> None:
    mass, gain = (estimates.get(name, action, stratum=stratum) for name in (_MASS, quantity))
    if mass.estimate is None or gain.estimate is None or gain.estimate <= 0:
        return
    x, y = 100 * mass.estimate, gain.estimate
    if stratum == POOLED:
        axes.errorbar([x], [y], xerr=errors(mass), yerr=errors(gain, 1.0), fmt=style.marker,
                      color=style.colour, markersize=6.5, linewidth=1.2, capsize=2.5, zorder=4)  # fmt: skip
    else:
        axes.plot([x], [y], linestyle="none", marker=style.marker, color=style.colour, markersize=4, alpha=0.4)


def _risks(axes: Axes, systems: Systems) -> None:
    seen = [100 * value for one in (*systems.own, *systems.published) for value in (one.exact, *one.estimates.values())]
    top = 1.05 * max(seen)
    axes.plot([0, top], [0, top], color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)))
    for estimator, (colour, marker, _) in _STYLES.items():
        for members, filled in ((systems.published, False), (systems.own, True)):
            points = [
                (100 * one.exact, 100 * one.estimates[estimator]) for one in members if estimator in one.estimates
            ]
            axes.plot(*zip(*points, strict=True) if points else ([], []), linestyle="none", marker=marker, color=colour,
                      markersize=4.5 if filled else 6.5, markerfacecolor=colour if filled else "none",
                      markeredgewidth=0.9, zorder=4 if filled else 3)  # fmt: skip
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_title("a  Estimates and exact risks")
    axes.set_xlabel("exact R (%)")
    axes.set_ylabel("estimated R (%)")


def _ratios(axes: Axes, systems: Systems) -> None:
    colour, marker, _ = _STYLES[SWRB]
    for ratios, filled in ((systems.published_ratios, False), (systems.ratios, True)):
        if not ratios:
            continue
        middle = statistics.median(ratios)
        axes.plot(range(1, len(ratios) + 1), ratios, color=colour, marker=marker, linewidth=1.2 if filled else 0.7,
                  markersize=4.5 if filled else 6.5, markerfacecolor=colour if filled else "none", markeredgewidth=0.9,
                  zorder=4 if filled else 3)  # fmt: skip
        dash = (0, (4, 3)) if filled else (0, (1.5, 2.5))
        axes.axhline(middle, color=INK if filled else QUIET, linewidth=1.0, linestyle=dash)
        what = "median" if filled else "published median"
        # Below a median at the right, above it at the left: the sorted points are on the other side of it.
        axes.annotate(f"{what} {significant(middle)}×", (0.015 if filled else 0.985, middle), (0, 3 if filled else -3),
                      xycoords=axes.get_yaxis_transform(), textcoords="offset points", fontsize=8,
                      ha="left" if filled else "right", va="bottom" if filled else "top",
                      color=INK if filled else QUIET)  # fmt: skip
    log_axis(axes)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_title("b  Variance of a coupled pair over SWRB’s")
    axes.set_xlabel("system, sorted")
    axes.set_ylabel("variance ratio (log scale)")
