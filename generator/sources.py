"""Document sources: where a stratum's prompts come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from generator.embedded import documents as embedded
from schema.document import SPLITS, Document, split_of
from schema.errors import InputError, nearest
from schema.study import DocumentsSection

SOURCES: dict[str, tuple[str, ...]] = {"embedded": embedded.TASKS}


def stratum_documents(section: DocumentsSection, seed: int) -> dict[str, list[Document]]:
    """The stratum's documents by split: ``development`` and ``evaluation`` of them, in the source's own order.

    Which split a document belongs to is a function of its cluster's name alone, so asking for more documents adds new
    ones and moves none. InputError for an unknown source, task or length.
    """
    check_source(section)
    wanted = {"development": section.development, "evaluation": section.evaluation}
    chosen: dict[str, list[Document]] = {split: [] for split in SPLITS}
    for document in _candidates(section, seed):
        split = split_of(document.cluster)
        if len(chosen[split]) < wanted[split]:
            chosen[split].append(replace(document, stratum=section.stratum_name))
        if all(len(chosen[split]) == wanted[split] for split in SPLITS):
            return chosen
    raise AssertionError  # candidates never end


def check_source(section: DocumentsSection) -> None:
    """InputError unless the source can make the section's tasks at its length."""
    where = f"documents '{section.stratum_name}'"
    if section.source not in SOURCES:
        raise InputError(f"{where}: unknown source '{section.source}'; {nearest(section.source, SOURCES)}")
    for task in section.tasks:
        if task not in SOURCES[section.source]:
            raise InputError(f"{where}: unknown task '{task}'; {nearest(task, SOURCES[section.source])}")
    if section.length not in embedded.LENGTHS:
        lengths = ", ".join(map(str, embedded.LENGTHS))
        raise InputError(f"{where}: length {section.length}: the embedded source makes {lengths} tokens")


def _candidates(section: DocumentsSection, seed: int) -> Iterator[Document]:
    for index in count():
        task = section.tasks[index % len(section.tasks)]
        yield embedded.make_document(task, section.length, index, seed)
