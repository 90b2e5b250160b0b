"""The document sources by name, and the choice of a stratum's documents from its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from kvdrift.generator.documents.files import read_object
from kvdrift.generator.documents.helmet import HelmetSource
from kvdrift.generator.documents.jsonl import JSONL, JsonlSource, has_chats, missed, named_splits
from kvdrift.generator.documents.prompts import Tokenizer
from kvdrift.generator.documents.ruler import RulerSource
from kvdrift.generator.documents.source import (
    NOTHING_HELD,
    Candidate,
    DocumentSource,
    HeldDocument,
    HeldDocuments,
    where,
)
from kvdrift.generator.embedded import documents
from kvdrift.schema.document import SPLITS, Document, hash_position, part_of, split_of
from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.study import DocumentsSection


class EmbeddedSource(DocumentSource):
    """Records hidden in filler, and a question about some of them."""

    tasks = generated = documents.TASKS
    reads_text = False
    summary = f"lengths {', '.join(map(str, documents.LENGTHS))}"

    def check(self, section: DocumentsSection) -> None:
        """Check that the model was trained on prompts of the section's length."""
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
        self, section: DocumentsSection, chosen: Sequence[Candidate], _tokenizer: Tokenizer, seed: int
    ) -> list[Document]:
        """Make the documents of the chosen numbers; their tokens need no tokenizer."""
        made = (documents.make_document(item.task, section.length, item.number, seed) for item in chosen)
        return [replace(document, stratum=section.stratum_name) for document in made]


SOURCES: dict[str, DocumentSource] = {
    "embedded": EmbeddedSource(),
    "ruler": RulerSource(),
    "helmet": HelmetSource(),
    JSONL: JsonlSource(),
}
_OPTIONAL_KEYS = ("path", "shots", "chat_template")
_MOST_GENERATED = 1_000_000  # candidates of a task that are generated to find the held documents


def stratum_documents(
    section: DocumentsSection,
    seed: int,
    tokenizer: Callable[[], Tokenizer] | None = None,
    chosen: Mapping[str, Sequence[Candidate]] | None = None,
) -> dict[str, list[Document]]:
    """Make a stratum's documents, a list for each split, from the candidates ``chosen`` for each split.

    If ``chosen`` is None, candidates are chosen as for a study with this stratum alone. ``tokenizer`` loads the model's
    tokenizer; it is called only for sources of text.
    """
    if chosen is None:
        (chosen,) = choose_candidates([section], seed)
    source = SOURCES[section.source]
    loaded: Any = tokenizer() if source.reads_text and tokenizer is not None else None
    made = iter(source.documents(section, [item for split in SPLITS for item in chosen[split]], loaded, seed))
    return {split: [next(made) for _ in chosen[split]] for split in SPLITS}


def choose_candidates(
    sections: Sequence[DocumentsSection], seed: int, held: HeldDocuments = NOTHING_HELD
) -> list[dict[str, list[Candidate]]]:
    """Choose each stratum's documents of each split, before any document is made; a stratum's tasks take turns.

    Documents that the study already has come first, in their order and split. A row of a file may name the split of its
    cluster. The split of any other cluster is a function of the cluster's name alone, unless a stratum would have too
    few documents in one split (``divided``). So asking for more documents of a large source moves no document to
    another split. Which part of the source a cluster belongs to (``part``) is also a function of its name alone.
    """
    for section in sections:
        check_source(section)
    named = named_splits(sections)
    fixed, strata = held.splits() | named, []
    for section in sections:
        strata.append(_chosen(section, seed, held, named, fixed))
        fixed |= {item.cluster: split for split, items in strata[-1].items() for item in items}
    return strata


def _chosen(
    section: DocumentsSection, seed: int, held: HeldDocuments, named: Mapping[str, str], fixed: dict[str, str]
) -> dict[str, list[Candidate]]:
    """Choose a stratum's documents of each split; add the split of each held document's cluster to ``fixed``."""
    source = SOURCES[section.source]
    excluded = excluded_clusters(section)
    tasks = [_TaskCandidates(section, source, task, seed, excluded, held) for task in section.tasks or [""]]
    _find_held(section, held, tasks)
    for split, candidate in ((side, candidate) for task in tasks for side in SPLITS for candidate in task.held[side]):
        if named.get(candidate.cluster, split) != split:
            raise InputError(
                f"{where(section)}: document '{candidate.doc}' is of the stored study's {split} documents, and a row "
                f"of its cluster '{candidate.cluster}' in {section.path} has split '{named[candidate.cluster]}'; a "
                "document keeps its split: undo that change, or give the changed study a new name"
            )
        fixed[candidate.cluster] = split
    first = {split: _held_first(split, held.of(section.stratum_name), tasks) for split in SPLITS}
    requested = {"development": section.development, "evaluation": section.evaluation}
    # No other document takes the place of a removed document.
    wanted = {split: max(0, requested[split] - held.forgotten.count(split, section.stratum_name)) for split in SPLITS}

    def choose(splits: Mapping[str, str]) -> dict[str, list[Candidate]]:
        return {split: _in_turn(split, wanted[split], first[split], tasks, splits) for split in SPLITS}

    chosen = choose(fixed)
    if all(len(chosen[split]) == wanted[split] for split in SPLITS):
        return chosen
    sizes = Counter(candidate.cluster for task in tasks for candidate in task.free())
    splits = divided(sizes, {split: wanted[split] - len(first[split]) for split in SPLITS}, fixed)
    chosen = choose(splits)
    if any(len(chosen[split]) < wanted[split] for split in SPLITS):
        raise InputError(_too_few(section, wanted, first, sizes, splits, excluded))
    return chosen


