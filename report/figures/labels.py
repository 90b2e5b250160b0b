"""Names beside the marks of a figure, placed so that they overlap no name, mark, interval or line if there is room.

Libraries were tried on these figures. adjustText leaves names on bars, marks and the frame; textalloc avoids these, but
puts most names so far from their marks that each needs a line to its mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdrift.report.figures.canvas import INK, QUIET, Axes, library
from kvdrift.report.figures.strokes import moved_aside

Boxes = NDArray[np.float64]
"""float64[n, 4], left, bottom, right and top in points from the figure's corner; float64[4] for a single box."""

_SIZE = 9.0  # height of a name, in points
_DESCENT = 2.0  # of that, the part below the line of writing
_HALF = 4.5  # half the width of a mark, in points
_BAR = 2.5  # half the width of an interval, in points
_STEP = 3.0  # length of a box along a line, in points
_NEAR = 3.0  # from a mark to its name, in points
_RINGS = (0.0, 4.0, 8.0, 15.0, 25.0, 38.0, 54.0)  # further from the mark
_ALONE = 8.0  # so far a name stands without a line to its mark
# Right or left of the mark, above or below it, and to which side the name extends; the first is preferred.
_SIDES = (
    (1, 0, 1), (-1, 0, -1), (1, 1, 1), (1, -1, 1), (-1, -1, -1), (-1, 1, -1),
    (0, 1, 0), (0, -1, 0), (0, 1, 1), (0, 1, -1), (0, -1, 1), (0, -1, -1),
)  # fmt: skip
_FLUSH = {1: "left", 0: "center", -1: "right"}  # the end of a name that stays in place if another font shortens it
_DIAGONAL = 0.75  # factor on the horizontal and vertical distance
_APART = (-3.0, 0.0, 3.0, 0.0)  # margin to the left and right of a name, in points
_SIDE = 0.01  # cost of each less preferred side, in points of distance from the mark
_MARGIN = 2.0  # from the frame to a name, in points
_OVERLAP = 20.0  # cost of an overlapping square point
_OUTSIDE = 200.0  # cost of a point outside the axes
_STRAY = 300.0  # cost of another name's mark at the same distance
_PASSES = 3  # so often each name chooses its place, given the places of the others
_CLEAR = 60.0  # below this cost a name overlaps nothing


@dataclass(frozen=True)
class Mark:
    """A mark of a figure: its name, place and vertical interval in data units, and shift to the right in points.

    In SVG files ``gid`` begins the ids of the name and of the line that leads to it.
    """

    name: str
    x: float
    y: float
    low: float
    high: float
    aside: float = 0.0
    gid: str = ""


@dataclass(frozen=True)
class _Spot:
    mark: Mark
    boxes: Boxes  # of the name, and along the way from there to the mark
    flush: str  # one of ``_FLUSH``
    cost: float
    leader: bool = False  # whether a line is drawn along the way


def name_marks(
    axes: Axes, marks: Sequence[Mark], lines: Sequence[Sequence[tuple[float, float]]] = (), bands: Sequence[Mark] = ()
) -> None:
    """Write every name once, beside one of its marks, and join the marks of one name by a thin line.

    Call this last: the free room depends on the limits of the axes and on everything around the axes. Names keep off
    ``lines``, whose points are in data units. Each of ``bands`` is a mark whose interval spans the whole width of the
    axes; its name stands at the right or left end of the band, at the upper or lower edge.
    """
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # lays the figure out
    frame = np.array(axes.bbox.extents) * 72 / axes.figure.dpi + (_MARGIN, _MARGIN, -_MARGIN, -_MARGIN)
    boxes = {mark: _boxes(axes, mark) for mark in marks}
    paths = [_along(_place(axes, *start), _place(axes, *end)) for line in lines for start, end in pairwise(line)]
    taken = _stacked(*boxes.values(), *paths)
    spots = {band.name: list(_at_the_end(axes, band, frame, taken)) for band in bands}
    for name in dict.fromkeys(mark.name for mark in marks):
        same_name = sorted((mark for mark in marks if mark.name == name), key=lambda mark: (mark.x, mark.aside))
        others = _stacked(*(boxes[mark] for mark in marks if mark.name != name))
        _join(axes, same_name)
        spots[name] = [spot for mark in reversed(same_name) for spot in _beside(axes, mark, frame, taken, others)]
    for spot in _chosen(spots):
        _write(axes, spot, QUIET if spot.mark in bands else INK)


