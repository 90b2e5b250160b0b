"""The sections on R and its parts, KL along X, entry into divergence, saturation, and both clocks."""

from __future__ import annotations

import math
import textwrap
from functools import partial
from typing import Any

from kvdrift.report.figures.canvas import (
    INK,
    QUIET,
    RULE,
    SHADE,
    ActionStyle,
    Axes,
    Figure,
    action_styles,
    legend_line,
    library,
    new_figure,
    shown,
)
from kvdrift.report.figures.labels import name_ends
from kvdrift.report.figures.strokes import (
    PALE,
    TOGETHER,
    WIDTH,
    across,
    action_legend,
    curve,
    headroom,
    percent_axis,
    points,
    position_axis,
    published_handle,
    published_points,
    round_ticks,
    upright,
    zero_line,
)
from kvdrift.report.printing.estimate_tables import CellColumn, EstimateColumn, action_table, action_tables, columns_of
from kvdrift.report.printing.numbers import MISSING, count
from kvdrift.report.printing.tables import Cell, Column
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.sections.findings import signs, span
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.schema.study import POOLED
from kvdrift.schema.windows import Windows

_DECOMPOSITION = (
    "mismatch", "rollout_tv", "fixed_history_tv", "occurrence", "exposure", "mismatch_rate", "divergence_probability",
    "mean_entry",
)  # fmt: skip
_WRITTEN = ("written", "mismatch_written", "exposure_written")
_REDUCED = ("mismatch", "exposure", "occupation", "mismatch_rate", "divergence_probability", "mean_entry")
_FORCED = (
    "kl_fixed_history", "kl_fixed_history_p99", "kl_infinite", "top1_agreement", "fixed_history_tv", "mismatch", "kl",
)  # fmt: skip
_SATURATION = ("saturation", "long_agreement", "mismatch_after_agreement")
_ACROSS = 4  # panels in a row
_LETTERS = 26  # letters in a line of a panel's title
_PALE_LINE: Any = {"color": RULE, "linewidth": 1.0}  # opaque, since many transparent lines would add up to a dark one
_PALE_POINTS = 32  # points of such a line; there are as many lines as pairs of actions
PRE_EOS = (
    "early_pre_eos", "late_pre_eos", "late_minus_early_pre_eos", "early_pre_eos_fraction", "late_pre_eos_fraction",
)  # fmt: skip
_ON_PAPER: Any = {"frameon": True, "framealpha": 1.0, "edgecolor": "none", "borderpad": 0.2}  # opaque legends
_EVERY = 8  # lags between two open markers on a curve
_STEP = 0.62  # for each action, as a fraction of a stratum's height
_ASIDE, _SPREAD = 0.09, 0.72  # of a block: between two actions, and between first and last
_LOWER = 2.0  # height of the lower panels; upper panels have 3
_LINE = 0.22  # for each action, as a fraction of that height


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
    shows = span(content, {"exposure": "Exposure E", "mismatch_rate": "the mismatch rate C"})
    return Section("decomposition", "How much, how soon, how long", tables, shows=shows)


def teacher_forced(content: PageContent) -> Section | None:
    """Make the section on KL and equal most probable tokens along X; None if no event has a KL divergence."""
    if not content.estimates.known("top1_agreement"):
        return None
    tables = action_tables("teacher_forced", "Teacher-forced distances", content, columns_of(*_FORCED))
    shows = span(content, {"kl_fixed_history": "Mean KL along X", "mismatch": "R"})
    return Section("teacher-forced", "What teacher-forced tools would say", tables, shows=shows)


def saturation(content: PageContent) -> Section | None:
    """Make the section on saturation and local agreement; None for finite-state systems."""
    if content.facts.finite:
        return None
    known = content.estimates.known("saturation", "long_agreement")
    title = "Saturation and local agreement"
    tables = action_tables("saturation", title, content, columns_of(*_SATURATION)) if known else ()
    shows = span(content, {"saturation": "S"})
    return Section("saturation", "Saturation and local agreement", tables, shows=shows)


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
    first = next(iter(bounds))
    shows = span(content, {"entry_cdf": f"The share of pairs that have diverged by position {count(first)}"}, first)
    return Section("entry", "Entry into divergence", tables, drawings, shows, values)


