"""Count documents, the units that documents have, and scored pairs.

The counts distinguish revisions, but do not say which revision is current.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from log.delta.folder import DeltaFolder
from log.delta.snapshot import Snapshot
from log.units.revisions import are_revised, current_documents, current_revision, current_scores
from schema.rows import Wide, combined_codes, row_hashes, run_begins

_ANSWERS = ("source", "task", "scoring")
_OF_PLACES = ("study", "model", "split", "stratum", *_ANSWERS, "answers")
_DOCUMENT = ("study", "model", "doc")
_OF_DOCUMENTS = (*_DOCUMENT, *_OF_PLACES[2:], "document_revision")
_OF_SCORES = (*_DOCUMENT, "action", "action_revision")
_OF_UNITS = (*_DOCUMENT, "action", "action_revision", "estimator", "replicates", "weights_sha256")


class Answers(NamedTuple):
    """The columns of ``documents`` that determine how known answers are scored."""

    source: str | None
    task: str | None
    scoring: str | None


class Place(NamedTuple):
    """The study, model, split and stratum of documents, and how their answers are scored.

    Attributes:
        split: The split; None, like ``stratum``, if a document is known only from its units.
        answers: How answers are scored; None if no answer is known.

    """

    study: str
    model: str
    split: str | None
    stratum: str | None
    answers: Answers | None


class Held(NamedTuple):
    """The units of one document under one revision of an action and one estimator.

    Attributes:
        replicates: The replicates of all these units.
        units: The number of units.
        unknown: The number of units that do not say which weights made them.

    """

    action: str
    action_revision: int
    estimator: str
    replicates: int
    units: int
    unknown: int


class Scored(NamedTuple):
    """The key of a count of scored pairs; ``split`` is None if the document has no row."""

    study: str
    model: str
    split: str | None
    action: str
    action_revision: int


Holdings = Counter[tuple[Place, tuple[Held, ...]]]
"""The number of documents of a place that have exactly these units."""


class Counts(NamedTuple):
    """The counts of a store's content.

    Attributes:
        documents: The number of documents of each place.
        units: The number of documents by place and units, superseded units included.
        scores: The number of scored coupled pairs.

    """

    documents: Counter[Place]
    units: Holdings
    scores: Counter[Scored]

    def current_units(self, actions: pa.Table) -> Holdings:
        """Return the counts without superseded units, and without documents that have only such units.

        Args:
            actions: All rows of ``actions``, read before the counts.

        """
        is_current, found = current_revision(actions), Holdings()
        for (place, own), count in self.units.items():
            if kept := tuple(one for one in own if is_current((place.study, one.action, one.action_revision))):
                found[place, kept] += count
        return found


def count_documents(documents: pa.Table) -> Counter[Place]:
    """Count documents by place.

    Args:
        documents: Rows of ``documents`` with at least study, model, split, stratum and the columns of answers.

    """
    places, place = _places(documents)
    return Counter(dict(zip(places, np.bincount(place, minlength=len(places)).tolist(), strict=True)))


def count_scores(scores: pa.Table, documents: pa.Table) -> Counter[Scored]:
    """Count scored pairs.

    Args:
        scores: Rows of ``scores`` with at least the columns that name their document, action and revision.
        documents: Rows of ``documents``, at least those of the scored documents.

    """
    splits = documents["split"].combine_chunks().dictionary_encode()
    split = np.append(splits.indices.to_numpy(), len(splits.dictionary))[_documents_of(scores, documents)]
    names = ("study", "model", "action", "action_revision")
    codes = combined_codes([*(_coded(scores[name]) for name in names), (split, len(splits) + 1)], len(split))
    _, first, counts = np.unique(codes, return_index=True, return_counts=True)
    words, found = [*splits.dictionary.to_pylist(), None], Counter[Scored]()
    for (study, model, *action), at, count in zip(
        _rows(scores.take(pa.array(first)), names), split[first].tolist(), counts.tolist(), strict=True
    ):
        found[Scored(study, model, words[at], *action)] = count
    return found


def count_units(units: pa.Table, documents: pa.Table) -> Holdings:
    """Count documents by the units that they have.

    Args:
        units: All rows of ``units`` of the documents.
        documents: Rows of ``documents``, at least those of these documents.

    """
    if not units.num_rows:
        return Holdings()
    names = ("action", "action_revision", "estimator")
    owner, of_action = _codes(units, _DOCUMENT), _codes(units, names)
    order = np.lexsort((of_action, owner))
    begins = np.flatnonzero(run_begins(owner[order], of_action[order]))
    first = order[begins]
    unknown = pc.is_null(units["weights_sha256"]).to_numpy().astype(np.int64)
    replicates = units["replicates"].to_numpy().astype(np.int64)
    sums = [np.add.reduceat(values[order], begins) for values in (replicates, np.ones_like(unknown), unknown)]
    held, example, kind = np.unique(np.stack([of_action[first], *sums]), axis=1, return_index=True, return_inverse=True)
    actions = _rows(units.take(pa.array(first[example])), names)
    kinds = [Held(*action, *counts) for action, counts in zip(actions, held[1:].T.tolist(), strict=True)]

    of_document = np.flatnonzero(run_begins(owner[first]))
    place, places = _places_of(units.take(pa.array(first[of_document])), documents)
    spans = itertools.pairwise([*of_document.tolist(), len(kind)])
    own = Counter((at, *kind[begin:end].tolist()) for at, (begin, end) in zip(place, spans, strict=True))
    # Sorted, since the order of codes is that of first appearance, and counts of several files are subtracted.
    return Counter(
        {(places[at], tuple(sorted(kinds[one] for one in ones))): count for (at, *ones), count in own.items()}
    )


def stored_counts(folder: DeltaFolder, units_and_missing: Callable[[], tuple[Snapshot, pa.Table]]) -> Counts:
    """Count a store's documents, units and scored pairs.

    Args:
        folder: The store's tables.
        units_and_missing: Loads the table ``units``, and makes the rows that the table lacks for visible events.

    """
    scores = folder.load("scores")  # first: what is scored is there
    units, missing = units_and_missing()
    documents = folder.read(folder.load("documents"), _OF_DOCUMENTS)
    current = current_documents(documents)
    scored = folder.read(scores, (*_OF_SCORES, "document_revision"), coded=True).unify_dictionaries()
    if are_revised(documents):
        scored = current_scores(scored, documents)
    held = _with_missing(folder.read(units, _OF_UNITS, coded=True), missing)
    return Counts(count_documents(current), count_units(held, current), count_scores(scored, current))


def _with_missing(rows: pa.Table, missing: pa.Table) -> pa.Table:
    return pa.concat_tables([rows, missing.select(rows.column_names).cast(rows.schema)]).unify_dictionaries()


def _places(documents: pa.Table) -> tuple[list[Place], Wide]:
    """Return the places of documents, and the number of each document's place."""
    rows, names = _with_answered(documents), [*_OF_PLACES[:-1], "answered"]
    _, first, place = np.unique(_codes(rows, names), return_index=True, return_inverse=True)
    return [_place(*row) for row in _rows(rows.take(pa.array(first)), names)], place


