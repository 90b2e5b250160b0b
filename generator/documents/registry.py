"""The document sources, and which of a source's documents a stratum takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from generator.documents.embedded import EmbeddedSource
from generator.documents.files import read_object
from generator.documents.helmet import HelmetSource
from generator.documents.jsonl import JsonlSource
from generator.documents.prompts import Tokenizer
from generator.documents.ruler import RulerSource
from generator.documents.source import Candidate, DocumentSource, where
from schema.document import SPLITS, Document, part_of, split_of
from schema.errors import InputError, nearest
from schema.study import DocumentsSection

SOURCES: dict[str, DocumentSource] = {
    "embedded": EmbeddedSource(),
    "ruler": RulerSource(),
    "helmet": HelmetSource(),
    "jsonl": JsonlSource(),
}
_OPTIONAL_KEYS = ("path", "shots", "chat_template")


def stratum_documents(
    section: DocumentsSection, seed: int, tokenizer: Callable[[], Tokenizer] | None = None
) -> dict[str, list[Document]]:
    """Make a stratum's documents by split, in the source's own order.

    ``tokenizer`` loads the model's tokenizer; it is called only for sources of text.

    Raises:
        InputError: An unknown source, task or length, a missing or faulty file, or too few documents.
    """
    chosen = choose_candidates(section, seed)
    source = SOURCES[section.source]
    loaded = tokenizer() if source.reads_text and tokenizer is not None else None
    made = iter(source.documents(section, [item for split in SPLITS for item in chosen[split]], loaded, seed))
    return {split: [next(made) for _ in chosen[split]] for split in SPLITS}


def choose_candidates(section: DocumentsSection, seed: int) -> dict[str, list[Candidate]]:
    """Choose the documents that a stratum takes, by split, before any is made; the stratum's tasks take turns.

    The split and the part of the source that a document belongs to are functions of its cluster's name alone, so that
    asking for more documents adds new ones and moves none.

    Raises:
        InputError: An unknown source, task or length, a missing or faulty file, or too few documents.
    """
    check_source(section)
    source = SOURCES[section.source]
    excluded = excluded_clusters(section)
    queues = [_TaskCandidates(section, source, task, seed, excluded) for task in section.tasks or [""]]
    chosen: dict[str, list[Candidate]] = {}
    for split, wanted in (("development", section.development), ("evaluation", section.evaluation)):
        taken: list[Candidate] = []
        turns = deque(queues)
        while turns and len(taken) < wanted:
            task = turns.popleft()
            if (candidate := task.take(split)) is not None:
                taken.append(candidate)
                turns.append(task)
        if len(taken) < wanted:
            clusters = len({candidate.cluster for candidate in taken})
            part = "" if section.part == "1/1" else f" in part {section.part}"
            part += f" without the {len(excluded)} cluster(s) that 'exclude' names" if excluded else ""
            raise InputError(
                f"{where(section)}: {split} = {wanted}, but the source has {len(taken)} document(s) in {clusters} "
                f"cluster(s) on the {split} side of the split{part}{source.missed(section)}"
            )
        chosen[split] = taken
    return chosen


def left_out(sections: Sequence[DocumentsSection]) -> list[str]:
    """Return a line on each file of which a study's sections leave rows out that none of them can take.

    Raises:
        InputError: A file or a field is missing or faulty.
    """
    return [
        line
        for name, source in SOURCES.items()
        for line in source.left_out([section for section in sections if section.source == name])
    ]


def excluded_clusters(section: DocumentsSection) -> frozenset[str]:
    """Read which clusters a stratum leaves out.

    Raises:
        InputError: The file is missing or faulty.
    """
    if section.exclude is None:
        return frozenset()
    return frozenset(read_object(Path(section.exclude)).texts("clusters"))


def check_source(section: DocumentsSection) -> None:
    """Check a section's source, keys and tasks, as far as that is possible without data.

    Raises:
        InputError: The source is unknown, or takes other keys or tasks.
    """
    if section.source not in SOURCES:
        raise InputError(f"{where(section)}: unknown source '{section.source}'; {nearest(section.source, SOURCES)}")
    source = SOURCES[section.source]
    for key in _OPTIONAL_KEYS:
        given = getattr(section, key) is not None
        if given and key not in source.takes:
            raise InputError(f"{where(section)}: source '{section.source}' takes no '{key}'")
        if not given and key in source.needs:
            raise InputError(f"{where(section)}: source '{section.source}' needs '{key}'; {source.summary}")
    if source.tasks and not section.tasks:
        raise InputError(f"{where(section)}: tasks is missing; source '{section.source}': {', '.join(source.tasks)}")
    for task in section.tasks:
        if not source.tasks:
            raise InputError(f"{where(section)}: source '{section.source}' takes no tasks; remove '{task}'")
        if task not in source.tasks:
            raise InputError(f"{where(section)}: unknown task '{task}'; {nearest(task, source.tasks)}")
        if section.tasks.count(task) > 1:
            raise InputError(f"{where(section)}: task '{task}' is listed twice")
    source.check(section)


class _TaskCandidates:
    """One task's candidates in their order, sorted into splits as they are read."""

    def __init__(
        self, section: DocumentsSection, source: DocumentSource, task: str, seed: int, excluded: frozenset[str]
    ) -> None:
        self._candidates = source.candidates(section, task, seed)
        self._excluded = excluded
        self._which, self._parts = section.part_of_clusters
        self._waiting: dict[str, deque[Candidate]] = {split: deque() for split in SPLITS}

    def take(self, split: str) -> Candidate | None:
        """Take the split's next candidate; None where no candidate is left."""
        while not self._waiting[split]:
            candidate = next(self._candidates, None)
            if candidate is None:
                return None
            if candidate.cluster not in self._excluded and part_of(candidate.cluster, self._parts) == self._which:
                self._waiting[split_of(candidate.cluster)].append(candidate)
        return self._waiting[split].popleft()
