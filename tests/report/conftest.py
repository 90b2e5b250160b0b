"""What the tests of the report share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from fixtures.report_views import Page, build
from matplotlib.figure import Figure


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words and tables: figures are made but not written."""
    monkeypatch.setattr("report.page.save", lambda _figure, _name, _folder, _text: "<svg></svg>")


@pytest.fixture
def page(tmp_path: Path, undrawn: None) -> Page:  # noqa: ARG001 - by its effect
    """The page of given views, without its figures' files."""
    return functools.partial(build, tmp_path)


@pytest.fixture
def no_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that read a page's SVG: its PDF files, most of the work, are not written."""
    savefig = Figure.savefig

    def only_svg(figure: Figure, file: Any, **options: Any) -> None:
        if options["format"] == "svg":
            savefig(figure, file, **options)

    monkeypatch.setattr(Figure, "savefig", only_svg)
