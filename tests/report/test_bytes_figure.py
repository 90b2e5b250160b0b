"""The figure of bytes against divergence: places, kinds, names, the Pareto front, noise floors and scales."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fixtures.report_views import content_of, make_scalar_views
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from kvdrift.report.figures.canvas import PAPER, drawing, save
from kvdrift.report.reading.content import PageContent
from kvdrift.report.sections.choice import Choice, choose
from kvdrift.report.sections.frontier import bytes_figure

ELEVEN = {
    "snapkv-eighth": (0.125, 0.683), "snapkv-half-int4": (0.197, 0.144), "int2": (0.228, 0.371),
    "snapkv-quarter": (0.25, 0.333), "snapkv-half-int8": (0.307, 0.165), "rotated-int4": (0.333, 0.108),
    "int4": (0.366, 0.09), "snapkv-half": (0.5, 0.152), "fp8": (0.512, 0.075), "int8": (0.596, 0.027),
    "snapkv-three-quarters": (0.75, 0.102),
}  # fmt: skip
THREE = {"less": (0.25, 0.6), "same": (0.5, 0.55), "more": (0.5, 0.2)}
FLOORS = {"noise-floor": (0.024, 0.015, 0.05), "second-floor": (0.04, 0.03, 0.06)}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "evicted": ({"keep": "1/2"}, "o"),
    "coded": ({"keep": "all", "codec": "int4"}, "s"),
    "both": ({"keep": "1/2", "codec": "int4"}, "D"),
    "policy": ({"keep": "64", "policy": "sliding"}, "^"),
    "settings": ({"keep": "all", "settings": "{}"}, "s"),
    "weights": ({"keep": "all", "weights": "other", "settings": "{}"}, "p"),
    "ingested": ({"keep": "unknown"}, "v"),
}


def study(
    places: Mapping[str, tuple[float, float]],
    floors: Mapping[str, tuple[float, float, float]] | None = None,
    columns: Mapping[str, Mapping[str, Any]] | None = None,
) -> PageContent:
    """Make a page's content of actions with a share of the bytes and an R, and of noise floors with R and interval."""
    ends = {action: (risk, 0.8 * risk, 1.2 * risk) for action, (_, risk) in places.items()} | dict(floors or {})
    views = make_scalar_views(tuple(ends), strata=("NIAH-4K",), documents_each=2)
    for row in views.views["units"]:
        held = int(2**20 * places.get(row["action"], (1.0,))[0])
        row.update(payload_bytes=held, index_bytes=0, metadata_bytes=0, resident_bytes=held)
    for row in views.views["estimates"]:
        if (row["quantity"], row["x"]) == ("mismatch", None) and row["action"] in ends:
            row.update(zip(("estimate", "low", "high"), ends[row["action"]], strict=True))
    for row in views.views["actions"]:
        row.update({"selector": "numerics", "keep": "all"} if row["action"] in (floors or {}) else {})
        row.update((columns or {}).get(row["action"], {}))
    return content_of(views)


def drawn(content: PageContent, choice: Choice | None = None) -> tuple[Axes, dict[str, Any]]:
    """Draw the figure; return its axes, and its artists by id."""
    with drawing():
        figure = bytes_figure(content, choice or choose(content))
        FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    return axes, {artist.get_gid(): artist for artist in axes.get_children() if artist.get_gid()}


def part(content: PageContent, action: str, name: str) -> str:
    return f"action-{content.actions.index(action)}-{name}"


def test_actions_stand_at_their_shares_with_their_names() -> None:
    """The one with the least R of those with the same bytes at its share, another one beside it."""
    content = study(THREE)
    axes, artists = drawn(content)
    assert {text.get_text() for text in axes.texts} == {*THREE, "full"}
    assert axes.get_legend() is None
    at = {}
    for action, (share, risk) in THREE.items():
        mark = artists[part(content, action, "mark")]
        assert list(mark.get_xydata()[0]) == pytest.approx([100 * share, 100 * risk], abs=0.01)
        at[action] = mark.get_transform().transform(mark.get_xydata())[0, 0]
        assert list(artists[part(content, action, "bar")].get_ydata()) == pytest.approx([80 * risk, 120 * risk])
    assert at["more"] == pytest.approx(axes.transData.transform((50.0, 0.0))[0], abs=0.1)
    assert abs(at["same"] - at["more"]) > 5
    assert "1.0 MiB" in axes.get_xlabel()


def test_of_a_control_that_moved_there_are_no_shares() -> None:
    views = make_scalar_views()
    views.views["controls"][0]["moved_pairs"] = 1
    axes, _ = drawn(content_of(views))
    assert "KiB" in axes.get_xlabel()


