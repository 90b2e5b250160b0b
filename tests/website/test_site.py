"""The site is built without a warning, has every page of the documents, and fetches nothing.

What takes a built site is slow; ``make site`` fails at a warning.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urldefrag

import pytest
from fixtures.browser import Tabs, findings
from fixtures.house import ROOT
from fixtures.study_files import load_study

from website.pages import PAGES, STUDIES, gallery_page, linked, shown

FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(https?:)?//|<link(?![^>]*rel=\"?canonical)[^>]*\shref=\"?(https?:)?//"
)


(BUILD,) = re.findall(r"^\t.*-m (mkdocs build .*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def build(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """Call what ``make site`` calls."""
    command = [sys.executable, "-m", *BUILD.split(), "--site-dir", folder, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("broken", [(), ("[b](c.md)", "[b](b.md#nowhere)", "[b](#nowhere)", "![b](b.png)")])
def test_each_link_that_leads_nowhere_fails_it(tmp_path: Path, broken: tuple[str, ...]) -> None:
    """Each has a warning, and any warning fails the build."""
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text("\n\n".join(("# A", "[b](b.md#there)", *broken)), encoding="utf-8")
    (pages / "b.md").write_text("# B\n\n## There\n", encoding="utf-8")
    settings = {
        "INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": str(pages), "nav": ["index.md", "b.md"], "plugins": [],
        "hooks": [], "extra_css": [],
    }  # fmt: skip
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings), encoding="utf-8")
    done = build(tmp_path / "site", "--config-file", tmp_path / "mkdocs.yml")
    warned = re.findall(r"WARNING.*link '([^']+)'", done.stderr)
    assert (done.returncode, sorted(warned)) == (bool(broken), sorted(text[4:-1].lstrip("(") for text in broken))


@pytest.mark.slow
def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    first = (site / "index.html").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "docs").glob("*.md")] + list(PAGES.values())
    for name in names:
        page = name.replace(".md", ".html")
        assert (site / page).is_file()
        assert f'href="{page}"' in first or page == "index.html"


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, _tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value and name in {"href", "src"}:
                self.links.append(value)
            elif value and name in {"id", "name"}:
                self.anchors.add(value)


@pytest.mark.slow
def test_no_link_is_broken(site: Path) -> None:
    """Every link to a file and to a place in a page; a server alone has the page of addresses that are not there.

    A gallery, of studies that were run here, links to states of its explorers, such as ``#action=snapkv-half``.
    """
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    followed = 0
    for page, held in pages.items():
        for link in held.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            path, place = urldefrag(link)
            target = (page.parent / unquote(path)).resolve() if path else page
            assert target.is_file(), f"{page.name}: {link}"
            is_state = "=" in place
            anchored = target not in pages or unquote(place) in pages[target].anchors
            assert not place or is_state or anchored, f"{page.name}: {link}"
            followed += 1
    assert followed > 2000


@pytest.mark.slow
def test_nothing_is_fetched(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not FETCHED.search(page.read_text(encoding="utf-8")), page
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*['\"]?(?:https?:)?//", style.read_text(encoding="utf-8")), style


@pytest.mark.slow
def test_the_reference_has_what_docstrings_say(site: Path) -> None:
    page = (site / "python.html").read_text(encoding="utf-8")
    for text in ("folder or URL of a store", "MissingStoreError", "There is no store at the given location"):
        assert text in page


def test_links_lead_to_pages() -> None:
    text = (
        "[a](docs/gate.md#what) [b](ARCHITECTURE.md) [c](https://x.org/docs/a.md) [d](LICENSE) [e](#f) ![p](docs/p.png)"
    )
    here = "[a](gate.md#what) [b](architecture.md) [c](https://x.org/docs/a.md) [d](LICENSE.txt) [e](#f) ![p](p.png)"
    assert linked(text, "README.md") == here
    assert linked("[x](../README.md) [y](gate.md)", "docs/clusters.md") == "[x](index.md) [y](gate.md)"


@pytest.mark.slow
def test_its_search_needs_no_server(site: Path, tabs: Tabs) -> None:
    """Opened as a file: the worker's script runs in a frame, and finds the page that has the word in its title."""
    tab = tabs.open(site / "gate.html")
    tab.locator(".md-search__input").click()
    tab.locator(".md-search__input").press_sequentially("cookbook")
    found = tab.locator(".md-search-result__link").first
    found.wait_for()
    assert str(found.get_attribute("href")).startswith((site / "cookbook.html").as_uri())
    assert tabs.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("light", 390), ("dark", 1280), ("dark", 390)])
@pytest.mark.parametrize("name", ["gallery", "costs", "study-file", "python"])
def test_it_is_accessible(site: Path, tabs: Tabs, name: str, scheme: Literal["light", "dark"], width: int) -> None:
    """Pages with pictures, tables, code and classes, once the theme has made its parts of them."""
    assert findings(tabs.open(site / f"{name}.html", scheme=scheme, width=width)) == []


def finished(root: Path, name: str) -> None:
    """A study of the gallery with a report, whose page leads to its explorer."""
    (root / "studies").mkdir(exist_ok=True)
    for file in STUDIES:
        text = f'# What {file} is.\n# On two lines.\n\n[study]\nname = "{file}-study"\n'
        (root / "studies" / f"{file}.toml").write_text(text, encoding="utf-8")
    folder = root / "stores" / name / "report" / name
    (folder / "figures").mkdir(parents=True)
    for path in ("index.html", "trajectories.html", "figures/bytes.svg", "figures/bytes.pdf", ".part"):
        (folder / path).write_text(path, encoding="utf-8")
    (folder / "verdict.json").write_text('{"sentence": "Recommended: int8."}', encoding="utf-8")


def test_the_gallery_has_the_studies_that_are_there(tmp_path: Path) -> None:
    finished(tmp_path, "frontier-study")
    (study,) = shown(tmp_path)
    assert (study.name, study.about) == ("frontier-study", "What frontier is. On two lines.")
    assert sorted(map(str, study.files)) == [
        "figures/bytes.pdf",
        "figures/bytes.svg",
        "index.html",
        "trajectories.html",
        "verdict.json",
    ]
    page = gallery_page([study])
    for path in ("index.html", "trajectories.html", "figures/bytes.svg"):
        assert f"(gallery/frontier-study/{path})" in page
    assert "Recommended: int8." in page
    assert "make gallery" not in page
    assert "`make gallery` runs the shipped studies" in gallery_page([])
    there = [path for file in STUDIES if (path := ROOT / "studies" / f"{file}.toml").is_file()]
    assert {load_study(path).name for path in there} >= {"quickstart", "frontier", "llama-cpp"}
    (tmp_path / "studies" / "weights.toml").unlink()
    assert shown(tmp_path) == [study]
