"""The section on entry into divergence: when the two continuations first differ."""

from __future__ import annotations

import math
import textwrap
from functools import partial
from typing import Any

from kvdrift.report.printing.canvas import Axes, Figure, action_styles, legend_line, new_figure, shown
from kvdrift.report.printing.estimate_tables import EstimateColumn, action_tables
from kvdrift.report.printing.numbers import count
from kvdrift.report.printing.palette import INK, QUIET, RULE
from kvdrift.report.printing.section import Drawing, Section
from kvdrift.report.printing.strokes import (
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
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate

_ACROSS = 4  # panels in a row
_LETTERS = 26  # letters in a line of a panel's title
_PALE_LINE: Any = {"color": RULE, "linewidth": 1.0}  # opaque, since many transparent lines would add up to a dark one
_PALE_POINTS = 32  # points of such a line; there are as many lines as pairs of actions

TEMPLATE = """
{% if shown %}
{% call figure("entry_cdf") %}<b>When the two continuations first differ.</b> {% if panels %}A panel for each action, all on one scale; its curve is coloured{% if content.estimates.have_intervals %}, with a band of pointwise intervals{% endif %}. The thin plain line is {{ content.baseline }}, the baseline, and the faint lines are the other actions. {% endif %}The height of a curve at t is the share of continuations whose first mismatch is at position t or before. Continuations that agree through H = {{ windows.horizon }} are counted too, so a curve need not reach 100%. A curve further to the left means earlier divergence.{% if content.estimates.have_intervals and not panels %} Bands are pointwise intervals.{% endif %}{% endcall %}
<p class="how">The columns are the shares of continuations that have diverged by the end of the first block, by the bound of the branch cohort, and by H. Mean τ averages over the continuations that diverge.</p>
{{ table(tables.entry, False) }}
{{ by_stratum("Entry in each stratum", tables.entry_by_stratum) -}}
{% else %}{{ absent("entry times") }}{% endif %}
"""  # noqa: E501


def section(content: PageContent) -> Section:
    """Make the section: P(τ ≤ t) and mean entry of each action."""
    windows = content.windows
    bounds = dict.fromkeys(t for t in (windows.first_block_last, windows.cohort_bound, windows.horizon) if t >= 1)
    columns = [EstimateColumn("entry_cdf", t, f"P(τ\u00a0≤\u00a0{count(t)})") for t in bounds]
    tables = action_tables("entry", "Entry into divergence", content, [*columns, EstimateColumn("mean_entry")])
    shown = content.estimates.known("entry_cdf")
    words = "Share of continuations that have diverged by each position, one curve per action"
    drawings = (Drawing("entry_cdf", words, partial(entry_figure, content)),) if shown else ()
    values = {"shown": shown, "panels": len(content.actions) > TOGETHER}
    return Section("entry", "Entry into divergence", TEMPLATE, tables, drawings, values)


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
