"""Count documents, the units that documents have, and scored pairs.

The counts distinguish revisions, but do not say which revision is current.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from log.delta.folder import DeltaFolder
from log.delta.snapshot import Snapshot
from log.units.revisions import are_revised, current_documents, current_revision, current_scores
from schema.rows import Wide, combined_codes

_ANSWERS = ("source", "task", "scoring")
_OF_PLACES = ("study", "model", "split", "stratum", *_ANSWERS, "answers")
_DOCUMENT = ("study", "model", "doc")
_ACTION = ("action", "action_revision", "estimator")
_OF_DOCUMENTS = (*_DOCUMENT, *_OF_PLACES[2:], "document_revision")
_OF_SCORES = (*_DOCUMENT, "action", "action_revision")
_OF_UNITS = (*_DOCUMENT, *_ACTION, "replicates", "weights_sha256")


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


_Made = TypeVar("_Made")

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
    scored = scores.append_column("split", splits.take(_documents_of(scores, documents)))
    counted = scored.group_by([*Scored._fields], use_threads=False).aggregate([([], "count_all")])
    return Counter({Scored(*row): count for *row, count in _rows(counted, (*Scored._fields, "count_all"))})


def count_units(units: pa.Table, documents: pa.Table) -> Holdings:
    """Count documents by the units that they have.

    Args:
        units: All rows of ``units`` of the documents.
        documents: Rows of ``documents``, at least those of these documents.

    """
    if not units.num_rows:
        return Holdings()
    held = (
        units.append_column("unknown", pc.is_null(units["weights_sha256"]).cast(pa.int64()))
        .group_by([*_DOCUMENT, *_ACTION], use_threads=False)
        .aggregate([("replicates", "sum"), ([], "count_all"), ("unknown", "sum")])
    )
    kinds, kind = _numbered(held.drop_columns(_DOCUMENT).rename_columns(Held._fields), Held)
    actions, action = _firsts(_codes(held, _ACTION))
    documents_first, document = _firsts(_codes(held, _DOCUMENT))
    places, place = _places_of(held.take(pa.array(documents_first)), documents)
    own = np.full((len(actions), len(place)), len(kinds), dtype=np.int32)  # of each document; the last is none
    own[action, document] = kind
    firsts, alike = _firsts(combined_codes([(place, len(places)), *((row, len(kinds) + 1) for row in own)], len(place)))
    found = Holdings()
    for at, count in zip(firsts.tolist(), np.bincount(alike).tolist(), strict=True):
        # Sorted, since kinds come in the order of their first appearance, and counts of several files are subtracted.
        found[places[place[at]], tuple(sorted(kinds[one] for one in own[:, at] if one < len(kinds)))] = count
    return found


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
    return _numbered(_with_answered(documents).select([*_OF_PLACES[:-1], "answered"]), _place)


def _places_of(keys: pa.Table, documents: pa.Table) -> tuple[list[Place], Wide]:
    """Return the places of the documents of all rows of ``keys``, and the number of each row's place."""
    places, place = _places(documents)
    at = pa.array(place).take(_documents_of(keys, documents)).fill_null(-1).to_numpy().copy()
    without = np.flatnonzero(at < 0)  # no row of it yet
    at[without] = np.arange(len(without)) + len(places)
    places += [Place(study, model, None, None, None) for study, model in _rows(keys.take(without), _DOCUMENT[:2])]
    found, number = _distinct(places)
    return found, number[at]


def _numbered(rows: pa.Table, make: Callable[..., _Made]) -> tuple[list[_Made], Wide]:
    """Return the distinct results of ``make`` for the values of each row, and the number of each row's result."""
    firsts, number = _firsts(_codes(rows, rows.column_names))
    found, same = _distinct([make(*row) for row in _rows(rows.take(pa.array(firsts)), rows.column_names)])
    return found, same[number]


def _firsts(codes: Wide) -> tuple[Wide, Wide]:
    """Return the first row of each code, ascending, and for each row the number of its code in this order."""
    number: Wide = pa.array(codes).dictionary_encode().indices.to_numpy().astype(np.int64)
    firsts = np.zeros(number.max(initial=-1) + 1, dtype=np.int64)
    firsts[number[::-1]] = np.arange(len(number))[::-1]
    return firsts, number


def _distinct(things: Sequence[_Made]) -> tuple[list[_Made], Wide]:
    """Return the distinct things, and for each thing the number of its equal among these."""
    numbers = {one: number for number, one in enumerate(dict.fromkeys(things))}
    return [*numbers], np.array([numbers[one] for one in things], dtype=np.int64)


def _documents_of(rows: pa.Table, documents: pa.Table) -> pa.Array:
    """Return the number of each row's document, int32 [rows]; null for rows without a document."""
    names = pa.schema([(name, pa.dictionary(pa.int32(), pa.string())) for name in _DOCUMENT])
    parts = [part.select(_DOCUMENT).cast(names).combine_chunks() for part in (rows, documents)]
    codes = pa.array(_codes(pa.concat_tables(parts).unify_dictionaries(), _DOCUMENT))
    return pc.index_in(codes[: rows.num_rows], value_set=codes[rows.num_rows :])


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
