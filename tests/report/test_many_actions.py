"""Figures of more actions than there are colours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.report_views import HAZARD, PAIR, H, content_of, make_views
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from kvdrift.report.figures.canvas import drawing
from kvdrift.report.reading.content import PublishedStudy
from kvdrift.report.sections import calibration, divergence


def test_bands_of_many_actions_lie_in_panels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bands as there are colours share a panel; more bands could not be distinguished there."""
    actions = (*PAIR, "one-whose-name-is-too-long-for-a-line")
    content = content_of(make_views(actions, strata=("NIAH-4K",), documents_each=1))

    def panels(together: int) -> list[Axes]:
        monkeypatch.setattr(divergence, "TOGETHER", together)
        with drawing():
            return [axes for axes in divergence.entry_figure(content).axes if axes.get_visible()]

    (whole,) = panels(len(actions))
    assert len(whole.collections) == len(actions)
    each = panels(len(actions) - 1)
    assert [axes.get_title(loc="left").replace("\n", "") for axes in each] == content.actions
    assert [(len(axes.collections), len(axes.lines)) for axes in each] == [(1, 3)] * 3, "a band, and the curves of all"
    assert all(max(line.get_xdata()) == H for axes in each for line in axes.lines)


def test_of_many_predictors_those_that_were_selected_are_drawn() -> None:
    """Five contrasts have 30 predictors, of which 10 are selected."""
    content = content_of(make_views(tuple(HAZARD), strata=("NIAH-4K",), documents_each=1))
    section = calibration.section(content)
    assert section is not None
    assert len(section.tables[0].rows) == 30
    with drawing():
        (axes,) = section.drawings[0].draw().axes
    labels = [label.get_text().strip() for label in axes.get_yticklabels()]
    assert len(labels) == 10
    assert all(label.endswith("ridge") for label in labels)


def test_decisions_of_predictors_stand_beside_the_margin() -> None:
    """Wherever the interval lies: a word across the zero line is hard to read."""
    windows: Any = SimpleNamespace(first_block_last=16)
    intervals = {"different": (-0.2, -0.03), "equivalent": (-0.01, 0.01), "unresolved": (-0.03, 0.05)}
    rows = [
        {
            "action": "recent-half", "baseline": "snapkv-half", "observation": "positions", "candidate": "ridge", "decision": decision,
            "margin": 0.02, "selected": True, "error": (low + high) / 2, "low": low, "high": high,
        }
        for decision, (low, high) in intervals.items()
    ]  # fmt: skip
    with drawing():
        figure = calibration.calibration_figure(rows, windows, PublishedStudy())
        FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    margin_end = axes.transData.transform((2.0, 0.0))[0]
    words = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}
    assert set(words) == set(intervals)
    for decision, (_, high) in intervals.items():
        assert words[decision].x0 > max(margin_end, axes.transData.transform((100 * high, 0.0))[0])
        assert words[decision].x1 < figure.bbox.x1


def test_gaps_of_many_actions_stand_at_their_own_block() -> None:
    actions = tuple(f"action-{number}" for number in range(12))
    content = content_of(make_views(actions, strata=("NIAH-4K",), documents_each=1))
    with drawing():
        axes = divergence.clocks_figure(content).axes[2]
    lines = [list(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 3]
    assert len(lines) == len(actions) - 1
    low, high = axes.get_xlim()
    for place, (left, right) in enumerate(((low, 1.45), (1.55, 2.45), (2.55, high))):
        assert all(left < line[place] < right for line in lines)
