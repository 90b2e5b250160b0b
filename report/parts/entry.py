"""The section on entry into divergence: when the two continuations first differ."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from report.printing.canvas import action_styles, new_figure
from report.printing.numbers import count
from report.printing.section import Drawing, Section
from report.printing.strokes import WIDTH, action_legend, curve, percent_axis, position_axis, published_points
from report.printing.tables import EstimateColumn, action_tables
from report.reading.content import PageContent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = """
{% if shown %}
{% call figure("entry_cdf") %}<b>When the two continuations first differ.</b> The height of a curve at t is the share of continuations whose first mismatch is at position t or before. Continuations that agree through H = {{ windows.horizon }} are counted too, so a curve need not reach 100%. A curve further to the left means earlier divergence.{% if content.estimates.have_intervals %} Bands are pointwise intervals.{% endif %}{% endcall %}
<p class="how">The columns are the shares of continuations that have diverged by the end of the first block, by the bound of the branch cohort, and by H. Mean τ averages over the continuations that diverge.</p>
{{ table(tables.entry, False) }}
{{ by_stratum("Entry in each stratum", tables.entry_by_stratum) -}}
{% else %}{{ absent("entry times") }}{% endif %}
"""  # noqa: E501


def section(content: PageContent) -> Section:
    """P(τ ≤ t) of each action, and mean entry."""
    windows = content.windows
    bounds = dict.fromkeys(t for t in (windows.first_block_last, windows.cohort_bound, windows.horizon) if t >= 1)
    columns = [EstimateColumn("entry_cdf", t, f"P(τ\u00a0≤\u00a0{count(t)})") for t in bounds]
    tables = action_tables("entry", "Entry into divergence", content, [*columns, EstimateColumn("mean_entry")])
    shown = content.estimates.known("entry_cdf")
    words = "Share of continuations that have diverged by each position, one curve per action"
    drawings = (Drawing("entry_cdf", words, partial(entry_figure, content)),) if shown else ()
    return Section("entry", "Entry into divergence", TEMPLATE, tables, drawings, {"shown": shown})


def entry_figure(content: PageContent) -> Figure:
    """P(τ ≤ t) of each action against t."""
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
    axes.set_ylim(0, 101)  # a curve at 100% is seen whole
    position_axis(axes, content.windows.horizon, "generation position t (tokens)")
    action_legend(figure, styles, published=published)
    return figure
