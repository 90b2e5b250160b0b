"""The page's colours contrast with their background, in light and in dark."""

from __future__ import annotations

import re

import pytest

from report.printing.palette import properties, with_properties


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