def entry_figure(content: PageContent) -> Figure:
    """Draw P(τ ≤ t) against t: in one panel, or in a panel for each action if bands would hide one another."""
    if len(content.actions) > TOGETHER:
        return _panels(content)
    figure = new_figure(WIDTH, 3.7)
    axes = figure.add_subplot()
    styles = action_styles(content.actions)
    curves = {action: content.estimates.profile("entry_cdf", action) for action in styles}
    for action, rows in curves.items():
        curve(axes, rows, styles[action])
        published_points(axes, rows, styles[action])
    percent_axis(axes, "diverged by position t (% of continuations)")
    axes.set_ylim(0, 101)  # so that a curve at 100% is seen whole
    position_axis(axes, content.windows.horizon, "generation position t (tokens)")
    if any(row.published is not None for rows in curves.values() for row in rows):
        figure.legend(handles=[published_handle()], loc="outside upper left")
    name_ends(axes, {action: list(zip(*points(rows), strict=True))[-1] for action, rows in curves.items() if rows})
    return figure


def _panels(content: PageContent) -> Figure:
    """Draw a panel for each action: its curve and band in front of the pale curves of the other actions."""
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
    """Return some of a profile's rows in reverse order, the last and the first row always among them."""
    return rows[:: -max(1, len(rows) // _PALE_POINTS)] + rows[:1]


def _share_axes(panels: list[Axes], used: int, last: int) -> None:
    """Give all panels one scale, with numbers at the lowest of each column, and hide unused panels."""
    panels[0].set_ylim(0, 101)  # so that a curve at 100% is seen whole
    panels[0].set_yticks([0, 50, 100])
    for place, axes in enumerate(panels):
        axes.set_visible(place < used)
        position_axis(axes, last, "")
        axes.tick_params(labelbottom=place + _ACROSS >= used)


def clocks_section(content: PageContent) -> Section | None:
    """Make the section on both clocks; None for finite-state systems without lag windows."""
    finite, windows, baseline = content.facts.finite, content.windows, content.baseline
    drawn = content.estimates.known("generation_delta", "branch_delta", "late_minus_early")
    if finite and not (drawn and windows.early_last >= 1):
        return None
    tables = [
        *action_tables("branch", "Branch clock", content, _branch_columns(content)),
        *action_tables("branch_pre_eos", "Branch clock before either EOS", content, columns_of(*PRE_EOS)),
        action_table(
            "generation_blocks", "Generation clock: blocks of positions", content.estimates, content.actions,
            [column for letter, name in (("δ", "delta"), ("f", "f"))
             for column in _block_columns(windows, f"generation_block_{name}", letter)],
        ),
    ]  # fmt: skip
    if content.others:
        columns = [*_block_columns(windows, "generation_gap", "g"), EstimateColumn("generation_gap_change")]
        title = "Generation clock: gaps by block"
        note = f"Differences to {baseline}; Δg is the gap of the last block less the gap of the first block."
        tables += action_tables("generation_gaps", title, content, columns, contrasts=True, note=note)
    words = "Total variation by generation position and by lag after divergence, with block gaps and late minus early"
    drawings = [Drawing("two_clocks", words, partial(clocks_figure, content))] if drawn else []
    if drawn and len(content.facts.strata) > 1:
        words = "Change of the gap over generation blocks and late minus early on the branch, in each stratum"
        drawings.append(Drawing("clocks_by_stratum", words, partial(strata_figure, content)))
    values = {"bandless": content.estimates.have_intervals and len(content.actions) > TOGETHER}
    shows = signs(content, "late_minus_early", "Late minus early δ on the branch")
    return Section("clocks", "Two clocks", tuple(tables), tuple(drawings), shows, values)


def _branch_columns(content: PageContent) -> list[EstimateColumn | CellColumn]:
    """Return the columns of the branch clock's windows.

    The second column has the numbers of documents and trajectories in the branch cohort, ours and the paper's.
    """
    printed = content.published.support
    cells = {}
    for row in content.source.of("branch_windows", split=content.split):
        place = row["stratum"], row["action"]
        beside = f"published {_support(*printed[place])}" if place in printed else ""
        cells[place] = Cell(_support(row["documents"], row["paths"]), published=beside)
    support = CellColumn(Column("documents / paths", "", "support of the cohort"), cells)
    share = EstimateColumn("cohort_fraction", head=f"P(τ\u00a0≤\u00a0{count(content.windows.cohort_bound)})")
    return [share, support, *columns_of("early", "late", "late_minus_early")]


def _support(documents: float, paths: float) -> str:
    return f"{count(documents)} / {count(paths)}"


def _block_columns(windows: Windows, quantity: str, symbol: str) -> list[EstimateColumn]:
    return [EstimateColumn(quantity, x, f"{symbol}, {_span(block)}") for x, block in enumerate(windows.blocks, 1)]


def _span(block: tuple[int, int]) -> str:
    first, last = block
    return f"{first}–{last}" if last >= first else MISSING


def clocks_figure(content: PageContent) -> Figure:
    """Draw the generation clock on the left, the branch clock on the right; curves above, summaries below."""
    styles = action_styles(content.actions)
    lower = max(_LOWER, _LINE * len(styles))
    figure = new_figure(WIDTH, 6.6 + 1.32 * (lower - _LOWER))
    grid = figure.subplots(2, 2, height_ratios=(3, lower))
    _generation_curves(grid[0, 0], content, styles)
    _branch_curves(grid[0, 1], content, styles)
    top = max(axes.get_ylim()[1] for axes in grid[0])
    for axes in grid[0]:  # one scale for one quantity
        axes.set_ylim(0, top)
        round_ticks(axes.yaxis)
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= min(top, 100)])
    _block_points(grid[1, 0], content, styles)
    _late_minus_early(grid[1, 1], content, styles)
    action_legend(figure, styles, marker=True, published=content.estimates.have_published)
    return figure


