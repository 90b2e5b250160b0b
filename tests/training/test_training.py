"""Training sequences, the measured accuracy, and that the committed checkpoint retrieves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from kvdrift.generator import embedded
from kvdrift.generator.embedded import vocabulary
from kvdrift.generator.embedded.documents import LENGTHS, MEAN_FILLER, TASKS, make_document, study_layout
from training import accuracy
from training.model import build_tokenizer
from training.trainer import make_training_sequence

CHECKPOINT = Path(embedded.__file__).parent / "checkpoint"
ACCURACY_SEED = 40_000_003
FLOORS = {"needle": 0.6, "variable_tracking": 0.8}


def test_training_never_shows_a_study_document() -> None:
    layout = study_layout("needle", 384)
    trained = {make_training_sequence(layout, index, seed=7).tokens[:396] for index in range(50)}
    assert not trained & {make_document("needle", 384, index, seed=7).tokens for index in range(50)}


def test_training_answer_states_every_asked_record_once_and_ends() -> None:
    for task in TASKS:
        for index in range(50):
            sequence = make_training_sequence(study_layout(task, 384), index, seed=7)
            answer = sequence.tokens[sequence.prompt_tokens :]
            body = sequence.tokens[:384]
            stated = accuracy.statements(answer)
            assert answer.index(vocabulary.EOS) == len(answer) - 1
            assert len(set(stated)) == len(stated) == (5 if task == "needle" else 9)
            records = [body[place + 1 : place + 4] for place, token in enumerate(body) if token == vocabulary.RECORD]
            assert set(stated) <= set(records)
            for position, allowed in sequence.choices:
                assert sequence.tokens[position] in allowed or sequence.tokens[position] >= vocabulary.FIRST_FILLER


def test_training_answers_have_the_documented_mean_length() -> None:
    """600 answers: the standard error of their mean is about .4 tokens, the tolerance four of them."""
    lengths = []
    for index in range(300):
        for task in TASKS:
            sequence = make_training_sequence(study_layout(task, 384), index, seed=1)
            lengths.append(len(sequence.tokens) - sequence.prompt_tokens)
    expected = ((5 + 3) * (1 + MEAN_FILLER) + 5 * 3 + 3 * 9) / 2
    assert sum(lengths) / len(lengths) == pytest.approx(expected, abs=1.6)


def test_record_accuracy_counts_the_first_statement_only() -> None:
    document = make_document("needle", 384, 0, seed=3)
    first, second, third, *_ = (list(vocabulary.to_tokens(answer)) for answer in document.answers)
    filler = [vocabulary.FIRST_FILLER]
    wrong = [third[0], *first[1:]]
    assert accuracy.right_records(document, [*first, *filler, *second, vocabulary.EOS, *third]) == 2
    assert accuracy.right_records(document, [*wrong, *filler, *third, *first, *first]) == 1
    assert accuracy.right_records(document, [*filler, *first[:2]]) == 0


def test_the_committed_tokenizer_is_the_one_that_training_makes(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    made, committed = AutoTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(CHECKPOINT)
    assert made.get_vocab() == committed.get_vocab()
    assert len(made) == vocabulary.SIZE


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_checkpoint_retrieves(task: str) -> None:
    """Record accuracy on fresh documents of all three lengths together, with the full cache.

    The sample is 72 documents per task: 360 needle records and 648 chain records. Measured here: .750 with a standard
    deviation of .27 between documents, hence a standard error of .032, and .897 with .17 and .020. The floors lie more
    than 4.5 standard errors below, so that other documents or another machine's rounding would fail by chance less
    than once in 100,000 times; a model that does not retrieve is near 0.
    """
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    assert isinstance(model, Qwen2ForCausalLM)
    assert model.dtype == torch.float32
    right = records = 0
    for length in LENGTHS:
        fresh = [make_document(task, length, index, ACCURACY_SEED) for index in range(24)]
        result = accuracy.measure_accuracy(model, fresh, seed=ACCURACY_SEED, batch=24)
        right += result.right
        records += result.records
    assert records == 3 * 24 * (5 if task == "needle" else 9)
    assert right / records > FLOORS[task]
