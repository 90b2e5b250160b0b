"""Prompts in the explorer: packed data equals the store's, within the room for it; and readers see it."""

from __future__ import annotations

import base64
import gzip
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fixtures.browser import Tabs
from fixtures.report_views import MODEL

from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.report.explorer import page as prompts
from kvdrift.report.explorer.page import read_prompts, write_explorer
from kvdrift.report.explorer.trajectories import choose, read_outcomes
from kvdrift.report.reading.content import PageContent
from kvdrift.schema.token_texts import shown_texts
from kvdrift.sql.catalog import Views

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_shares_are_those_of_the_store(content: PageContent, views: Views) -> None:
    outcomes = read_outcomes(content)
    found = prompts.read_prompts(content.source, outcomes, choose(outcomes))
    assert len(found) == 6
    for prompt in found:
        doc = outcomes.documents[prompt.place]["doc"]
        rows = {row["action"]: row for row in views.rows("prompts", doc=doc).to_pylist()}
        assert prompt.tokens.tolist() == rows[None]["tokens"]
        assert prompt.records == [list(record.values()) for record in rows[None]["records"]]
        assert prompt.layers == 3
        for one in prompt.kept:
            row = rows[outcomes.actions[one.action]]
            assert (one.step, one.first_layers, one.shares.shape) == (0, [0, 1, 2], (3, len(prompt.tokens)))
            counts = np.array(row["kept"]).reshape(one.shares.shape)
            assert (one.shares == np.array([0, 128, 255])[counts]).all(), "of two KV heads"


