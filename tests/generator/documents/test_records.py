"""The places where prompts state their answers."""

from __future__ import annotations

import pytest

from kvdrift.generator.documents.answers import MOST_PLACES, Record, find_records
from kvdrift.generator.embedded import vocabulary
from kvdrift.generator.embedded.documents import TASKS, make_document


@pytest.mark.parametrize("task", TASKS)
def test_the_records_of_embedded_documents_are_found(task: str) -> None:
    """Each needle is one record of three tokens; each chain has three, and the question is none."""
    document = make_document(task, 384, 4, 7)
    symbols = [vocabulary.SYMBOLS[token] for token in document.tokens]
    found = find_records([f" {symbol}" for symbol in symbols], document.answers, document.scoring)
    pieces = 1 if task == "needle" else 3
    assert len(found) == pieces * len(document.answers)
    for number, answer in enumerate(document.answers):
        own = [record for record in found if record.answer == number]
        stated = [" ".join(symbols[record.first - 1 : record.last]) for record in own]
        assert " ".join(stated) == answer
        assert [symbols[record.first - 2] for record in own] == ["REC"] * pieces
        assert [symbols[record.last] for record in own] == [";"] * pieces


@pytest.mark.parametrize(
    ("tokens", "answers", "records"),
    [
        (["The", " code", " is", " 78", "12", "."], ["7812"], [Record(0, 0, 4, 5)]),
        (["NEW", " York", ",", "new", "york"], ["New York"], [Record(0, 0, 1, 2), Record(0, 0, 4, 5)]),
        (["ne", "w y", "ork"], ["x", "New  York"], [Record(1, 0, 1, 3)]),
        (["a b", " c d", " a"], ["a b c d"], [Record(0, 0, 1, 2)]),
        (["a", "b", "x", "c", "d"], ["a b c d"], [Record(0, 0, 1, 2), Record(0, 1, 4, 5)]),
        (["a", "x", "b"], ["a b"], []),  # single words are no record
        (["the "] * (MOST_PLACES + 1), ["the"], []),
        (["the "] * MOST_PLACES, ["the"], [Record(0, 0, at, at) for at in range(1, MOST_PLACES + 1)]),
        (["İstanbul", " x"], ["X"], [Record(0, 0, 2, 2)]),  # a letter that is two in lower case
        (["\\xE9", "\\x95", "\\xBF\\xE5", "\\x9F\\x8E", "。"], ["长城"], [Record(0, 0, 1, 4)]),
        (["在 \\xE9", "\\x95\\xBF", "城"], ["长城"], [Record(0, 0, 1, 3)]),
        (["\\xE5", "\\xE9", "\\x95\\xBF", " ", "城"], ["长城"], [Record(0, 0, 2, 5)]),
        (["a"], ["", " "], []),
        ([], ["a"], []),
    ],
)
def test_places(tokens: list[str], answers: list[str], records: list[Record]) -> None:
    assert find_records(tokens, answers, "all") == records


@pytest.mark.parametrize(
    ("tokens", "answers", "records"),
    [
        (["see", " Beatles", "!"], ["The Beatles"], [Record(0, 0, 2, 2)]),
        (["3", ",", "677", " seated"], ["3677 seated"], [Record(0, 0, 1, 4)]),
        (["Lord", "of", "the", "Rings"], ["Lord of the Rings"], [Record(0, 0, 1, 4)]),
        (["Lord", " of", " Rings"], ["The Lord of the Rings"], [Record(0, 0, 1, 3)]),
        (["a", "an", "the"], ["the"], []),
        (["x.", "(y)", "z", "u", "v"], ["x y - u v"], [Record(0, 0, 1, 2), Record(0, 1, 4, 5)]),
        (["C+", "+"], ["C++"], [Record(0, 0, 1, 1)]),
    ],
)
def test_places_of_normalized_answers(tokens: list[str], answers: list[str], records: list[Record]) -> None:
    """Single tokens do not determine white space, so that articles may stand between the words of an answer."""
    assert find_records(tokens, answers, "normalized") == records
