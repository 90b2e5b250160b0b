"""A program that commits a little of everything to the store below its last argument, and says what it was told."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
from fixtures.stored_units import derive, make_unit

from schema.store.store import Store
from schema.tables import DOCUMENTS
from sql.catalog import write_catalog

STORE = "parent/store"  # below the root: making a store makes its parents
DOCS = ("d0", "d1", "d2", "d3")


def document_rows() -> pa.Table:
    """Return a row of each document."""
    named = {"study": "s", "model": "org/model", "split": "evaluation", "stratum": "all", "cluster": "c"}
    rows = [dict.fromkeys(DOCUMENTS.columns) | named | {"doc": doc} for doc in DOCS]
    return pa.Table.from_pylist(rows, schema=DOCUMENTS.schema)


def main(root: Path) -> None:
    def acknowledge(*words: str) -> None:
        with (root / "acknowledged").open("a") as told:
            told.write(" ".join(words) + "\n")

    store = Store.create(root / STORE)
    acknowledge("store")
    store.append_rows("documents", document_rows())
    acknowledge("documents")
    store.append_units([make_unit("d0")])
    acknowledge("d0")
    store.append_units([make_unit("d1"), make_unit("d2")])
    acknowledge("d1", "d2")
    derive(store)
    acknowledge("derived")
    write_catalog(store)
    acknowledge("catalogue")
    Store.create(root / STORE).append_units([make_unit("d3")])
    acknowledge("d3")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