def strata_figure(content: PageContent) -> Figure:
    """Draw Δg of each contrast, and late − early of each action, in rows: all strata pooled, then each stratum.

    Δg is the gap in δ to the baseline in the last block of positions, less that in the first block. Late − early has
    two panels: over all lags, and over those before the first EOS.
    """
    estimates, styles = content.estimates, action_styles(content.actions)
    others = {action: styles[action] for action in content.others}
    rows = [POOLED, *content.facts.strata]
    figure = new_figure(WIDTH, 1.5 + len(rows) * max(0.34, 0.13 * len(styles) + 0.1))
    panels: list[tuple[str, str, str | None, dict[str, ActionStyle]]] = [
        ("late_minus_early", "Late − early δ", None, styles),
        ("late_minus_early_pre_eos", "Late − early δ, pre-EOS", None, styles),
    ]
    if others:
        title = f"Δg, gap in δ to {shown(content.baseline)}"
        panels.insert(0, ("generation_gap_change", title, content.baseline, others))
    grid = figure.subplots(1, len(panels), sharey=True)
    for axes, letter, (quantity, title, base, drawn) in zip(grid, "abc", panels, strict=False):
        for place, stratum in enumerate(rows):
            _stratum(axes, [estimates.get(quantity, action, base, stratum=stratum) for action in drawn], place, drawn)
        axes.axhline(0.5, color=QUIET, linewidth=0.7)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(library().ticker.MaxNLocator(nbins=5))
        axes.set(title=f"{letter}  {title}", xlabel="percentage points")
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


