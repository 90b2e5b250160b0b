"""Prompts of 16,384 and 32,768 tokens in the explorer: as many as there is room for, each of them whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fixtures.browser import Tabs, overflow
from fixtures.report_views import MODEL, PAIR, STUDY, FakeViews, make_views

from log.prompts import KeptEntries, kept_entries
from report.explorer import prompts
from report.explorer.page import write_explorer
from report.reading.content import read_content
from report.reading.source import Provenance, StudyRows

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCUMENTS, LAYERS, HEADS = 24, 32, 8
VOCABULARY = 30_000
RECORD = (5_001, 5_006)  # of the first answer, in the half that recent-half evicts
LATE = 9_000  # from the end: stands once in each prompt


@dataclass(frozen=True)
class Written:
    """An explorer, and the length of its prompts."""

    path: Path
    length: int


def half(action: str, length: int, random: np.random.Generator) -> KeptEntries:
    """Return the kept entries of a prompt: the newest half, or a random half for each layer and KV head."""
    if action == "recent-half":
        counts = np.where(np.arange(length) >= length // 2, HEADS, 0)
        return kept_entries([counts] * LAYERS, LAYERS * HEADS)
    return kept_entries([random.binomial(HEADS, 0.5, length) for _ in range(LAYERS)], LAYERS * HEADS)


def long_views(length: int) -> FakeViews:
    """Views of a study whose prompts have this many tokens: words by Zipf's law, as texts have them."""
    random = np.random.default_rng(length)
    views = make_views(strata=("book",), documents_each=DOCUMENTS)
    rows = []
    for document in views.views["documents"]:
        document["prompt_tokens"] = length
        tokens = random.zipf(1.1, length) % (VOCABULARY - 1)
        tokens[-LATE] = VOCABULARY - 1
        keys = {name: document[name] for name in ("study", "model", "doc")} | {
            "document_revision": 0, "action_revision": 0, "step": 0,
        }  # fmt: skip
        records = [{"answer": 0, "piece": 0, "first": RECORD[0], "last": RECORD[1]}]
        rows.append(keys | {"action": None, "tokens": tokens.tolist(), "records": records})
        for action in PAIR:
            kept = half(action, length, random)
            counts = {"layers": kept.layers, "pairs": kept.pairs, "kept": kept.counts.reshape(-1)}
            rows.append(keys | {"action": action} | counts)
    views.views["prompts"] = rows
    return views


def written(views: FakeViews, folder: Path) -> Path:
    source = StudyRows(views, STUDY, MODEL)
    content = read_content(source, baseline=None, token_text=None, provenance=Provenance(), latex=False)
    path = write_explorer(content, folder, lambda token: f" w{token}")
    assert path is not None
    return path


@pytest.fixture(scope="module", params=[1 << 14, 1 << 15])
def explorer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(written(long_views(request.param), tmp_path_factory.mktemp("long")), request.param)


def opened(tabs: Tabs, path: Path, number: int, **how: Any) -> Page:
    tab = tabs.open(path, f"#doc=book/evaluation/{number}&action=recent-half&replicate=0", **how)
    tab.locator("#score table").first.wait_for()
    return tab


def prompt_texts(path: Path) -> list[str]:
    return re.findall(r'<script type="text/plain" id="prompt\d+">([^<]*)</script>', path.read_text(encoding="utf-8"))


@pytest.mark.by_default("32768")
def test_the_file_has_what_its_bounds_allow(explorer: Written) -> None:
    texts = prompt_texts(explorer.path)
    held = sum(map(len, texts))
    assert 1 < len(texts) < DOCUMENTS
    assert held <= prompts.MOST_BYTES < held + 1.1 * max(map(len, texts)), "no other one would fit"
    assert explorer.path.stat().st_size < 5_000_000


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.by_default("32768")
def test_a_long_prompt_is_shown_folded_searched_and_by_layers(
    tabs: Tabs, explorer: Written, width: int, scheme: Any
) -> None:
    tab = opened(tabs, explorer.path, 0, width=width, scheme=scheme)
    tab.locator("#prompt:not([hidden])").wait_for()
    note = tab.locator("#prompt-note").inner_text()
    assert note.startswith(f"{explorer.length:,} tokens; recent-half has 50% of the entries")
    assert note.endswith("the answer’s record is gone.")
    assert "(record gone)" in tab.locator("#answers").inner_text()
    assert tab.locator("#prompt-text .token").count() < 100
    assert tab.locator("#prompt-text .of-record.gone").count() == RECORD[1] - RECORD[0] + 1
    tab.fill("#wanted", f"w{VOCABULARY - 1}")
    tab.keyboard.press("Enter")
    assert tab.locator("#found").inner_text() == "1 of 1"
    assert tab.locator("#prompt-text .at").get_attribute("data-p") == str(explorer.length - LATE + 1)
    tab.check("#compare")
    tab.locator(".strip").nth(1).wait_for()
    groups = tab.locator("#prompt-here .layers").first.locator(".layer small").all_inner_texts()
    shown = prompts.MOST_SHARES // explorer.length
    size = LAYERS // shown
    assert groups == [f"{first}–{first + size - 1}" for first in range(0, LAYERS, size)]
    assert overflow(tab) == 0


@pytest.mark.by_default("32768")
def test_a_document_without_its_prompt_says_by_which_rule_the_others_were_chosen(tabs: Tabs, explorer: Written) -> None:
    held = len(prompt_texts(explorer.path))
    tab = opened(tabs, explorer.path, DOCUMENTS - 1)
    tab.locator("#prompt-note:not(:empty)").wait_for()
    assert tab.locator("#prompt").is_hidden()
    assert tab.locator("#prompt-note").inner_text() == (
        f"This document’s prompt is not in this file, which has those of {held} of {DOCUMENTS} documents: those that "
        "jumps lead to, then the first ones of each stratum, until they take 1.5 MB."
    )


@pytest.mark.slow
def test_prompts_that_are_too_long_are_not_said_to_be_missing_in_the_store(
    tabs: Tabs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_BYTES", 1000)
    tab = opened(tabs, written(long_views(1 << 14), tmp_path), 0)
    tab.locator("#prompt-note:not(:empty)").wait_for()
    assert tab.locator("#prompt-note").inner_text() == (
        "The store’s prompts are too long for this file, which has 1.5 MB for them; kvdrift show prints the records of "
        "the answers."
    )
