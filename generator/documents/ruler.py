"""RULER: six tasks generated for any tokenizer and length, or all thirteen from the benchmark's files.

Task definitions, parameters and wording are those of RULER (Hsieh et al. 2024, arXiv:2404.06654; NVIDIA/RULER:
``scripts/synthetic.yaml``, ``scripts/data/synthetic/constants.py``). A generated prompt has any number of parts
(sentences, needles or words); the random draws differ from the official files.
"""

from __future__ import annotations

import json
import math
import re
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from itertools import count, pairwise
from pathlib import Path

from kvdrift.generator.documents.files import SourceRow, find_file, read_rows
from kvdrift.generator.documents.prompts import PromptText, Tokenizer, longest_prompt
from kvdrift.generator.documents.source import (
    Candidate,
    DocumentDraws,
    DocumentSource,
    document_of,
    documents_of_rows,
    question_cluster,
    where,
)
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import DocumentsSection

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_NEEDLE_PROMPT = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
_NEEDLE_OPENING = " The special magic {kind} for {query} mentioned in the provided text is"
_CHAIN_PROMPT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
_CHAIN_OPENING = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {value}, they are: "
)
_COMMON_PROMPT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
_COMMON_OPENING = " Answer: The top 10 words that appear most often in the list are:"
_FREQUENT_PROMPT = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
_FREQUENT_OPENING = " Answer: According to the coded text above, the three most frequently appeared words are:"

_HOPS = 4
_EXAMPLE_TOKENS = 500  # of the worked example before a variable-tracking prompt
_COMMON_WORDS = 10
_FULL_LENGTH = 4096  # shorter common-words prompts repeat their words less often
_ALPHA = 2.0  # of the zeta distribution of coded words

Composed = tuple[PromptText, tuple[str, ...]]


@dataclass(frozen=True)
class RulerTask:
    """How the prompts of one task are generated.

    Attributes:
        generated_tokens: The number of tokens that RULER lets a model generate.
        compose: ``compose(draws, length, parts, tokenizer)`` returns the prompt and its answers.
        least: The fewest parts of a prompt.
        finite: Whether parts are words of the word list, which limits a prompt to about 100,000 tokens.
    """

    generated_tokens: int
    compose: Callable[[DocumentDraws, int, int, Tokenizer], Composed]
    least: int = 5
    finite: bool = False

    @property
    def most(self) -> int | None:
        """The most parts of a prompt; None for no bound."""
        return len(_all_words()) if self.finite else None


def _words_of(kind: str) -> list[str]:
    text = files("wonderwords.assets").joinpath(f"{kind}list.txt").read_text(encoding="utf-8")
    return [word.strip() for word in text.splitlines() if word.strip()]


@cache
def _key_words() -> tuple[list[str], list[str]]:
    """Return the adjectives and nouns of keys; a key is one of each."""
    return sorted(set(_words_of("adjective"))), sorted(set(_words_of("noun")))


@cache
def _all_words() -> list[str]:
    return sorted({word for kind in ("noun", "adjective", "verb") for word in _words_of(kind)})


def _key(draws: DocumentDraws, kind: str) -> str:
    if kind == "uuid":
        return _uuid(draws)
    adjectives, nouns = _key_words()
    return f"{adjectives[draws.below(len(adjectives))]}-{nouns[draws.below(len(nouns))]}"


def _uuid(draws: DocumentDraws) -> str:
    number = 0
    for _ in range(4):
        number = number << 32 | draws.below(1 << 32)
    return str(uuid.UUID(int=number, version=4))


def _value(draws: DocumentDraws, kind: str) -> str:
    return _uuid(draws) if kind == "uuid" else str(10**6 + draws.below(9 * 10**6))


