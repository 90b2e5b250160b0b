"""Documents of the embedded model, which need neither a tokenizer nor files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from generator.documents.prompts import Tokenizer
from generator.documents.source import Candidate, where
from generator.embedded import documents
from schema.document import Document
from schema.errors import InputError
from schema.study import DocumentsSection


class EmbeddedSource:
    """Records hidden in filler, and a question about some of them."""

    tasks: tuple[str, ...] = documents.TASKS
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    reads_text = False
    summary = f"lengths {', '.join(map(str, documents.LENGTHS))}"

    def makes(self, task: str) -> bool:  # noqa: ARG002 - all of them
        """All tasks are generated."""
        return True

    def check(self, section: DocumentsSection) -> None:
        """Check that the model was trained on the length."""
        if section.length not in documents.LENGTHS:
            lengths = ", ".join(map(str, documents.LENGTHS))
            message = f"{where(section)}: length {section.length}: the embedded source has the lengths {lengths}"
            raise InputError(message)

    def candidates(self, section: DocumentsSection, task: str, seed: int) -> Iterator[Candidate]:  # noqa: ARG002 - names alone
        """Yield documents 0, 1, 2, …; each is its own cluster."""
        for index in count():
            name = documents.document_name(task, section.length, index)
            yield Candidate(name, name, task, index)

    def documents(
        self,
        section: DocumentsSection,
        chosen: Sequence[Candidate],
        tokenizer: Tokenizer | None,  # noqa: ARG002 - it brings its own ids
        seed: int,
    ) -> list[Document]:
        """Make the documents of the chosen numbers."""
        made = (documents.make_document(item.task, section.length, item.number, seed) for item in chosen)
        return [replace(document, stratum=section.stratum_name) for document in made]
