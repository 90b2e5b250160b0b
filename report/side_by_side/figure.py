"""The figure of bytes against divergence for every action of a comparison; a colour and a marker for each study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvdrift.report.printing.canvas import Figure, action_styles, legend_line, new_figure
from kvdrift.report.printing.labels import Mark, name_marks
from kvdrift.report.printing.strokes import WIDTH, errors, moved_aside, percent_axis, round_ticks
from kvdrift.report.side_by_side.leaderboard import Place

_ASIDE = 8.0  # points between studies whose actions hold the same share
_BETWEEN = 0.7  # fraction of that between two actions of the same share whose intervals overlap
_ROOM = 1.0  # percentage points of R kept free above and below an action's mark
_SAME = 0.004  # shares of the full cache that differ by less look the same


def drawn(places: Sequence[Place]) -> list[Place]:
    """Return the actions that a figure can show: those whose share of the full cache and R are known."""
    return [place for place in places if place.share is not None and place.estimate("mismatch").estimate is not None]


def leaderboard_figure(places: Sequence[Place], studies: Sequence[str]) -> Figure:
    """Draw R with intervals over the share of the full cache, study by study; each action is named once."""
    figure = new_figure(WIDTH, 4.2)
    axes = figure.add_subplot()
    there = {place.entry.name for place in places}
    styles = action_styles([name for name in studies if name in there])
    marks = []
    for column in _columns(places):
        for place, aside in _asides(column, list(styles)):
            style, mark = styles[place.entry.name], _mark(place, aside)
            axes.errorbar(
                [mark.x], [mark.y], yerr=errors(place.estimate("mismatch")), fmt=style.marker, color=style.colour,
                markersize=7, linewidth=1.3, capsize=3, zorder=3, transform=moved_aside(axes, aside),
            )  # fmt: skip
            marks.append(mark)
    top, widest = max(mark.high for mark in marks), max(mark.x for mark in marks)  # above 100: more than the prompt
    axes.set(xlim=(0, max(104, 1.08 * widest)), ylim=(0, 1.1 * top or 1.0), xlabel="cache (% of the full prompt’s)")
    round_ticks(axes.xaxis)
    percent_axis(axes, "R (token): positions that differ (%)")
    handles = [legend_line(f" {name}", linestyle="none", marker=style.marker, color=style.colour)
               for name, style in styles.items()]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 4))
    name_marks(axes, marks)
    return figure


def _mark(place: Place, aside: float = 0.0) -> Mark:
    risk = place.estimate("mismatch")
    y, (below, above) = 100 * (risk.estimate or 0.0), errors(risk)
    return Mark(place.action, 100 * (place.share or 0.0), y, y - below[0], y + above[0], aside)


def _columns(places: Sequence[Place]) -> list[list[Place]]:
    """Group the places of about the same share of the full cache, whose marks would overlap."""
    columns: list[list[Place]] = []
    for place in sorted(places, key=lambda one: one.share or 0.0):
        if not columns or (place.share or 0.0) - (columns[-1][0].share or 0.0) > _SAME:
            columns.append([])
        columns[-1].append(place)
    return columns


def _asides(column: Sequence[Place], studies: Sequence[str]) -> list[tuple[Place, float]]:
    """Return how many points each mark of a column moves: studies stand side by side, and so do overlapping actions."""
    of: dict[str, list[Place]] = {}
    for place in column:
        of.setdefault(place.action, []).append(place)
    present = [name for name in studies if any(place.entry.name == name for place in column)]
    width = len(present) + _BETWEEN
    asides = []
    for beside in _overlapping({action: _span(own) for action, own in of.items()}):
        middle = (len(beside) * width - _BETWEEN - 1) / 2
        for slot, action in enumerate(beside):
            steps = [slot * width + present.index(place.entry.name) - middle for place in of[action]]
            asides += [(place, _ASIDE * step) for place, step in zip(of[action], steps, strict=True)]
    return asides


def _overlapping(spans: Mapping[str, tuple[float, float]]) -> list[list[str]]:
    """Group the actions whose spans overlap, directly or through others; the lowest group first."""
    groups: list[list[str]] = []
    reached = -math.inf
    for action in sorted(spans, key=lambda one: (spans[one], one)):
        low, high = spans[action]
        if low > reached:
            groups.append([])
        groups[-1].append(action)
        reached = max(reached, high)
    return groups


def _span(places: Sequence[Place]) -> tuple[float, float]:
    marks = [_mark(place) for place in places]
    return min(mark.low for mark in marks) - _ROOM, max(mark.high for mark in marks) + _ROOM
