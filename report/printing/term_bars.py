"""Differences to the baseline as stacked bars of their terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from report.printing.canvas import legend_patch, new_figure
from report.printing.numbers import MISSING, decimals_for, fixed, interval, scaled
from report.printing.palette import INK, QUIET
from report.printing.section import Drawing
from report.printing.strokes import WIDTH, errors, published_handle
from report.reading.content import PageContent
from report.reading.estimates import Estimate, ReportedEstimates
from schema.study import POOLED
from stats.registry import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch


@dataclass(frozen=True)
class Bar:
    """One bar: the difference of an action from the baseline, in one stratum or pooled."""

    label: str
    action: str
    baseline: str
    stratum: str = POOLED


@dataclass(frozen=True)
class Terms:
    """The parts of a bar: quantity, label, colour and hatch of each term; the terms' total; the share in print."""

    total: str
    share: str
    share_label: str
    axis: str
    terms: tuple[tuple[str, str, str, str], ...]


def term_drawings(name: str, words: str, content: PageContent, terms: Terms) -> tuple[Drawing, ...]:
    """Return the figure of all contrasts with the baseline, and, if there are several strata, ``NAME_by_stratum``."""
    pooled = [Bar(action, action, content.baseline) for action in content.others]
    drawings = [Drawing(name, words, partial(term_bars, content.estimates, pooled, terms))]
    strata = content.facts.strata
    if len(strata) > 1:
        several = len(content.others) > 1
        bars = [
            Bar(f"{stratum} · {action}" if several else stratum, action, content.baseline, stratum)
            for action in content.others for stratum in strata
        ]  # fmt: skip
        draw = partial(term_bars, content.estimates, bars, terms)
        drawings.append(Drawing(f"{name}_by_stratum", f"{words}, in each stratum", draw))
    return tuple(drawings)


def term_bars(estimates: ReportedEstimates, bars: Sequence[Bar], terms: Terms) -> Figure:
    """Draw each difference as a stacked bar of its terms, with its interval, its value and one share."""
    figure = new_figure(WIDTH, 1.35 + 0.42 * len(bars))
    axes, beside = figure.subplots(1, 2, width_ratios=(3, 1.3))
    totals = [estimates.get(terms.total, bar.action, bar.baseline, stratum=bar.stratum) for bar in bars]
    for place, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        _stack(axes, estimates, bar, place, terms)
        _total(axes, total, place)
    axes.use_sticky_edges = False  # room beyond the longest bar
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(bars)), [f" {bar.label}" for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(terms.axis)
    decimals = decimals_for(totals, Scale.POINTS)
    beside.set_axis_off()
    beside.set(xlim=(0, 1), ylim=axes.get_ylim())
    beside.text(0, -0.62, "total, pp", va="bottom", color=QUIET)
    beside.text(1, -0.62, terms.share_label, va="bottom", ha="right", color=QUIET)
    for place, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        share = MISSING
        if total.excludes_zero() or not total.has_interval:
            share = _share(estimates.get(terms.share, bar.action, bar.baseline, stratum=bar.stratum))
        value = f"{scaled(total.estimate, Scale.POINTS, decimals)} {interval(total, Scale.POINTS, decimals)}".rstrip()
        beside.text(0, place, value, va="center")
        beside.text(1, place, share, va="center", ha="right", fontweight="bold")
    handles: list[Patch | Line2D] = [
        legend_patch(label, facecolor=colour, hatch=hatch, edgecolor="white") for _, label, colour, hatch in terms.terms
    ]
    if any(total.published is not None for total in totals):
        handles.append(published_handle("D"))
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    return figure


def _stack(axes: Axes, estimates: ReportedEstimates, bar: Bar, place: int, terms: Terms) -> None:
    right, left = 0.0, 0.0
    for quantity, _, colour, hatch in terms.terms:
        value = estimates.get(quantity, bar.action, bar.baseline, stratum=bar.stratum).estimate
        if value is None:
            continue
        width = 100 * value
        start = right if width >= 0 else left
        axes.barh(place, width, left=start, height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        right, left = (right + width, left) if width >= 0 else (right, left + width)


def _total(axes: Axes, total: Estimate, place: int) -> None:
    if total.estimate is not None and total.has_interval:
        axes.errorbar([total.estimate * 100], [place], xerr=errors(total), color=INK, linewidth=1.2, capsize=3.5)
    if total.published is not None:
        axes.plot([100 * total.published], [place], marker="D", markersize=6.5, markerfacecolor="white",
                  markeredgecolor=INK, markeredgewidth=1.1, zorder=4)  # fmt: skip


def _share(row: Estimate) -> str:
    return MISSING if row.estimate is None else f"{fixed(100 * row.estimate, 1)}%"
