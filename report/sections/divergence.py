"""The sections on R and its parts, on entry into divergence, and on positions where the distributions share no mass."""

from __future__ import annotations

import math
import textwrap
from functools import partial
from typing import Any

from kvdrift.report.figures.canvas import INK, QUIET, RULE, Axes, Figure, action_styles, legend_line, new_figure, shown
from kvdrift.report.figures.strokes import (
    TOGETHER,
    WIDTH,
    action_legend,
    curve,
    percent_axis,
    points,
    position_axis,
    published_handle,
    published_points,
)
from kvdrift.report.printing.estimate_tables import EstimateColumn, action_table, action_tables, columns_of
from kvdrift.report.printing.numbers import count
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.sections.section import Drawing, Section

_DECOMPOSITION = (
    "mismatch", "rollout_tv", "fixed_history_tv", "occurrence", "exposure", "mismatch_rate", "divergence_probability",
    "mean_entry",
)  # fmt: skip
_WRITTEN = ("written", "mismatch_written", "exposure_written")
_REDUCED = ("mismatch", "exposure", "occupation", "mismatch_rate", "divergence_probability", "mean_entry")


_SATURATION = ("saturation", "long_agreement", "mismatch_after_agreement")


_ACROSS = 4  # panels in a row
_LETTERS = 26  # letters in a line of a panel's title
_PALE_LINE: Any = {"color": RULE, "linewidth": 1.0}  # opaque, since many transparent lines would add up to a dark one
_PALE_POINTS = 32  # points of such a line; there are as many lines as pairs of actions


def decomposition(content: PageContent) -> Section:
    """Make the section: R, F, O, E, C, P(τ ≤ H) and mean entry of each action."""
    tables = action_tables("decomposition", "Decomposition", content, columns_of(*_DECOMPOSITION))
    written = action_table(
        "written", "Over the written positions", content.estimates, content.actions, columns_of(*_WRITTEN)
    )
    tables = (*tables, written)
    reduced = content.estimates.reduced
    if reduced.all():
        title = "Reduced estimates"
        tables = (*tables, action_table("reduced", title, reduced, content.actions, columns_of(*_REDUCED)))
    return Section("decomposition", "How much, how soon, how long", tables)


def saturation(content: PageContent) -> Section | None:
    """Make the section on saturation and local agreement; None for finite-state systems."""
    if content.facts.finite:
        return None
    known = content.estimates.known("saturation", "long_agreement")
    title = "Saturation and local agreement"
    tables = action_tables("saturation", title, content, columns_of(*_SATURATION)) if known else ()
    return Section("saturation", "Saturation and local agreement", tables)


def entry_section(content: PageContent) -> Section:
    """Make the section: P(τ ≤ t) and mean entry of each action."""
    windows = content.windows
    bounds = dict.fromkeys(t for t in (windows.first_block_last, windows.cohort_bound, windows.horizon) if t >= 1)
    columns = [EstimateColumn("entry_cdf", t, f"P(τ\u00a0≤\u00a0{count(t)})") for t in bounds]
    tables = action_tables("entry", "Entry into divergence", content, [*columns, EstimateColumn("mean_entry")])
    shown = content.estimates.known("entry_cdf")
    words = "Share of continuations that have diverged by each position, one curve per action"
    drawings = (Drawing("entry_cdf", words, partial(entry_figure, content)),) if shown else ()
    values = {"shown": shown, "panels": len(content.actions) > TOGETHER}
    return Section("entry", "Entry into divergence", tables, drawings, values)


def entry_figure(content: PageContent) -> Figure:
    """Draw P(τ ≤ t) against t: in one panel, or in a panel for each action if bands would hide one another."""
    if len(content.actions) > TOGETHER:
        return _panels(content)
    figure = new_figure(WIDTH, 3.7)
    axes = figure.add_subplot()
    styles = action_styles(content.actions)
    published = False
    for action, style in styles.items():
        rows = content.estimates.profile("entry_cdf", action)
        curve(axes, rows, style)
        published_points(axes, rows, style)
        published = published or any(row.published is not None for row in rows)
    percent_axis(axes, "diverged by position t (% of continuations)")
    axes.set_ylim(0, 101)  # so that a curve at 100% is seen whole
    position_axis(axes, content.windows.horizon, "generation position t (tokens)")
    action_legend(figure, styles, published=published)
    return figure


def _panels(content: PageContent) -> Figure:
    """Draw a panel for each action: its curve and band before the pale curves of all actions."""
    styles, last = action_styles(content.actions), content.windows.horizon
    profiles = {action: content.estimates.profile("entry_cdf", action) for action in styles}
    lines = math.ceil(len(styles) / _ACROSS)
    figure = new_figure(WIDTH, 0.9 + 1.5 * lines)
    grid = figure.subplots(lines, _ACROSS, sharex=True, sharey=True, squeeze=False)
    published = False
    for axes, (action, style) in zip(grid.flat, styles.items(), strict=False):
        for other in (name for name in profiles if name not in {action, content.baseline}):
            axes.plot(*points(_thinned(profiles[other])), **_PALE_LINE)
        if action != content.baseline:
            axes.plot(*points(profiles[content.baseline]), color=INK, linewidth=0.8)
        curve(axes, profiles[action], style)
        published_points(axes, profiles[action], style)
        published = published or any(row.published is not None for row in profiles[action])
        axes.set_title("\n".join(textwrap.wrap(shown(action), _LETTERS)), fontsize=8.5)
    _share_axes(list(grid.flat), len(styles), last)
    figure.supxlabel("generation position t (tokens)", fontsize="medium")
    figure.supylabel("diverged by position t (% of continuations)", fontsize="medium")
    handles = [
        legend_line("coloured: the action above the panel", color=QUIET, linewidth=1.8),
        legend_line(f"baseline, {content.baseline}", color=INK, linewidth=0.8),
        legend_line("the other actions", **_PALE_LINE),
    ]
    figure.legend(handles=handles + [published_handle()] * published, loc="outside upper left", ncols=4)
    return figure


def _thinned(rows: list[Estimate]) -> list[Estimate]:
    """Return some rows of a profile in reverse, always the first and the last."""
    return rows[:: -max(1, len(rows) // _PALE_POINTS)] + rows[:1]


def _share_axes(panels: list[Axes], used: int, last: int) -> None:
    """Give all panels one scale, with numbers at the lowest of each column, and hide unused panels."""
    panels[0].set_ylim(0, 101)  # so that a curve at 100% is seen whole
    panels[0].set_yticks([0, 50, 100])
    for place, axes in enumerate(panels):
        axes.set_visible(place < used)
        position_axis(axes, last, "")
        axes.tick_params(labelbottom=place + _ACROSS >= used)
