"""One section of the page: its tables, its figures, and the values of its template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvdrift.report.figures.canvas import Figure
from kvdrift.report.printing.tables import PrintedTable


@dataclass(frozen=True)
class Drawing:
    """A figure still to be drawn, and its files' name; ``words`` are for readers who cannot see the figure.

    Another process may draw it: ``draw`` can be pickled.
    """

    name: str
    words: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Section:
    """One section of the page; its HTML is ``templates/sections/NAME.html.j2``.

    The template reads ``content``, this section's ``tables`` by name, the page's ``figures``, and ``values``. Macros
    are in ``templates/macros.html.j2``.
    """

    name: str  # its anchor
    title: str  # its heading, also in the page's navigation
    tables: tuple[PrintedTable, ...] = ()  # its tables; each is a CSV file too
    drawings: tuple[Drawing, ...] = ()
    shows: str = ""  # one sentence with the result that the first figure or table shows; empty if it is unknown
    values: Mapping[str, Any] = field(default_factory=dict)  # further values for the template
