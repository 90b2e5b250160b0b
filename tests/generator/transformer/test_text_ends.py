"""The tokens that end a text: the union of what files and chat template name, ``[study] eos``, and where texts end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fixtures.chat_models import (
    FORMS,
    LLAMA_2,
    WORDS,
    ChatForm,
    chat_tokenizer,
    edit_json,
    write_chat_study,
)
from fixtures.refusals import refused
from fixtures.report_views import content_of
from fixtures.small_study import evaluate, run_of
from fixtures.study_files import load_study

import kvdrift
from kvdrift.dry_run.description import end_lines
from kvdrift.generator.transformer.files.locations import model_location
from kvdrift.generator.transformer.files.text_ends import TextEnds, end_texts, template_end, text_ends
from kvdrift.report.sections.study import section as study_section
from kvdrift.report.sections.verdict import section as verdict_section
from kvdrift.schema.study import Study
from kvdrift.sql.catalog import open_views

CASE_02 = FORMS[0]
NAMED = [pytest.param(form, id=form.report) for form in FORMS]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (None, None),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),  # a newline alone
        ("{% for m in messages %}{{ m.content }} answer{% endfor %}", None),  # a word
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}</s>{% endfor %}", None),  # no answers
        ("{{ raise_exception('only one message') if messages | length > 1 }}{{ messages[0].content }}</s>", None),
        ("{{ messages[9].content.strip() }}", None),
        (LLAMA_2, "</s>"),  # a space before it
        ("{% for m in messages %}{{ m.content }}\n\n</s>\n{% endfor %}", "</s>"),
        ("{% for m in messages %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m.content }}<sep>{% endfor %}</s>", "<sep>"),  # the first of two
    ],
)
def test_templates_that_end_an_answer_in_other_ways(template: str | None, end: str | None) -> None:
    special = ("<s>", "</s>", "<sep>")
    assert template_end(chat_tokenizer(template, special, "</s>")) == (None if end is None else special.index(end))


def ends_of(folder: Path, form: ChatForm, **changes: str) -> tuple[Study, TextEnds]:
    study = load_study(write_chat_study(folder, form, **changes))
    return study, text_ends(study)


@pytest.mark.parametrize("form", NAMED)
def test_the_set_is_the_union_of_all_that_name_one(tmp_path: Path, form: ChatForm) -> None:
    ids = {name: token for token, name in enumerate(form.special)}
    by_files = {*form.generation, *form.config, form.tokenizer}
    _, plain = ends_of(tmp_path, form, chat="false")
    _, chat = ends_of(tmp_path, form)
    assert set(plain.tokens) == {ids[name] for name in by_files}
    assert set(chat.tokens) == {ids[name] for name in by_files | {form.end}}
    assert chat.tokens[0] == ids[form.end]  # by which answers end, so that it fills what follows an end
    assert plain.tokens[0] == ids[(*form.generation, *form.config)[0]]


def test_rows_of_messages_apply_the_template(tmp_path: Path) -> None:
    """Without a word in the study file; a worker may have no file of prompts."""
    path = write_chat_study(tmp_path, CASE_02)
    path.write_text(path.read_text().replace("chat_template = true\n", ""))
    study, file = load_study(path), tmp_path / "prompts.jsonl"
    end = CASE_02.special.index(CASE_02.end)
    assert "the chat template" not in text_ends(study).places[end]
    file.write_text(file.read_text() + json.dumps({"id": "m", "messages": []}) + "\n")
    assert "the chat template" in text_ends(study).places[end]
    file.unlink()
    assert "the chat template" not in text_ends(study).places[end]


def test_each_token_is_named_with_its_text_and_its_places(tmp_path: Path) -> None:
    study, ends = ends_of(tmp_path, CASE_02)
    first, second = end_texts(ends, model_location(study.model), None)
    assert first.startswith("2 '<|im_end|>' (")
    assert "the chat template" in first
    assert "tokenizer" in first
    assert second == "0 '<|endoftext|>' (generation_config.json, config.json)"
    (line,) = end_lines(study)
    assert first in line
    assert second in line


@pytest.mark.parametrize(
    ("eos", "tokens"), [("[0]", (0,)), ('[1, "<|im_end|>"]', (1, 2)), ('["six"]', (12,)), ("[]", ())]
)
def test_the_study_file_replaces_the_set(tmp_path: Path, eos: str, tokens: tuple[int, ...]) -> None:
    study, ends = ends_of(tmp_path, CASE_02, eos=eos)
    assert ends.tokens == tokens
    (line,) = end_lines(study)
    assert all(f"{token} '" in line for token in tokens)
    assert ("study.eos" in line) == bool(tokens)


@pytest.mark.parametrize(
    ("eos", "says"),
    [
        ("[15]", ["study.eos", "15"]),
        ('["<|im_edn|>"]', ["study.eos = '<|im_edn|>'", "did you mean '<|im_end|>'"]),
        ('["one two"]', ["study.eos = 'one two'", "2 tokens"]),
        ("[-1]", ["study.eos", "-1"]),
        ("[true]", ["study.eos"]),
        ("[1.5]", ["study.eos", "1.5"]),
        ("2", ["study.eos", "2"]),
    ],
)
def test_what_is_no_token_is_refused(tmp_path: Path, eos: str, says: list[str]) -> None:
    line = refused(ends_of, tmp_path, CASE_02, eos=eos)
    assert all(part in line for part in says), line


def test_a_token_beyond_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    """The tokenizer may know more tokens than the model."""
    study = load_study(write_chat_study(tmp_path, CASE_02, eos='["six"]'))
    edit_json(tmp_path / "model" / "config.json", vocab_size=12)
    line = refused(text_ends, study)
    assert line == "study.eos = 'six': is token 12, but the model's vocabulary has 12 tokens"


def test_a_model_without_any_end_has_none(tmp_path: Path) -> None:
    study = load_study(write_chat_study(tmp_path, CASE_02, chat="false"))
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    for name in ("config.json", "generation_config.json"):
        edit_json(tmp_path / "model" / name, eos_token_id=None)
    assert text_ends(study).tokens == ()
    (line,) = end_lines(study)
    assert "no token ends a text" in line


def test_texts_end_where_the_template_ends_an_answer(tmp_path: Path) -> None:
    """Case 02 as a whole: positions after the end of an answer are no text, on either side; units say the set."""
    study = load_study(write_chat_study(tmp_path, CASE_02))
    run = run_of(study, tmp_path / "store")
    evaluate(run)
    with kvdrift.open(tmp_path / "store") as views:
        table = "select * from events where action = 'recent' and kind = 'coupled' order by doc, replicate, t"
        rows = views.sql(table).fetchnumpy()
        sets = views.sql("select distinct eos_tokens from units").fetchall()
        stated = views.sql("select distinct eos_tokens from revisions").fetchall()
    assert sets == stated == [("2,0",)]
    for side in ("x", "y"):
        tokens, ended = (np.reshape(rows[f"{side}_{name}"], (-1, 24)) for name in ("token", "eos"))
        expected = np.cumsum(np.isin(tokens, (0, 2)), axis=1) > 0
        np.testing.assert_array_equal(ended, expected)
        assert (ended[:, -1] & (tokens == 2).any(axis=1)).any()  # some end, and not by what the configurations name
        after = ended & np.roll(ended, 1, axis=1)
        after[:, 0] = False
        assert set(tokens[after].tolist()) == {2}
    texts = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *WORDS)
    with open_views(run.store) as opened:
        content = content_of(opened, "chat", "model", token_text=texts.__getitem__)
        ended, count = content.ended
        ends = dict(study_section(content).values["rows"])["Ends of texts"]
        assert not verdict_section(content).values["endless"]
    assert count == 2 * 4
    assert ended > 0
    assert ends.startswith("at 2 ‘<|im_end|>’, 0 ‘<|endoftext|>’; ")
    assert f"{ended} of {count}" in ends
    assert f"({ended / count:.0%})" in ends
