"""Drawn estimates: curves with bands, points with bars, axes in percent; open markers are the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvdrift.report.figures.canvas import (
    ACTION_COLOURS,
    INK,
    QUIET,
    ActionStyle,
    Axes,
    Axis,
    Figure,
    Line2D,
    legend_line,
    library,
)
from kvdrift.report.reading.estimates import Estimate

WIDTH = 9.0
HALF_WIDTH = 6.4  # in inches: half of a screen, where 9 points are some 12 pixels
BAND = 0.16
PALE = 0.45
TOGETHER = len(ACTION_COLOURS)  # most actions whose bands a reader can distinguish in one panel
_OPEN_SIZE = 7.5


def curve(axes: Axes, rows: list[Estimate], style: ActionStyle, *, band: bool = True) -> None:
    """Draw a profile as a line, its intervals as a band."""
    axes.plot(*points(rows), color=style.colour, linestyle=style.dashes)
    banded = [row for row in rows if band and row.low is not None and row.high is not None]
    if banded:
        low, high = [100 * (row.low or 0.0) for row in banded], [100 * (row.high or 0.0) for row in banded]
        axes.fill_between([row.x or 0 for row in banded], low, high, color=style.colour, alpha=BAND, linewidth=0)


def points(rows: list[Estimate]) -> tuple[list[int], list[float]]:
    """Return the positions (or lags, or blocks) of a profile, and its estimates in percent."""
    return [row.x or 0 for row in rows], [100 * (row.estimate or 0.0) for row in rows]


def errors(row: Estimate, factor: float = 100.0) -> list[list[float]]:
    """Return how far an interval extends below and above the estimate, times ``factor``, as [[below], [above]].

    This is the form of Matplotlib's error bars. A distance is 0 if that end is unknown, or if a percentile interval
    lies wholly on the other side of the estimate.
    """
    value = row.estimate or 0.0
    low, high = (value if end is None else end for end in (row.low, row.high))
    return [[max(0.0, factor * (value - low))], [max(0.0, factor * (high - value))]]


def across(axes: Axes, row: Estimate, place: float, style: ActionStyle, *, pale: bool = False) -> None:
    """Draw an estimate with a horizontal interval at height ``place``, and the paper's number as an open marker."""
    if row.estimate is None:
        return
    axes.errorbar([100 * row.estimate], [place], xerr=errors(row), fmt=style.marker, color=style.colour,
                  markersize=5, linewidth=1.2, capsize=2.5, alpha=PALE if pale else 1.0)  # fmt: skip
    open_markers(axes, [100 * row.published] if row.published is not None else [], [place], style)


def mark(axes: Axes, x: Estimate, y: Estimate, style: ActionStyle, *, pale: bool, factor: float = 100.0) -> None:
    """Draw the point (``x``, ``y``) with the intervals of both; if ``pale``, a small point without intervals.

    ``y`` is drawn times ``factor``, and ``x`` in percent.
    """
    if x.estimate is None or y.estimate is None:
        return
    place = [100 * x.estimate], [factor * y.estimate]
    if pale:
        axes.plot(*place, linestyle="none", marker=style.marker, color=style.colour, markersize=4, alpha=PALE)
    else:
        axes.errorbar(*place, xerr=errors(x), yerr=errors(y, factor), fmt=style.marker, color=style.colour,
                      markersize=7, linewidth=1.2, capsize=2.5, zorder=4)  # fmt: skip


def upright(axes: Axes, places: list[float], rows: list[Estimate], style: ActionStyle) -> None:
    """Draw estimates over their horizontal ``places``, joined by a line, with intervals and the paper's numbers."""
    values = [100 * (row.estimate or 0.0) for row in rows]
    axes.plot(places, values, color=style.colour, linestyle=style.dashes, marker=style.marker, markersize=4.5,
              linewidth=1.2)  # fmt: skip
    for place, value, row in zip(places, values, rows, strict=True):
        if row.has_interval:
            axes.errorbar([place], [value], yerr=errors(row), color=style.colour, linewidth=1.2, capsize=3)
        if row.published is not None:
            open_markers(axes, [place + 0.05], [100 * row.published], style)


def published_points(axes: Axes, rows: list[Estimate], style: ActionStyle, *, every: int = 1) -> None:
    """Draw the paper's numbers along a profile: each ``every``-th, and the last."""
    known = [row for row in rows if row.published is not None]
    kept = [row for place, row in enumerate(known) if place % every == 0 or row is known[-1]]
    open_markers(axes, [float(row.x or 0) for row in kept], [100 * (row.published or 0.0) for row in kept], style)


def open_markers(axes: Axes, x: Sequence[float], y: Sequence[float], style: ActionStyle) -> None:
    """Draw the paper's numbers as markers without a filling."""
    if x:
        axes.plot(x, y, linestyle="none", marker=style.marker, markersize=_OPEN_SIZE, markerfacecolor="none",
                  markeredgecolor=style.colour, markeredgewidth=1.1, zorder=4, clip_on=False)  # fmt: skip


def published_handle(marker: str = "o") -> Line2D:
    """Return the legend entry of open markers."""
    return legend_line("open: published", linestyle="none", marker=marker, markersize=_OPEN_SIZE,
                       markerfacecolor="none", markeredgecolor=QUIET, markeredgewidth=1.1)  # fmt: skip


def action_legend(
    figure: Figure, styles: dict[str, ActionStyle], *, marker: bool = False, published: bool = False
) -> None:
    """Draw one legend above a whole figure, with markers and an entry for published numbers if requested."""
    handles = [style.handle(action, marker=marker) for action, style in styles.items()]
    if published:
        handles.append(published_handle())
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 4), handlelength=3.4)


def moved_aside(axes: Axes, points: float) -> Any:
    """Return the transform of data coordinates that also moves everything to the right by ``points``."""
    figure = axes.get_figure()
    shift = library().transforms.ScaledTranslation(points / 72, 0, figure.dpi_scale_trans)  # type: ignore[union-attr]
    return axes.transData + shift


def percent_axis(axes: Axes, label: str) -> None:
    """Give a vertical axis in percent its label, and few, round ticks."""
    axes.set_ylabel(label)
    round_ticks(axes.yaxis)


def round_ticks(axis: Axis) -> None:
    """Set about five ticks at round numbers."""
    axis.set_major_locator(library().ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))


def position_axis(axes: Axes, last: int, label: str) -> None:
    """Make the horizontal axis show positions, lags or depths from 1 to ``last``, with five ticks at most."""
    ticks = sorted({1, *(round(last * part / 4) for part in (1, 2, 3)), last})
    axes.set_xticks([tick for tick in ticks if tick >= 1])
    axes.set(xlim=(1, last) if last > 1 else (0.5, 1.5), xlabel=label)


def log_axis(axes: Axes) -> None:
    """Make the vertical axis logarithmic."""
    axes.set_yscale("log")
    log_ticks(axes.yaxis)


def log_ticks(axis: Axis) -> None:
    """Set plain numbers at powers of 10 on a logarithmic axis, on short ranges also at 2 and 5."""
    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    ticker = library().ticker
    axis.set_major_locator(ticker.LogLocator(subs=steps))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def headroom(axes: Axes, share: float) -> None:
    """Leave ``share`` of the axis's height as room for words above the curves, without ticks above 100%."""
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= min(high, 100)])
    high = min(high, 102.0)
    axes.set_ylim(low, high + share * (high - low))


def zero_line(axes: Axes, *, upright: bool) -> None:
    """Draw the line at difference 0, ``upright`` or horizontal."""
    (axes.axvline if upright else axes.axhline)(0, color=INK, linewidth=0.8)
