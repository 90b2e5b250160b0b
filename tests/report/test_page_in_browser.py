"""The small study's page as readers see it: wide and narrow, light and dark, sorted, followed and printed."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from fixtures.browser import Tabs, overflow
from fixtures.report_views import MODEL, STUDY, FakeViews, make_scalar_views, make_views, these_alone

from kvdrift.report.page import build_report
from kvdrift.stats.quantities import QUANTITIES
from kvdrift.stats.registry import DIFFERENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

OPEN = "document.querySelectorAll('details').forEach(one => { one.open = true })"


@pytest.fixture
def page(finished: Path) -> Path:
    return finished / "report" / "small" / "index.html"


@pytest.fixture(scope="module")
def wide(browser: Browser, finished: Path) -> Iterator[Page]:
    """The page in a wide window, for tests that leave it as it was but for its order."""
    opened = Tabs(browser)
    yield opened.open(finished / "report" / "small" / "index.html", height=800)
    opened.close()
    assert opened.complaints == []


def column(tab: Page, head: str) -> list[str]:
    """The first line of each cell under a head of the ranked table."""
    heads = [text.split("\n")[0].lstrip("↑↓ ") for text in tab.locator("#table-ranking thead th").all_inner_texts()]
    cells = tab.locator(f"#table-ranking tbody tr > :nth-child({heads.index(head) + 1})").all_inner_texts()
    return [text.split("\n")[0] for text in cells]


def test_each_section_opens_with_its_figure_and_readers_who_do_not_see_it_have_all(wide: Page) -> None:
    """Then come a sentence, tables and explanations; the plan opens with what was frozen, the study with settings."""
    sections = wide.evaluate(
        "[...document.querySelectorAll('#why > section, #specialists > details')].map(section => [section.id,"
        " [...section.children].slice(1).map(child => child.tagName + '.' + child.className.split(' ')[0])])"
    )
    opening = {name: parts[: parts.index("DIV.table")] for name, parts in sections if "DIV.table" in parts}
    assert opening.keys() >= {"ranking", "contrasts", "decomposition", "entry", "gap", "clocks", "eos", "depth"}
    for name in opening.keys() - {"plan", "study"}:
        whole = dict(sections)[name]
        assert opening[name] in (["FIGURE.", "P.shows"], ["P.shows"]), name
        assert ("FIGURE." in whole) == ("FIGURE." in opening[name]), name
    assert wide.locator("h1").count() == 1
    assert wide.locator("html").get_attribute("lang") == "en"
    assert wide.locator("svg:not([role=img][aria-label])").count() == 0
    assert wide.locator("thead th:not([scope]), tbody th:not([scope])").count() == 0
    levels = [
        int(name[1]) for name in wide.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(one => one.tagName)")
    ]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.by_default("390")
def test_no_page_is_wider_than_its_window(tabs: Tabs, page: Path, width: int) -> None:
    """The page may be fully open, and dark; background, text and curves then change together."""
    grounds, curves = set(), set()
    for scheme in ("light", "dark"):
        tab = tabs.open(page, width=width, scheme=scheme)
        assert overflow(tab) == 0
        tab.evaluate(OPEN)
        assert overflow(tab) == 0
        ground, ink = (
            tab.evaluate(f"getComputedStyle(document.{where}).{what}")
            for where, what in (("documentElement", "backgroundColor"), ("body", "color"))
        )
        axes = tab.locator("#figure-entry_cdf svg text").first.evaluate("one => getComputedStyle(one).fill")
        assert axes == ink != ground
        grounds.add(ground)
        curves.add(
            tab.locator("#figure-entry_cdf svg [style*=action-1]").first.evaluate(
                "one => getComputedStyle(one).fill + getComputedStyle(one).stroke"
            )
        )
    assert len(grounds) == len(curves) == 2


def scored_views(actions: tuple[str, ...]) -> FakeViews:
    """Views with answers scored, and intervals of the widest numbers."""
    views = make_scalar_views(actions, strata=("NIAH-4K",))
    scalar = views.views["estimates"]
    whole = [row for row in scalar if row["quantity"] == "divergence_probability"]
    scored = [row | {"quantity": name} for row in whole for name in ("accuracy", "accuracy_reference", "lost_share")]
    views.views["estimates"] = scalar + [row | {"estimate": 0.99951, "low": 0.9951, "high": 1.0} for row in scored]
    return views


def test_the_ranked_table_fits_on_paper_with_a_column_of_weights(tabs: Tabs, tmp_path: Path) -> None:
    views = scored_views(("cache-q8_0-q4_0", "weights-Q4_0"))
    for row in views.views["actions"]:
        row["weights"] = "tiny-Q4_0.gguf" if row["action"] == "weights-Q4_0" else None
    for row in views.views["units"]:
        row["weight_bytes"] = 10**6 if row["action"] == "weights-Q4_0" else 3 * 10**6
    page = build_report(views, STUDY, MODEL, tmp_path, draw=these_alone())
    tab = tabs.open(page, width=702)  # A4 less its margins
    tab.emulate_media(media="print")
    heads = tab.locator("#table-ranking thead th").all_inner_texts()
    assert any(head.startswith("weights") for head in heads)
    box = tab.locator(".scroll:has(#table-ranking)")
    assert box.evaluate("one => one.querySelector('table').offsetWidth - one.clientWidth") <= 0


def test_no_table_of_twelve_actions_scrolls_on_a_wide_page(tabs: Tabs, tmp_path: Path) -> None:
    """Contrasts have a row for each action then: beside each other, twelve actions would need two pages."""
    actions = (
        "int4", "fp8", "int2", "int8", "noise-floor", "rotated-int4", "snapkv-eighth", "snapkv-half", "snapkv-half-int4",
        "snapkv-half-int8", "snapkv-quarter", "snapkv-three-quarters",
    )  # fmt: skip
    views = make_scalar_views(actions, strata=("needle-768",))
    estimates = views.views["estimates"]
    diverged = [row for row in estimates if row["quantity"] == "divergence_probability_difference"]
    known = {row["quantity"] for row in estimates}
    others = [name for name in QUANTITIES if name.endswith(DIFFERENCE) and name not in known]
    estimates += [row | {"quantity": name} for row in diverged for name in others]
    page = build_report(views, STUDY, MODEL, tmp_path, draw=these_alone())
    tab = tabs.open(page)
    tab.evaluate(OPEN)
    scrolling = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth)"
    assert tab.evaluate(f"{scrolling}.map(one => one.getAttribute('aria-label'))") == []
    heads = [tab.locator(f"#table-differences{part} thead th").all_inner_texts() for part in ("", "-7")]
    assert [len(part) for part in heads] == [7, 7], "twelve differences, in two parts"
    assert heads[0][0] == heads[1][0] == "action"
    assert tab.locator("#table-differences-7 tbody tr").count() == 11


@pytest.mark.slow
def test_what_scrolls_is_reached_by_keyboard(tabs: Tabs, page: Path) -> None:
    box = tabs.open(page, width=390).locator(".scroll:has(#table-decomposition)")
    box.press("ArrowRight")
    assert box.evaluate("one => one.scrollWidth > one.clientWidth && one.matches(':focus')")
    assert tabs.open(page).locator(".scroll:has(#table-ranking)").get_attribute("tabindex") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.by_default("dark")
def test_a_phone_shows_verdicts_and_figures_whole(tabs: Tabs, page: Path, scheme: Literal["light", "dark"]) -> None:
    """At 390 pixels nothing of the first two tables or of a figure is beyond the window's side."""
    tab = tabs.open(page, width=390, scheme=scheme)
    tab.evaluate(OPEN)
    cells = tab.locator(":is(#table-glance, #table-ranking) :is(tbody th, td)")
    boxes = cells.evaluate_all(
        "all => all.map(one => [one.getBoundingClientRect().left, one.getBoundingClientRect().right])"
    )
    assert len(boxes) > 20
    assert all(0 <= left < right <= 390 for left, right in boxes)
    verdicts = tab.locator("#table-ranking td[data-head=verdict]")
    assert verdicts.count() == tab.locator("#table-ranking tbody tr").count()
    assert verdicts.first.is_visible()
    figures = tab.locator("figure svg").evaluate_all("all => all.map(one => one.getBoundingClientRect().right)")
    assert len(figures) > 5
    assert max(figures) <= 390


