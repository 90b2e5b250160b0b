"""The removal of a document from a store for good: nothing is left of its id, prompt and events in any file.

The order lets a removal that was killed anywhere be called again: first the document is recorded as removed, so that no
writer brings it back; then its rows go, each table by one commit, and the tables from which others are made come last;
then the history of the tables and all other files that may show the document are deleted.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvdrift.log.delta.durability import sync
from kvdrift.log.forgotten import add_forgotten, forgotten_documents
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, nearest, reading
from kvdrift.schema.estimate_tables import LOOKS, PLANS
from kvdrift.schema.frozen_text import frozen_sha256, frozen_text
from kvdrift.schema.location import is_local
from kvdrift.schema.locking import TEMPORARY, repaired, run_alone, sweep
from kvdrift.schema.tables import TABLES
from kvdrift.sql.catalog_file import CATALOG_NAME, refresh_catalog

# All other tables are made from these, so the rows of these go last, in this order.
_SOURCES = ("units", "events", "prompts", "documents")
_ESTIMATES = ("results", "calibration", "tokens")  # of all documents together; the next analysis makes them again
_OF_ONE = tuple(name for name, table in TABLES.items() if "doc" in table.columns and name not in _SOURCES)
_FILES: Final = (CATALOG_NAME, "report", "set-aside", f"{TEMPORARY}*")
"""Other parts of a store that may show a document."""

_NAMES: Final = ("study", "model", "doc")

Key = tuple[str, str]  # study and model


@dataclass(frozen=True)
class Removal:
    """A document that is to be removed: the studies that have or had it, and its numbers of units and events."""

    doc: str
    places: tuple[Mapping[str, Any], ...]  # study, model, split and stratum
    units: int
    events: int

    @property
    def keys(self) -> set[Key]:
        """The studies and models that have, or had, the document."""
        return {(place["study"], place["model"]) for place in self.places}


def find_removal(store: Store, doc: str, study: str | None) -> Removal:
    """Find a document of one study, or of all studies of a local store.

    Raises:
        InputError: The store is behind a URL, or neither has nor had such a document.
    """
    if not is_local(store.location):
        raise InputError(
            f"{store.location}: documents can be removed from a local store only, since an object store may keep "
            "versions; copy the store to a disk, remove the document there, and copy the store back to another place"
        )

    places, rows_by_table, forgotten = (
        dict[Key, dict[str, Any]](),
        dict[str, pa.Table](),
        forgotten_documents(store.location),
    )
    of_document = pc.field("doc") == doc if study is None else (pc.field("doc") == doc) & (pc.field("study") == study)
    with reading(store.location):
        for table, names in (("documents", (*_NAMES, "split", "stratum")), ("units", _NAMES), ("events", _NAMES)):
            rows_by_table[table] = store.dataset(table).to_table(columns=list(names), filter=of_document)
        for path in _pieces(store):
            rows_by_table[path.name] = pq.read_table(path, columns=list(_NAMES), filters=of_document)
    for rows in rows_by_table.values():
        for row in rows.group_by(rows.column_names).aggregate([]).to_pylist():
            places.setdefault((row["study"], row["model"]), {"split": "", "stratum": "", **row})
    for line in forgotten.lines:  # an earlier call may have been killed
        if study in {None, line["study"]} and forgotten.of(line["study"], line["model"]).has(doc):
            places.setdefault((line["study"], line["model"]), dict(line))
    if not places:
        where = store.location if study is None else f"{store.location}: study '{study}'"
        known = store.read("documents", columns=["doc"])["doc"].unique().to_pylist()
        raise InputError(f"{where}: no document '{doc}'; {nearest(doc, known) if known else 'the store has none'}")
    return Removal(doc, tuple(places.values()), rows_by_table["units"].num_rows, rows_by_table["events"].num_rows)


def remove_document(store: Store, removal: Removal, say: Callable[[str], None]) -> None:
    """Remove a document for good from a local store.

    Runs and commits of other processes wait until the removal ends, or end before it begins. Readers of earlier
    versions are refused from then on. Copies of the store, and pages elsewhere, stay as they are.
    """
    with run_alone(store.location, say), repaired(store.location):
        add_forgotten(store.location, removal.places, removal.doc)
        store.reconcile()
        for table, change in _changes(store, removal):
            docs = [removal.doc] if "doc" in TABLES[table].columns else None
            store.rewrite_rows(table, change, docs)
        for table in (*_OF_ONE, *_SOURCES, *_ESTIMATES, LOOKS.name, PLANS.name):
            store.forget_history(table)
        _remove_files(store, removal)
    refresh_catalog(Store(store.location))


def _changes(store: Store, removal: Removal) -> Iterator[tuple[str, Callable[[pa.Table], pa.Table]]]:
    """Yield each table to change, in order, with the function that returns its changed rows."""
    revised = {
        row["plan_sha256"]: (text, frozen_sha256(text))
        for row in store.read("plans").to_pylist()
        if (row["study"], row["model"]) in removal.keys and (text := without_document(row["plan"], removal.doc))
    }

    def cited(rows: pa.Table) -> pa.Table:
        """Return the rows of ``looks`` or ``plans`` with the new hash of each changed plan in place of the old one."""
        hashes = rows["plan_sha256"].to_pylist()
        if not revised.keys() & set(hashes):
            return rows
        return _with(rows, "plan_sha256", [revised[sha256][1] if sha256 in revised else sha256 for sha256 in hashes])

    def planned(rows: pa.Table) -> pa.Table:
        hashes, texts = (rows[name].to_pylist() for name in ("plan_sha256", "plan"))
        if not revised.keys() & set(hashes):
            return rows
        texts = [revised[sha256][0] if sha256 in revised else text for sha256, text in zip(hashes, texts, strict=True)]
        return _with(cited(rows), "plan", texts)

    def unestimated(rows: pa.Table) -> pa.Table:
        return _filtered(rows, pc.invert(_of_keys(rows, removal.keys)))

    def removed(rows: pa.Table) -> pa.Table:
        gone = pc.and_(pc.equal(rows["doc"], removal.doc), _of_keys(rows, removal.keys))
        return _filtered(rows, pc.invert(gone))

    yield from ((table, unestimated) for table in _ESTIMATES)
    yield LOOKS.name, cited  # before the plans: from changed plans a second call could not find the new hashes
    yield PLANS.name, planned
    yield from ((table, removed) for table in (*_OF_ONE, *_SOURCES))


def without_document(plan: str, doc: str) -> str | None:
    """Return a plan's text without a document; None if the plan does not list the document.

    ``forgotten`` in the plan's JSON counts the removed documents by split and stratum.
    """
    content = json.loads(plan)
    lacks = Counter(
        (split, stratum)
        for split, strata in content.get("documents", {}).items()
        for stratum, rows in strata.items()
        for row in rows
        if row["doc"] == doc
    )
    orders = content.get("sequential", {}).get("order", {})
    if not lacks and not any(doc in order for order in orders.values()):
        return None
    for strata in content.get("documents", {}).values():
        for stratum, rows in strata.items():
            strata[stratum] = [row for row in rows if row["doc"] != doc]
    for stratum, order in orders.items():
        orders[stratum] = [name for name in order if name != doc]
    forgotten = content.setdefault("forgotten", {})
    for (split, stratum), count in lacks.items():
        counts = forgotten.setdefault(split, {})
        counts[stratum] = counts.get(stratum, 0) + count
    return frozen_text(content)


def _remove_files(store: Store, removal: Removal) -> None:
    """Delete the document's rows in folder ``pieces``, and the store's other files that may show the document."""
    root = Path(store.location)
    for path in _pieces(store):
        rows = pq.read_table(path)
        left = _filtered(rows, pc.invert(pc.and_(pc.equal(rows["doc"], removal.doc), _of_keys(rows, removal.keys))))
        if left is not rows:
            aside = path.with_name(f".{path.name}.part")
            pq.write_table(left, aside, compression="zstd", write_page_checksum=True)
            aside.replace(path)
            sync(path.parent)
    sweep(root)
    for path in (path for pattern in _FILES for path in root.glob(pattern)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    sync(root)


def _pieces(store: Store) -> list[Path]:
    return sorted(Path(store.location, "pieces").rglob("*.parquet"))


def _of_keys(rows: pa.Table, keys: set[Key]) -> pa.ChunkedArray:
    masks = [pc.and_(pc.equal(rows["study"], study), pc.equal(rows["model"], model)) for study, model in keys]
    return functools.reduce(pc.or_, masks)


def _filtered(rows: pa.Table, kept: pa.ChunkedArray) -> pa.Table:
    """Return the rows for which ``kept`` is true; the same object if it is true for all."""
    left = rows.filter(kept)
    return rows if left.num_rows == rows.num_rows else left


def _with(rows: pa.Table, name: str, values: list[Any]) -> pa.Table:
    at = rows.column_names.index(name)
    return rows.set_column(at, rows.schema.field(name), pa.array(values, rows.schema.field(name).type))
