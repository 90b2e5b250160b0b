"""How numbers and colours are printed: ends with the digits that draws determine, and contrast in light and in dark."""

from __future__ import annotations

import re

import numpy as np
import pytest
from fixtures.simulated_studies import simulated_study

from kvdrift.report.figures.canvas import properties, with_properties
from kvdrift.report.printing.numbers import in_text, interval, sure_decimals
from kvdrift.report.reading.estimates import Estimate
from kvdrift.stats.bootstrap import estimate
from kvdrift.stats.ends import error_of_ends
from kvdrift.stats.registry import Scale


def made(low: float, high: float, draws: int | None, level: float | None = 0.95) -> Estimate:
    return Estimate("pooled", "one", None, "lost_share", None, (low + high) / 2, low, high, level, draws)


@pytest.mark.parametrize(
    ("low", "high", "draws", "printed"),
    [
        (0.16, 0.387, 2_000, "[16, 39]"),  # another seed moves these by half a point
        (0.16, 0.387, None, "[16.0, 38.7]"),  # made without draws
        (0.16, 0.387, 0, "[16.0, 38.7]"),
        (0.1801, 0.1999, 2_000, "[18.0, 20.0]"),
        (0.16, 0.22, 2_000, "[16, 22]"),
        (0.16, 0.22, 20_000, "[16.0, 22.0]"),
        (0.003, 0.223, 2_000, "[0.3, 22.3]"),  # not 0
        (-0.003, 0.223, 2_000, "[−0.3, 22.3]"),
        (0.0, 0.223, 2_000, "[0, 22]"),
        (0.0, 0.0002, 2_000, "[0.00, 0.02]"),  # never of no width
        (0.98, 1.0, 2_000, "[98.0, 100.0]"),
        (0.9996, 1.0, 2_000, "[99.96, 100.00]"),
    ],
)
def test_ends_have_the_digits_that_draws_are_sure_of(low: float, high: float, draws: int | None, printed: str) -> None:
    assert interval(made(low, high, draws), Scale.PERCENT, 1) == printed


def test_ratios_have_three_digits_at_most() -> None:
    assert interval(made(0.918, 1.082, 2_000), Scale.RATIO, 1) == "[0.92, 1.08]"
    assert interval(made(0.918, 1.082, None), Scale.RATIO, 1) == "[0.918, 1.08]"
    assert in_text(made(0.918, 1.082, 2_000), Scale.RATIO) == "1.00 [0.92, 1.08]"


def test_an_end_is_not_printed_as_the_margin_that_it_is_not() -> None:
    assert sure_decimals(-9.0, 1.96, 0.9, 10_000, 2, boundary=2.0) == 2
    assert sure_decimals(-9.0, 1.26, 0.9, 10_000, 2, boundary=2.0) == 0


@pytest.mark.slow
def test_another_seed_moves_an_end_by_about_the_error() -> None:
    """A standard deviation from 30 seeds is within 45% of its expectation in all but 1 of 1,000 cases.

    Ends by Student's law do not move, and skewed ends move more than those of a normal law.
    """
    study = simulated_study(3, 24).of_actions(("action 0", "action 1"))
    found = [
        estimate(study, draws=512, seed=seed, quantities=["mismatch", "gap"], pairs=[("action 0", "action 1")]).columns
        for seed in range(30)
    ]
    low, high = (np.array([one[name] for one in found], dtype=float) for name in ("low", "high"))
    expected = np.array([error_of_ends(width, 0.95, 512) for width in (high - low).mean(axis=0)])
    moved = np.maximum(low.std(axis=0, ddof=1), high.std(axis=0, ddof=1)) / expected
    assert (moved < 3).all()
    assert np.median(moved) == pytest.approx(1, abs=0.6)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_told_from_their_ground(dark: bool) -> None:  # noqa: FBT001
    """WCAG 2.2: 4.5 for text, 3 for marks and lines. The rule between rows and the ground itself say nothing."""
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", properties(dark=dark)))
    ground = luminance(colours["paper"])
    for name, colour in colours.items():
        least, most = sorted((ground, luminance(colour)))
        needed = {"paper": 1.0, "rule": 1.0, "ink": 4.5, "quiet": 4.5}.get(name, 3.0)
        assert (most + 0.05) / (least + 0.05) >= needed, (name, colour)


def test_paint_is_a_property_and_text_stays() -> None:
    svg = '<path style="fill: #ffffff; stroke: #0072b2"/><text>#0072b2</text>'
    assert with_properties(svg) == '<path style="fill: var(--paper); stroke: var(--action-1)"/><text>#0072b2</text>'
