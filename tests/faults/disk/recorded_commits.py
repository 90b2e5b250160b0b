"""A program that commits some rows of every table to the store below its last argument, and prints acknowledgements."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

from faults.outcomes import MENDED, SURVIVED
from fixtures.stored_units import content, derive, expected, make_unit
from fixtures.table_rows import add_rows

from kvdrift.log.store import Store
from kvdrift.schema.errors import DamagedStoreError
from kvdrift.sql.catalog_file import write_catalog
from kvdrift.verification.files import check_logs
from kvdrift.verification.repair import repair

ACKNOWLEDGED = "acknowledged"  # a file below the root: each write to it says that something was acknowledged
STORE = "parent/store"  # below the root: making a store makes its parents
DOCS = ("d0", "d1", "d2", "d3")
DOCUMENTS = [{"doc": doc} for doc in DOCS]


def main(root: Path, *, catalog: bool = True) -> None:
    """Make all commits; the catalogue, which takes as long as everything else, may be left out."""

    def acknowledge(*words: str) -> None:
        with (root / ACKNOWLEDGED).open("a") as told:
            told.write(" ".join(words) + "\n")

    store = Store.create(root / STORE)
    acknowledge("store")
    add_rows(store, "documents", *DOCUMENTS)
    acknowledge("documents")
    store.append_units([make_unit("d0")])
    acknowledge("d0")
    store.append_units([make_unit("d1"), make_unit("d2")])
    acknowledge("d1", "d2")
    derive(store)
    acknowledge("derived")
    if catalog:
        write_catalog(store)
        acknowledge("catalogue")
    Store.create(root / STORE).append_units([make_unit("d3")])
    acknowledge("d3")


def go_on(location: Path, told: Collection[str]) -> str:
    """Open the store that a failure left, mend it if an error asks for it, and go on to the end.

    Args:
        location: The store.
        told: The acknowledgements, all of which must hold.

    Returns:
        The outcome: survived, or refused and then mended.
    """
    outcome = SURVIVED
    try:
        store = Store.create(location)
    except DamagedStoreError:
        outcome = MENDED
        assert check_logs(Store(location)).faults, "what is refused is named"
        assert list(repair(Store(location)))
        store = Store.create(location)
    docs = set(told) & set(DOCS)
    assert docs <= set(store.units()["doc"].to_pylist())
    assert docs <= set(store.read("events")["doc"].to_pylist())
    assert store.read("documents").num_rows == (len(DOCS) if "documents" in told else store.read("documents").num_rows)
    add_rows(store, "documents", *DOCUMENTS)
    store.append_units([make_unit(doc) for doc in DOCS])
    derive(store)
    assert content(store).equals(expected([make_unit(doc) for doc in DOCS]))
    assert sorted(store.units()["doc"].to_pylist()) == list(DOCS)
    assert store.read("documents").num_rows == len(DOCS)
    for table in ("events", "unit_moments", "trajectories", "steps"):
        assert sorted(store.read(table)["unit"].unique().to_pylist()) == sorted(store.units()["unit"].to_pylist())
    assert check_logs(store).faults == ()
    return outcome


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
