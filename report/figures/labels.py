"""Names beside the marks of a figure, placed so that they overlap no name, mark, interval or line if there is room.

Libraries were tried on these figures. adjustText leaves names on bars, marks and the frame; textalloc avoids these, but
puts most names so far from their marks that each needs a line to its mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdrift.report.figures.canvas import INK, QUIET, Axes, library
from kvdrift.report.figures.strokes import moved_aside

Boxes = NDArray[np.float64]
"""float64[n, 4], left, bottom, right and top in points from the figure's corner; float64[4] for a single box."""

_SIZE = 8  # height of a name, in points
_HALF = 4.5  # half the width of a mark, in points
_BAR = 2.5  # half the width of an interval, in points
_STEP = 3.0  # length of a box along a line, in points
_NEAR = 3.0  # from a mark to its name, in points
_RINGS = (0.0, 7.0, 15.0, 25.0, 38.0)  # further from the mark; beyond the second a line leads to the mark
_SIDES = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1), (0, 1), (0, -1))  # the right side is preferred
_DIAGONAL = 0.75  # factor on the horizontal and vertical distance
_OVERLAP = 20.0  # cost of an overlapping square point, in points of distance from the mark
_OUTSIDE = 10.0  # overlapping square points that cost as much as one point outside the axes
_STRAY = 15.0  # overlapping square points that cost as much as another name's mark at the same distance


@dataclass(frozen=True)
class Mark:
    """A mark of a figure: its name, place and vertical interval in data units, and shift to the right in points."""

    name: str
    x: float
    y: float
    low: float
    high: float
    aside: float = 0.0


def name_marks(axes: Axes, marks: Sequence[Mark], line: Sequence[Mark] = (), *, in_legend: bool = False) -> None:
    """Write every name once, beside one of its marks, and join the marks of one name by a thin line.

    Call this last: the free room depends on the limits of the axes and on everything around the axes. Names choose
    their place in the order of ``marks``, and avoid the ``line`` that joins some marks. If they are ``in_legend`` as
    well, names without room beside a mark are left out.
    """
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # lays the figure out
    frame = np.array(axes.bbox.extents) * 72 / axes.figure.dpi
    boxes = {mark: _boxes(axes, mark) for mark in marks}
    taken = np.concatenate([*boxes.values(), *_along(axes, line)])
    _join(axes, line)
    for name in dict.fromkeys(mark.name for mark in marks):
        same_name = sorted((mark for mark in marks if mark.name == name), key=lambda mark: (mark.x, mark.aside))
        others = np.concatenate([np.empty((0, 4)), *(boxes[mark] for mark in marks if mark.name != name)])
        _join(axes, same_name)
        costs: dict[tuple[float, int, int], tuple[Mark, Boxes, float]] = {}
        for mark, box, far, side in _spots(axes, name, same_name, _RINGS[:2] if in_legend else _RINGS):
            outside = np.maximum(frame - box, 0)[:2].sum() + np.maximum(box - frame, 0)[2:].sum()
            stray = bool((_distances(box, others) <= _distances(box, boxes[mark]).min() + 0.5).any())
            area = _overlaps(box, taken).sum() + _OUTSIDE * outside + _STRAY * stray
            costs[_OVERLAP * float(area) + far, side, len(costs)] = mark, box, far
        cost, *_ = least = min(costs)
        mark, box, far = costs[least]
        if not in_legend or cost <= _RINGS[1]:
            _write(axes, mark, box, far)
            taken = np.concatenate([taken, [box]])


def _place(axes: Axes, mark: Mark, value: float) -> NDArray[np.float64]:
    """Return the place of a value at a mark, in points."""
    place: NDArray[np.float64] = axes.transData.transform((mark.x, value)) * 72 / axes.figure.dpi + (mark.aside, 0)
    return place


def _boxes(axes: Axes, mark: Mark) -> Boxes:
    """Return the box of a mark and the box of its interval, float64[2, 4]."""
    middle, low, high = (_place(axes, mark, value) for value in (mark.y, mark.low, mark.high))
    bar = np.array([_BAR, 0])
    return np.array([[*(middle - _HALF), *(middle + _HALF)], [*(low - bar), *(high + bar)]])


def _along(axes: Axes, line: Sequence[Mark]) -> Iterator[Boxes]:
    """Yield small boxes along a line."""
    for start, end in pairwise(_place(axes, mark, mark.y) for mark in line):
        steps = max(2, 1 + int(np.ceil(np.hypot(*(end - start)) / _STEP)))
        points = np.linspace(start, end, steps)
        yield np.hstack([points - _STEP / 2, points + _STEP / 2])


def _spots(
    axes: Axes, name: str, marks: Sequence[Mark], rings: Sequence[float]
) -> Iterator[tuple[Mark, Boxes, float, int]]:
    """Yield the possible places of a name: mark, box of the name, distance beyond the nearest place, and side."""
    path = library().textpath.TextPath((0, 0), name or " ", size=_SIZE)
    size = np.array([path.get_extents().width + 1.0, _SIZE])
    for mark in reversed(marks):
        x, y = _place(axes, mark, mark.y)
        ends = {up: _place(axes, mark, value)[1] for up, value in ((-1, mark.low), (0, mark.y), (1, mark.high))}
        for far in rings:
            for side, (across, up) in enumerate(_SIDES):
                away = (_HALF + _NEAR + far) * (_DIAGONAL if across and up else 1.0)
                beyond = y if across else ends[up]  # above and below the mark its interval is in the way
                corner = (x + across * away, beyond + up * away) + (np.array([across, up]) - 1) * size / 2
                yield mark, np.concatenate([corner, corner + size]), far, side


def _overlaps(box: Boxes, boxes: Boxes) -> NDArray[np.float64]:
    """Return the area that a box shares with each of some boxes."""
    shared = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    areas: NDArray[np.float64] = np.maximum(shared, 0).prod(axis=1)
    return areas


def _distances(box: Boxes, boxes: Boxes) -> NDArray[np.float64]:
    """Return the distance from a box to each of some boxes."""
    between = np.maximum(boxes[:, :2] - box[2:], box[:2] - boxes[:, 2:])
    distances: NDArray[np.float64] = np.hypot(*np.maximum(between, 0).T)
    return distances


def _join(axes: Axes, marks: Sequence[Mark]) -> None:
    for start, end in pairwise(marks):
        ends = {"xycoords": moved_aside(axes, start.aside), "textcoords": moved_aside(axes, end.aside)}
        joined = axes.annotate("", (start.x, start.y), (end.x, end.y), **ends, arrowprops=_leader(0.8), zorder=2)
        joined.set_in_layout(False)


def _write(axes: Axes, mark: Mark, box: Boxes, far: float) -> None:
    x, y = box[:2] - _place(axes, mark, mark.y)
    written = axes.annotate(
        mark.name, (mark.x, mark.y), xycoords=moved_aside(axes, mark.aside), xytext=(float(x), float(y)),
        textcoords="offset points", color=INK, fontsize=_SIZE, zorder=5, annotation_clip=False,
        arrowprops=_leader(0.5, _HALF) if far > _RINGS[1] else None,
    )  # fmt: skip
    written.set_in_layout(False)


def _leader(width: float, before: float = 0.0) -> dict[str, Any]:
    """Return the style of a plain line that stops ``before`` points short of its end."""
    return {"arrowstyle": "-", "color": QUIET, "linewidth": width, "shrinkA": 0, "shrinkB": before}
