"""RULER: six tasks generated for any tokenizer and length, or all thirteen from the benchmark's files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from kvdrift.generator.documents.draws import DocumentDraws
from kvdrift.generator.documents.files import SourceRow, find_file, read_rows
from kvdrift.generator.documents.prompts import PromptText, Tokenizer, longest_prompt
from kvdrift.generator.documents.ruler_tasks import GENERATED
from kvdrift.generator.documents.source import (
    Candidate,
    DocumentSource,
    document_of,
    need_tokenizer,
    question_cluster,
    where,
)
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import DocumentsSection

_FROM_FILES = (
    "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "qa_1", "qa_2",
)  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f]")  # all but the line feed
_QUESTIONS = ("qa_1", "qa_2")


class RulerSource(DocumentSource):
    """RULER (Hsieh et al. 2024). ``length`` bounds prompt plus generated tokens, as in the benchmark.

    Without ``path``, prompts are generated as long as the length allows, and each is its own cluster. With ``path``,
    all tasks are read from a folder of the benchmark's files, in their order. The cluster of a question task's row is
    its question, so that one question at several lengths is in one split. A row's ``answer_prefix``, or ``gen_prefix``
    in rows of lm-evaluation-harness, opens the answer. Older files, whose input ends with the opening, can be read too.
    """

    tasks = (*GENERATED, *_FROM_FILES)
    generated = tuple(GENERATED)
    takes = ("path", "chat_template")
    summary = (
        f"{', '.join(GENERATED)} are generated at any length; all others need path: "
        "a folder with TASK/validation_LENGTH.jsonl or LENGTH/TASK/validation.jsonl"
    )

    def check(self, section: DocumentsSection) -> None:
        """Check that tasks which cannot be generated have a path."""
        for task in section.tasks:
            if section.path is None and task not in GENERATED:
                raise InputError(
                    f"{where(section)}: task '{task}' needs RULER's files: set path to their folder, "
                    f"or take {', '.join(GENERATED)}"
                )

    def candidates(self, section: DocumentsSection, task: str, seed: int) -> Iterator[Candidate]:  # noqa: ARG002 - names alone
        """Yield endless numbers, or the rows of the task's file."""
        if section.path is None:
            for index in count():
                name = _name(task, section.length, index)
                yield Candidate(name, name, task, index)
            return
        for number, row in read_rows(_file(section, task)):
            _check_row(row, section)
            name = _name(task, section.length, number)
            yield Candidate(name, _question(row) if task in _QUESTIONS else name, task, number)

    def documents(
        self, section: DocumentsSection, chosen: Sequence[Candidate], tokenizer: Tokenizer | None, seed: int
    ) -> list[Document]:
        """Generate or read the chosen prompts, and tokenize them."""
        text_tokenizer, chat = need_tokenizer(section, tokenizer), bool(section.chat_template)
        if section.path is None:
            return [_generated(section, item, text_tokenizer, seed) for item in chosen]
        made: dict[Candidate, Document] = {}
        for task in dict.fromkeys(item.task for item in chosen):
            wanted = {item.number: item for item in chosen if item.task == task}
            for number, row in read_rows(_file(section, task), wanted):
                item = wanted[number]
                prompt = _prompt(row)
                tokens = prompt.tokens(text_tokenizer, chat=chat)
                document = document_of(section, item, tokens, _answers(row))
                made[item] = prompt.described(document, text_tokenizer, chat=chat)
        return [made[item] for item in chosen]


def _name(task: str, length: int, number: int) -> str:
    return f"{task}-{length}-{number:05d}"


def _generated(section: DocumentsSection, item: Candidate, tokenizer: Tokenizer, seed: int) -> Document:
    task = GENERATED[item.task]

    answers: dict[str, tuple[str, ...]] = {}

    def prompt(parts: int) -> PromptText:
        # A fresh stream for each number of parts: the document does not depend on the numbers that were tried before.
        draws = DocumentDraws("kvdrift/ruler", item.task, section.length, item.number, seed)
        text, answers[text.text] = task.compose(draws, section.length, parts, tokenizer)
        return text

    room = section.length - task.generated_tokens
    chat = bool(section.chat_template)
    fitted = longest_prompt(prompt, tokenizer, chat=chat, tokens=room, least=task.least, most=task.most)
    if fitted is None:
        raise InputError(
            f"{where(section)}: length {section.length} is too short for task '{item.task}', "
            f"whose answer takes {task.generated_tokens} tokens of it"
        )
    text, tokens = fitted
    document = document_of(section, item, tokens, answers[text.text])
    return text.described(document, tokenizer, chat=chat)


def _file(section: DocumentsSection, task: str) -> Path:
    folder, length = Path(section.path or "").expanduser(), str(section.length)
    places = [
        folder / task / f"validation_{length}.jsonl", folder / length / task / "validation.jsonl",
        folder / length / "data" / task / "validation.jsonl", folder / task / "validation.jsonl",
    ]  # fmt: skip
    return find_file(places, f"RULER's {task} at length {length}")


def _check_row(row: SourceRow, section: DocumentsSection) -> None:
    """Check the fields of a row, and that its length is not above the stratum's."""
    row.text("input")
    row.texts("outputs")
    if row.has("length") and row.number("length") > section.length:
        raise row.error(f"field 'length': {row.number('length'):.0f} tokens, above the stratum's {section.length}")


def _prompt(row: SourceRow) -> PromptText:
    """Return a row's prompt with the opening of its answer.

    RULER's ``answer_prefix`` begins with a space (``scripts/data/synthetic/constants.py``). The harness strips it from
    ``gen_prefix`` and puts a space before a plain prompt's (``lm_eval/api/task.py``, ``build_qa_turn``).
    """
    text = row.text("input")
    opening, harness = (row.text(name) if row.has(name) else "" for name in ("answer_prefix", "gen_prefix"))
    if opening and harness and opening.strip() != harness.strip():
        raise row.error(
            f"fields 'answer_prefix' and 'gen_prefix': '{opening}' and '{harness}' are two openings of the answer; "
            "leave one of them out"
        )
    if opening or not harness:
        return PromptText(text, opening, opening)
    apart = text[-1:].isspace() or harness[0].isspace()
    return PromptText(text, harness if apart else f" {harness}", harness)


def _answers(row: SourceRow) -> tuple[str, ...]:
    """Return a row's answers; refuse one that RULER's scoring treats in another way than ours.

    RULER strips a continuation and makes line feeds of its control characters (``scripts/eval/evaluate.py``,
    ``postprocess_pred``), and nothing of an answer's.
    """
    answers = row.texts("outputs")
    for answer in answers:
        if not answer or answer != answer.strip() or _CONTROL.search(answer):
            raise row.error(
                f"field 'outputs': {json.dumps(answer)} is empty, begins or ends with white space, or has a control "
                "character, which RULER takes out of a continuation before it looks for the answer; write it without"
            )
    return answers


def _question(row: SourceRow) -> str:
    """Return the cluster of the row's question; older files have the opening of the answer after the question."""
    _, found, question = row.text("input").rpartition("Question:")
    if not found:
        raise row.error("field 'input': expected a text that ends with 'Question: …'")
    question, _, _ = question.partition("Answer:")
    return question_cluster(question)
