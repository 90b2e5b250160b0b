"""The trajectory explorer in Chromium, as readers use it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fixtures.browser import Tabs, overflow
from fixtures.report_views import MODEL, build, make_views

from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.sql.catalog import Views

if TYPE_CHECKING:
    from playwright.sync_api import Page

ACTION = "recent-half"


def opened(tabs: Tabs, path: Path, fragment: str = "", **how: Any) -> Page:
    tab = tabs.open(path, fragment, **how)
    tab.locator("#score table").first.wait_for()
    return tab


def address(doc: str, action: str, replicate: int) -> str:
    return f"#doc={doc}&action={action}&replicate={replicate}"


def where(tab: Page) -> tuple[str, str, int]:
    """The trajectory that the page shows: its document, action and replicate."""
    chosen = [tab.locator(f"#{name} option:checked").inner_text() for name in ("document", "action", "replicate")]
    assert tab.evaluate("location.hash").startswith(address(*chosen))  # type: ignore[arg-type] # as text
    return chosen[0], chosen[1], int(chosen[2])


def rows_of(views: Views, query: str, *given: object) -> list[tuple[Any, ...]]:
    return views.connection.execute(query, list(given)).fetchall()


def column(tab: Page, t: int) -> list[str]:
    return [cell.inner_text() for cell in tab.locator(f"#score :is(.x, .y) [data-t='{t}']").all()]


FOLLOWED = """hash => new Promise(done => {
    addEventListener("hashchange", () => setTimeout(done), { once: true });
    location.hash = hash;
})"""
WITHIN = """
with own as (
    from analyzed_trajectories where split = 'evaluation' and action = $1 and coalesce(stratum = $2, true)
)
"""
LOST = """
select doc, replicate from own inner join scores using (study, model, doc, action, replicate)
where score_x = 1 and score_y < 1 order by row_number() over (partition by doc order by replicate), doc
"""
LEADS = {
    "earliest": "select doc, action, replicate from own where tau is not null order by tau, doc, replicate limit 1",
    "latest": "select doc, action, replicate from own where tau is not null order by tau desc, doc, replicate limit 1",
    "median": "select doc, action, replicate from own where tau is not null qualify row_number() over (order by tau, doc, replicate)"
    " = (count(*) over () + 1) // 2",
    "exposure": "select doc, action, replicate from own where tau is not null order by least(last_eos, horizon) - tau desc, doc, replicate limit 1",
    "agreement": "select doc, action, replicate from own where longest_agreement > 0 order by longest_agreement desc, doc, replicate limit 1",
}


def test_jumps_lead_where_sql_says(tabs: Tabs, path: Path, views: Views) -> None:
    tab = opened(tabs, path)
    start = where(tab)
    tab.select_option("#action", label=ACTION)
    taken = 0
    for stratum in (None, "tracking"):
        tab.select_option("#stratum", label=stratum or "all strata")
        for kind, tail in LEADS.items():
            query = WITHIN + tail
            found = rows_of(views, query, ACTION, stratum)
            if not found:
                assert tab.locator(f"[data-jump={kind}]").is_disabled()
                continue
            tab.click(f"[data-jump={kind}]")
            assert [where(tab)] == found
            assert tab.locator(f"[data-jump={kind}]").get_attribute("aria-current") == "true"
            taken += 1
        lost = rows_of(views, f"{WITHIN} {LOST}", ACTION, stratum)  # the file holds all of them
        assert tab.locator("[data-jump=lost]").inner_text().endswith(str(len(lost) or "answers"))
        here = where(tab)
        begin = lost.index((here[0], here[2])) + 1 if (here[0], here[2]) in lost else 0
        turns = [*range(begin, len(lost)), *range(begin)]
        for turn in turns if stratum else turns[:3]:
            tab.click("[data-jump=lost]")
            assert where(tab) == (lost[turn][0], ACTION, lost[turn][1])
            assert tab.locator("[data-jump=lost]").inner_text().endswith(f" {turn + 1} of {len(lost)}")
            assert tab.locator("#answers .wrong").count() == 1
            taken += 1
    assert taken > 6
    assert where(tab) != start


def test_tokens_and_distances_are_those_of_events(tabs: Tabs, path: Path, views: Views) -> None:
    """Every position of two actions under one X, as text; the line below has the distances."""
    ((doc,),) = rows_of(views, "select min(doc) from documents where split = 'evaluation'")
    tab = opened(tabs, path, f"{address(doc, ACTION, 2)}&compare=1")
    assert where(tab) == (doc, ACTION, 2)
    text = token_reader(MODEL)
    assert text is not None
    query = """
        select t, x_token, y_token, action, delta, f from events
        where doc = ? and replicate = 2 and action in ('recent-half', 'snapkv-half') order by t, action
    """
    rows = rows_of(views, query, doc)
    assert len(rows) == 24
    for (t, x, y, _, _, _), (_, other_x, other_y, *_) in zip(rows[::2], rows[1::2], strict=True):
        assert x == other_x
        assert column(tab, t) == [text(token) for token in (x, y, other_y)]
    tab.uncheck("#compare")
    tab.keyboard.press("Home")
    for t, x, y, action, delta, f in rows:
        if action != ACTION:
            continue
        line = tab.locator("#here").inner_text()
        assert line.startswith(f"t = {t}")
        assert (text(x) in line, text(y) in line) == (True, True)
        assert re.findall(r"[δf] ([\d.e-]+)", line)[-2:] == [f"{delta:.4f}", f"{f:.4f}"]
        assert ("equal" in line or "both have ended" in line) == (x == y)
        apart = tab.locator(f"#score .y [data-t='{t}']").get_attribute("class") or ""
        assert ("apart" in apart) == (x != y)
        tab.keyboard.press("ArrowRight")


def test_the_line_below_shades_a_token_of_y_where_it_differs_from_x(tabs: Tabs, path: Path, views: Views) -> None:
    """Two actions share one X: each is shaded by its own difference, whichever is chosen; they are chosen in turn."""
    query = """
        select doc, replicate, t, list(x_token <> y_token order by action) as differ from events
        inner join (from documents select doc, split) using (doc)
        where split = 'evaluation' and action in ('recent-half', 'snapkv-half') group by all order by doc, replicate, t
    """
    kinds: dict[tuple[bool, ...], tuple[str, int, int]] = {}
    for doc, replicate, t, differ in rows_of(views, query):
        kinds.setdefault(tuple(differ), (doc, replicate, t))
    assert len(kinds) >= 3
    tab = opened(tabs, path)
    for turn, ((recent, snapkv), (doc, replicate, t)) in enumerate(kinds.items()):
        chosen = (("recent-half", recent, snapkv), ("snapkv-half", snapkv, recent))
        action, own, other = chosen[turn % 2]
        tab.evaluate(FOLLOWED, f"{address(doc, action, replicate)}&compare=1&t={t}")
        shaded = [code.get_attribute("class") == "apart" for code in tab.locator("#here code").all()]
        assert shaded == [False, own, other]
        tab.uncheck("#compare")
        shaded = [code.get_attribute("class") == "apart" for code in tab.locator("#here code").all()]
        assert shaded == [own, own]


def test_choosing_keys_and_the_back_button(tabs: Tabs, path: Path, views: Views) -> None:
    query = "select doc from documents where split = 'evaluation' and stratum = 'needle' order by doc"
    docs = [doc for (doc,) in rows_of(views, query)]
    tab = opened(tabs, path, address(docs[0], ACTION, 1))
    query = "select tau from trajectories where doc = ? and action = ? and replicate = 1"
    ((tau,),) = rows_of(views, query, docs[0], ACTION)
    assert f"τ = {tau}" in tab.inner_text("#story")
    assert tab.locator("#score .y .tau-at").get_attribute("data-t") == str(tau)
    assert tab.inner_text("#command") == f"kvdrift show 'small study' {docs[0]} {ACTION} 1"
    tab.select_option("#stratum", label="needle")
    assert tab.locator("#document option").all_inner_texts() == docs
    tab.select_option("#document", label=docs[1])
    tab.select_option("#replicate", label="3")
    assert where(tab) == (docs[1], ACTION, 3)
    tab.click("[data-step=replicate][data-by='1']")
    assert where(tab) == (docs[1], ACTION, 4)
    assert tab.locator("[data-step=replicate][data-by='1']").is_disabled()
    for back in ((docs[1], ACTION, 3), (docs[1], ACTION, 1), (docs[0], ACTION, 1)):
        tab.go_back()
        assert where(tab) == back
    tab.go_forward()
    tab.locator("#score").focus()
    for key, trajectory in (
        ("ArrowDown", (docs[1], ACTION, 2)), ("ArrowUp", (docs[1], ACTION, 1)), ("]", (docs[2], ACTION, 1)),
        ("[", (docs[1], ACTION, 1)), ("a", (docs[1], "snapkv-half", 1)),
    ):  # fmt: skip
        tab.keyboard.press(key)
        assert where(tab) == trajectory, key
    for key, t in (("End", 12), ("ArrowLeft", 11), ("Home", 1), ("ArrowRight", 2)):
        tab.keyboard.press(key)
        assert tab.locator("#here b").inner_text() == f"t = {t}", key
    tab.wait_for_url("**&t=2")
    tab.keyboard.press("c")
    assert tab.locator("#compare").is_checked()
    assert tab.locator("#score table").first.locator(".y").count() == 2
    assert tab.evaluate("location.hash").endswith("&compare=1&t=2")
    tab.keyboard.press("?")
    assert tab.locator("#help").is_visible()
    tab.keyboard.press("Escape")
    assert not tab.locator("#help").is_visible()
    row = tab.locator("#pairs button", has_text="τ").last
    name = row.text_content() or ""
    row.click()
    assert name.startswith(", ".join((where(tab)[1], f"replicate {where(tab)[2]}")))


def test_the_report_leads_to_a_lost_answer_of_each_action(tabs: Tabs, path: Path, finished: Path, views: Views) -> None:
    """The links' addresses name a jump; an address with an unknown jump leads to a typical trajectory."""
    report = tabs.open(finished / "report" / "small" / "index.html")
    assert report.locator("header a[href='trajectories.html']").count() == 1
    links = {one.inner_text(): one.get_attribute("href") for one in report.locator("#answers a[href*=jump]").all()}
    losing = """
        select distinct action from analyzed_trajectories inner join scores using (study, model, doc, action, replicate)
        where split = 'evaluation' and score_x = 1 and score_y < 1 order by action
    """
    assert sorted(links) == [action for (action,) in rows_of(views, losing)]
    for action, link in links.items():
        file, _, fragment = str(link).partition("#")
        assert file == path.name
        tab = opened(tabs, path, f"#{fragment}")
        ((doc, replicate),) = rows_of(views, f"{WITHIN} {LOST} limit 1", action, None)
        assert where(tab) == (doc, action, replicate)
        assert tab.locator("[data-jump=lost]").get_attribute("aria-current") == "true"
    where(opened(tabs, path, "#action=nobody&jump=lost"))


