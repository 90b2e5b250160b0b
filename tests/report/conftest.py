"""Fixtures that the tests of the report share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.report_views import MODEL, Page, build, content_of, these_alone
from matplotlib.figure import Figure

from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.log.store import Store
from kvdrift.report.explorer.page import write_explorer
from kvdrift.report.figures.canvas import save
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Provenance
from kvdrift.sql.catalog import Views, open_views


@pytest.fixture(scope="module", autouse=True)
def unwritten_figures() -> None:
    """Figures are written here."""


@pytest.fixture(scope="module")
def views(finished: Path) -> Iterator[Views]:
    """The views of the finished small study."""
    with open_views(Store.open(finished)) as opened:
        yield opened


@pytest.fixture(scope="module")
def content(views: Views) -> PageContent:
    """The content of its page."""
    return content_of(views, "small", token_text=token_reader(MODEL), provenance=Provenance("small study"))


@pytest.fixture(scope="module")
def path(content: PageContent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The explorer of the small study: 60 trajectories of 12 positions, in two strata."""
    written = write_explorer(content, tmp_path_factory.mktemp("explorer"), token_reader(MODEL))
    assert written is not None
    return written


@pytest.fixture
def page(tmp_path: Path) -> Page:
    """The page of given views without its figures."""
    return functools.partial(build, tmp_path, draw=these_alone())


@pytest.fixture
def no_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that read a page's SVG: its PDF files, most of the work, are not written."""

    def save_svg(figure: Figure, name: str, folder: Path, description: str) -> str:
        savefig = figure.savefig
        monkeypatch.setattr(figure, "savefig", lambda file, **how: how["format"] == "svg" and savefig(file, **how))
        return save(figure, name, folder, description)

    monkeypatch.setattr("kvdrift.report.page.save", save_svg)
