"""How many documents there are, and how many have which units: counted from rows once, where these are compacted.

A compacted file of ``documents`` or ``units`` has the counts of its rows in its footer. The file does not change, nor
does a row of ``documents``, so the counts hold as long as the file is visible. Later rows are counted as they are.
Which units are current is not in the counts: it changes with every redone action, and they tell revisions apart.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schema.rows import combined_codes, run_begins
from schema.store.appends import is_compacted
from schema.store.compaction.members import packed, unpacked
from schema.store.delta.folder import DeltaFolder
from schema.store.delta.snapshot import Snapshot
from schema.store.parquet_files import StoredFile

_FOOTER = "kvdrift.counts"
_WORTHWHILE = 8  # rows to a count; with fewer, reading the counts costs what reading the rows does

_PLACE = ("study", "model", "split", "stratum")
_DOCUMENT = ("study", "model", "doc")
_OF_DOCUMENTS = (*_DOCUMENT, "split", "stratum")
_OF_UNITS = (*_DOCUMENT, "action", "action_revision", "estimator", "replicates", "weights_sha256")


class Place(NamedTuple):
    """Where documents belong; ``split`` and ``stratum`` are None where only units name a document."""

    study: str
    model: str
    split: str | None
    stratum: str | None


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


Holdings = Counter[tuple[Place, tuple[Held, ...]]]
"""The number of documents of a place that have just these units."""


def count_documents(documents: pa.Table) -> Counter[Place]:
    """Count documents.

    Args:
        documents: Rows of ``documents``, in study, model, split and stratum at least.

    """
    counted = documents.group_by(list(_PLACE)).aggregate([([], "count_all")])
    return Counter({Place(*place): count for *place, count in _rows(counted, (*_PLACE, "count_all"))})


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
    return Counter({(place, tuple(kinds[one] for one in own)): count for (place, *own), count in found.items()})


def footer_of_counts(folder: DeltaFolder, table: str, rows: pa.Table) -> dict[str, str]:
    """Return the footer of a file of a table's rows: their counts, or nothing where these would save little.

    Raises:
        InputError: A file of ``documents`` is missing or damaged.

    """
    counts: Mapping[Any, int] = {}
    if table == "documents":
        counts = count_documents(rows)
    elif table == "units":
        counts = count_units(rows, folder.read(folder.load("documents"), _OF_DOCUMENTS))
    return {_FOOTER: packed(list(counts.items()))} if counts and len(counts) * _WORTHWHILE <= rows.num_rows else {}


def stored_documents(folder: DeltaFolder, documents: Snapshot) -> Counter[Place]:
    """Count the visible documents.

    Raises:
        InputError: A file is missing or damaged.

    """
    found, others = Counter[Place](), list[str]()
    for file in documents.files():
        counts = _remembered(folder, documents, file)
        if counts is None:
            others.append(file.path)
        else:
            found.update({Place(*place): count for place, count in counts})
    if others:
        found.update(count_documents(folder.read(documents, _PLACE, paths=others, coded=True).unify_dictionaries()))
    return found


def stored_units(folder: DeltaFolder, units: Snapshot, missing: pa.Table, documents: Snapshot) -> Holdings:
    """Count the documents that visible units are of, superseded units too.

    The counts of one compacted file, the largest, are taken as they are, but for documents that have later rows.

    Args:
        folder: The store's tables.
        units: The table ``units``.
        missing: Rows that it lacks for visible events.
        documents: The table ``documents``.

    Raises:
        InputError: A file is missing or damaged.

    """
    largest = max(units.files(), key=lambda file: (is_compacted(file.path), file.rows), default=None)
    counts = None if largest is None else _remembered(folder, units, largest)
    found: Holdings = Counter(
        {(Place(*place), tuple(Held(*one) for one in own)): count for (place, own), count in counts or ()}
    )
    if largest is None or counts is None or any(place.split is None for place, _ in found):
        rows = _with_missing(folder.read(units, _OF_UNITS, coded=True), missing)
        return count_units(rows, folder.read(documents, _OF_DOCUMENTS, coded=True))
    later = [path for path in units.paths() if path != largest.path]
    if not later and not missing.num_rows:
        return found
    new = _with_missing(folder.read(units, _OF_UNITS, paths=later, coded=True), missing)
    names = pa.array(new["doc"].cast(pa.string()).unique().to_pylist(), pa.string())
    bounds = pc.min_max(names).as_py()  # they tell Arrow which row groups need not be read
    named = (pc.field("doc") >= bounds["min"]) & (pc.field("doc") <= bounds["max"]) & pc.field("doc").isin(names)
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
    said = footer.get(_FOOTER.encode())
    try:
        return None if said is None else list(unpacked(said))
    except ValueError:
        raise folder.damaged(f"table '{snapshot.table}' is damaged ({file.path}: no counts in its footer)") from None


def _with_missing(rows: pa.Table, missing: pa.Table) -> pa.Table:
    return pa.concat_tables([rows, missing.select(rows.column_names).cast(rows.schema)]).unify_dictionaries()


def _places(keys: pa.Table, documents: pa.Table) -> list[Place]:
    """The place of each document, in the order of ``keys``."""
    known = {tuple(document): (split, stratum) for *document, split, stratum in _rows(documents, _OF_DOCUMENTS)}
    found = []
    for study, model, doc in _rows(keys, _DOCUMENT):
        split, stratum = known.get((study, model, doc), (None, None))
        found.append(Place(study, model, split, stratum))
    return found


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