def test_an_address_of_what_is_not_there(tabs: Tabs, path: Path) -> None:
    tab = opened(tabs, path, "#doc=it's%20gone&action=x&replicate=7")
    assert "replicate 7 of it's gone under x" in tab.inner_text("#notice")
    assert r"kvdrift show 'small study' 'it'\''s gone' x 7" in tab.inner_text("#notice")
    where(tab)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.by_default("dark")
def test_nothing_is_wider_than_its_window(tabs: Tabs, path: Path, scheme: Any) -> None:
    for width in (1280, 390):
        tab = opened(tabs, path, width=width, scheme=scheme)
        assert overflow(tab) == 0
        tab.keyboard.press("c")
        assert overflow(tab) == 0
        names = tab.locator("main :is(button, select, input)").evaluate_all(
            "all => all.filter(one => !(one.innerText || one.ariaLabel || one.labels?.[0]?.innerText).trim()).length"
        )
        assert names == 0
    tab.set_viewport_size({"width": 700, "height": 500})
    tab.locator("#overview svg[viewBox^='0 0 6']").wait_for()
    assert overflow(tab) == 0


@pytest.mark.slow
def test_paper_has_what_fits_on_it(tabs: Tabs, path: Path) -> None:
    """Browsers lay a page out for paper without a change of the window's size, and say so before."""
    tab = opened(tabs, path, "#compare=1")
    parts = "main :is(section, table, svg, p)"
    right = f"Math.max(...[...document.querySelectorAll('{parts}')].map(one => one.getBoundingClientRect().right))"
    assert tab.evaluate(right) > 702
    tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    tab.emulate_media(media="print")
    tab.evaluate("document.body.style.cssText = 'width: 702px; margin: 0'")  # A4 less its margins
    assert tab.evaluate(right) <= 702
    tab.emulate_media(media="screen")
    tab.evaluate("document.body.style.cssText = ''; window.dispatchEvent(new Event('afterprint'))")
    assert tab.locator("#overview svg").get_attribute("width") != "680"
    assert tab.evaluate(right) > 702


@pytest.mark.slow
def test_texts_of_strangers_stay_texts(tabs: Tabs, tmp_path: Path, undrawn: None) -> None:  # noqa: ARG001 - by its effect
    hostile = "</script><img src=x onerror=\"document.title = 'taken'\"><script>document.title = 'taken'</script>"
    views = make_views(strata=("VT-4K",), documents_each=1)
    build(tmp_path, views, token_text=lambda token: hostile if token % 5 else "\u202e\x1b\n")
    tab = opened(tabs, tmp_path / "trajectories.html", width=390)
    assert hostile in tab.locator("#score td", has_text="onerror").first.inner_text()
    assert tab.locator("#score img").count() == 0
    assert tab.title().startswith("Trajectories")
    assert overflow(tab) == 0
    assert "␛↵" in tab.inner_text("#score")
