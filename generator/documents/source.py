"""The interface of a document source: it lists candidates before anything is tokenized, and makes the chosen documents.

A stratum first takes the documents that the stored study already has, and then others in the source's order.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvdrift.generator.documents.answers import task_scoring
from kvdrift.generator.documents.files import SourceRow, read_rows
from kvdrift.generator.documents.prompts import Tokenizer
from kvdrift.log.forgotten import NOTHING_FORGOTTEN, ForgottenDocuments
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.keyed_random import keyed_generator
from kvdrift.schema.study import DocumentsSection


@dataclass(frozen=True)
class Candidate:
    """A document that a source can make."""

    doc: str
    cluster: str  # the name of the group of dependent documents
    task: str
    number: int  # the number of the generated document or of the file's row, from 0


class DocumentSource(ABC):
    """A source of prompts, such as a generator or a folder of files.

    Attributes:
        tasks: The tasks that a section may name; empty for a source without tasks.
        generated: The tasks whose documents are made without files.
        takes: The section's optional keys that the source understands.
        needs: The optional keys that the source requires.
        reads_text: Whether prompts are text, so that documents need the model's tokenizer.
        summary: The data that the source needs, in one line.
    """

    tasks: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    reads_text = True
    summary: str

    def check(self, section: DocumentsSection) -> None:  # noqa: B027 - most have nothing more to check
        """Check a section, apart from its keys and tasks, without data and model."""

    @abstractmethod
    def candidates(self, section: DocumentsSection, task: str, seed: int) -> Iterator[Candidate]:
        """Yield the task's candidates in the source's own order, without an end if documents are generated."""

    @abstractmethod
    def documents(
        self, section: DocumentsSection, chosen: Sequence[Candidate], tokenizer: Tokenizer, seed: int
    ) -> list[Document]:
        """Make documents of the chosen candidates, in their order; without ``reads_text`` the tokenizer is not used."""


def sampling_order(candidates: Iterable[Candidate], *key: str | int) -> list[Candidate]:
    """Return candidates in random order: first a candidate of each cluster, then a second of each, and so on.

    A stratum thus takes two rows of one question only after it has taken every question. The order is a function of
    ``key`` and of the candidates' names.
    """

    def draw(candidate: Candidate) -> bytes:
        return hashlib.sha256("\0".join([*map(str, key), candidate.doc]).encode()).digest()

    taken: Counter[str] = Counter()
    rounds: list[tuple[int, bytes, Candidate]] = []
    for candidate in sorted(candidates, key=draw):
        rounds.append((taken[candidate.cluster], draw(candidate), candidate))
        taken[candidate.cluster] += 1
    return [candidate for _, _, candidate in sorted(rounds, key=lambda entry: entry[:2])]


def question_cluster(question: str) -> str:
    """Return the cluster of a question: its words, so that all tasks with the question share the cluster."""
    return " ".join(question.lower().split()).rstrip(" ?.")


def where(section: DocumentsSection) -> str:
    """Return the words by which an error message names a section."""
    return f"documents '{section.stratum_name}'"


def document_of(
    section: DocumentsSection,
    candidate: Candidate,
    tokens: tuple[int, ...],
    answers: tuple[str, ...],
    scoring: str | None = None,
) -> Document:
    """Return the document of a section's candidate; without ``scoring`` its answers are scored by the task's rule."""
    if scoring is None and answers:
        scoring = task_scoring(section.source, candidate.task)
    return Document(
        doc=candidate.doc, stratum=section.stratum_name, cluster=candidate.cluster, task=candidate.task,
        source=section.source, tokens=tokens, answers=answers, scoring=scoring or "",
    )  # fmt: skip


def documents_of_rows(
    chosen: Sequence[Candidate], file_of: Callable[[str], Path], make: Callable[[Candidate, SourceRow], Document]
) -> list[Document]:
    """Make the documents of chosen rows, in their order; ``file_of`` gives the file of a task's rows."""
    made: dict[Candidate, Document] = {}
    for task in dict.fromkeys(item.task for item in chosen):
        wanted = {item.number: item for item in chosen if item.task == task}
        file = file_of(task)
        for number, row in read_rows(file, wanted):
            made[wanted[number]] = make(wanted[number], row)
        if not made.keys() >= set(wanted.values()):
            raise InputError(f"{file}: the file changed while it was read; run the same command again")
    return [made[item] for item in chosen]


@dataclass(frozen=True)
class HeldDocument:
    """A document that a study already has, with its split, which does not change.

    ``place`` is its place among the frozen documents of its split and stratum, from 0. It is None for a document that
    no plan has frozen; such documents come after the frozen ones, in the source's order.
    """

    doc: str
    split: str
    stratum: str
    task: str | None
    cluster: str
    place: int | None = None


@dataclass(frozen=True)
class HeldDocuments:
    """All documents that a study already has, and those that were removed from it; both empty for a new study."""

    documents: tuple[HeldDocument, ...] = ()
    forgotten: ForgottenDocuments = NOTHING_FORGOTTEN

    def of(self, stratum: str) -> dict[str, HeldDocument]:
        """Return a stratum's documents by their ids."""
        return {document.doc: document for document in self.documents if document.stratum == stratum}

    def elsewhere(self, stratum: str) -> frozenset[str]:
        """Return the ids of the documents of all other strata."""
        return frozenset(document.doc for document in self.documents if document.stratum != stratum)

    def splits(self) -> dict[str, str]:
        """Return the splits of the documents' clusters, as they are stored."""
        return {document.cluster: document.split for document in self.documents}


NOTHING_HELD = HeldDocuments()


_T = TypeVar("_T")


class DocumentDraws:
    """A stream of random draws, which is a function of the constructor's ``parts`` alone."""

    def __init__(self, *parts: str | int) -> None:
        self._random = keyed_generator("\0".join(map(str, parts)))

    def below(self, bound: int) -> int:
        """Draw an integer from 0 to ``bound`` - 1."""
        return int(self._random.random() * bound)

    def chosen(self, population: Sequence[_T], count: int) -> list[_T]:
        """Draw ``count`` different members of ``population``, in random order."""
        if count > len(population):
            raise ValueError(f"cannot draw {count} of {len(population)}")
        order = np.argsort(self._random.random(len(population)), kind="stable")[:count]
        return [population[position] for position in order.tolist()]

    def shuffled(self, items: Sequence[_T]) -> list[_T]:
        """Return all items in random order."""
        return self.chosen(items, len(items))

    def letters(self, alphabet: str, length: int) -> str:
        """Draw a word of random letters."""
        return "".join(alphabet[position] for position in (self._random.random(length) * len(alphabet)).astype(int))

    def different_letters(self, alphabet: str, length: int, count: int) -> list[str]:
        """Draw ``count`` different words of random letters."""
        words: dict[str, None] = {}
        while len(words) < count:
            words[self.letters(alphabet, length)] = None
        return list(words)