def test_a_tap_enlarges_a_figure_on_a_phone_and_another_one_shows_it_whole(tabs: Tabs, page: Path) -> None:
    """Its smallest text is larger than 10 pixels then, and the figure scrolls in its own box."""
    smallest = """one => one.getBoundingClientRect().width / one.viewBox.baseVal.width
        * Math.min(...[...one.querySelectorAll('text')].map(text => parseFloat(getComputedStyle(text).fontSize)))"""
    tab = tabs.open(page, width=390)
    figure = tab.locator("#figure-answers svg")
    assert tab.locator("#figure-answers .on-phone").is_visible()
    for size in (1, 2):
        figure.click()
        assert (figure.evaluate(smallest) > 10) == (size == 1)
        assert (figure.evaluate("one => one.getBoundingClientRect().right") > 390) == (size == 1)
        assert overflow(tab) == 0
    wide = tabs.open(page)
    width = "one => one.getBoundingClientRect().width"
    before = wide.locator("#figure-answers svg").evaluate(width)
    wide.locator("#figure-answers svg").click()
    assert wide.locator("#figure-answers svg").evaluate(width) == before
    assert wide.locator("#figure-answers .on-phone").is_hidden()


def test_the_rows_of_actions_are_on_the_first_screen(wide: Page) -> None:
    for width, height in ((390, 844), (1280, 800)):
        wide.set_viewport_size({"width": width, "height": height})
        rows = wide.locator("#table-glance tbody tr")
        assert rows.evaluate_all("all => all.map(row => row.dataset.badge)")[-1] == "control"
        assert rows.last.evaluate("one => one.getBoundingClientRect().bottom") < height
        assert wide.locator("main table").first.get_attribute("id") == "table-glance"