def test_what_does_not_fit_is_left_out_and_layers_are_joined(
    content: PageContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = read_outcomes(content)
    sample = choose(outcomes)
    monkeypatch.setattr(prompts, "MOST_SHARES", 800)
    monkeypatch.setattr(prompts, "MOST_BYTES", 3000)
    found = prompts.read_prompts(content.source, outcomes, sample)
    first_jump = int(outcomes.doc[sample.jumps[0].rows[0]])
    assert found[0].place == first_jump
    assert all(one.first_layers == [0, 1] and len(one.shares) == 2 for prompt in found for one in prompt.kept)
    tokens = np.unique(np.concatenate([prompt.tokens for prompt in found]))
    said, texts = prompts.pack_prompts(found, tokens)
    assert 0 < len(said) == len(texts) < len(found)
    assert sum(map(len, texts)) <= 3000
    data = gzip.decompress(base64.b64decode(texts[0]))
    n = said[0]["entries"]
    planes = np.frombuffer(data, np.uint8, 2 * n).reshape(2, n).astype(int)
    assert (tokens[planes[0] + 256 * planes[1]] == found[0].tokens).all()
    assert len(data) == 2 * n + sum(len(first_layers) * n for _, _, first_layers in said[0]["kept"])


def opened(tabs: Tabs, path: Path, fragment: str, **how: Any) -> Page:
    tab = tabs.open(path, fragment, **how)
    tab.locator("#prompt:not([hidden])").wait_for()
    return tab


def address(action: str = "recent-half", **more: object) -> str:
    parts = {"doc": "needle-384-00002", "action": action, "replicate": 0, **more}
    return "#" + "&".join(f"{name}={value}" for name, value in parts.items())


def test_records_and_layers_are_shown(tabs: Tabs, path: Path, views: Views) -> None:
    """A lost record is pale and named beside its answer; a click shows it for each layer and each action."""
    (row,) = views.rows("documents", doc="needle-384-00002").to_pylist()
    kept = views.rows("answer_records", doc="needle-384-00002", action="recent-half").to_pylist()
    gone = [one["answer"] for one in kept if one["kept"] == 0]
    assert gone, "a study with something to show"
    tab = opened(tabs, path, address())
    assert tab.locator("#answers .record-gone").count() == len(gone)
    assert f"of {len(row['answers'])} records of answers {len(gone)} " in tab.locator("#prompt-note").inner_text()
    tab.click(f"#record-buttons button:has-text('answer {gone[0] + 1}')")
    here = tab.locator("#prompt-here")
    assert f"of the record of answer {gone[0] + 1}" in here.inner_text()
    assert re.findall(r"(\d) (\d+)%", here.locator(".layers").inner_text()) == [("0", "0"), ("1", "0"), ("2", "0")]
    words = tab.locator("#prompt-text .of-record.gone").all_inner_texts()
    assert row["answers"][gone[0]] in " ".join(word.strip() for word in words)
    tab.check("#compare")
    tab.locator(".strip").nth(1).wait_for()
    assert here.locator(".layers b").all_inner_texts() == ["recent-half", "snapkv-half"]


@pytest.mark.slow
def test_turns_begin_with_their_roles(
    tabs: Tabs, content: PageContent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt that a chat template wrote; a role stands before a fold, too."""
    turns = [("system", 1), ("user", 20), ("assistant", 200), ("tool <b>", 203), ("user", 360)]
    outcomes = read_outcomes(content)
    found = prompts.read_prompts(content.source, outcomes, choose(outcomes))
    assert all(prompt.turns == [] for prompt in found), "of the embedded source"
    monkeypatch.setattr(
        "kvdrift.report.explorer.page.read_prompts", lambda *_: [replace(one, turns=turns) for one in found]
    )
    path = write_explorer(content, tmp_path, token_reader(MODEL))
    assert path is not None
    tab = opened(tabs, path, address())
    labels = tab.locator("#prompt-text .turn")
    assert labels.all_inner_texts() == [role for role, _ in turns]
    following = "(all) => all.map(({ nextElementSibling: one }) => Number(one.dataset.p ?? one.dataset.first))"
    assert labels.evaluate_all(following) == [first for _, first in turns]
    assert " tokens in 5 turns; " in tab.locator("#prompt-note").inner_text()
    tab.click('#prompt-text [data-p="2"]')
    assert ", in a turn of system" in tab.locator("#prompt-here").inner_text()


def test_search_and_folds(tabs: Tabs, path: Path, views: Views) -> None:
    (prompt,) = [row for row in views.rows("prompts", doc="needle-384-00002").to_pylist() if row["action"] is None]
    text = token_reader(MODEL)
    assert text is not None
    words = [text(token).strip() for token in prompt["tokens"]]
    places = [at + 1 for at in range(len(words) - 1) if words[at : at + 2] == [";", words[-1]]]
    tab = opened(tabs, path, address())
    assert tab.locator(".fold").count() > 0
    tab.keyboard.press("/")
    tab.keyboard.type("rec K")  # over two tokens, whatever the case
    tab.keyboard.press("Enter")
    records = [at + 1 for at, word in enumerate(words) if word == "REC"]
    assert tab.locator("#found").inner_text() == f"1 of {len(records)}"
    assert tab.locator("#prompt-text .at").get_attribute("data-p") == str(records[0])
    tab.keyboard.press("Enter")
    assert tab.locator("#prompt-text .at").get_attribute("data-p") == str(records[1])
    tab.fill("#wanted", "nothing like it")
    tab.keyboard.press("Enter")
    assert tab.locator("#found").inner_text() == "not in the prompt"
    assert not places
    while tab.locator(".fold").count():
        tab.locator(".fold").first.click()
    assert tab.locator("#prompt-text .token").count() == len(words)


def test_a_character_of_several_tokens_is_found_and_drawn_once(
    content: PageContent, tabs: Tabs, views: Views, tmp_path: Path
) -> None:
    """In prompt and continuations, at the last of its tokens; the others are their bytes, and all are marked."""
    (prompt,) = [row for row in views.rows("prompts", doc="needle-384-00002").to_pylist() if row["action"] is None]
    tokens = prompt["tokens"]
    at = next(at for at in range(5, len(tokens)) if len({*tokens[at : at + 3]}) == 3)
    parts = dict(zip(tokens[at : at + 3], ("\\xE9", "\\x95", "\\xBF.\\xF0"), strict=True))
    texts = {token: parts.get(token, "\u200d" if token % 2 else "\\xFF") for token in range(256)}
    written = write_explorer(content, tmp_path, texts.__getitem__)
    assert written is not None
    tab = opened(tabs, written, address())
    tab.fill("#wanted", "长.")
    tab.keyboard.press("Enter")
    places = [here for here in range(len(tokens)) if tokens[here : here + 3] == tokens[at : at + 3]]
    assert tab.locator("#found").inner_text() == f"1 of {len(places)}"
    assert tab.locator("#prompt-text .match").all_inner_texts()[:3] == ["\\xE9", "\\x95", "长.\\xF0"]
    assert tab.locator("#prompt-text .at").get_attribute("data-p") == str(places[0] + 1)
    assert {*tab.locator("#prompt-text .token").all_inner_texts()} >= {"U+200D", "\\xFF"}
    rows = views.rows("events", doc="needle-384-00002", action="recent-half", replicate=0, kind="coupled").to_pylist()
    drawn = sorted(rows, key=lambda row: int(row["t"]))
    for side in ("x", "y"):
        cells = tab.locator(f"#score .{side} [data-t]").all_inner_texts()
        shown = shown_texts([texts[row[f"{side}_token"]] for row in drawn])
        assert [cell.replace("U+200D", "\u200d") for cell in cells] == shown


@pytest.mark.slow
def test_numbers_of_tokens_are_found_whole(content: PageContent, tabs: Tabs, views: Views, tmp_path: Path) -> None:
    """Without a tokenizer a prompt is numbers: neither a part of a number nor the end and start of two is found."""
    (prompt,) = [row for row in views.rows("prompts", doc="needle-384-00002").to_pylist() if row["action"] is None]
    tokens = prompt["tokens"]
    written = write_explorer(content, tmp_path, None)
    assert written is not None
    tab = opened(tabs, written, address())
    ends = next(at for at in range(len(tokens) - 1) if min(tokens[at : at + 2]) > 9)
    joined = f"{tokens[ends] % 10}{tokens[ends + 1] // 10 ** (len(str(tokens[ends + 1])) - 1)}"
    assert len(joined) == 2
    for wanted in (int(joined), tokens[ends]):
        tab.fill("#wanted", str(wanted))
        tab.keyboard.press("Enter")
        places = [at + 1 for at, token in enumerate(tokens) if token == wanted]
        assert tab.locator("#found").inner_text().endswith(f" of {len(places)}" if places else "not in the prompt")
    tab.fill("#wanted", f"{tokens[ends]} {tokens[ends + 1]}")
    tab.keyboard.press("Enter")
    pairs = [at for at in range(len(tokens) - 1) if tokens[at : at + 2] == tokens[ends : ends + 2]]
    assert tab.locator("#found").inner_text().endswith(f" of {len(pairs)}")


@pytest.mark.parametrize(("most", "note"), [(3000, "{} of 6 documents"), (10, "kvdrift show")])
@pytest.mark.by_default("3000")
def test_a_prompt_that_is_left_out_is_explained(
    content: PageContent, tabs: Tabs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, note: str
) -> None:
    assert prompts.MOST_BYTES == 1_500_000
    monkeypatch.setattr(prompts, "MOST_BYTES", most)
    written = write_explorer(content, tmp_path, token_reader(MODEL))
    assert written is not None
    held = len(re.findall(r'id="prompt\d+"', written.read_text(encoding="utf-8")))
    tab, notes = tabs.open(written), set[str]()
    tab.locator("#score table").first.wait_for()
    for doc in tab.locator("#document option").all_inner_texts():
        tab.select_option("#document", label=doc)
        tab.locator("#prompt-note:not(:empty)").wait_for()
        notes.add(tab.locator("#prompt-note").inner_text())
    assert any(note.format(held) in told for told in notes)
    assert len(notes) > 1 or held == 0


@pytest.mark.slow
def test_thousands_of_records_stay_folded(
    tabs: Tabs, content: PageContent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page opens as quickly if the answer is a common word; the folds count its records, and a button opens each."""

    def stated_often(*given: Any) -> list[prompts.Prompt]:
        found = read_prompts(*given)
        often = [[0, 0, p, p] for p in range(100, 20_000, 10)]
        return [replace(one, tokens=np.resize(one.tokens, 20_000), records=often, kept=[]) for one in found]

    monkeypatch.setattr("kvdrift.report.explorer.page.read_prompts", stated_often)
    written = write_explorer(content, tmp_path, token_reader(MODEL))
    assert written is not None
    tab = opened(tabs, written, address())
    assert 300 < tab.locator("#prompt-text .token").count() < 1100
    fold = tab.locator("#prompt-text .fold").last
    assert re.search(r"1[89],\d{3} tokens, 1,[89]\d\d records …", fold.inner_text())
    tab.evaluate("for (let turn = 0; turn < 100; turn += 1) document.querySelector('#record-buttons button').click()")
    assert tab.locator("#prompt-text .at").get_attribute("data-p") == "1090"


@pytest.mark.slow
def test_a_store_without_prompts_says_so(
    tabs: Tabs, content: PageContent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdrift.report.explorer.page.read_prompts", lambda *_: [])
    written = write_explorer(content, tmp_path, token_reader(MODEL))
    assert written is not None
    tab = tabs.open(written)
    tab.locator("#score table").first.wait_for()
    assert "The store has no prompts" in tab.locator("#prompt-note").inner_text()
    assert tab.locator("#prompt").is_hidden()
