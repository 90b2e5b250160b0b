"""One style for all figures, and files that are byte for byte the same for the same input.

Text stays text, so that it can be searched, selected and read aloud. Every action has one colour, line style and marker
on all figures: colour-blind readers can distinguish the colours, and line styles differ in greyscale. Figures are drawn
in the light colours. In the page each colour is a CSS custom property, which has another value if the reader prefers
dark pages; files of figures stay light. Text has a contrast of at least 4.5 to its ground, lines and marks of at least
3. This is the one module that imports matplotlib, when the first figure is drawn.
"""

from __future__ import annotations

import functools
import html
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

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


if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.axis
    import matplotlib.figure
    import matplotlib.lines
    import matplotlib.patches
# For annotations in every module that draws.
Axes: TypeAlias = "matplotlib.axes.Axes"
Axis: TypeAlias = "matplotlib.axis.Axis"
Figure: TypeAlias = "matplotlib.figure.Figure"
Line2D: TypeAlias = "matplotlib.lines.Line2D"
Patch: TypeAlias = "matplotlib.patches.Patch"
_DASHES: tuple[Any, ...] = (
    "solid", (0, (5, 1.8)), (0, (1.2, 1.3)), (0, (6, 1.6, 1.2, 1.6)), (0, (3, 1.2, 1, 1.2, 1, 1.2)), (0, (9, 2.5)),
)  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLE: Any = {
    "figure.facecolor": PAPER, "axes.facecolor": PAPER,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9.0,
    "text.parse_math": False, "text.color": INK,
    "axes.edgecolor": QUIET, "axes.labelcolor": INK, "axes.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.grid": True, "axes.axisbelow": True, "axes.unicode_minus": True,
    "grid.color": RULE, "grid.linewidth": 0.6,
    "xtick.color": QUIET, "ytick.color": QUIET, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "lines.linewidth": 1.8, "legend.frameon": False, "hatch.linewidth": 0.6,
    "svg.fonttype": "none", "svg.hashsalt": "kvdrift", "pdf.fonttype": 42,
}  # fmt: skip
# Characters that names may have but XML 1.0 forbids (its section 2.2).
_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def properties(*, dark: bool) -> str:
    """Return the CSS declarations of all colours as custom properties, for light or ``dark`` pages."""
    return " ".join(f"--{name}: {_DARK[colour] if dark else colour};" for colour, name in _NAMES.items())


def with_properties(svg: str) -> str:
    """Replace the palette's colours in an SVG document by the CSS custom properties of ``properties``."""
    return _PAINT.sub(lambda match: f"{match['what']}: var(--{_NAMES[match['colour']]})", svg)


@dataclass(frozen=True)
class ActionStyle:
    """The style of an action on every figure."""

    colour: str
    dashes: Any
    marker: str

    def handle(self, label: str, *, marker: bool = False) -> Line2D:
        """Return the action's legend entry, a line, with the action's marker if ``marker``."""
        return legend_line(shown(label), color=self.colour, linestyle=self.dashes, marker=self.marker if marker else "")


def action_styles(actions: list[str]) -> dict[str, ActionStyle]:
    """Return each action's style, chosen by its place; from the seventh on, colours repeat with other dashes."""
    turn = len(ACTION_COLOURS)
    return {
        action: ActionStyle(ACTION_COLOURS[i % turn], _DASHES[(i + i // turn) % turn], _MARKERS[(i + i // turn) % turn])
        for i, action in enumerate(actions)
    }


def shown(label: str) -> str:
    """Return a label, after a space if it begins with an underscore: matplotlib omits such labels from legends."""
    return f" {label}" if label.startswith("_") else label


@functools.cache
def library() -> Any:
    """Return matplotlib, which the first call imports with all of its modules that are used here."""
    # Imported here because the import takes half a second, and only figures need matplotlib.
    import matplotlib.figure  # noqa: PLC0415
    import matplotlib.lines  # noqa: PLC0415
    import matplotlib.patches  # noqa: PLC0415
    import matplotlib.textpath  # noqa: PLC0415
    import matplotlib.ticker  # noqa: PLC0415
    import matplotlib.transforms  # noqa: PLC0415

    return matplotlib


def legend_line(label: str, **style: Any) -> Line2D:
    """Return a legend entry with a line or a marker."""
    line: Line2D = library().lines.Line2D([], [], label=label, **style)
    return line


def legend_patch(label: str, **style: Any) -> Patch:
    """Return a legend entry with an area."""
    patch: Patch = library().patches.Patch(label=label, **style)
    return patch


@contextmanager
def drawing() -> Iterator[None]:
    """Give figures drawn in the block the common style, and hide warnings about glyphs that the local font lacks.

    The browser that shows a figure has other fonts.
    """
    with library().rc_context(_STYLE), warnings.catch_warnings(), _plain_fonts():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


@contextmanager
def _plain_fonts() -> Iterator[None]:
    """Embed fonts in PDF files without their layout tables, since the text of a written file is laid out already.

    Reducing these tables to the characters in use takes two thirds of the time of embedding a font.
    """
    from fontTools.subset import Options  # noqa: PLC0415 - comes with matplotlib

    name = "_drop_tables_default"
    before = getattr(Options, name, None)
    if before is None:  # in another fontTools nothing changes but the size of the files
        yield
        return
    setattr(Options, name, [*before, "GDEF", "GPOS", "GSUB", "MATH"])
    try:
        yield
    finally:
        setattr(Options, name, before)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sized in inches, on the Agg canvas: no window system, no global state."""
    figure: Figure = library().figure.Figure(figsize=(width, height), layout="constrained")
    return figure


def save(figure: Figure, name: str, folder: Path, description: str) -> str:
    """Write ``name``.svg and ``name``.pdf; return the SVG for the page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    figure.set_layout_engine("none")  # both files have the same layout, computed once
    svg = _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text.getvalue())
    (folder / f"{name}.svg").write_text(svg, encoding="utf-8", newline="\n")
    unnamed = {"CreationDate": None, "Creator": None, "Producer": None}
    document = io.BytesIO()  # matplotlib could not handle a full disk while it writes
    figure.savefig(document, format="pdf", metadata=unnamed)
    (folder / f"{name}.pdf").write_bytes(document.getvalue())
    return inline(svg, name, description)


def inline(svg: str, name: str, description: str) -> str:
    """Return an SVG document as an HTML element: no prolog, the page's colours, ids that no other figure has."""
    body = with_properties(svg[svg.index("<svg") :])
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", body)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    body = re.sub(r'href="#', f'href="#{name}-', body)
    opening, rest = body.split(">", 1)
    opening = re.sub(r'\s(?:width|height)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{html.escape(description)}">{rest}'.strip()