def _in_turn(
    split: str, wanted: int, first: Sequence[Candidate], tasks: Sequence[_TaskCandidates], splits: Mapping[str, str]
) -> list[Candidate]:
    """Return up to ``wanted`` candidates of a split: those in ``first``, then others, which the tasks give in turn."""
    taken = list(first[:wanted])
    counts = {task: len(task.held[split]) for task in tasks}
    others = {task: task.of(split, splits) for task in tasks}
    while counts and len(taken) < wanted:
        task = min(counts, key=lambda task: counts[task])  # of equal counts, the first task
        if (candidate := next(others[task], None)) is None:
            del counts[task]
        else:
            taken.append(candidate)
            counts[task] += 1
    return taken


def _too_few(
    section: DocumentsSection, wanted: Mapping[str, int], first: Mapping[str, Sequence[Candidate]],
    sizes: Mapping[str, int], splits: Mapping[str, str], excluded: frozenset[str],
) -> str:  # fmt: skip
    """Return the error message about a stratum whose source has too few documents."""
    there = Counter({split: len(first[split]) for split in SPLITS})
    for cluster, size in sizes.items():
        there[splits[cluster]] += size
    clusters = len({item.cluster for split in SPLITS for item in first[split]} | set(sizes))
    part = "" if section.part == "1/1" else f" in part {section.part}"
    part += f" without the {len(excluded)} cluster(s) that 'exclude' names" if excluded else ""
    requested = " and ".join(f"{split} = {count}" for split, count in wanted.items())
    if there.total() < sum(wanted.values()):
        right = f"; ask for at most {there.total()} in all" if there.total() else ""
    else:
        sides = " and ".join(f"{there[split]} for {split}" for split in SPLITS)
        right = f"; clusters stay whole, and in a split that a row or the store gives them, which leaves {sides}"
    return (
        f"{where(section)}: {requested}, but the source has {there.total()} document(s) in {clusters} cluster(s)"
        f"{part}{right}{missed(section) if section.source == JSONL else ''}"
    )


def _find_held(section: DocumentsSection, held: HeldDocuments, tasks: Sequence[_TaskCandidates]) -> None:
    """Read candidates until all documents that the study already has are found; raise InputError if any is missing."""
    wanted = held.of(section.stratum_name)
    present = set[str]()
    for task in tasks:
        present |= task.find_held({doc for doc, document in wanted.items() if task.name in {"", document.task}})
    gone = [doc for doc in wanted if doc not in present]
    if gone:
        more = f" and {len(gone) - 1} more" if gone[1:] else ""
        place = "its source" if section.path is None else section.path
        raise InputError(
            f"{where(section)}: document '{gone[0]}'{more} of the stored study is gone from {place}, or left out there "
            "by 'exclude' or by another stratum; put it back, or give the changed study a new name"
        )


def _held_first(split: str, held: Mapping[str, HeldDocument], tasks: Sequence[_TaskCandidates]) -> list[Candidate]:
    """Return the candidates for a split's documents that the study already has, ``held``.

    Those that a plan has frozen come first, in the order of their places. The tasks give the others in turn.
    """
    ranked = [
        (place if (place := held[candidate.doc].place) is not None else len(held), turn, number, candidate)
        for number, task in enumerate(tasks)
        for turn, candidate in enumerate(task.held[split])
    ]
    return [candidate for *_, candidate in sorted(ranked, key=lambda row: row[:3])]


def applies_template(section: DocumentsSection) -> bool:
    """Return whether prompts of a section go through the model's chat template."""
    if section.chat_template is not None:
        return section.chat_template
    return section.source == JSONL and has_chats(section)


def excluded_clusters(section: DocumentsSection) -> frozenset[str]:
    """Return the clusters that a section's ``exclude`` file names, which its stratum leaves out."""
    if section.exclude is None:
        return frozenset()
    return frozenset(read_object(Path(section.exclude)).texts("clusters"))


