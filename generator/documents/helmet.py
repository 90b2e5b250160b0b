"""HELMET: retrieved-context questions (RAG) and answers with citations (ALCE), from a local copy of the benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvdrift.generator.documents.answers import score_text
from kvdrift.generator.documents.files import SourceRow, find_file, read_object, read_rows
from kvdrift.generator.documents.prompts import PromptText, Tokenizer, longest_prompt
from kvdrift.generator.documents.source import (
    Candidate,
    DocumentDraws,
    DocumentSource,
    document_of,
    documents_of_rows,
    question_cluster,
    sampling_order,
    where,
)
from kvdrift.schema.document import NORMALIZED, Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import DocumentsSection

_SHOTS = 2
_PASSAGES = {4096: (20, 8), 8192: (50, 30), 16384: (105, 75), 32768: (220, 165), 65536: (440, 345), 131072: (1000, 700)}
"""Numbers of passages for each length, for RAG and for ALCE (HELMET, ``scripts/generate_configs.py``)."""

_POPULAR = 1000  # HELMET's PopQA leaves out subjects with this many page views or more

# The wording of the benchmark's RAG prompts (HELMET, ``data.py``); ALCE's wording is read from its files.
_RAG_PROMPT = (
    "Use the given documents to write a concise and short answer to the question. "
    "Write your answer in the following format:\nAnswer: [answer]\n\n{shown}{context}\n\nQuestion: {question}"
)
_OPENING = "\nAnswer:"
_RAG_PASSAGE = "Document (Title: {title}): {text}"
_SYSTEM = "You are a helpful assistant."

Writer = Callable[[int], PromptText]
"""A function that returns the prompt with a given number of its first passages."""


@dataclass(frozen=True)
class _Task:
    """The files of a task's rows and worked examples, and how many tokens HELMET generates for it."""

    rows: str
    examples: str
    generated_tokens: int = 20
    cites: bool = False


_KILT, _ALCE = "data/kilt/", "data/alce/"
_TASKS = {
    "nq": _Task(_KILT + "nq-dev-multikilt_1000_k{}_dep6.jsonl", _KILT + "nq-train-multikilt_1000_k3_dep6.jsonl"),
    "triviaqa": _Task(
        _KILT + "triviaqa-dev-multikilt_1000_k{}_dep6.jsonl", _KILT + "triviaqa-train-multikilt_1000_k3_dep6.jsonl"
    ),
    "hotpotqa": _Task(
        _KILT + "hotpotqa-dev-multikilt_1000_k{}_dep3.jsonl", _KILT + "hotpotqa-train-multikilt_1000_k3_dep3.jsonl"
    ),
    "popqa": _Task(_KILT + "popqa_test_1000_k{}_dep6.jsonl", _KILT + "popqa_test_1000_k3_dep6.jsonl"),
    "asqa": _Task(_ALCE + "asqa_eval_gtr_top2000.json", "prompts/asqa_revised.json", 300, cites=True),
    "qampari": _Task(_ALCE + "qampari_eval_gtr_top2000.json", "prompts/qampari_revised.json", 300, cites=True),
}


