"""The document sources by name, and the choice of a stratum's documents from its source."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

from generator.documents.embedded import EmbeddedSource
from generator.documents.files import read_object
from generator.documents.helmet import HelmetSource
from generator.documents.jsonl import JsonlSource
from generator.documents.prompts import Tokenizer
from generator.documents.ruler import RulerSource
from generator.documents.source import NOTHING_HELD, Candidate, DocumentSource, HeldDocument, HeldDocuments, where
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
_MOST_GENERATED = 1_000_000  # candidates of a task, in search of one that is held


def stratum_documents(
    section: DocumentsSection,
    seed: int,
    tokenizer: Callable[[], Tokenizer] | None = None,
    held: HeldDocuments = NOTHING_HELD,
) -> dict[str, list[Document]]:
    """Make a stratum's documents by split: first the documents that the study has, then new ones in the source's order.

    ``tokenizer`` loads the model's tokenizer; it is called only for sources of text.
    """
    chosen = choose_candidates(section, seed, held)
    source = SOURCES[section.source]
    loaded = tokenizer() if source.reads_text and tokenizer is not None else None
    made = iter(source.documents(section, [item for split in SPLITS for item in chosen[split]], loaded, seed))
    return {split: [next(made) for _ in chosen[split]] for split in SPLITS}


def choose_candidates(
    section: DocumentsSection, seed: int, held: HeldDocuments = NOTHING_HELD
) -> dict[str, list[Candidate]]:
    """Choose a stratum's documents by split before any document is made; the stratum's tasks take turns.

    Documents that the study has come first, in their order and in their split. The split of any other document, and its
    part of the source, are functions of its cluster's name alone. So asking for more documents adds documents and moves
    none.
    """
    check_source(section)
    source = SOURCES[section.source]
    excluded = excluded_clusters(section)
    tasks = [_TaskCandidates(section, source, task, seed, excluded, held) for task in section.tasks or [""]]
    _find_held(section, held, tasks)
    chosen: dict[str, list[Candidate]] = {}
    for split, wanted in (("development", section.development), ("evaluation", section.evaluation)):
        taken = _held_first(split, held.of(section.stratum_name), tasks)[:wanted]
        counts = {task: len(task.held[split]) for task in tasks}
        while counts and len(taken) < wanted:
            task = min(counts, key=lambda one: counts[one])  # of equal ones, the first
            if (candidate := task.take(split)) is None:
                del counts[task]
            else:
                taken.append(candidate)
                counts[task] += 1
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


def _find_held(section: DocumentsSection, held: HeldDocuments, tasks: Sequence[_TaskCandidates]) -> None:
    """Read the tasks until all held documents are found; raise InputError if some are missing."""
    wanted = held.of(section.stratum_name)
    found = set[str]()
    for task in tasks:
        found |= task.find_held({doc for doc, one in wanted.items() if task.name in {"", one.task}})
    gone = [doc for doc in wanted if doc not in found]
    if gone:
        more = f" and {len(gone) - 1} more" if gone[1:] else ""
        place = "its source" if section.path is None else section.path
        raise InputError(
            f"{where(section)}: document '{gone[0]}'{more} of the stored study is gone from {place}, or left out there "
            "by 'exclude' or by another stratum; put it back, or give the changed study a new name"
        )


def _held_first(split: str, held: Mapping[str, HeldDocument], tasks: Sequence[_TaskCandidates]) -> list[Candidate]:
    """Return a split's held documents: frozen documents in their order, then others as the tasks take turns."""
    ranked = [
        (place if (place := held[candidate.doc].place) is not None else len(held), turn, number, candidate)
        for number, task in enumerate(tasks)
        for turn, candidate in enumerate(task.held[split])
    ]
    return [candidate for *_, candidate in sorted(ranked, key=lambda one: one[:3])]


def left_out(sections: Sequence[DocumentsSection]) -> list[str]:
    """Return a line on each file that has rows which none of a study's sections can take."""
    return [
        line
        for name, source in SOURCES.items()
        for line in source.left_out([section for section in sections if section.source == name])
    ]


def excluded_clusters(section: DocumentsSection) -> frozenset[str]:
    """Return the clusters that a stratum leaves out."""
    if section.exclude is None:
        return frozenset()
    return frozenset(read_object(Path(section.exclude)).texts("clusters"))


def check_source(section: DocumentsSection) -> None:
    """Check a section's source, keys and tasks, as far as possible without data."""
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
    """One task's candidates in their order; held candidates are kept apart, others are sorted into splits."""

    def __init__(
        self,
        section: DocumentsSection,
        source: DocumentSource,
        task: str,
        seed: int,
        excluded: frozenset[str],
        held: HeldDocuments,
    ) -> None:
        self.name = task
        self.held: dict[str, list[Candidate]] = {split: [] for split in SPLITS}
        self._candidates = source.candidates(section, task, seed)
        if task in source.generated:  # without an end
            self._candidates = islice(self._candidates, _MOST_GENERATED)
        self._excluded = excluded
        self._which, self._parts = section.part_of_clusters
        self._held, self._elsewhere = held.of(section.stratum_name), held.elsewhere(section.stratum_name)
        self._splits: dict[str, str] = {}  # of the clusters of held documents
        self._waiting: dict[str, deque[Candidate]] = {split: deque() for split in SPLITS}

    def find_held(self, names: set[str]) -> set[str]:
        """Read candidates until all names are found; return the names that exist and are not excluded."""
        found, left, passed = set[str](), set(names), list[Candidate]()
        while left and (candidate := next(self._candidates, None)) is not None:
            if candidate.doc not in left:
                passed.append(candidate)
                continue
            left.remove(candidate.doc)
            if candidate.cluster not in self._excluded:
                split = self._held[candidate.doc].split
                self.held[split].append(candidate)
                self._splits[candidate.cluster] = split
                found.add(candidate.doc)
        self._candidates = chain(passed, self._candidates)
        return found

    def take(self, split: str) -> Candidate | None:
        """Return the split's next candidate that is not held; None if there is none left."""
        while not self._waiting[split]:
            candidate = next(self._candidates, None)
            if candidate is None:
                return None
            if self._is_free(candidate):
                own = self._splits.get(candidate.cluster) or split_of(candidate.cluster)
                self._waiting[own].append(candidate)
        return self._waiting[split].popleft()

    def _is_free(self, candidate: Candidate) -> bool:
        """Tell whether a candidate is of the section's part, and neither excluded nor held."""
        is_held = candidate.doc in self._held or candidate.doc in self._elsewhere
        return (
            not is_held
            and candidate.cluster not in self._excluded
            and part_of(candidate.cluster, self._parts) == self._which
        )