def test_markers_tell_kinds_apart_and_the_key_has_those_that_occur() -> None:
    places = {name: (0.1 * place, 0.3 + 0.05 * place) for place, name in enumerate(KINDS, 1)}
    content = study(places, columns={name: columns for name, (columns, _) in KINDS.items()})
    axes, artists = drawn(content)
    for name, (_, marker) in KINDS.items():
        assert artists[part(content, name, "mark")].get_marker() == marker
    (key,) = axes.figure.legends
    assert len(key.get_texts()) == len(KINDS)
    (key,) = drawn(study(THREE))[0].figure.legends
    assert [text.get_text().strip() for text in key.get_texts()] == ["entries evicted"]


def test_recommended_actions_are_filled() -> None:
    content = study(THREE)
    _, artists = drawn(content, Choice([*THREE], {}, recommended=["more"]))
    fills = {action: artists[part(content, action, "mark")].get_markerfacecolor() for action in THREE}
    assert {action for action, fill in fills.items() if fill != PAPER} == {"more"}


def test_the_front_is_a_line_of_steps_to_the_right_edge() -> None:
    content = study(THREE)
    axes, artists = drawn(content)
    right = axes.get_xlim()[1]
    steps = [(25.0, 60.0), (50.0, 60.0), (50.0, 20.0), (right, 20.0)]
    assert artists["front"].get_xydata().tolist() == [pytest.approx(step, abs=0.01) for step in steps]
    for lone in (study({"only": (0.5, 0.2)}), study(THREE, columns={"more": {"weights": "other"}})):
        assert not len(drawn(lone)[1]["front"].get_xydata())


def test_noise_floors_are_bands_and_no_points() -> None:
    content = study(THREE, {**FLOORS, "exact": (0.1, 0.1, 0.1)})
    axes, artists = drawn(content)
    for floor, (_, low, high) in FLOORS.items():
        band = artists[part(content, floor, "bar")].get_extents().transformed(axes.transData.inverted())
        assert (band.x1, band.y0, band.y1) == pytest.approx((axes.get_xlim()[1], 100 * low, 100 * high), rel=1e-3)
        assert part(content, floor, "mark") not in artists
    line = artists[part(content, "exact", "bar")]
    assert list(line.get_ydata()) == [pytest.approx(10.0)] * 2


def test_r_has_a_logarithmic_scale_if_values_differ_much_and_none_is_0() -> None:
    wide, near = {"one": (0.3, 0.9), "other": (0.6, 0.01)}, {"one": (0.3, 0.9), "other": (0.6, 0.1)}
    assert drawn(study(near))[0].get_yscale() == "linear"
    assert drawn(study(near | {"zero": (0.8, 0.0)}))[0].get_ylim()[0] == 0
    content = study(wide, {"floor": (0.0, 0.0, 0.05)})
    axes, artists = drawn(content)
    assert axes.get_yscale() == "log"
    bottom = axes.get_ylim()[0]
    assert bottom == pytest.approx(0.64)
    assert artists[part(content, "floor", "bar")].get_extents().y0 == pytest.approx(axes.bbox.y0, abs=0.1)
    assert "full: R = 0" in {text.get_text() for text in axes.texts}


def test_names_of_eleven_actions_overlap_nothing_and_ids_tell_the_action(tmp_path: Path) -> None:
    """All that shows an action has an id that begins with its place in the content, also a noise floor's band."""
    content = study(ELEVEN, FLOORS)
    axes, artists = drawn(content)
    names = {text.get_text(): list(Text.get_window_extent(text).extents) for text in axes.texts}
    assert set(names) == {*ELEVEN, *FLOORS, "full: R = 0"}
    points = axes.figure.dpi / 72
    others = []
    for action in ELEVEN:
        mark, bar = (artists[part(content, action, name)] for name in ("mark", "bar"))
        ((x, y),) = mark.get_transform().transform(mark.get_xydata())
        (_, low), (_, high) = bar.get_transform().transform(bar.get_xydata())
        others += [
            [x - 4 * points, y - 4 * points, x + 4 * points, y + 4 * points],
            [x - points, low, x + points, high],
        ]
    for one, other in itertools.combinations(names, 2):
        assert not overlap(names[one], names[other]), (one, other)
    for name, box in names.items():
        assert not [other for other in others if overlap(box, other)], name
        assert axes.bbox.x0 <= box[0]
        assert box[2] <= axes.bbox.x1
    with drawing():
        svg = save(axes.figure, "bytes", tmp_path, "")
    ids = re.findall(r'\bid="(bytes-action-\d+-\w+)"', svg)
    assert len(set(ids)) == len(ids)
    for action in content.actions:
        parts = {"bar", "name"} if action in FLOORS else {"bar", "mark", "name"}
        assert {f"bytes-{part(content, action, name)}" for name in parts} <= set(ids), action


def overlap(one: list[float], other: list[float]) -> bool:
    return min(min(one[end + 2], other[end + 2]) - max(one[end], other[end]) for end in (0, 1)) > 0.5  # half a pixel