def _needle_task(key: str, value: str, haystack: str) -> Callable[[DocumentDraws, int, int, Tokenizer], Composed]:
    """Return the function ``compose`` of a task that asks for one needle.

    ``key`` and ``value`` are the kinds of a needle's key and value, such as "word" and "number". The needle lies among
    sentences of noise if ``haystack`` is "noise", else among other needles.
    """

    def needle(draws: DocumentDraws) -> tuple[str, str, str]:
        name, content = _key(draws, key), _value(draws, value)
        return name, content, _NEEDLE.format(kind=value, key=name, value=content)

    def compose(draws: DocumentDraws, _length: int, parts: int, _tokenizer: Tokenizer) -> Composed:
        query, answer, question = needle(draws)
        place = draws.below(parts)
        lines = [_NOISE] * parts if haystack == "noise" else [needle(draws)[2] for _ in range(parts)]
        lines.insert(place, question)
        text = _NEEDLE_PROMPT.format(kind=value, context="\n".join(lines), query=query)
        opening = _NEEDLE_OPENING.format(kind=value, query=query)
        return PromptText(text, opening, opening), (answer,)

    return compose


def _chain(draws: DocumentDraws, letters: int, parts: int) -> Composed:
    """Write a chain of assignments, to variables named by ``letters`` letters, among ``parts`` sentences of noise."""
    names = draws.different_letters(string.ascii_uppercase, letters, _HOPS + 1)
    value = str(10_000 + draws.below(89_999))
    links = [f"VAR {names[0]} = {value}"]
    links += [
        f"VAR {name} = VAR {previous} " for previous, name in pairwise(names)
    ]  # with the benchmark's trailing space
    lines = [_NOISE] * parts
    for moved, (place, link) in enumerate(zip(sorted(draws.chosen(range(parts), len(links))), links, strict=True)):
        lines.insert(place + moved, link)
    opening = _CHAIN_OPENING.format(count=len(names), value=value)
    prompt = _CHAIN_PROMPT.format(context="\n".join(lines), value=value)
    return PromptText(prompt, opening, opening), tuple(names)


def _variable_tracking(draws: DocumentDraws, _length: int, parts: int, tokenizer: Tokenizer) -> Composed:
    """Write a worked example with shorter variable names, then the chain of assignments and the question about it."""
    key = draws.letters(string.ascii_lowercase, 8)

    def example(noise: int) -> PromptText:
        prompt, names = _chain(DocumentDraws("example", key), 3, noise)
        return PromptText(prompt.text + prompt.plain_opening + " " + " ".join(names))

    fitted = longest_prompt(example, tokenizer, chat=False, tokens=_EXAMPLE_TOKENS, least=5)
    shown = example(5) if fitted is None else fitted[0]
    prompt, names = _chain(draws, 5, parts)
    text = f"{shown.text}\n\n{prompt.text}"
    return PromptText(text, prompt.plain_opening, prompt.chat_opening), names


def _word_list(draws: DocumentDraws, count: int, common_times: int, other_times: int) -> tuple[str, list[str]]:
    """Return a numbered list of ``count`` different words, and those ten of them that are common.

    The list has each common word ``common_times`` times, and each other word ``other_times`` times.
    """
    words = draws.chosen(_all_words(), count)
    common = words[:_COMMON_WORDS]
    listed = draws.shuffled(common * common_times + words[_COMMON_WORDS:] * other_times)
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, start=1)), common


def _common_words(draws: DocumentDraws, length: int, parts: int, _tokenizer: Tokenizer) -> Composed:
    """Write a worked example, then a list of words and the question about its common words."""
    full = length >= _FULL_LENGTH
    shown, shown_answers = _word_list(draws, *((40, 10, 3) if full else (20, 3, 1)))
    listed, answers = _word_list(draws, parts, *((30, 3) if full else (6, 1)))
    example = _COMMON_PROMPT.format(context=shown) + _COMMON_OPENING
    example += " " + " ".join(f"{number}. {word}" for number, word in enumerate(shown_answers, start=1))
    text = f"{example}\n{_COMMON_PROMPT.format(context=listed)}"
    return PromptText(text, _COMMON_OPENING, _COMMON_OPENING), tuple(answers)