def name_ends(axes: Axes, ends: Mapping[str, tuple[float, float]]) -> None:
    """Write the name of each curve to the right of its end, moved up or down so that no names overlap.

    ``ends`` has the point (x, y), in data units, at which each curve ends. Call this last, as ``name_marks``.
    """
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    rising = sorted(ends.items(), key=lambda name_end: name_end[1][1])
    heights = [_place(axes, *end)[1] for _, end in rising]
    for (name, end), height, apart in zip(rising, heights, _apart(heights, _SIZE + _NEAR), strict=True):
        moved = abs(apart - height) > _NEAR
        axes.annotate(name, end, (4 * _NEAR, apart - height), textcoords="offset points", fontsize=_SIZE,
                      verticalalignment="center", annotation_clip=False,
                      arrowprops=_leader(0.6, _NEAR) | {"relpos": (0, 0.5)} if moved else None)  # fmt: skip


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Move rising heights as little as possible, so that neighbours are ``least`` or more apart."""
    pools: list[list[float]] = []
    for place, height in enumerate(heights):
        pools.append([height - least * place])
        while len(pools) > 1 and fmean(pools[-1]) < fmean(pools[-2]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [fmean(pool) + least * place for place, pool in enumerate(pool for pool in pools for _ in pool)]


def _stacked(*boxes: Boxes) -> Boxes:
    return np.concatenate([np.empty((0, 4)), *boxes])


def _place(axes: Axes, x: float, y: float, aside: float = 0.0) -> NDArray[np.float64]:
    """Convert the point (``x``, ``y``) from data units to points, and move it ``aside`` points to the right."""
    place: NDArray[np.float64] = axes.transData.transform((x, y)) * 72 / axes.figure.dpi + (aside, 0)
    return place


def _boxes(axes: Axes, mark: Mark) -> Boxes:
    """Return the box of a mark and the box of its interval, float64[2, 4]."""
    middle, low, high = (_place(axes, mark.x, value, mark.aside) for value in (mark.y, mark.low, mark.high))
    bar = np.array([_BAR, 0])
    return np.array([[*(middle - _HALF), *(middle + _HALF)], [*(low - bar), *(high + bar)]])


def _along(start: NDArray[np.float64], end: NDArray[np.float64]) -> Boxes:
    """Return small boxes along a line between two places."""
    steps = max(2, 1 + int(np.ceil(np.hypot(*(end - start)) / _STEP)))
    points = np.linspace(start, end, steps)
    return np.hstack([points - _STEP / 2, points + _STEP / 2])


def _size(name: str) -> NDArray[np.float64]:
    path = library().textpath.TextPath((0, 0), name or " ", size=_SIZE)
    return np.array([path.get_extents().width + 1.0, _SIZE])


def _beside(axes: Axes, mark: Mark, frame: Boxes, taken: Boxes, others: Boxes) -> Iterator[_Spot]:
    """Yield the possible places of a name beside a mark; ``others`` are marks and intervals of other names."""
    size, middle, own = _size(mark.name), _place(axes, mark.x, mark.y, mark.aside), _boxes(axes, mark)
    ends = {-1: own[1, 1], 1: own[1, 3]}
    for far in _RINGS:
        for side, (across, up, to) in enumerate(_SIDES):
            away = (_HALF + _NEAR + far) * (_DIAGONAL if across and up else 1.0)
            start = middle[0] + across * away + _HALF * (across - to)
            beyond = (middle[1] if across else ends[up]) + up * away  # above and below, its interval is in the way
            corner = (start, beyond) + (np.array([to, up]) - 1) * size / 2
            box = np.concatenate([corner, corner + size])
            end = np.clip(middle, box[:2], box[2:])
            way = _along(middle + min(1.0, 2 * _HALF / np.hypot(*(end - middle))) * (end - middle), end)
            cost = far + _SIDE * side + _crowding(box, frame, taken)
            if far:
                cost += float(_overlaps(way, taken).sum())
            leader = far > _ALONE
            if not leader and (_distances(box, others) <= _distances(box, own).min() + 0.5).any():
                cost += _STRAY
            yield _Spot(mark, _stacked(box[None], way), _FLUSH[to], cost, leader)


def _at_the_end(axes: Axes, band: Mark, frame: Boxes, taken: Boxes) -> Iterator[_Spot]:
    """Yield the possible places of a band's name: inside or outside its edges, at the right or the left end."""
    size = _size(band.name)
    low, high = (_place(axes, band.x, value)[1] for value in (band.low, band.high))
    inside = 0.0 if high - low > size[1] + 2 else _HALF
    for flush, left, preferred in (("right", frame[2] - size[0] - _NEAR, 0.0), ("left", frame[0] + _NEAR, 6.0)):
        heights = ((high - size[1] - 1, inside), (high + 1, 1.0), (low + 1, inside + 2.0), (low - size[1] - 1, 3.0))
        for bottom, less_fit in heights:
            box = np.array([left, bottom, left + size[0], bottom + size[1]])
            cost = less_fit + preferred + _crowding(box, frame, taken)
            yield _Spot(band, box[None], flush, cost)


