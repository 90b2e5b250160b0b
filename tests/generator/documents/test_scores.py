"""Scores and answer spans against RULER's own functions and plain loops over decoded text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures.byte_level import byte_level_tokenizer
from oracles.plain_scores import RULER_TASKS, SCORES, plain_span, up_to_eos

from generator.documents.answers import Decode, Tokens, answer_characters, score_pairs, score_text, task_scoring
from generator.documents.registry import SOURCES, stratum_documents
from generator.documents.ruler_tasks import GENERATED
from generator.embedded import vocabulary
from generator.embedded.documents import TASKS, make_document
from generator.transformer.files.tokenizer import text_decoder
from schema.document import Document
from schema.study import DocumentsSection

FILLER = ("and", "the \u00e9migr\u00e9", "\u2014 then \U0001f600", "ok,")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level_tokenizer()


def each(tokenizer: Any) -> Decode:
    def decode(continuations: Sequence[Tokens]) -> list[str]:
        return [tokenizer.decode(list(tokens), skip_special_tokens=True) for tokens in continuations]

    return decode


def stated(answers: Sequence[str], draws: random.Random) -> str:
    """A continuation that states some of the answers, in some order and case, among other words."""
    chosen = [answer for answer in answers if draws.random() < 0.8]
    draws.shuffle(chosen)
    words = [answer.upper() if draws.random() < 0.3 else answer for answer in chosen]
    return " ".join(f"{draws.choice(FILLER)} {word}" for word in words)


@pytest.mark.parametrize("task", GENERATED)
def test_rulers_tasks_score_as_the_benchmark_does(tokenizer: Any, task: str) -> None:
    section = DocumentsSection(source="ruler", tasks=[task], length=1024, development=2, evaluation=2)
    documents = [one for own in stratum_documents(section, 3, lambda: tokenizer).values() for one in own]
    draws, decode = random.Random(task), each(tokenizer)  # noqa: S311 - a test's numbers
    found, plain = list[float](), list[float]()
    for document in documents:
        assert document.scoring == RULER_TASKS[task]
        pairs = [tuple(tuple(tokenizer.encode(stated(document.answers, draws))) for _ in range(2)) for _ in range(12)]
        scores = score_pairs(pairs, document.answers, document.scoring, decode)
        for (x, y), score in zip(pairs, scores, strict=True):
            rule = SCORES[RULER_TASKS[task]]
            assert score.score_x == rule(tokenizer.decode(x), document.answers)
            assert score.score_y == rule(tokenizer.decode(y), document.answers)
            span = (score.span_first, score.span_last) if score.span_first else None
            assert span == plain_span(x, document.answers, document.scoring, tokenizer.decode)
            found.append(score.score_y)
            plain.append(rule(tokenizer.decode(y), document.answers))
    assert sum(found) == sum(plain)
    assert 0 < sum(plain) < len(plain), "some are right and some are not"


def test_rulers_tasks_have_its_rules() -> None:
    assert {task: task_scoring("ruler", task) for task in SOURCES["ruler"].tasks} == RULER_TASKS


@pytest.mark.parametrize("task", TASKS)
def test_embedded_tasks_score_by_the_share_of_asked_items(task: str) -> None:
    decode = text_decoder("kvdrift/tiny")
    assert decode is not None
    draws = random.Random(task)  # noqa: S311 - a test's numbers
    for number in range(4):
        document = make_document(task, 384, number, 7)
        pairs = [(answer_of(document, draws), answer_of(document, draws)) for _ in range(10)]
        read = [tuple(tuple(up_to_eos(side, vocabulary.EOS)) for side in pair) for pair in pairs]
        for (x, y), score in zip(read, score_pairs(read, document.answers, document.scoring, decode), strict=True):
            rule = SCORES["all"]
            assert (score.score_x, score.score_y) == tuple(
                rule(vocabulary.to_text(side), document.answers) for side in (x, y)
            )
            span = (score.span_first, score.span_last) if score.span_first else None
            assert span == plain_span(x, document.answers, "all", vocabulary.to_text)


def answer_of(document: Document, draws: random.Random) -> tuple[int, ...]:
    """Return a possible answer of the embedded model: asked items, filler, the end, and more."""
    items = [answer for answer in document.answers if draws.random() < 0.9]
    draws.shuffle(items)
    tokens = [token for item in items for token in (*vocabulary.to_tokens(item), vocabulary.FIRST_FILLER + 3)]
    return (*tokens, vocabulary.EOS, *vocabulary.to_tokens(document.answers[0]))


def test_a_letter_of_several_tokens_belongs_to_all_of_them(tokenizer: Any) -> None:
    text = "The word \U0001f600\U0001f680 is it"
    tokens = tuple(tokenizer.encode(text))
    (score,) = score_pairs([(tokens, tokens)], ["\U0001f680"], "all", each(tokenizer))
    first, last = score.span_first, score.span_last
    assert first is not None
    assert last is not None
    assert last - first >= 2, "an emoji is several bytes, and here several tokens"
    assert "\U0001f680" in tokenizer.decode(tokens[first - 1 : last])
    assert "\U0001f680" not in tokenizer.decode(tokens[first:last])
    assert "\U0001f680" not in tokenizer.decode(tokens[first - 1 : last - 1])


def test_lower_case_may_be_longer() -> None:
    text = "\u0130\u0130 so Answer."  # each of the first letters has two characters in lower case
    begin, end = answer_characters(text, ["ANSWER"], "all") or (0, 0)
    assert text[begin:end] == "Answer"


def test_parts_of_answers() -> None:
    assert score_text("one two", ["ONE", "three"], "all") == 0.5
    assert score_text("one two", ["ONE", "three"], "part") == 1.0
    assert score_text("", ["one"], "part") == score_text("", ["one"], "all") == 0.0
    assert answer_characters("b a b", ["a", "b"], "all") == (0, 3)
    assert answer_characters("b a b", ["a", "b"], "part") == (0, 1)
    assert answer_characters("b", ["a"], "all") is None


def test_a_row_of_json_lines_says_how_it_is_scored(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"id": f"p{n}", "prompt": f"Prompt {n}"} | ({"answers": ["a", "b"]} if n % 3 else {})
        | ({"scoring": "part"} if n % 3 == 2 else {})
        for n in range(60)
    ]  # fmt: skip
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DocumentsSection(source="jsonl", path=str(path), length=20, development=5, evaluation=20, stratum="m")
    documents = [one for own in stratum_documents(section, 0, lambda: tokenizer).values() for one in own]
    assert {(int(one.doc[1:]) % 3, one.scoring) for one in documents} == {(0, ""), (1, "all"), (2, "part")}
