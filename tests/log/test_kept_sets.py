"""Kept sets: appended units of a document, action, revision and estimator must keep the entries that stored units keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures.older_stores import make_empty_store
from fixtures.refusals import refused
from fixtures.stored_units import make_unit

from log.store import Store
from log.units.kept_sets import unlike_units
from schema.errors import UnlikeUnitsError

KEPT, OTHERS = ["ab" * 32, "cd" * 32], ["ab" * 32, "ef" * 32]
LINE = (
    "action 'snapkv', document 'd0' of study 's': replicates [0, 4) and [4, 8) keep unlike entries (layer 1: kept_sha256 "
    "cdcdcdcdcdcd and efefefefefef), so something beside source and parameters decides, such as the environment, a "
    "file, a hash seed or the machine; kvdrift run STUDY.toml --redo snapkv generates its units anew"
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(tmp_path / "store")
    made.append_units([make_unit(kept_sha256=KEPT, read_checksums=["1" * 16] * 2)])
    return made


def test_a_unit_that_keeps_other_entries_is_refused_and_nothing_is_stored(store: Store) -> None:
    before = store.versions()
    both = [make_unit("d1"), make_unit(first=4, kept_sha256=OTHERS)]
    assert refused(store.append_units, both, error=UnlikeUnitsError) == LINE
    assert store.versions() == before
    assert refused(Store.open(store.location).append_units, both, error=UnlikeUnitsError) == LINE


def test_units_that_are_given_together_are_compared(store: Store) -> None:
    given = [make_unit("d1", kept_sha256=KEPT), make_unit("d1", first=4, kept_sha256=OTHERS)]
    assert "document 'd1'" in refused(store.append_units, given, error=UnlikeUnitsError)


def test_what_is_read_back_is_compared_too(store: Store) -> None:
    other = make_unit(first=4, kept_sha256=KEPT, read_checksums=["1" * 16, "2" * 16])
    line = refused(store.append_units, [other], error=UnlikeUnitsError)
    assert "read unlike entries (layer 1: read_checksums 111111111111 and 222222222222)" in line


@pytest.mark.parametrize(
    "changed",
    [
        {"first": 4, "kept_sha256": None},  # unknown, as of an older version or another generator
        {"first": 4, "kept_sha256": KEPT, "read_checksums": None},
        {"first": 4, "kept_sha256": KEPT, "read_checksums": ["1" * 16] * 2},
        {"doc": "d1", "kept_sha256": OTHERS},
        {"action": "recent", "kept_sha256": OTHERS},
        {"kept_sha256": OTHERS, "action_revision": 1},
    ],
)
def test_other_units_are_taken(store: Store, changed: dict[str, Any]) -> None:
    assert store.append_units([make_unit(**changed)]) == 1
    assert list(unlike_units(store.read("units").to_pylist())) == []


def test_another_number_of_layers_is_told() -> None:
    units = [make_unit(kept_sha256=KEPT).record, make_unit(first=4, kept_sha256=KEPT[:1]).record]
    (line,) = unlike_units({"read_checksums": None, **unit} for unit in units)
    assert "(layer 1: kept_sha256 cdcdcdcdcdcd and none)" in line


def test_a_store_of_the_version_before_takes_and_compares_units(tmp_path: Path) -> None:
    store = Store.open(make_empty_store(tmp_path / "old", 9))
    store.append_units([make_unit(kept_sha256=KEPT)])
    assert refused(store.append_units, [make_unit(first=4, kept_sha256=OTHERS)], error=UnlikeUnitsError) == LINE
