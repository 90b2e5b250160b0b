"""Moments of units, which views pool."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fixtures.file_faults import file_faults
from fixtures.refusals import refused
from fixtures.stored_units import make_unit
from fixtures.table_rows import add_rows

from kvdrift.log.store import Store, Unit
from kvdrift.schema.tables import STEPS
from kvdrift.schema.windows import Windows
from kvdrift.sql.catalog import open_views
from kvdrift.sql.contracts import contract
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.verification.repair import repair

WINDOWS = {"horizon": 8, "cohort_bound": 4, "early_last": 1, "late_first": 4, "first_block_last": 2,
           "second_block_last": 4, "agreement_run": 2, "saturation_threshold": 0.9}  # fmt: skip
POOLED = ("moments", "position_moments", "lag_moments", "depth_moments")
ALL = {(doc, action) for doc in ("d0", "d1") for action in ("one", "two")}
ROUNDING = 1e-12  # units are added in another order than their steps


def declare(store: Store, windows: dict[str, Any]) -> None:
    add_rows(store, "studies", windows)


def add_documents(store: Store, *docs: str) -> None:
    add_rows(store, "documents", *({"doc": doc} for doc in docs))


def add_actions(store: Store, revision: int, *names: str) -> None:
    add_rows(store, "actions", *({"action": name, "action_revision": revision} for name in names))


def generate(store: Store, *units: Unit) -> None:
    store.append_units(units)
    run_derivation(store.location)


def pooled(store: Store, versions: dict[str, int] | None = None) -> dict[str, pa.Table]:
    """The rows of the views that pool units."""
    with open_views(store, versions) as views:
        return {view: views.rows(view) for view in POOLED}


def assert_same(found: dict[str, pa.Table], wanted: dict[str, pa.Table]) -> None:
    for view, rows in wanted.items():
        assert found[view].num_rows == rows.num_rows > 0, view
        for name in rows.column_names:
            ours, others = found[view][name], rows[name]
            if pa.types.is_floating(others.type):
                np.testing.assert_allclose(ours.to_numpy(), others.to_numpy(), rtol=ROUNDING, atol=ROUNDING)
            else:
                assert ours.equals(others), f"{view}.{name}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two documents under two actions, one of them with two units."""
    made = Store.create(tmp_path_factory.mktemp("made") / "store")
    declare(made, WINDOWS)
    add_documents(made, "d0", "d1")
    add_actions(made, 0, "one", "two")
    generate(made, *(make_unit(doc, action=action) for doc, action in sorted(ALL)))
    generate(made, make_unit("d1", action="one", first=4))
    return made


@pytest.fixture
def store(made: Store, tmp_path: Path) -> Store:
    """A copy of the store, for tests that write to it."""
    return Store.open(shutil.copytree(made.location, tmp_path / "it's a [store]* {x}"))


def test_the_views_read_no_steps(store: Store) -> None:
    for file in store.files("steps"):
        pq.write_table(STEPS.schema.empty_table(), file)
    with open_views(store) as views:
        assert views.rows("steps").num_rows == 0
        for view in ("decomposition", "contrasts", "generation_clock", "branch_clock", "entry", "depth_moments"):
            assert views.rows(view).num_rows > 0, view


def test_moments_are_kept_in_the_order_of_their_grain(store: Store) -> None:
    """Otherwise the last bits of sums over documents would depend on the order in which moments were stored."""
    add_documents(store, "a")
    generate(store, *(make_unit("a", action=action) for action in ("two", "one")))
    with open_views(store, kept=POOLED) as views:
        for view in POOLED:
            keys = views.sql(f"from {contract(view).relation} select {', '.join(contract(view).grain)}").fetchall()
            assert len(keys) >= 6
            assert keys == sorted(keys), view


def test_a_study_that_is_declared_after_its_units(tmp_path: Path) -> None:
    """Its units have the moments of the windows that a log of another generator gets."""
    first, alike, other = (undeclared(tmp_path / name) for name in ("first", "alike", "other"))
    before = pooled(alike)
    declare(alike, vars(Windows.of(8)))
    assert_same(pooled(alike), before)
    declare(other, WINDOWS)
    line = refused(pooled, other)
    assert line.endswith(
        "study 's' was declared after its units were derived, with other windows: kvdrift verify STORE --repair makes "
        "their moments again"
    )
    assert list(repair(other, file_faults(other)))
    declare(first, WINDOWS)
    first.withdraw_units("unit_moments", first.units()["unit"].to_pylist())
    run_derivation(first.location)
    assert_same(pooled(Store.open(other.location)), pooled(Store.open(first.location)))


def undeclared(folder: Path) -> Store:
    """A derived store whose study has no row."""
    store = Store.create(folder)
    add_documents(store, "d0")
    add_actions(store, 0, "one")
    generate(store, make_unit("d0", action="one"))
    return store


def test_a_document_that_becomes_known_after_its_trajectories(store: Store) -> None:
    generate(store, make_unit("late", action="one"))
    assert "late" not in pooled(store)["moments"]["doc"].to_pylist()
    add_documents(store, "late")
    assert "late" in pooled(store)["moments"]["doc"].to_pylist()


def test_redone_and_dropped_actions(store: Store) -> None:
    add_actions(store, 1, "one")
    assert set(pooled(store)["moments"]["action"].to_pylist()) == {"two"}
    generate(store, make_unit("d0", action="one", action_revision=1))
    rows = pooled(store)["moments"].to_pylist()
    assert [(row["doc"], row["replicates"]) for row in rows if row["action"] == "one"] == [("d0", 4)]
