"""The opener of pages in Chromium that other tests use."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.browser import Tabs, chromium, overflow


@pytest.mark.slow
def test_pages_and_what_they_complain_of(tabs: Tabs, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        "<!DOCTYPE html><title>t</title><body style='margin: 0'><div style='width: 500px'>wide</div>"
        "<style>@media (prefers-color-scheme: dark) { div { color: rgb(9, 9, 9) } }</style>"
        "<script>console.error('first'); location.hash === '#x' && missing()</script>"
    )
    tab = tabs.open(path, width=390, scheme="dark")
    assert tabs.complaints == ["error: first"]
    assert (tab.title(), overflow(tab)) == ("t", 110)
    assert tab.evaluate("getComputedStyle(document.querySelector('div')).color") == "rgb(9, 9, 9)"
    tabs.open(path, "#x")
    assert tabs.complaints[2:] == ["uncaught: missing is not defined"]
    tabs.complaints.clear()


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["CI", "KVDRIFT_CI"])
def test_without_chromium(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CI", "KVDRIFT_CI"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Chromium on this machine"):
        chromium()
    monkeypatch.setenv(variable, "1")
    with pytest.raises(pytest.fail.Exception, match="here there must be one"):
        chromium()
