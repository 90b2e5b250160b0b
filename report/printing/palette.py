"""The page's colours, on a light and on a dark ground.

Figures are drawn in the light colours. In the page each colour is a CSS custom property, which has another value if the
reader prefers dark pages; files of figures stay light. Text has a contrast of at least 4.5 to its ground, lines and
marks of at least 3.
"""

from __future__ import annotations

import re

INK = "#1f2328"
QUIET = "#5f6773"
RULE = "#d9dde3"
PAPER = "#ffffff"
SHADE = "#111827"  # for windows and margins, nearly transparent
ACTION_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0559a", "#8a6a00", "#2f9ed6")  # Okabe and Ito's, two darker
TERM_COLOURS = ("#3e8191", "#bd872f", "#343a46")  # for exposure, rate, occurrence

_DARK = {
    INK: "#e8eaed", QUIET: "#a6adb8", RULE: "#3b424d", PAPER: "#14171c", SHADE: "#c9d4e5",
    **dict(zip(ACTION_COLOURS, ("#4f9dff", "#ff8a4c", "#2fc79b", "#dd93cd", "#cfae3c", "#8fdcff"), strict=True)),
    **dict(zip(TERM_COLOURS, ("#5fb3c6", "#b98f4e", "#c3cad6"), strict=True)),
}  # fmt: skip
_NAMES = {
    INK: "ink", QUIET: "quiet", RULE: "rule", PAPER: "paper", SHADE: "shade",
    **{colour: f"action-{place}" for place, colour in enumerate(ACTION_COLOURS, 1)},
    **{colour: f"term-{place}" for place, colour in enumerate(TERM_COLOURS, 1)},
}  # fmt: skip
_PAINT = re.compile(f"(?P<what>fill|stroke): (?P<colour>{'|'.join(_NAMES)})")


def properties(*, dark: bool) -> str:
    """Return the declarations of all colours as custom properties."""
    return " ".join(f"--{name}: {_DARK[colour] if dark else colour};" for colour, name in _NAMES.items())


def with_properties(svg: str) -> str:
    """Replace the palette's colours in an SVG document by the custom properties; other colours stay."""
    return _PAINT.sub(lambda match: f"{match['what']}: var(--{_NAMES[match['colour']]})", svg)