def _generation_curves(axes: Axes, content: PageContent, styles: dict[str, ActionStyle]) -> None:
    for action, style in styles.items():
        forced = content.estimates.profile("generation_f", action)
        axes.plot(*points(forced), color=style.colour, linestyle=style.dashes, linewidth=0.8, alpha=0.8)
        curve(axes, content.estimates.profile("generation_delta", action), style, band=len(styles) <= TOGETHER)
    axes.set_title("a  Generation clock")
    percent_axis(axes, "total variation (%)")
    axes.set_ylim(bottom=0)
    position_axis(axes, content.windows.horizon, "generation position t (tokens)")
    sample = [
        legend_line("δ, each on its own history", color=QUIET, linewidth=1.8),
        legend_line("f, forced along the reference", color=QUIET, linewidth=0.8),
    ]
    headroom(axes, 0.24)
    axes.legend(handles=sample, loc="upper right", fontsize=8, borderaxespad=0.2, **_ON_PAPER)


def _branch_curves(axes: Axes, content: PageContent, styles: dict[str, ActionStyle]) -> None:
    windows, bound = content.windows, content.windows.cohort_bound
    for action, style in styles.items():
        rows = content.estimates.profile("branch_delta", action)
        curve(axes, rows, style, band=len(styles) <= TOGETHER)
        published_points(axes, rows, style, every=_EVERY)
    axes.set_ylim(bottom=0)
    axes.set_title("b  Branch clock")
    percent_axis(axes, "total variation (%)")
    if windows.early_last >= 1:
        for first, last in ((1, windows.early_last), (windows.late_first, bound)):
            axes.axvspan(first - 0.5, last + 0.5, color=SHADE, alpha=0.06, linewidth=0)
        headroom(axes, 0.1)
        top = axes.get_xaxis_transform()
        for name, ends in (("early", 1 + windows.early_last), ("late", windows.late_first + bound)):
            axes.text(ends / 2, 0.985, name, transform=top, ha="center", va="top", color=QUIET, fontsize=8)
    position_axis(axes, max(bound, 2), "lag after the first mismatch (tokens)")


def _block_points(axes: Axes, content: PageContent, styles: dict[str, ActionStyle]) -> None:
    quantity, baseline = ("generation_gap", content.baseline) if content.others else ("generation_block_delta", None)
    drawn = content.others or content.actions
    aside = min(_ASIDE, _SPREAD / max(1, len(drawn) - 1))
    for place, action in enumerate(drawn):
        rows = content.estimates.profile(quantity, action, baseline)
        shift = aside * (place - (len(drawn) - 1) / 2)
        upright(axes, [(row.x or 0) + shift for row in rows], rows, styles[action])
    axes.set_xticks((1, 2, 3), [_span(block) for block in content.windows.blocks])
    axes.set(xlim=(0.6, 3.4), xlabel="block of generation positions (tokens)")
    axes.grid(visible=False, axis="x")
    if baseline:
        axes.set(title=f"c  Gap in δ to {shown(baseline)}", ylabel="gap (percentage points)")
        zero_line(axes, upright=False)
    else:
        axes.set(title="c  δ by block", ylabel="total variation (%)")
        axes.set_ylim(bottom=0)


def _late_minus_early(axes: Axes, content: PageContent, styles: dict[str, ActionStyle]) -> None:
    for place, (action, style) in enumerate(styles.items()):
        across(axes, content.estimates.get("late_minus_early", action), place - 0.11, style)
        across(axes, content.estimates.get("late_minus_early_pre_eos", action), place + 0.2, style, pale=True)
    axes.set_yticks(range(len(styles)), [shown(action) for action in styles])
    axes.grid(visible=False, axis="y")
    zero_line(axes, upright=True)
    axes.set(title="d  Late minus early on the branch", xlabel="late − early δ (percentage points)")
    sample = [
        legend_line("all steps", linestyle="none", marker="o", color=QUIET),
        legend_line("steps before either EOS", linestyle="none", marker="o", color=QUIET, alpha=PALE),
    ]
    axes.set_ylim(len(styles) - 0.4, -0.6 - 0.34 * max(1.0, len(styles) / 3))  # room for the legend
    axes.legend(
        handles=sample, loc="upper right", fontsize=8, ncols=2, borderaxespad=0.1, handletextpad=0.2, **_ON_PAPER
    )