def test_a_badge_opens_its_reasons_in_place_and_closes_again(wide: Page) -> None:
    badges = wide.locator("#table-glance details.badge")
    opened = "all => all.map(badge => badge.open)"
    assert not any(badges.evaluate_all(opened))
    badges.first.locator("summary").press("Enter")
    reasons = badges.first.locator("div")
    assert reasons.is_visible()
    assert overflow(wide) == 0
    assert wide.locator("details.badge[open] div p").count() >= 1
    badges.last.locator("summary").click()
    assert badges.evaluate_all(opened).count(True) == 1, "of several reasons one is open"
    wide.keyboard.press("Escape")
    assert not any(badges.evaluate_all(opened))


def test_a_row_and_its_mark_in_the_figure_stand_out_together(wide: Page) -> None:
    row = wide.locator("tr[data-figure]").first
    parts = wide.locator(f'[id^="{row.get_attribute("data-figure")}"]')
    assert parts.count() >= 2
    for element in (row, wide.locator(f"#{row.get_attribute('data-figure')}mark")):
        assert row.get_attribute("data-on") is None
        element.hover()
        assert row.get_attribute("data-on") == ""
        assert parts.evaluate_all("all => all.every(part => part.hasAttribute('data-on'))")
        wide.mouse.move(1, 1)


def test_tables_sort_by_mouse_and_keyboard_and_links_lead_somewhere(wide: Page, page: Path) -> None:
    ranked = column(wide, "action")
    assert ranked[-1] == "full"
    head = wide.locator("#table-ranking th", has_text="R (token)")
    for key, order, expected in (
        ("click", "ascending", ["full", *ranked[:-1]]),
        ("Enter", "descending", [*reversed(ranked[:-1]), "full"]),
        (" ", "none", ranked),
    ):
        if key == "click":
            head.locator("button").click()
        else:
            head.locator("button").press(key)
        assert head.get_attribute("aria-sort") == order
        assert column(wide, "action") == expected
    wide.locator("#table-ranking th", has_text="mean τ").locator("button").click()
    assert column(wide, "mean τ")[-1] == "–", "what is not there comes last"
    for link in {one.get_attribute("href") for one in wide.locator("a[href]").all()}:
        if link is not None and link.startswith("#"):
            assert wide.locator(f'[id="{link[1:]}"]').count() == 1, link
        else:
            assert (page.parent / str(link).partition("#")[0]).exists(), link
    assert not wide.locator("#means-e").is_visible()
    wide.locator('a[href="#means-e"]').first.click()
    assert wide.locator("#means-e").is_visible(), "a link opens what it leads to"


def test_an_unfinished_page_reloads_until_its_reader_stops_it(tabs: Tabs, tmp_path: Path) -> None:
    page = build_report(
        make_views(), STUDY, MODEL, tmp_path, preliminary="Half is done.",
        draw=these_alone(),
    )  # fmt: skip
    tab = tabs.open(page)
    tab.clock.install()
    tab.reload()
    with tab.expect_navigation():
        tab.clock.run_for(30_000)
    tab.get_by_label("Reload").uncheck()
    tab.evaluate("window.stays = true")
    tab.clock.run_for(60_000)
    assert tab.evaluate("window.stays")


@pytest.mark.slow
def test_paper_has_what_is_open_and_the_definitions(tabs: Tabs, page: Path) -> None:
    tab = tabs.open(page)
    folded, definitions = tab.locator("#table-identified_interval"), tab.locator("#means-e")
    question = tab.get_by_text("What does a short window after the first mismatch say of R?")
    tab.emulate_media(media="print", color_scheme="dark")
    assert definitions.is_visible(), "no link opens them on paper"
    assert question.is_visible()
    assert not folded.is_visible()
    assert tab.locator("summary", has_text="Decomposition in each stratum").is_visible() is False
    assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(31, 35, 40)", "paper is white"
    short = sheets(tab)
    tab.emulate_media(media="screen")
    tab.get_by_role("button", name="Open all of this page").click()
    assert folded.is_visible()
    tab.emulate_media(media="print")
    assert folded.is_visible()
    assert short <= 8 < sheets(tab)


def sheets(tab: Page) -> int:
    """How many sheets a page takes in print."""
    return len(re.findall(rb"/Type\s*/Page\b", tab.pdf(format="A4")))
