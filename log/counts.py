"""How many documents there are, how many have which units, and how many pairs are scored.

Which units are current is not in the counts: they tell revisions apart.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from log.delta.folder import DeltaFolder
from log.delta.snapshot import Snapshot
from log.units.revisions import are_revised, current_documents, current_revision, current_scores
from schema.rows import combined_codes, run_begins

_ANSWERS = ("source", "task", "scoring")
_OF_PLACES = ("study", "model", "split", "stratum", *_ANSWERS, "answers")
_DOCUMENT = ("study", "model", "doc")
_OF_DOCUMENTS = (*_DOCUMENT, *_OF_PLACES[2:], "document_revision")
_OF_SCORES = (*_DOCUMENT, "action", "action_revision")
_OF_UNITS = (*_DOCUMENT, "action", "action_revision", "estimator", "replicates", "weights_sha256")


class Answers(NamedTuple):
    """What says how known answers are scored: the columns of ``documents``."""

    source: str | None
    task: str | None
    scoring: str | None


class Place(NamedTuple):
    """Where documents belong.

    Attributes:
        split: None where only units name a document, and so is ``stratum``.
        answers: None where no answer is known.

    """

    study: str
    model: str
    split: str | None
    stratum: str | None
    answers: Answers | None


class Held(NamedTuple):
    """The units of one document under one revision of an action and one estimator.

    Attributes:
        replicates: Of all of them.
        units: How many there are.
        unknown: How many of them do not say what weights made them.

    """

    action: str
    action_revision: int
    estimator: str
    replicates: int
    units: int
    unknown: int


class Scored(NamedTuple):
    """What scores are of; ``split`` is None where their document has no row."""

    study: str
    model: str
    split: str | None
    action: str
    action_revision: int


Holdings = Counter[tuple[Place, tuple[Held, ...]]]
"""The number of documents of a place that have just these units."""


class Counts(NamedTuple):
    """What a store holds, counted.

    Attributes:
        documents: Of each place.
        units: What documents have, superseded units too.
        scores: Coupled pairs that are scored; all of them are of these units.

    """

    documents: Counter[Place]
    units: Holdings
    scores: Counter[Scored]

    def current_units(self, actions: pa.Table) -> Holdings:
        """Leave superseded units out, and documents that have no others.

        Args:
            actions: All rows of ``actions``, read before the counts.

        """
        is_current, found = current_revision(actions), Holdings()
        for (place, own), count in self.units.items():
            if kept := tuple(one for one in own if is_current((place.study, one.action, one.action_revision))):
                found[place, kept] += count
        return found


def count_documents(documents: pa.Table) -> Counter[Place]:
    """Count documents.

    Args:
        documents: Rows of ``documents``, in study, model, split, stratum and what their answers are at least.

    """
    names = [*_OF_PLACES[:-1], "answered"]
    counted = _with_answered(documents).group_by(names).aggregate([([], "count_all")])
    found = Counter[Place]()
    for *place, count in _rows(counted, (*names, "count_all")):
        found[_place(*place)] += count
    return found


def count_scores(scores: pa.Table, documents: pa.Table) -> Counter[Scored]:
    """Count scored pairs.

    Args:
        scores: Rows of ``scores``, in what tells their documents, their action and its revision at least.
        documents: Rows of ``documents``, those of these documents at least.

    """
    counted = scores.group_by(list(_OF_SCORES)).aggregate([([], "count_all")])
    texts = [(name, pa.string()) for name in _DOCUMENT]
    counted = counted.cast(pa.schema([*texts, *(counted.field(at) for at in range(len(texts), counted.num_columns))]))
    splits = documents.select([*_DOCUMENT, "split"]).cast(pa.schema([*texts, ("split", pa.string())]))
    group = list(Scored._fields)
    summed = counted.join(splits, list(_DOCUMENT)).group_by(group).aggregate([("count_all", "sum")])
    return Counter({Scored(*of): count for *of, count in _rows(summed, [*group, "count_all_sum"])})


def count_units(units: pa.Table, documents: pa.Table) -> Holdings:
    """Count the documents that units are of, by what they have.

    Args:
        units: Rows of ``units``; all of a document.
        documents: Rows of ``documents``, those of these documents at least.

    """
    group = [*_DOCUMENT, "action", "action_revision", "estimator"]
    unknown = pc.CountOptions(mode="only_null")
    summed = units.group_by(group).aggregate(
        [("replicates", "sum"), ([], "count_all"), ("weights_sha256", "count", unknown)]
    )
    held = [*group[3:], "replicates_sum", "count_all", "weights_sha256_count"]
    of_document = _codes(summed, _DOCUMENT)
    _, first, kind = np.unique(_codes(summed, held), return_index=True, return_inverse=True)
    kinds = [Held(*row) for row in _rows(summed.take(pa.array(first)), held)]
    order = np.lexsort((kind, of_document))
    begins = np.flatnonzero(run_begins(of_document[order]))
    places, kind = _places(summed.take(pa.array(order[begins])), documents), kind[order].tolist()
    spans = itertools.pairwise([*begins.tolist(), len(kind)])
    found = Counter((place, *kind[begin:end]) for place, (begin, end) in zip(places, spans, strict=True))
    # Sorted, since the order of codes is that of first appearance, and counts of several files are subtracted.
    return Counter({(place, tuple(sorted(kinds[one] for one in own))): count for (place, *own), count in found.items()})


def stored_counts(folder: DeltaFolder, units_and_missing: Callable[[], tuple[Snapshot, pa.Table]]) -> Counts:
    """Count what a store holds.

    Args:
        folder: The store's tables.
        units_and_missing: What loads the table ``units``, and makes the rows that it lacks for visible events.

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


def _places(keys: pa.Table, documents: pa.Table) -> list[Place]:
    """The place of each document, in the order of ``keys``."""
    documents = _with_answered(documents)
    places = zip(_rows(documents, _DOCUMENT), _rows(documents, [*_OF_PLACES[:-1], "answered"]), strict=True)
    known = {document: _place(*place) for document, place in places}
    return [
        known.get((study, model, doc)) or Place(study, model, None, None, None)  # no row of it yet
        for study, model, doc in _rows(keys, _DOCUMENT)
    ]


def _with_answered(documents: pa.Table) -> pa.Table:
    """Rows of documents with a column that tells whether they have any answer that is not empty."""
    answers = documents["answers"].combine_chunks()
    stated = pc.greater(pc.binary_length(answers.flatten()), 0)
    answered = np.zeros(documents.num_rows, dtype=np.bool_)
    answered[pc.list_parent_indices(answers).filter(stated).to_numpy()] = True
    return documents.drop_columns("answers").append_column("answered", pa.array(answered))


def _place(study: str, model: str, split: str, stratum: str, *answers: Any) -> Place:
    """The place of a row: ``answers`` are its source, task and scoring, and whether there are any."""
    *how, answered = answers
    return Place(study, model, split, stratum, Answers(*how) if answered else None)


def _codes(rows: pa.Table, names: Any) -> Any:
    """Number the combinations of values of some columns: int64 [rows]."""
    columns = []
    for name in names:
        coded = rows[name].combine_chunks()
        coded = coded if pa.types.is_dictionary(coded.type) else coded.dictionary_encode()
        columns.append((coded.indices.to_numpy(zero_copy_only=False), len(coded.dictionary)))
    return combined_codes(columns, rows.num_rows)


def _rows(rows: pa.Table, names: Any) -> Any:
    return zip(*(rows[name].to_pylist() for name in names), strict=True)
