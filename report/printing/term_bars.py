"""Differences to the baseline as stacked bars of their terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvdrift.report.printing.canvas import Axes, Figure, Line2D, Patch, legend_patch, new_figure
from kvdrift.report.printing.numbers import MISSING, decimals_for, fixed, interval, scaled
from kvdrift.report.printing.palette import INK, QUIET
from kvdrift.report.printing.section import Drawing
from kvdrift.report.printing.strokes import WIDTH, errors, published_handle
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate, ReportedEstimates
from kvdrift.schema.study import POOLED
from kvdrift.stats.registry import Scale


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
    pooled = {action: (action, POOLED) for action in content.others}
    drawings = [Drawing(name, words, partial(term_bars, content.estimates, content.baseline, pooled, terms))]
    strata = content.facts.strata
    if len(strata) > 1:
        several = len(content.others) > 1
        bars = {
            f"{stratum} · {action}" if several else stratum: (action, stratum)
            for action in content.others for stratum in strata
        }  # fmt: skip
        draw = partial(term_bars, content.estimates, content.baseline, bars, terms)
        drawings.append(Drawing(f"{name}_by_stratum", f"{words}, in each stratum", draw))
    return tuple(drawings)


def term_bars(estimates: ReportedEstimates, baseline: str, bars: Mapping[str, tuple[str, str]], terms: Terms) -> Figure:
    """Draw the difference of each labelled action, in a stratum, as a stacked bar of its terms."""
    figure = new_figure(WIDTH, 1.35 + 0.42 * len(bars))
    axes, beside = figure.subplots(1, 2, width_ratios=(3, 1.3))

    def of(quantity: str) -> list[Estimate]:
        return [estimates.get(quantity, action, baseline, stratum=stratum) for action, stratum in bars.values()]

    totals = of(terms.total)
    for place, parts in enumerate(zip(*(of(quantity) for quantity, *_ in terms.terms), strict=True)):
        _stack(axes, parts, place, terms)
        _total(axes, totals[place], place)
    axes.use_sticky_edges = False  # room beyond the longest bar
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(bars)), [f" {label}" for label in bars])
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
    for place, (total, part) in enumerate(zip(totals, of(terms.share), strict=True)):
        clear, share = total.excludes_zero() or not total.has_interval, MISSING
        if clear and part.estimate is not None:
            share = f"{fixed(100 * part.estimate, 1)}%"
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


def _stack(axes: Axes, parts: Sequence[Estimate], place: int, terms: Terms) -> None:
    right, left = 0.0, 0.0
    for part, (_, _, colour, hatch) in zip(parts, terms.terms, strict=True):
        if part.estimate is None:
            continue
        width = 100 * part.estimate
        start = right if width >= 0 else left
        axes.barh(place, width, left=start, height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        right, left = (right + width, left) if width >= 0 else (right, left + width)


def _total(axes: Axes, total: Estimate, place: int) -> None:
    if total.estimate is not None and total.has_interval:
        axes.errorbar([total.estimate * 100], [place], xerr=errors(total), color=INK, linewidth=1.2, capsize=3.5)
    if total.published is not None:
        axes.plot([100 * total.published], [place], marker="D", markersize=6.5, markerfacecolor="white",
                  markeredgecolor=INK, markeredgewidth=1.1, zorder=4)  # fmt: skip
