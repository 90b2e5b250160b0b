"""Names beside the marks of a figure, placed so that they overlap no name, mark or interval if there is room."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvdrift.report.printing.canvas import Axes, library
from kvdrift.report.printing.palette import INK, QUIET
from kvdrift.report.printing.strokes import moved_aside

_SIZE = 8  # height of a name, in points
_HALF = 4.5  # half the width of a mark, in points
_BAR = 2.5  # half the width of an interval, in points
_STEP = 3.0  # length of a box along a line, in points
_NEAR = 3.0  # from a mark to its name, in points
_RINGS = (0.0, 7.0, 15.0, 25.0, 38.0)  # further from the mark; a line leads to the mark then
_SIDES = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1), (0, 1), (0, -1))  # the right side is preferred
_DIAGONAL = 0.75  # factor on the horizontal and vertical distance
_UPON = 20.0  # overlapping square points that cost as much as one point further away
_OUTSIDE = 10.0  # overlapping square points that cost as much as one point outside the axes
_STRAY = 15.0  # overlapping square points that cost as much as another name's mark as near

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in points from the figure's corner."""


@dataclass(frozen=True)
class Mark:
    """A mark of a figure: its name, its place in data units, its interval, and its shift in points."""

    name: str
    x: float
    y: float
    low: float
    high: float
    aside: float = 0.0


@dataclass(frozen=True)
class _Spot:
    """A possible place of a name: its mark, its box, and the offset of its lower left corner in points."""

    mark: Mark
    offset: tuple[float, float]
    box: Box
    far: float
    side: int


def name_marks(axes: Axes, marks: Sequence[Mark], line: Sequence[Mark] = (), *, in_legend: bool = False) -> None:
    """Write every name once, beside one of its marks, and join the marks of one name by a thin line.

    Call this last: the free room depends on the limits of the axes and on everything around the axes. Names choose
    their place in the order of ``marks``, and avoid the ``line`` that joins some marks. If they are ``in_legend`` as
    well, names without room beside a mark are left out.
    """
    of: dict[str, list[Mark]] = {}
    for mark in marks:
        of.setdefault(mark.name, []).append(mark)
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # lays the figure out
    boxes = {mark: tuple(_boxes(axes, mark)) for mark in marks}
    taken = [*(box for own in boxes.values() for box in own), *_along(axes, line)]
    _join(axes, line)
    for name, own in of.items():
        own.sort(key=lambda mark: (mark.x, mark.aside))
        _join(axes, own)
        others = [box for mark in marks if mark.name != name for box in boxes[mark]]
        spots = _spots(axes, name, own, _RINGS[:2] if in_legend else _RINGS)
        costs = {spot: _cost(axes, spot, taken, boxes[spot.mark], others) for spot in spots}
        best = min(costs, key=lambda spot: (costs[spot], spot.side))
        if not in_legend or costs[best] <= _RINGS[1]:
            _write(axes, name, best)
            taken.append(best.box)


def _place(axes: Axes, mark: Mark, value: float) -> tuple[float, float]:
    """Return the place of a value at a mark, in points."""
    x, y = axes.transData.transform((mark.x, value)) * 72 / axes.figure.dpi
    return float(x) + mark.aside, float(y)


def _boxes(axes: Axes, mark: Mark) -> Iterator[Box]:
    x, y = _place(axes, mark, mark.y)
    yield x - _HALF, y - _HALF, x + _HALF, y + _HALF
    yield x - _BAR, _place(axes, mark, mark.low)[1], x + _BAR, _place(axes, mark, mark.high)[1]


def _along(axes: Axes, line: Sequence[Mark]) -> Iterator[Box]:
    """Yield small boxes along a line."""
    corners = [_place(axes, mark, mark.y) for mark in line]
    for (x, y), (to_x, to_y) in pairwise(corners):
        steps = max(1, math.ceil(math.hypot(to_x - x, to_y - y) / _STEP))
        for step in range(steps + 1):
            at_x, at_y = x + (to_x - x) * step / steps, y + (to_y - y) * step / steps
            yield at_x - _STEP / 2, at_y - _STEP / 2, at_x + _STEP / 2, at_y + _STEP / 2


def _cost(axes: Axes, spot: _Spot, taken: Sequence[Box], own: Sequence[Box], others: Sequence[Box]) -> float:
    """Return the cost of a spot: overlaps, parts outside the axes, distance, and whether another mark is as near."""
    left, bottom, right, top = (float(end) * 72 / axes.figure.dpi for end in axes.bbox.extents)
    upon = sum(_common(spot.box, box) for box in taken)
    ends = (left - spot.box[0], spot.box[2] - right, bottom - spot.box[1], spot.box[3] - top)
    outside = sum(max(0.0, end) for end in ends)
    beside = min(_apart(spot.box, box) for box in own)
    stray = any(_apart(spot.box, box) <= beside + 0.5 for box in others)
    return _UPON * (upon + _OUTSIDE * outside + _STRAY * stray) + spot.far


def _spots(axes: Axes, name: str, marks: Sequence[Mark], rings: Sequence[float]) -> Iterator[_Spot]:
    """Yield the possible places of a name around each of its marks, the nearest first."""
    width, height = _extent(name)
    for mark in reversed(marks):
        x, y = _place(axes, mark, mark.y)
        ends = {up: _place(axes, mark, value)[1] for up, value in ((-1, mark.low), (0, mark.y), (1, mark.high))}
        for far in rings:
            for side, (across, up) in enumerate(_SIDES):
                away = (_HALF + _NEAR + far) * (_DIAGONAL if across and up else 1.0)
                beyond = ends[up] if not across else y  # above and below the mark its interval is in the way
                left = x + across * away + (across - 1) * width / 2
                below = beyond + up * away + (up - 1) * height / 2
                yield _Spot(mark, (left - x, below - y), (left, below, left + width, below + height), far, side)


def _extent(name: str) -> tuple[float, float]:
    """Return the width and height of a name, in points."""
    path = library().textpath.TextPath((0, 0), name or " ", size=_SIZE)
    return float(path.get_extents().width) + 1.0, float(_SIZE)


def _common(one: Box, other: Box) -> float:
    """Return the area that two boxes share."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    up = min(one[3], other[3]) - max(one[1], other[1])
    return across * up if across > 0 and up > 0 else 0.0


def _apart(one: Box, other: Box) -> float:
    """Return the distance between two boxes."""
    across = max(one[0] - other[2], other[0] - one[2], 0.0)
    up = max(one[1] - other[3], other[1] - one[3], 0.0)
    return math.hypot(across, up)


def _join(axes: Axes, marks: Sequence[Mark]) -> None:
    line = {"arrowstyle": "-", "color": QUIET, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
    for one, other in pairwise(marks):
        joined = axes.annotate("", (one.x, one.y), xycoords=moved_aside(axes, one.aside), xytext=(other.x, other.y),
                               textcoords=moved_aside(axes, other.aside), arrowprops=line, zorder=2)  # fmt: skip
        joined.set_in_layout(False)


def _write(axes: Axes, name: str, spot: _Spot) -> None:
    line = {"arrowstyle": "-", "color": QUIET, "linewidth": 0.5, "shrinkA": 0, "shrinkB": _HALF}
    written = axes.annotate(
        name, (spot.mark.x, spot.mark.y), xycoords=moved_aside(axes, spot.mark.aside), xytext=spot.offset,
        textcoords="offset points", color=INK, fontsize=_SIZE, zorder=5, annotation_clip=False,
        arrowprops=line if spot.far > _RINGS[1] else None,
    )  # fmt: skip
    written.set_in_layout(False)
