"""What the tests of the report share."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from fixtures.report_views import Page, build


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """The page of given views, for tests of words and tables: figures are made but not written."""
    monkeypatch.setattr("report.page.save", lambda _figure, _name, _folder, _text: "<svg></svg>")
    return functools.partial(build, tmp_path)
