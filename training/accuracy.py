"""Measure how often a model states records of embedded documents correctly, in real generation.

A statement is a key with the two tokens after it. An answer is read from its start, statement by statement, up to
``<eos>``; filler between statements is skipped. A record is right if the first statement with its key equals the
record. Record accuracy is the number of right records divided by the number of records in the asked items. A record
that is never stated, first stated wrongly, or stated after the generation limit counts as wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

from kvdrift.generator.embedded import vocabulary as v
from kvdrift.schema.document import Document

GENERATION_LIMIT = 96
"""Generated tokens per answer at most; fewer than one right answer in 2,000 is longer."""


@dataclass(frozen=True)
class Accuracy:
    """Counts over documents of one stratum, from one sampled answer to each document.

    ``records`` is the number of records that documents ask for, ``right`` the number of those that answers state
    correctly, and ``statements`` that of all statements, right or wrong. ``finished`` is the number of answers that
    reached ``<eos>`` within the limit, and ``generated`` the number of tokens, ``<eos>`` included.
    """

    stratum: str
    documents: int
    records: int
    right: int
    statements: int
    finished: int
    generated: int

    def line(self) -> str:
        """Return the counts as one line of text."""
        accuracy, mean = self.right / self.records, self.generated / self.documents
        return (
            f"{self.stratum:>24}  record accuracy {accuracy:.3f} ({self.right} of {self.records} records,"
            f" {self.documents} documents)  {self.statements} statements  mean answer {mean:.1f} tokens"
            f"  {self.finished} finished"
        )


def statements(answer: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the statements of an answer in order, each of three tokens; a statement cut off at the end is left out."""
    stated: list[tuple[int, ...]] = []
    position = 0
    while position + 3 <= len(answer) and answer[position] != v.EOS:
        if v.is_key(answer[position]):
            stated.append(tuple(answer[position : position + 3]))
            position += 3
        else:
            position += 1
    return stated


def asked_records(document: Document) -> set[tuple[int, ...]]:
    """Return the records of a document's asked items as token triples."""
    records: set[tuple[int, ...]] = set()
    for answer in document.answers:
        tokens = v.to_tokens(answer)
        records.update(tokens[start : start + 3] for start in range(0, len(tokens), 3))
    return records


def right_records(document: Document, answer: Sequence[int]) -> int:
    """Count the asked records whose first statement in the answer is right."""
    first: dict[int, tuple[int, ...]] = {}
    for statement in statements(answer):
        first.setdefault(statement[0], statement)
    return len(asked_records(document) & set(first.values()))


def sample_answers(model: Qwen2ForCausalLM, prompts: torch.Tensor, *, limit: int, seed: int) -> list[list[int]]:
    """Draw one answer for each prompt at temperature 1 from the full softmax, with the full cache.

    Prompts are int64 [B, n]. An answer has at most ``limit`` tokens; it ends earlier with ``<eos>``.
    """
    torch.manual_seed(seed)
    network: Any = model  # generate is typed loosely
    made = network.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=limit, eos_token_id=v.EOS, pad_token_id=v.PAD,
    )  # fmt: skip
    answers: list[list[int]] = made[:, prompts.shape[1] :].tolist()
    return [answer[: answer.index(v.EOS) + 1] if v.EOS in answer else answer for answer in answers]


def measure_accuracy(
    model: Qwen2ForCausalLM, documents: Sequence[Document], *, seed: int, limit: int = GENERATION_LIMIT, batch: int = 16
) -> Accuracy:
    """Measure the record accuracy on documents of one stratum; raise ValueError if there are several strata."""
    strata = {document.stratum for document in documents}
    if len(strata) != 1:
        raise ValueError(f"accuracy is measured in one stratum at a time, not in {len(strata)}")
    records = right = stated = finished = generated = 0
    for start in range(0, len(documents), batch):
        some = documents[start : start + batch]
        prompts = torch.tensor([document.tokens for document in some])
        for document, answer in zip(some, sample_answers(model, prompts, limit=limit, seed=seed + start), strict=True):
            records += len(asked_records(document))
            right += right_records(document, answer)
            stated += len(statements(answer))
            finished += answer[-1] == v.EOS
            generated += len(answer)
    return Accuracy(strata.pop(), len(documents), records, right, stated, finished, generated)
