"""Count the documents, units and scored pairs of a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs

from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.versions import Snapshot
from kvdrift.log.units.revisions import current_documents, current_revision, current_scores, current_units

_DOCUMENT = ("study", "model", "doc")
_ANSWERS = ("source", "task", "scoring")
_OF_DOCUMENTS = (*_DOCUMENT, "split", "stratum", *_ANSWERS, "answers", "document_revision")
_OF_SCORES = (*_DOCUMENT, "action", "action_revision")
_KIND = ("action", "action_revision", "estimator")
_OF_UNITS = (*_DOCUMENT, *_KIND, "replicates", "weights_sha256")
_OF_PLACE = ("study", "model", "split", "stratum", *_ANSWERS, "answered")


_Key = TypeVar("_Key", bound=tuple[Any, ...])


class Answers(NamedTuple):
    """The columns of ``documents`` that determine how known answers are scored."""

    source: str | None
    task: str | None
    scoring: str | None


class Place(NamedTuple):
    """The study, model, split and stratum of documents, and how their answers are scored.

    Split and stratum are None if a document is known only from its units, ``answers`` is None if no answer is known.
    """

    study: str
    model: str
    split: str | None
    stratum: str | None
    answers: Answers | None


class Held(NamedTuple):
    """How many units and replicates one document has under one revision of an action and one estimator.

    ``unknown`` is the number of units that do not record which weights made them.
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


Holdings = Counter[tuple[Place, Held]]
"""The number of documents by place, and by the counts of units that a document has there."""


class Counts(NamedTuple):
    """Counts of a store's documents and units by ``Place``, and of its scored pairs by the columns of ``Scored``."""

    documents: Counter[Place]  # the number of documents of each place
    generated: Counter[Place]  # the number of documents of each place that have a current unit
    units: Holdings  # the number of documents by place and units, superseded units included
    current: Holdings  # the same without superseded units
    scores: Counter[Scored]  # the number of scored coupled pairs

    def of_study(self, study: str, model: str) -> Counts:
        """Return the counts of one study and model."""

        def of(part: Counter[_Key]) -> Counter[_Key]:
            places = ((key, key[0] if isinstance(key[0], Place) else key) for key in part)
            return Counter({key: part[key] for key, place in places if place[:2] == (study, model)})

        return Counts(of(self.documents), of(self.generated), of(self.units), of(self.current), of(self.scores))


def stored_counts(
    folder: DeltaFolder, actions: pa.Table, units_and_missing: Callable[[], tuple[Snapshot, pa.Table]]
) -> Counts:
    """Count a store's documents, units and scored pairs.

    ``actions`` are all rows of table ``actions``, read before this call. ``units_and_missing`` loads the table
    ``units``, and makes the rows that the table lacks for visible events.
    """
    scored = folder.load("scores")  # first, so that the units of all scored pairs are there
    stored, missing = units_and_missing()
    documents = folder.read(folder.load("documents"), _OF_DOCUMENTS)
    scores = folder.read(scored, (*_OF_SCORES, "document_revision"), coded=True).unify_dictionaries()
    pairs = _grouped(current_scores(scores, documents), _OF_SCORES, [([], "count_all")])
    units = folder.read(stored, _OF_UNITS, coded=True)
    units = pa.concat_tables([units, missing.select(_OF_UNITS).cast(units.schema)]).unify_dictionaries()
    units = units.append_column("unknown", pc.is_null(units["weights_sha256"]).cast(pa.int64()))
    held = _grouped(units, (*_DOCUMENT, *_KIND), [("replicates", "sum"), ([], "count_all"), ("unknown", "sum")])
    held = held.rename_columns([*_DOCUMENT, *Held._fields])

    places, place_of = _places(current_documents(documents))
    held, pairs = (rows.join(place_of, _DOCUMENT) for rows in (held, pairs))

    def place(row: Mapping[str, Any]) -> Place:
        at = row["place"]
        return Place(row["study"], row["model"], None, None, None) if at is None else places[at]

    of_units = _count(held, Held._fields, lambda row: (place(row), Held(*(row[name] for name in Held._fields))))
    is_current = current_revision(actions)
    return Counts(
        _count(place_of, (), place),
        _count(current_units(held, actions), (), place, ("doc", "count_distinct")),
        of_units,
        Counter(
            {of: n for of, n in of_units.items() if is_current((of[0].study, of[1].action, of[1].action_revision))}
        ),
        _count(
            pairs,
            ("action", "action_revision"),
            lambda row: Scored(row["study"], row["model"], place(row).split, row["action"], row["action_revision"]),
            ("count_all", "sum"),
        ),
    )


def _places(documents: pa.Table) -> tuple[list[Place], pa.Table]:
    """Return each ``Place`` of documents once; also a row for each document, with its key and its place's index."""
    rows = documents.append_column("answered", _answered(documents["answers"].combine_chunks()))
    kinds = rows.group_by([*_OF_PLACE], use_threads=False).aggregate([("doc", "list")])
    docs = kinds["doc_list"].combine_chunks()
    number = pc.list_parent_indices(docs)
    place_of = {name: kinds[name].take(number) for name in _DOCUMENT[:2]} | {"doc": docs.flatten(), "place": number}
    places = []
    for row in kinds.select(_OF_PLACE).to_pylist():
        answers = Answers(row["source"], row["task"], row["scoring"]) if row["answered"] else None
        places.append(Place(row["study"], row["model"], row["split"], row["stratum"], answers))
    return places, pa.table(place_of)


def _answered(answers: pa.ListArray) -> pa.Array:
    """Return for each list of texts whether it has a text that is not empty."""
    stated = pc.greater(pc.binary_length(answers.flatten()), 0)
    answered = np.zeros(len(answers), dtype=np.bool_)
    answered[pc.list_parent_indices(answers).filter(stated).to_numpy()] = True
    return pa.array(answered)


def _grouped(rows: pa.Table, names: Sequence[str], sums: Sequence[tuple[Any, str]]) -> pa.Table:
    """Return the aggregates ``sums`` of each combination of values in the columns ``names``, with texts decoded."""
    sums_of = rows.group_by([*names], use_threads=False).aggregate([*sums])
    words = {field.name: field.type.value_type for field in sums_of.schema if pa.types.is_dictionary(field.type)}
    return sums_of.cast(pa.schema([field.with_type(words.get(field.name, field.type)) for field in sums_of.schema]))


def _count(
    rows: pa.Table,
    names: Sequence[str],
    key: Callable[[Mapping[str, Any]], Any],
    total: tuple[str | list[str], str] = ([], "count_all"),
) -> Counter[Any]:
    """Count rows, or aggregate ``total`` (column, function) over them, for each value of ``key``.

    ``key`` is a function of a mapping with ``study``, ``model``, ``place`` and the columns ``names``.
    """
    counts, of = Counter[Any](), ["study", "model", "place", *names]
    counted = rows.group_by(of, use_threads=False).aggregate([total])
    for row in counted.rename_columns([*of, "total"]).to_pylist():
        counts[key(row)] += row["total"]
    return counts