def _frequent_words(draws: DocumentDraws, length: int, parts: int, _tokenizer: Tokenizer) -> Composed:
    """Write a text of at most ``parts`` coded words; how often each occurs follows a zeta distribution.

    The most frequent word is written as dots, and is not an answer.
    """
    vocabulary = ["...", *draws.different_letters(string.ascii_lowercase, 6, max((length - 50) // 50, 4) - 1)]
    total = math.pi**2 / 6  # zeta(2)
    text: list[str] = []
    for rank, word in enumerate(vocabulary, start=1):
        text += [word] * int(parts * rank**-_ALPHA / total)
    prompt = _FREQUENT_PROMPT.format(context=" ".join(draws.shuffled(text)))
    return PromptText(prompt, _FREQUENT_OPENING, _FREQUENT_OPENING), tuple(vocabulary[1:4])


GENERATED: dict[str, RulerTask] = {
    "niah_single_1": RulerTask(128, _needle_task("word", "number", "noise")),
    "niah_multikey_2": RulerTask(128, _needle_task("word", "number", "needle")),
    "niah_multikey_3": RulerTask(128, _needle_task("uuid", "uuid", "needle")),
    "vt": RulerTask(30, _variable_tracking),
    "cwe": RulerTask(120, _common_words, least=_COMMON_WORDS + 1, finite=True),
    "fwe": RulerTask(50, _frequent_words, least=60),
}


_FROM_FILES = (
    "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "qa_1", "qa_2",
)  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f]")  # all but the line feed
_QUESTIONS = ("qa_1", "qa_2")


class RulerSource(DocumentSource):
    """RULER (Hsieh et al. 2024). ``length`` bounds prompt plus generated tokens, as in the benchmark.

    Without ``path``, prompts are generated that fill the length, and each is its own cluster. With ``path``, the rows
    of all tasks are read from a folder of the benchmark's files, in order. The cluster of a question task's row is
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
        """Yield documents 0, 1, 2, … without an end, or the rows of the task's file."""
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
        self, section: DocumentsSection, chosen: Sequence[Candidate], tokenizer: Tokenizer, seed: int
    ) -> list[Document]:
        """Generate or read the chosen prompts, and tokenize them."""
        chat = bool(section.chat_template)
        if section.path is None:
            return [_generated(section, item, tokenizer, seed) for item in chosen]

        def make(item: Candidate, row: SourceRow) -> Document:
            prompt = _prompt(row)
            document = document_of(section, item, prompt.tokens(tokenizer, chat=chat), _answers(row))
            return prompt.described(document, tokenizer, chat=chat)

        return documents_of_rows(chosen, partial(_file, section), make)


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
        raise row.error(
            f"field 'length': {row.number('length'):.0f} tokens, above the stratum's length = {section.length}; name "
            "the files of that length as path"
        )


def _prompt(row: SourceRow) -> PromptText:
    """Return a row's prompt with the opening of its answer.

    RULER's ``answer_prefix`` begins with a space (``scripts/data/synthetic/constants.py``). The harness strips the
    space from ``gen_prefix``, and puts one before the opening of a plain prompt (``lm_eval/api/task.py``,
    ``build_qa_turn``).
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
    """Return a row's answers; refuse answers that RULER's scoring treats in another way than kvdrift's.

    RULER strips a continuation and turns its control characters into line feeds (``scripts/eval/evaluate.py``,
    ``postprocess_pred``), but leaves answers unchanged.
    """
    answers = row.texts("outputs")
    for answer in answers:
        if not answer or answer != answer.strip() or _CONTROL.search(answer):
            raise row.error(
                f"field 'outputs': {json.dumps(answer)} is empty, begins or ends with white space, or has a control "
                "character, which RULER removes from a continuation before it searches for the answer; write the "
                "answer without it"
            )
    return answers


def _question(row: SourceRow) -> str:
    """Return the cluster of the row's question; the answer's opening, which follows it in older files, is left out."""
    _, separator, question = row.text("input").rpartition("Question:")
    if not separator:
        raise row.error("field 'input': expected a text that ends with 'Question: …'")
    question, _, _ = question.partition("Answer:")
    return question_cluster(question)
