"""axe-core finds nothing on any kind of page, wide or narrow, light or dark."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from fixtures.browser import Tabs, findings
from fixtures.report_views import MODEL, STUDY, make_views

from kvdrift.flows.pages.side_by_side import pairings, read_entries
from kvdrift.report.gates import record_gate
from kvdrift.report.page import build_report, write_ended
from kvdrift.report.side_by_side import Comparison, build_comparison
from kvdrift.schema.sampling import Sampling

Scheme = Literal["light", "dark"]
LOOKS = pytest.mark.parametrize(("scheme", "width"), [*itertools.product(("light", "dark"), (1280, 390))])
ALIKE = (
    "tbody tr ~ tr ~ tr, .pair ~ .pair, dd ~ dd ~ dd, #specialists > details ~ details ~ details, "
    "#why > section ~ section ~ section:not(#examples)"
)
OPEN = "document.querySelectorAll('details').forEach(one => { one.open = true })"


def test_a_study_without_what_is_alike(tabs: Tabs, finished: Path) -> None:
    """Without further rows of a table, trajectories and sections of one form, which take most of the time."""
    tab = tabs.open(finished / "report" / "small" / "index.html", scheme="dark", width=390)
    tab.evaluate(OPEN)
    tab.evaluate(f"document.querySelectorAll('{ALIKE}').forEach(one => one.remove())")
    assert min(tab.locator(kind).count() for kind in ("figure svg", ".scroll table", "details", ".pair", "dl")) > 0
    assert findings(tab) == []


@LOOKS
@pytest.mark.slow
def test_a_study(tabs: Tabs, finished: Path, scheme: Scheme, width: int) -> None:
    tab = tabs.open(finished / "report" / "small" / "index.html", scheme=scheme, width=width)
    tab.evaluate(OPEN)
    assert findings(tab) == []


@pytest.mark.slow
@LOOKS
def test_the_explorer(tabs: Tabs, finished: Path, scheme: Scheme, width: int) -> None:
    """All actions under one X, a token that every layer keeps chosen, and another one found; then the help."""
    tab = tabs.open(finished / "report" / "small" / "trajectories.html", scheme=scheme, width=width)
    tab.check("#compare")
    tab.locator("#prompt-text .token[style*='100%']").first.click()
    assert tab.locator("#prompt-here .layer").count()
    tab.fill("#wanted", "a")
    tab.click("#find-next")
    assert tab.locator("#prompt-text .match").count()
    assert findings(tab) == []
    tab.keyboard.press("Escape")
    tab.click("#help-button")
    assert findings(tab) == []


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a study of a sweep, with the answer of a gate."""
    folder, actions = tmp_path_factory.mktemp("swept"), ("snapkv@1/4", "snapkv@1/2")
    page = build_report(make_views(actions), STUDY, MODEL, folder)
    question = dict.fromkeys(("quantity", "action", "baseline", "stratum", "margin", "level"))
    assert record_gate(folder, question | {"decision": "worse", "versions": {}}, "worse: snapkv@1/4 less snapkv@1/2")
    assert 'id="figure-sweeps"' in page.read_text(encoding="utf-8")
    return page


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_report(make_views(), STUDY, MODEL, tmp_path_factory.mktemp("unfinished"), preliminary="Half is done.")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended")
    return write_ended(STUDY, folder / "report" / "index.html", "store", folder)


@pytest.fixture(scope="module")
def compared(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores, and three temperatures of one of them."""
    folder = tmp_path_factory.mktemp("compared")
    one, other = read_entries([str(finished), str(shutil.copytree(finished, folder / "other"))])
    entry, facts = one[0], one[0].content.facts
    of_temperatures = [
        replace(entry, name=f"at {t}", content=replace(entry.content, facts=replace(facts, sampling=Sampling(t))))
        for t in (0.0, 0.5, 1.0)
    ]
    page = build_comparison(Comparison((*of_temperatures, other[0]), tuple(pairings([one, other]))), folder)
    assert 'id="table-differences"' in (text := page.read_text(encoding="utf-8"))
    assert 'id="figure-by_temperature_1"' in text
    return page


@LOOKS
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swept", "unfinished", "ended", "compared"])
def test_other_pages(tabs: Tabs, request: pytest.FixtureRequest, kind: str, scheme: Scheme, width: int) -> None:
    tab = tabs.open(request.getfixturevalue(kind), scheme=scheme, width=width)
    tab.evaluate(OPEN)
    assert findings(tab) == []
