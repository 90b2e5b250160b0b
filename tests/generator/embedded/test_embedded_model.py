"""The embedded model: its documents are as described, and its tokenizer loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvdrift.generator import embedded
from kvdrift.generator.embedded import vocabulary
from kvdrift.generator.embedded.documents import LENGTHS, TASKS, make_document, study_layout

CHECKPOINT = Path(embedded.__file__).parent / "checkpoint"
STRATA = [(task, length) for task in TASKS for length in LENGTHS]
QUESTION_TOKENS = {"needle": 12, "variable_tracking": 8}


def records_of(body: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The records of a body as token triples, read by the record marker alone."""
    return [body[place + 1 : place + 4] for place, token in enumerate(body) if token == vocabulary.RECORD]


@pytest.mark.parametrize(("task", "length"), STRATA)
def test_a_document_is_as_described_and_its_answers_follow_from_its_body(task: str, length: int) -> None:
    """Each key opens one record, and each value stands once."""
    for index in range(20):
        document = make_document(task, length, index, seed=3)
        body, question = document.tokens[:length], document.tokens[length:]
        assert document.prompt_tokens == length + QUESTION_TOKENS[task]
        assert body[0] == vocabulary.BOS
        assert vocabulary.QUESTION not in body
        assert question[0] == vocabulary.QUESTION
        assert question[-1] == vocabulary.ANSWER
        assert set(question[2::2]) == {vocabulary.MARK}
        found = records_of(body)
        assert len(found) == body.count(vocabulary.END) == study_layout(task, length).records
        records = {record[0]: record for record in found}
        values = [token for record in found for token in record[1:] if not vocabulary.is_key(token)]
        assert len(records) == len(found)
        assert len(set(values)) == len(values)
        for key, answer in zip(question[1:-1:2], document.answers, strict=True):
            walk = records[key]
            while vocabulary.is_key(walk[-2]):
                walk = (*walk, *records[walk[-2]])
            assert vocabulary.to_tokens(answer) == walk
            assert len(walk) == (3 if task == "needle" else 9)


def test_documents_are_a_fixed_function_of_task_length_index_and_seed() -> None:
    document = make_document("needle", 384, 5, seed=11)
    assert document == make_document("needle", 384, 5, seed=11)
    assert (document.doc, document.cluster) == ("needle-384-00005", "needle-384-00005")
    assert (document.stratum, document.task, document.source) == ("needle-384", "needle", "embedded")
    others = [make_document("needle", 384, 5, seed=12), make_document("needle", 384, 6, seed=11)]
    assert len({document.prompt_sha256, *(other.prompt_sha256 for other in others)}) == 3
    # Pinned, so that an upgrade that would silently change every study's documents fails here.
    assert document.prompt_sha256 == "e580212db060bcf67e4f791f45ffc78c9d6ba937ce44bfdb539bb09f1248ffcc"
    tracked = "2e7dc3fe2d4c069846b19e3388228d0d2bb49dcc196c874ca429d4f37cf19f6f"
    assert make_document("variable_tracking", 1536, 2, seed=11).prompt_sha256 == tracked


def test_tokenizer_round_trip() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert len(tokenizer) == vocabulary.SIZE
    assert [str(tokenizer.decode([token])).strip() for token in range(vocabulary.SIZE)] == list(vocabulary.SYMBOLS)
    tokens = list(make_document("variable_tracking", 768, 1, seed=3).tokens)
    text = tokenizer.decode(tokens)
    assert text == vocabulary.to_text(tokens)
    assert tokenizer(text)["input_ids"] == tokens
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
