"""What a document source is: candidates known by name before anything is tokenized, and documents made of some."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from generator.documents.prompts import Tokenizer
from schema.document import Document
from schema.errors import InputError
from schema.study import DocumentsSection


@dataclass(frozen=True)
class Candidate:
    """A document that a source can make: its name, its cluster, its task, and where the source finds it.

    ``place`` is the number of a generated document or of a file's row, from 0.
    """

    doc: str
    cluster: str
    task: str
    place: int


class DocumentSource(Protocol):
    """One source of prompts, such as a generator or a folder of files.

    ``tasks`` are what a section may name under ``tasks``; a source without tasks takes none. ``takes`` and ``needs``
    are the section's optional keys that the source understands and those that it cannot do without. ``reads_text`` is
    True where prompts are text, so that documents need the model's tokenizer.
    """

    tasks: tuple[str, ...]
    takes: tuple[str, ...]
    needs: tuple[str, ...]
    reads_text: bool
    summary: str

    def makes(self, task: str) -> bool:
        """Whether the task's documents are made here, and need no files."""

    def check(self, section: DocumentsSection) -> None:
        """InputError for what is wrong with a section beside its keys and tasks, told without data and model."""

    def candidates(self, section: DocumentsSection, task: str, seed: int) -> Iterator[Candidate]:
        """The task's candidates in the source's own order, endless where documents are generated.

        InputError for a missing file or field.
        """

    def documents(
        self, section: DocumentsSection, chosen: Sequence[Candidate], tokenizer: Tokenizer | None, seed: int
    ) -> list[Document]:
        """The chosen candidates as documents, in the same order. ``tokenizer`` is None unless ``reads_text``."""


def sampling_order(candidates: Iterable[Candidate], *key: str | int) -> list[Candidate]:
    """A random order that ``key`` fixes: one candidate of each cluster first, then a second one, and so on.

    So a stratum takes two rows of one question only when it has used every question.
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
    """The cluster of a question: its words, so that it is the same in every task and benchmark that asks it."""
    return " ".join(question.lower().split()).rstrip(" ?.")


def where(section: DocumentsSection) -> str:
    """How an error line names a section."""
    return f"documents '{section.stratum_name}'"


def need_tokenizer(section: DocumentsSection, tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, which sources of text cannot do without."""
    if tokenizer is None:
        raise InputError(f"{where(section)}: source '{section.source}' makes text, which needs the model's tokenizer")
    return tokenizer