def _places_of(keys: pa.Table, documents: pa.Table) -> tuple[list[int], list[Place]]:
    """Return the place of each row's document as a number, and the places."""
    places, place = _places(documents)
    at = np.append(place, -1)[_documents_of(keys, documents)]
    without = np.flatnonzero(at < 0)  # no row of it yet
    names = [Place(study, model, None, None, None) for study, model in _rows(keys.take(without), _DOCUMENT[:2])]
    at[without] = np.arange(len(without)) + len(places)
    everywhere = [*places, *names]
    same = {one: number for number, one in reversed([*enumerate(everywhere)])}
    return [same[everywhere[number]] for number in at.tolist()], everywhere


def _documents_of(rows: pa.Table, documents: pa.Table) -> Wide:
    """Return the number of each row's document, int64 [rows]; the number after the last for rows without a document."""
    wanted, there = (row_hashes(part[name] for name in _DOCUMENT) for part in (rows, documents))
    order = np.argsort(there)
    at = np.searchsorted(there[order], wanted)
    order, there = np.append(order, len(there)), np.append(there[order], np.uint64(0))
    return np.where(there[at] == wanted, order[at], len(there) - 1)


def _with_answered(documents: pa.Table) -> pa.Table:
    """Return rows of documents with a column that tells whether they have an answer that is not empty."""
    answers = documents["answers"].combine_chunks()
    stated = pc.greater(pc.binary_length(answers.flatten()), 0)
    answered = np.zeros(documents.num_rows, dtype=np.bool_)
    answered[pc.list_parent_indices(answers).filter(stated).to_numpy()] = True
    return documents.drop_columns("answers").append_column("answered", pa.array(answered))


def _place(study: str, model: str, split: str, stratum: str, *answers: Any) -> Place:
    """Return the place of a row; ``answers`` are its source, task and scoring, and whether it has answers."""
    *how, answered = answers
    return Place(study, model, split, stratum, Answers(*how) if answered else None)


def _codes(rows: pa.Table, names: Sequence[str]) -> Wide:
    """Number the combinations of values of some columns, int64 [rows]."""
    return combined_codes([_coded(rows[name]) for name in names], rows.num_rows)


def _coded(column: pa.ChunkedArray) -> tuple[Wide, int]:
    """Number the values of a column; also return a number larger than all."""
    whole = column.combine_chunks()
    coded = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    return coded.indices.fill_null(len(coded.dictionary)).to_numpy(zero_copy_only=False), len(coded.dictionary) + 1


def _rows(rows: pa.Table, names: Any) -> Any:
    return zip(*(rows[name].to_pylist() for name in names), strict=True)