class HelmetSource(DocumentSource):
    """HELMET (Yen et al. 2024, arXiv:2410.02694). ``path`` is a copy of it, with its ``data`` and ``prompts`` folders.

    The cluster is the question, so that its rows, at several depths and lengths, are in one split. A stratum takes
    questions in a random order that is a function of the seed. A prompt begins with ``shots`` worked examples (2 by
    default). By default a citation prompt is a chat and a RAG prompt is not; ``chat_template`` overrides this. If
    ``length`` has no room for all passages and the answer's tokens, the last passages are left out.
    """

    tasks = tuple(_TASKS)
    takes = ("path", "shots", "chat_template")
    needs = ("path",)
    summary = f"path: a copy of HELMET with data/ and prompts/; lengths {', '.join(map(str, _PASSAGES))}"

    def check(self, section: DocumentsSection) -> None:
        """Check that the section's length is one of the benchmark's."""
        if section.length not in _PASSAGES:
            lengths = ", ".join(map(str, _PASSAGES))
            raise InputError(f"{where(section)}: length {section.length}: HELMET's lengths are {lengths}")

    def candidates(self, section: DocumentsSection, task: str, seed: int) -> Iterator[Candidate]:
        """Yield the task's rows in random order: first one row of each question, then a second of each, etc."""
        candidates = []
        for number, row in read_rows(_rows_file(section, task)):
            cluster = question_cluster(row.text("question"))
            if task != "popqa" or _unpopular(row):
                candidates.append(Candidate(f"{task}-{section.length}-{number:05d}", cluster, task, number))
        yield from sampling_order(candidates, "kvdrift/helmet", seed)

    def documents(
        self, section: DocumentsSection, chosen: Sequence[Candidate], tokenizer: Tokenizer, seed: int
    ) -> list[Document]:
        """Write the chosen rows as prompts with their worked examples, and tokenize them."""
        authors: dict[str, _RagAuthor | _CitationAuthor] = {
            name: _CitationAuthor(section, name) if _TASKS[name].cites else _RagAuthor(section, name)
            for name in {item.task for item in chosen}
        }

        def make(item: Candidate, row: SourceRow) -> Document:
            draws = DocumentDraws("kvdrift/helmet", item.cluster, seed)
            return _document(section, item, authors[item.task], row, draws, tokenizer)

        return documents_of_rows(chosen, partial(_rows_file, section), make)


def _unpopular(row: SourceRow) -> bool:
    return not row.has("s_pop") or row.number("s_pop") < _POPULAR


def _path(section: DocumentsSection, name: str, purpose: str) -> Path:
    """Return the path of a benchmark file: at ``name`` in the copy, or directly in the copy's top folder."""
    folder = Path(section.path or "").expanduser()
    return find_file([folder / name, folder / Path(name).name], purpose)


def _rows_file(section: DocumentsSection, task: str) -> Path:
    name = _TASKS[task].rows.format(_PASSAGES[section.length][0])
    return _path(section, name, f"HELMET's {task} at length {section.length}")


def _shots(section: DocumentsSection) -> int:
    return _SHOTS if section.shots is None else section.shots


class _RagAuthor:
    """Writes RAG prompts; their worked examples, from the task's file of examples, never have the prompt's question."""

    chat = False

    def __init__(self, section: DocumentsSection, task: str) -> None:
        self._shots = _shots(section)
        self._scored_opening = "" if section.chat_template else _OPENING.strip()
        self._examples: list[SourceRow] = []
        if self._shots:
            self._file = _path(section, _TASKS[task].examples, f"worked examples of {task} (shots = 0 needs none)")
            self._examples = [row for _, row in read_rows(self._file) if task != "popqa" or _unpopular(row)]

    def passages(self, row: SourceRow) -> int:
        return len(row.rows("ctxs"))

    def writer(self, row: SourceRow, draws: DocumentDraws) -> Writer:
        question = row.text("question")
        passages = [_passage(_RAG_PASSAGE, entry) for entry in row.rows("ctxs")]
        others = {example.text("question"): example for example in self._examples}  # one row of each question
        others.pop(question, None)
        if len(others) < self._shots:
            raise InputError(
                f"{self._file}: shots = {self._shots}, but only {len(others)} worked example(s) have another question "
                f"than {row.file.name}, {row.place}; write fewer shots"
            )
        shown = "".join(
            "\n\n".join(_passage(_RAG_PASSAGE, entry) for entry in example.rows("ctxs"))
            + f"\n\nQuestion: {example.text('question')}\nAnswer: {example.texts('answers')[0]}\n\n"
            for example in draws.chosen(list(others.values()), self._shots)
        )

        def write(count: int) -> PromptText:
            context = "\n\n".join(passages[:count])
            text = _RAG_PROMPT.format(shown=shown, context=context, question=question)
            return PromptText(text, plain_opening=_OPENING, system=_SYSTEM)

        return write

    def answers(self, row: SourceRow) -> tuple[str, ...]:
        """Return the answers; refuse an answer that HELMET finds in every continuation (``eval.py``, ``run_test``).

        HELMET puts a plain prompt's opening before a continuation, and so always finds an answer that the opening has.
        """
        answers = row.texts("answers")
        for answer in answers:
            if score_text(self._scored_opening, [answer], NORMALIZED):
                excluded = json.dumps({"clusters": [question_cluster(row.text("question"))]}, ensure_ascii=False)
                raise row.error(
                    f"field 'answers': '{answer}', once normalized, is empty or a part of 'Answer:', so that HELMET "
                    f"takes every continuation as right; name a file with {excluded} as 'exclude'"
                )
        return answers