def _chosen(spots: Mapping[str, Sequence[_Spot]]) -> list[_Spot]:
    """Choose a place for each name: in several rounds, each name in turn takes the place of least cost.

    This is tried with each name as the first, until no names overlap; the try of least total cost is returned.
    """
    boxes = {name: np.concatenate([spot.boxes for spot in own]) for name, own in spots.items()}
    starts = {name: np.cumsum([0, *(len(spot.boxes) for spot in own)])[:-1] for name, own in spots.items()}
    names, tries = list(spots), []
    for first in range(len(names)):
        chosen: dict[str, _Spot] = {}
        costs: dict[str, float] = {}
        for name in [*names[first:], *names[:first]] * _PASSES:
            written = _stacked(*(spot.boxes for other, spot in chosen.items() if other != name)) + _APART
            sums = np.add.reduceat(_overlaps(boxes[name], written), starts[name]) + [spot.cost for spot in spots[name]]
            least = int(np.argmin(sums))
            chosen[name], costs[name] = spots[name][least], float(sums[least])
        tries.append((sum(costs.values()), first, chosen))
        if max(costs.values()) < _CLEAR:
            break
    return list(min(tries, key=lambda one: one[:2])[2].values())


def _crowding(box: Boxes, frame: Boxes, taken: Boxes) -> float:
    """Return the cost of a name's box: of its overlaps with ``taken`` boxes, and of its part outside the ``frame``."""
    outside = np.maximum(frame - box, 0)[:2].sum() + np.maximum(box - frame, 0)[2:].sum()
    return float(_OUTSIDE * outside + _overlaps(box[None], taken).sum())


def _overlaps(boxes: Boxes, taken: Boxes) -> NDArray[np.float64]:
    """Return, for each of ``boxes``, the cost of the area that it shares with the boxes ``taken``."""
    shared = np.minimum(boxes[:, None, 2:], taken[:, 2:]) - np.maximum(boxes[:, None, :2], taken[:, :2])
    costs: NDArray[np.float64] = _OVERLAP * np.maximum(shared, 0).prod(axis=2).sum(axis=1)
    return costs


def _distances(box: Boxes, boxes: Boxes) -> NDArray[np.float64]:
    between = np.maximum(boxes[:, :2] - box[2:], box[:2] - boxes[:, 2:])
    distances: NDArray[np.float64] = np.hypot(*np.maximum(between, 0).T)
    return distances


def _join(axes: Axes, marks: Sequence[Mark]) -> None:
    for start, end in pairwise(marks):
        ends = {"xycoords": moved_aside(axes, start.aside), "textcoords": moved_aside(axes, end.aside)}
        joined = axes.annotate("", (start.x, start.y), (end.x, end.y), **ends, arrowprops=_leader(0.8), zorder=2)
        joined.set_in_layout(False)


def _write(axes: Axes, spot: _Spot, colour: str) -> None:
    mark, box = spot.mark, spot.boxes[0]
    middle = _place(axes, mark.x, mark.y, mark.aside)
    start = {"left": box[0], "center": box[[0, 2]].mean(), "right": box[2]}[spot.flush], box[1] + _DESCENT
    x, y = start - middle
    toward = (np.clip(middle, box[:2], box[2:]) - box[:2]) / (box[2:] - box[:2])
    written = axes.annotate(
        mark.name, (mark.x, mark.y), xycoords=moved_aside(axes, mark.aside), xytext=(float(x), float(y)),
        textcoords="offset points", color=colour, fontsize=_SIZE, zorder=5, annotation_clip=False,
        horizontalalignment=spot.flush,
        arrowprops=_leader(0.6, _HALF) | {"relpos": tuple(toward)} if spot.leader else None,
    )  # fmt: skip
    written.set_in_layout(False)
    if mark.gid:
        written.set_gid(f"{mark.gid}-name")
        if written.arrow_patch is not None:
            written.arrow_patch.set_gid(f"{mark.gid}-leader")


def _leader(width: float, before: float = 0.0) -> dict[str, Any]:
    """Return the style of a plain line that stops ``before`` points short of its end."""
    return {"arrowstyle": "-", "color": QUIET, "linewidth": width, "shrinkA": 0, "shrinkB": before}
