"""How many documents there are, how many have which units, and how many pairs are scored: counted from rows once.

A compacted file of ``documents``, ``units`` or ``scores`` has the counts of its rows in its footer. The file does not
change, so the counts hold as long as the file is visible and no document has a further revision, which changes what its
answers are and supersedes its scores: then all rows are counted anew. Later rows are counted as they are.
Which units are current is not in the counts: it changes with every redone action, and they tell revisions apart.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from log.appends import is_compacted
from log.compaction.members import packed, unpacked
from log.delta.folder import DeltaFolder
from log.delta.snapshot import Snapshot
from log.parquet_files import StoredFile
from log.revisions import are_revised, current_documents, current_revision, current_scores
from schema.rows import combined_codes, run_begins

# Those of earlier releases have other names and are not read: they lack answers, and those of scores lack splits.
_FOOTERS = {"documents": "kvdrift.counts-2", "units": "kvdrift.counts-2", "scores": "kvdrift.counts-3"}
_WORTHWHILE = 8  # rows to a count; with fewer, reading the counts costs what reading the rows does

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


def footer_of_counts(folder: DeltaFolder, table: str, rows: pa.Table) -> dict[str, str]:
    """Return the footer of a file of a table's rows: their counts, or nothing where these would save little.

    Raises:
        InputError: A file of ``documents`` is missing or damaged.

    """
    counts: Mapping[Any, int] = {}
    if table == "documents":
        counts = {} if are_revised(rows) else count_documents(rows)
    elif table in _FOOTERS:
        count = count_units if table == "units" else count_scores
        counts = count(rows, current_documents(folder.read(folder.load("documents"), _OF_DOCUMENTS)))
    if not counts or len(counts) * _WORTHWHILE > rows.num_rows:
        return {}
    return {_FOOTERS[table]: packed(list(counts.items()))}


def stored_counts(folder: DeltaFolder, units_and_missing: Callable[[], tuple[Snapshot, pa.Table]]) -> Counts:
    """Count what a store holds; of what was compacted, the footers say it.

    Args:
        folder: The store's tables.
        units_and_missing: What loads the table ``units``, and makes the rows that it lacks for visible events.

    Raises:
        InputError: A file is missing or damaged.

    """
    scores = folder.load("scores")  # first: what is scored is there
    units, missing = units_and_missing()
    documents = folder.load("documents")
    if _has_revised(folder, documents):
        return _counts_of_rows(folder, scores, units, missing, documents)
    return Counts(
        _stored_documents(folder, documents),
        _stored_units(folder, units, missing, documents),
        _stored_scores(folder, scores, documents),
    )


def _has_revised(folder: DeltaFolder, documents: Snapshot) -> bool:
    """Whether a document has a further revision; a file whose footer counts its rows has none."""
    _, others = _remembered_and_others(folder, documents)
    return bool(others) and are_revised(folder.read(documents, ["document_revision"], paths=others))


def _counts_of_rows(
    folder: DeltaFolder, scores: Snapshot, units: Snapshot, missing: pa.Table, documents: Snapshot
) -> Counts:
    """Count all rows, of which the documents in their newest revisions and the scores by them."""
    every = folder.read(documents, _OF_DOCUMENTS)
    current = current_documents(every)
    scored = current_scores(folder.read(scores, (*_OF_SCORES, "document_revision")), every)
    held = _with_missing(folder.read(units, _OF_UNITS, coded=True), missing)
    return Counts(count_documents(current), count_units(held, current), count_scores(scored, current))


def _stored_documents(folder: DeltaFolder, documents: Snapshot) -> Counter[Place]:
    """Count the visible documents of each place."""
    remembered, others = _remembered_and_others(folder, documents)
    found = Counter[Place]()
    for place, count in remembered:
        found[_place_of(*place)] += count
    if others:
        found += count_documents(folder.read(documents, _OF_PLACES, paths=others, coded=True).unify_dictionaries())
    return found


def _stored_scores(folder: DeltaFolder, scores: Snapshot, documents: Snapshot) -> Counter[Scored]:
    """Count the visible scored pairs of each action and split."""
    remembered, others = _remembered_and_others(folder, scores)
    found = Counter[Scored]()
    for of, count in remembered:
        found[Scored(*of)] += count
    if others:
        rows = folder.read(scores, _OF_SCORES, paths=others, coded=True).unify_dictionaries()
        found += count_scores(rows, folder.read(documents, (*_DOCUMENT, "split"), where=_named_in(rows)))
    return found


def _remembered_and_others(folder: DeltaFolder, snapshot: Snapshot) -> tuple[list[Any], list[str]]:
    """What footers of visible files count, and the paths of the files whose footers do not."""
    counted, others = list[Any](), list[str]()
    for file in snapshot.files():
        counts = _remembered(folder, snapshot, file)
        if counts is None:
            others.append(file.path)
        else:
            counted += counts
    return counted, others


def _stored_units(folder: DeltaFolder, units: Snapshot, missing: pa.Table, documents: Snapshot) -> Holdings:
    """Count the documents that visible units are of, by what they have.

    The counts of one compacted file, the largest, are taken as they are, but for documents that have later rows.
    """
    largest = max(units.files(), key=lambda file: (is_compacted(file.path), file.rows), default=None)
    counts = None if largest is None else _remembered(folder, units, largest)
    found: Holdings = Counter(
        {(_place_of(*place), tuple(sorted(Held(*one) for one in own))): count for (place, own), count in counts or ()}
    )
    if largest is None or counts is None or any(place.split is None for place, _ in found):
        rows = _with_missing(folder.read(units, _OF_UNITS, coded=True), missing)
        return count_units(rows, folder.read(documents, _OF_DOCUMENTS, coded=True))
    later = [path for path in units.paths() if path != largest.path]
    if not later and not missing.num_rows:
        return found
    new = _with_missing(folder.read(units, _OF_UNITS, paths=later, coded=True), missing)
    named = _named_in(new)
    rows = folder.read(documents, _OF_DOCUMENTS, where=named)
    before = folder.read(units, _OF_UNITS, where=named, paths=[largest.path], coded=True)
    found.subtract(count_units(before.unify_dictionaries(), rows))
    found.update(count_units(pa.concat_tables([before, new]).unify_dictionaries(), rows))
    if min(found.values()) < 0:
        raise folder.damaged(f"table 'units' is damaged (the counts of {largest.path} are not those of its rows)")
    return +found


def _remembered(folder: DeltaFolder, snapshot: Snapshot, file: StoredFile) -> list[Any] | None:
    """What the footer of a file counts; None where it does not say."""
    if not is_compacted(file.path):
        return None
    _, footer = folder.footer(snapshot.table, file.path)
    said = footer.get(_FOOTERS[snapshot.table].encode())
    try:
        return None if said is None else list(unpacked(said))
    except ValueError:
        raise folder.damaged(f"table '{snapshot.table}' is damaged ({file.path}: no counts in its footer)") from None


def _named_in(rows: pa.Table) -> pc.Expression:
    """What holds of rows whose document is one of those of ``rows``."""
    names = pa.array(rows["doc"].cast(pa.string()).unique().to_pylist(), pa.string())
    bounds = pc.min_max(names).as_py()  # they tell Arrow which row groups need not be read
    return (pc.field("doc") >= bounds["min"]) & (pc.field("doc") <= bounds["max"]) & pc.field("doc").isin(names)


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


def _place_of(*place: Any) -> Place:
    """The place that a footer tells of."""
    study, model, split, stratum, answers = place
    return Place(study, model, split, stratum, None if answers is None else Answers(*answers))


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