class _CitationAuthor:
    """Writes ALCE prompts from the task's prompt file: its instruction, worked examples, and form of a passage."""

    chat = True

    def __init__(self, section: DocumentsSection, task: str) -> None:
        self._passages = _PASSAGES[section.length][1]
        forms = read_object(_path(section, _TASKS[task].examples, f"instruction and worked examples of {task}"))
        self._instruction, self._passage = forms.text("instruction"), forms.text("doc_prompt")
        try:
            self._shown = [
                forms.text("demo_prompt").format(
                    instruction=self._instruction,
                    question=example.text("question"),
                    context=self._context(example.rows("docs")),
                    answer=example.text("answer"),
                )
                for example in forms.rows("demos")
            ]
        except (KeyError, IndexError, ValueError) as error:
            message = f"fields 'demo_prompt' and 'doc_prompt': expected HELMET's placeholders, not {error}"
            raise forms.error(message) from None
        self._shots = _shots(section)
        if self._shots > len(self._shown):
            raise forms.error(
                f"field 'demos': expected {self._shots} for shots = {self._shots}, not {len(self._shown)}"
            )

    def passages(self, row: SourceRow) -> int:
        return min(self._passages, len(row.rows("docs")))

    def writer(self, row: SourceRow, draws: DocumentDraws) -> Writer:
        question, passages = row.text("question"), row.rows("docs")
        shown = "".join(example + "\n\n\n" for example in draws.chosen(self._shown, self._shots))

        def write(count: int) -> PromptText:
            text = f"{shown}{self._instruction}\n\nQuestion: {question}\n\n{self._context(passages[:count])}"
            return PromptText(text, plain_opening="\n\nAnswer:", system=_SYSTEM)

        return write

    def answers(self, row: SourceRow) -> tuple[str, ...]:
        """Return the first short answer of each question pair (ASQA), or the first name of each answer (QAMPARI)."""
        if row.has("qa_pairs"):
            return tuple(answer for pair in row.rows("qa_pairs") for answer in pair.texts("short_answers")[:1])
        names = row.fields.get("answers") or []
        return tuple(str(name[0] if isinstance(name, list) and name else name) for name in names)

    def _context(self, passages: Sequence[SourceRow]) -> str:
        return "\n\n".join(_passage(self._passage, entry, number) for number, entry in enumerate(passages, start=1))


def _passage(form: str, entry: SourceRow, number: int = 0) -> str:
    return form.format(ID=number, title=entry.text("title"), text=entry.text("text"))


def _document(
    section: DocumentsSection, item: Candidate, author: _RagAuthor | _CitationAuthor, row: SourceRow,
    draws: DocumentDraws, tokenizer: Tokenizer,
) -> Document:  # fmt: skip
    chat = author.chat if section.chat_template is None else section.chat_template
    room = section.length - _TASKS[item.task].generated_tokens
    write, most = author.writer(row, draws), author.passages(row)
    fitted = longest_prompt(write, tokenizer, chat=chat, tokens=room, least=1, most=most) if most else None
    if fitted is None:
        raise row.error(
            f"the question, the worked examples and one passage do not fit into {room} tokens; write a larger length "
            "or fewer shots"
        )
    prompt, tokens = fitted
    return prompt.described(document_of(section, item, tokens, author.answers(row)), tokenizer, chat=chat)