def check_source(section: DocumentsSection) -> None:
    """Check a section's source, keys and tasks, as far as possible without data."""
    if section.source not in SOURCES:
        raise InputError(f"{where(section)}: unknown source '{section.source}'; {nearest(section.source, SOURCES)}")
    source = SOURCES[section.source]
    for key in _OPTIONAL_KEYS:
        is_set = getattr(section, key) is not None
        if is_set and key not in source.takes:
            raise InputError(f"{where(section)}: source '{section.source}' takes no '{key}'")
        if not is_set and key in source.needs:
            raise InputError(f"{where(section)}: source '{section.source}' needs '{key}'; {source.summary}")
    if source.tasks and not section.tasks:
        raise InputError(
            f"{where(section)}: tasks is missing; the tasks of source '{section.source}' are {', '.join(source.tasks)}"
        )
    for task in section.tasks:
        if not source.tasks:
            raise InputError(f"{where(section)}: source '{section.source}' takes no tasks; remove '{task}'")
        if task not in source.tasks:
            raise InputError(f"{where(section)}: unknown task '{task}'; {nearest(task, source.tasks)}")
        if section.tasks.count(task) > 1:
            raise InputError(f"{where(section)}: task '{task}' is listed twice")
    source.check(section)


class _TaskCandidates:
    """One task's candidates in their order; ``held`` has, by split, the candidates that are documents of the study."""

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
        self._forgotten = held.forgotten
        self._held, self._elsewhere = held.of(section.stratum_name), held.elsewhere(section.stratum_name)
        self._read: list[Candidate] = []  # the free candidates among those read so far

    def find_held(self, names: set[str]) -> set[str]:
        """Read candidates until all documents ``names`` are found; return the names of those that are not excluded."""
        present, left, passed = set[str](), set(names), list[Candidate]()
        while left and (candidate := next(self._candidates, None)) is not None:
            if candidate.doc not in left:
                passed.append(candidate)
                continue
            left.remove(candidate.doc)
            if candidate.cluster not in self._excluded:
                self.held[self._held[candidate.doc].split].append(candidate)
                present.add(candidate.doc)
        self._candidates = chain(passed, self._candidates)
        return present

    def of(self, split: str, splits: Mapping[str, str]) -> Iterator[Candidate]:
        """Yield the candidates of a split that can still be chosen.

        ``splits`` has the split of clusters by name; for a cluster that it lacks, the hash of the name decides.
        """
        return (
            candidate
            for candidate in self.free()
            if (splits.get(candidate.cluster) or split_of(candidate.cluster)) == split
        )

    def free(self) -> Iterator[Candidate]:
        """Yield the candidates that can still be chosen; the source is read only as far as the caller consumes them."""
        yield from self._read
        while (candidate := next(self._candidates, None)) is not None:
            if self._is_free(candidate):
                self._read.append(candidate)
                yield candidate

    def _is_free(self, candidate: Candidate) -> bool:
        """Return whether a candidate is of the section's part, not excluded, and never was a document of the study."""
        is_held = candidate.doc in self._held or candidate.doc in self._elsewhere
        return (
            not is_held
            and not self._forgotten.has(candidate.doc)
            and candidate.cluster not in self._excluded
            and part_of(candidate.cluster, self._parts) == self._which
        )


def divided(sizes: Mapping[str, int], wanted: Mapping[str, int], fixed: Mapping[str, str]) -> dict[str, str]:
    """Return each cluster's split, which follows from its hash unless a split would have too few documents.

    A split that has too few documents takes clusters from the other split, which keeps as many documents as it needs:
    development takes evaluation's clusters with the smallest hashes, and evaluation takes development's with the
    largest. If no division of whole clusters gives both splits enough, each cluster keeps the split of its hash.

    Args:
        sizes: the number of documents of each cluster.
        wanted: the number of documents that each split needs.
        fixed: the split of clusters that stay where they are.
    """
    splits = {cluster: fixed.get(cluster) or split_of(cluster) for cluster in sizes}
    free = sorted((cluster for cluster in sizes if cluster not in fixed), key=hash_position)

    def documents(split: str, clusters: Iterable[str]) -> int:
        return sum(sizes[cluster] for cluster in clusters if splits[cluster] == split)

    development, evaluation = SPLITS
    for short, other_split, order in ((development, evaluation, free[::-1]), (evaluation, development, free)):
        if not free or documents(short, sizes) >= wanted[short]:
            continue
        # Free clusters give the short side from ``least`` to ``most`` documents. Sums are bits of an integer.
        staying = [cluster for cluster in sizes if cluster in fixed]
        least = wanted[short] - documents(short, staying)
        most = sum(sizes[cluster] for cluster in free) - (wanted[other_split] - documents(other_split, staying))
        most = min(most, least + max(sizes[cluster] for cluster in free) - 1)  # with more, a cluster could be left out
        within = (1 << max(most + 1, 0)) - 1
        sums = [1]  # of the last clusters of the order: none, one, two …
        for cluster in reversed(order):
            sums.append((sums[-1] | sums[-1] << sizes[cluster]) & within)
        if not sums.pop() >> least:
            continue
        taken = 0
        for cluster in order:
            left, here = sums.pop(), splits[cluster] == short
            for taking in (here, not here):
                after = taken + taking * sizes[cluster]
                if (left << after & within) >> least:
                    splits[cluster], taken = short if taking else other_split, after
                    break
    return splits
