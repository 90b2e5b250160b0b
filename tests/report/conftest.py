"""What the tests of the report share."""

from __future__ import annotations

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words and tables: figures are made but not written."""
    monkeypatch.setattr("report.page.save", lambda _figure, _name, _folder, _text: "<svg></svg>")
