"""Documents of the embedded model, which need neither a tokenizer nor files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from kvdrift.generator.documents.prompts import Tokenizer
from kvdrift.generator.documents.source import Candidate, DocumentSource, where
from kvdrift.generator.embedded import documents
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import DocumentsSection


class EmbeddedSource(DocumentSource):
    """Records hidden in filler, and a question about some of them."""

    tasks = generated = documents.TASKS
    reads_text = False
    summary = f"lengths {', '.join(map(str, documents.LENGTHS))}"

    def check(self, section: DocumentsSection) -> None:
        """Check that the model was trained on the length."""
        if section.length not in documents.LENGTHS:
            lengths = ", ".join(map(str, documents.LENGTHS))
            raise InputError(
                f"{where(section)}: length {section.length}: the embedded source has the lengths {lengths}"
            )

    def candidates(self, section: DocumentsSection, task: str, seed: int) -> Iterator[Candidate]:  # noqa: ARG002 - names alone
        """Yield documents 0, 1, 2, …; each is its own cluster."""
        names = (documents.document_name(task, section.length, index) for index in count())
        yield from (Candidate(name, name, task, index) for index, name in enumerate(names))

    def documents(
        self, section: DocumentsSection, chosen: Sequence[Candidate], _tokenizer: Tokenizer | None, seed: int
    ) -> list[Document]:
        """Make the documents of the chosen numbers; their tokens need no tokenizer."""
        made = (documents.make_document(item.task, section.length, item.number, seed) for item in chosen)
        return [replace(document, stratum=section.stratum_name) for document in made]
