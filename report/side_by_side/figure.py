"""Bytes against divergence of every action of a comparison; a colour and a marker for each study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from report.printing.canvas import action_styles, legend_line, new_figure
from report.printing.palette import QUIET
from report.printing.strokes import WIDTH, errors, moved_aside, percent_axis, round_ticks
from report.side_by_side.leaderboard import Place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ASIDE = 7.0  # points between studies whose actions have the same share


def drawn(places: Sequence[Place]) -> list[Place]:
    """The actions that a figure can show: those whose share of the full cache and R are known."""
    return [place for place in places if place.share is not None and place.estimate("mismatch").estimate is not None]


def leaderboard_figure(places: Sequence[Place]) -> Figure:
    """R with its interval over the share of the full cache; each mark has its action's name."""
    figure = new_figure(WIDTH, 4.2)
    axes = figure.add_subplot()
    styles = action_styles(list(dict.fromkeys(place.entry.name for place in places)))
    for place in places:
        risk, style = place.estimate("mismatch"), styles[place.entry.name]
        x, y = 100 * (place.share or 0.0), 100 * (risk.estimate or 0.0)
        alike = [name for name in styles if any(one.entry.name == name and one.share == place.share for one in places)]
        aside = _ASIDE * (alike.index(place.entry.name) - (len(alike) - 1) / 2)
        axes.errorbar([x], [y], yerr=errors(risk), fmt=style.marker, color=style.colour, markersize=7, linewidth=1.3,
                      capsize=3, zorder=3, transform=moved_aside(axes, aside))  # fmt: skip
        axes.annotate(f" {place.action}", (x, y), xytext=(8 + aside, 4), textcoords="offset points", color=QUIET,
                      fontsize=8)  # fmt: skip
    top = max(100 * (place.estimate("mismatch").estimate or 0.0) + errors(place.estimate("mismatch"))[1][0]
              for place in places)  # fmt: skip
    widest = max(100 * (place.share or 0.0) for place in places)  # above 100 where a policy reads more than the prompt
    axes.set(xlim=(0, max(104, 1.08 * widest)), ylim=(0, 1.1 * top or 1.0), xlabel="cache (% of the full prompt’s)")
    round_ticks(axes.xaxis)
    percent_axis(axes, "R (token): positions that differ (%)")
    handles = [legend_line(f" {name}", linestyle="none", marker=style.marker, color=style.colour)
               for name, style in styles.items()]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 4))
    return figure
