"""Scores and answer spans against RULER's own functions and plain loops over decoded text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures.byte_level import byte_level_tokenizer
from fixtures.refusals import refused
from oracles.plain_scores import (
    RULER_TASKS,
    SCORES,
    helmet_score,
    plain_span,
    post_processed,
    string_match_all,
    string_match_part,
)

from kvdrift.generator.documents.answers import Decode, Tokens, answer_characters, score_pairs, score_text, task_scoring
from kvdrift.generator.documents.registry import SOURCES, stratum_documents
from kvdrift.generator.documents.ruler import GENERATED
from kvdrift.schema.document import Document
from kvdrift.schema.study import DocumentsSection

HELMET_TASKS = {
    "nq": "normalized", "triviaqa": "normalized", "hotpotqa": "normalized", "popqa": "normalized",
    "asqa": None, "qampari": None,
}  # fmt: skip
MONTREAL = [
    "City of Montréal", "Funtreal", "Sister cities of Montreal", "Team990", "The weather in Montreal", "Ville de Montreal"
]  # fmt: skip
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


def test_helmets_tasks_have_its_rules() -> None:
    assert {task: task_scoring("helmet", task) for task in SOURCES["helmet"].tasks} == HELMET_TASKS
    assert task_scoring("helmet", "msmarco") is None, "no other rule stands in for a benchmark's own"


@pytest.mark.parametrize(
    ("text", "answers", "score", "stated"),
    [
        ("Answer: Beatles", ["The Beatles"], 1, "Beatles"),
        ("about 3677 seated", ["3,677 seated"], 1, "3677 seated"),
        ("It seats 3,677\n seated fans", ["3677 seated"], 1, "3,677\n seated"),
        # EleutherAI/lm-evaluation-harness#1303
        (" The Spice Girls.\n", ["Spice Girls"], 1, "Spice Girls"),
        ("Spice, the girls", ["The Spice Girls"], 1, "Spice, the girls"),
        # EleutherAI/lm-evaluation-harness#726: a list of aliases without the plainest
        ("Montreal", MONTREAL, 0, None),
        ('the city of "Montréal"', MONTREAL, 1, 'city of "Montréal'),
        ("Montreal", [*MONTREAL, "Montreal"], 1, "Montreal"),
        # deepset-ai/haystack#2508: punctuation is that of ASCII
        ("1914–18", ["1914-18"], 0, None),
        ("1914–18", ["1914–18"], 1, "1914–18"),
        # UKGovernmentBEIS/inspect_ai#4620: no exception is made for numbers
        ("$3000 (3.14)", ["3,000"], 1, "3000"),
        ("314", ["(3.14)"], 1, "314"),
        ("−5", ["-5"], 1, "5"),
        # "a" is an article where it stands alone
        ("Grade A bananas", ["grade bananas"], 1, "Grade A bananas"),
        ("banana", ["A nana"], 1, "nana"),
        ("U.S.A. today", ["USA"], 1, "U.S.A"),
        ("", ["word"], 0, None),
        ("the", ["word"], 0, None),
        ("\u0130\u0130 THE Beatles", ["the beatles"], 1, "Beatles"),
    ],
)  # fmt: skip
def test_normalized_texts_state_answers_as_in_helmet(
    text: str, answers: list[str], score: float, stated: str | None
) -> None:
    assert score_text(text, answers, "normalized") == score == helmet_score("Answer:" + text, answers)
    characters = answer_characters(text, answers, "normalized")
    assert (characters and text[slice(*characters)]) == stated


@pytest.mark.parametrize(
    ("text", "answers", "scoring", "score"),
    [
        # NVIDIA/RULER#15: of a question's references, one is enough
        ("in Paris", ["Paris", "the city of Paris"], "part", 1.0),
        # NVIDIA/RULER#30, an example of common words; and with two words missing
        ("1. arthur 2. kilt 3. fire 4. meter 5. appliance", ["appliance", "meter", "kilt", "fire", "arthur"], "all", 1.0),
        ("1. arthur 2. kilt 3. fire", ["appliance", "meter", "kilt", "fire", "arthur"], "all", 0.6),
        # NVIDIA/RULER#95: a text that states everything is right
        ("a b c d e f g", ["a", "b", "c"], "all", 1.0),
        ("\n\tYes: 7654321.\x07", ["7654321", "1234567"], "all", 0.5),
        # no articles and no punctuation are left out here
        ("Beatles", ["The Beatles"], "part", 0.0),
        ("3677", ["3,677"], "all", 0.0),
    ],
)  # fmt: skip
def test_rulers_rules_by_hand(text: str, answers: list[str], scoring: str, score: float) -> None:
    benchmark = string_match_all if scoring == "all" else string_match_part
    assert score_text(text, answers, scoring) == score == benchmark(post_processed(text), answers)


def test_normalized_scores_and_spans_of_any_text(tokenizer: Any) -> None:
    """The line after "Answer:", which HELMET scores too, never states more than the whole text."""
    words = ("the", "A", "an", "Beatles,", "3,677", "u.s.", "(seated)", "thea", "\u00e9t\u00e9", "\u2014", "\U0001f600")
    draws, decode = random.Random(5), each(tokenizer)  # noqa: S311 - a test's numbers
    right = 0
    for _ in range(400):
        text = "".join(draws.choice(words) + draws.choice((" ", "  ", "\n", "")) for _ in range(draws.randrange(8)))
        answers = [" ".join(draws.choice(words[3:8]) for _ in range(draws.randrange(1, 3))) for _ in range(2)]
        tokens = tuple(tokenizer.encode(text))
        (score,) = score_pairs([(tokens, tokens)], answers, "normalized", decode)
        assert score.score_x == score.score_y == helmet_score(text, answers) == helmet_score("Answer: " + text, answers)
        span = (score.span_first, score.span_last) if score.span_first else None
        assert (score.score_x == 1) == (span is not None)
        if span:
            stated = tokenizer.decode(tokens[span[0] - 1 : span[1]])
            assert score_text(stated, answers, "normalized") == 1
            assert score_text(tokenizer.decode(tokens[: span[1] - 1]), answers, "normalized") == 0
            right += 1
    assert 50 < right < 350


def test_rulers_post_processing_changes_no_score_of_plain_answers() -> None:
    letters = "ab \n\t\x00"
    draws = random.Random(6)  # noqa: S311 - a test's numbers
    for _ in range(500):
        text = "".join(draws.choice(letters) for _ in range(draws.randrange(12)))
        answers = ["".join(draws.choice("ab ") for _ in range(draws.randrange(1, 4))).strip() or "a" for _ in range(3)]
        assert score_text(text, answers, "all") == string_match_all(post_processed(text), answers)
        assert score_text(text, answers, "part") == string_match_part(post_processed(text), answers)


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


def test_all_answers_or_the_first_to_end() -> None:
    assert answer_characters("b a b", ["a", "b"], "all") == (0, 3)
    assert answer_characters("b a b", ["a", "b"], "part") == (0, 1)
    assert answer_characters("b", ["a"], "all") is None


def test_a_row_of_json_lines_says_how_it_is_scored(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"id": f"p{n}", "prompt": f"Prompt {n}"} | ({"answers": ["x", "b"]} if n % 3 else {})
        | ({"scoring": "part" if n % 2 else "normalized"} if n % 3 == 2 else {})
        for n in range(60)
    ]  # fmt: skip
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DocumentsSection(source="jsonl", path=str(path), length=20, development=5, evaluation=20, stratum="m")
    documents = [one for own in stratum_documents(section, 0, lambda: tokenizer).values() for one in own]
    assert {(int(one.doc[1:]) % 6, one.scoring) for one in documents} == {
        (0, ""), (3, ""), (1, "all"), (4, "all"), (2, "normalized"), (5, "part")
    }  # fmt: skip


@pytest.mark.parametrize("answer", ["A", "the", "!?", "The .", "an a"])
def test_an_answer_that_every_normalized_text_states_is_refused(tokenizer: Any, tmp_path: Path, answer: str) -> None:
    """OpenBMB/UltraRAG#509: the gold answer "A" scored every prediction 1."""
    path = tmp_path / "mine.jsonl"
    rows = [{"id": str(n), "prompt": "?", "answers": ["B", answer], "scoring": "normalized"} for n in range(40)]

    def taken(scoring: str) -> dict[str, list[Document]]:
        path.write_text("".join(json.dumps(row | {"scoring": scoring}) + "\n" for row in rows))
        section = DocumentsSection(source="jsonl", path=str(path), length=9, development=2, evaluation=2, stratum="m")
        return stratum_documents(section, 0, lambda: tokenizer)

    line = refused(taken, "normalized")
    assert re.search(r"mine\.jsonl, line \d+: field 'answers': ", line)
    assert f"'{answer}'" in line
    assert taken("part")["evaluation"][0].answers == ("B", answer)
