"""Names beside marks, measured as they are drawn: none upon another, and each nearest to a mark of its own."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import matplotlib.text
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvdrift.report.figures.canvas import drawing, new_figure
from kvdrift.report.figures.labels import Mark, name_ends, name_marks
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.side_by_side import leaderboard_figure

FRONTIER = {
    "snapkv-eighth": (0.125, 0.683), "snapkv-half-int4": (0.197, 0.144), "int2": (0.25, 0.371),
    "snapkv-quarter": (0.25, 0.333), "snapkv-half-int8": (0.307, 0.165), "rotated-int4": (0.333, 0.108),
    "int4": (0.366, 0.09), "snapkv-half": (0.5, 0.152), "fp8": (0.512, 0.075), "int8": (0.596, 0.027),
    "snapkv-three-quarters": (0.75, 0.102), "noise-floor": (1.0, 0.024),
}  # fmt: skip
ONE_SHARE = {
    name: (0.5, risk)
    for name, risk in {
        "snapkv": 0.42,
        "recent": 0.43,
        "tova": 0.40,
        "h2o": 0.41,
        "pyramidkv": 0.12,
        "knorm": 0.63,
    }.items()
}


def places(actions: dict[str, tuple[float, float]], studies: int) -> list[Any]:
    """Each action in several studies, with a little more R in each."""
    made = []
    for study in range(studies):
        for action, (share, risk) in actions.items():
            value = risk * (1 + 0.08 * study)
            row = Estimate("pooled", action, None, "mismatch", None, value, 0.85 * value, 1.1 * value + 0.01, 0.95)
            made.append(
                SimpleNamespace(
                    entry=SimpleNamespace(name=f"study@t{study}"), action=action, share=share,
                    estimate=lambda _, row=row: row, risk=value,
                )
            )  # fmt: skip
    return made


def drawn(figure: Figure) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Return the box of each name of a figure's axes, and the boxes of its marks, in pixels."""
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    names: dict[str, list[float]] = {}
    for text in axes.texts:
        if text.get_text():
            assert text.get_text() not in names, "each name stands once"
            names[text.get_text()] = list(matplotlib.text.Text.get_window_extent(text).extents)
    marks = []
    for line in axes.lines:
        if line.get_marker() in {"o", "s", "^", "D", "v", "P"}:
            ((x, y),) = line.get_transform().transform(line.get_xydata())
            half = line.get_markersize() / 2 * figure.dpi / 72
            marks.append([x - half, y - half, x + half, y + half])
    return names, marks


def overlap(one: list[float], other: list[float]) -> bool:
    across, up = (min(one[end + 2], other[end + 2]) - max(one[end], other[end]) for end in (0, 1))
    return min(across, up) > 0.5  # half a pixel


@pytest.mark.parametrize(("actions", "studies"), [(FRONTIER, 2), (FRONTIER, 3), (ONE_SHARE, 3), (ONE_SHARE, 1)])
@pytest.mark.by_default("actions0-2", "actions2-3")
def test_names_of_the_leaderboard_do_not_overlap(actions: dict[str, tuple[float, float]], studies: int) -> None:
    """Whether several studies hold one share, several actions do, or both; then their marks stand apart, too."""
    with drawing():
        figure = leaderboard_figure(places(actions, studies), [f"study@t{number}" for number in range(studies)])
        names, marks = drawn(figure)
    assert set(names) == set(actions)
    assert len(marks) == len(actions) * studies
    assert not [pair for pair in itertools.combinations(names, 2) if overlap(names[pair[0]], names[pair[1]])]
    assert not [(name, mark) for name, box in names.items() for mark in marks if overlap(box, mark)]
    if actions is ONE_SHARE:
        assert not [pair for pair in itertools.combinations(marks, 2) if overlap(*pair)]
    inside = list(figure.axes[0].bbox.extents)
    for box in names.values():
        assert box[0] >= inside[0] - 1
        assert box[2] <= inside[2] + 1


def test_names_keep_off_a_line() -> None:
    """A line through the mark, to its right: the name goes elsewhere."""
    with drawing():
        figure = new_figure(9, 4)
        axes = figure.add_subplot()
        axes.set(xlim=(0, 100), ylim=(0, 100))
        mark = Mark("only", 50.0, 50.0, 50.0, 50.0)
        name_marks(axes, [mark], [[(50.0, 50.0), (90.0, 50.0)]])
        names, _ = drawn(figure)
        end = axes.transData.transform((50.0, 50.0))
    left, bottom, right, top = names["only"]
    assert not (left < end[0] + 40 and right > end[0] and bottom < end[1] < top)
    assert math.hypot(max(left - end[0], end[0] - right, 0), max(bottom - end[1], end[1] - top, 0)) < 20


def test_names_of_curves_stand_at_their_ends_and_apart() -> None:
    """Three of four curves end together: their names keep the curves' order, and the fourth stays at its height."""
    ends = {"third": (10.0, 52.0), "first": (10.0, 50.0), "lone": (10.0, 5.0), "second": (10.0, 51.0)}
    with drawing():
        figure = new_figure(9, 4)
        axes = figure.add_subplot()
        axes.set(xlim=(0, 10), ylim=(0, 100))
        name_ends(axes, ends)
        names, _ = drawn(figure)
        heights = {name: axes.transData.transform(end)[1] for name, end in ends.items()}
    assert sorted(names, key=lambda name: names[name][1]) == ["lone", "first", "second", "third"]
    assert not [pair for pair in itertools.combinations(names, 2) if overlap(names[pair[0]], names[pair[1]])]
    for name in ("lone", "second"):
        assert (names[name][1] + names[name][3]) / 2 == pytest.approx(heights[name], abs=2)
    assert all(axes.bbox.x1 < box[0] and box[2] <= figure.bbox.x1 for box in names.values())
