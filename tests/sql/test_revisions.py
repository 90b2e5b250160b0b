"""Superseded revisions: every view is that of a store in which only the current units ever were."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest
from fixtures.altered_events import with_column
from fixtures.branched_units import NAMES, make_rows, swrb_unit
from fixtures.stored_units import make_unit
from fixtures.table_rows import add_rows

from kvdrift.flows.estimate.stored import analyze_stored
from kvdrift.log.store import Store, Unit
from kvdrift.schema.errors import InputError
from kvdrift.sql.catalog import open_views, view_texts
from kvdrift.sql.catalog_file import write_catalog
from kvdrift.transforms.pipeline import run_derivation

# What says which tables or files were read, or what was there before.
HISTORY = {"revisions", "superseded", "actions", "identities"}
MARKS = {"action_revision", "unit"}


def action_row(action: str, revision: int = 0, *, dropped: bool = False) -> dict[str, Any]:
    study = NAMES["study"] if action == NAMES["action"] else "s"  # of the unit of residual branching
    return {"study": study, "action": action, "action_revision": revision, "dropped": dropped}


def store_of(folder: Path, actions: list[dict[str, Any]], units: list[Unit]) -> Store:
    store = Store.create(folder)
    add_rows(store, "documents", {"doc": "d0"}, {"doc": "d1"})
    add_rows(store, "actions", *actions)
    store.append_units(units)
    run_derivation(store.location)
    return store


def current_units(revision: int) -> list[Unit]:
    """Return units of the actions kept and redone; a redone action draws other tokens than before."""
    kept = [make_unit(doc, action="kept") for doc in ("d0", "d1")]
    again = [make_unit(doc, action="redone", action_revision=revision) for doc in ("d0", "d1")]
    return [*kept, *again, make_unit("d1", action="redone", first=4, action_revision=revision)]


def old_unit(doc: str, action: str) -> Unit:
    """Other events under the names of a current unit."""
    other = make_unit(doc, action=action, first=8)
    replicates = [replicate - 8 for replicate in other.events["replicate"].to_pylist()]
    return Unit(other.record | {"first_replicate": 0}, with_column(other.events, "replicate", replicates))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Revision 0 of redone is superseded and dropped is dropped; both have units of either estimator."""
    store = store_of(
        tmp_path_factory.mktemp("redone") / "store",
        [action_row("kept"), action_row("redone"), action_row("dropped"), action_row("snapkv")],
        [*(old_unit(doc, action) for doc in ("d0", "d1") for action in ("redone", "dropped")), swrb_unit(make_rows())],
    )
    later = [action_row("redone", 1), action_row("dropped", 1, dropped=True), action_row("snapkv", 1, dropped=True)]
    add_rows(store, "actions", *later)
    store.append_units(current_units(1))
    run_derivation(store.location)
    return store


@pytest.fixture
def redone(made: Store, tmp_path: Path) -> Store:
    """A copy of the store, for tests that write to it."""
    return Store.open(shutil.copytree(made.location, tmp_path / "redone"))


@pytest.mark.slow
def test_every_view_is_that_of_a_store_with_current_units_alone(redone: Store, tmp_path: Path) -> None:
    fresh = store_of(tmp_path / "fresh", [action_row("kept"), action_row("redone")], current_units(0))
    with open_views(redone) as ours, open_views(fresh) as theirs:
        for view in view_texts():
            if view in HISTORY:
                continue
            columns = [name for name in theirs.rows(view).column_names if name not in MARKS]
            assert ours.rows(view).select(columns).equals(theirs.rows(view).select(columns)), view
        assert ours.rows("actions")["action"].to_pylist() == ["kept", "redone"]
        assert set(ours.rows("trajectories")["action"].to_pylist()) == {"kept", "redone"}


def test_the_history_stays(redone: Store) -> None:
    with open_views(redone) as views:
        rows = {(row["action"], row["action_revision"]): row for row in views.rows("revisions").to_pylist()}
        assert {key: (row["current"], row["units"]) for key, row in rows.items()} == {
            ("kept", 0): (True, 2), ("redone", 0): (False, 2), ("redone", 1): (True, 3),
            ("dropped", 0): (False, 2), ("snapkv", 0): (False, 1),
        }  # fmt: skip
        stored = views.sql("select count(*) from stored.events").fetchall()
    assert stored == [(redone.read("events").num_rows,)]
    assert redone.units().num_rows == 5
    assert redone.read("units").num_rows == 10


@pytest.mark.slow
def test_no_view_shows_an_estimate_of_superseded_units(redone: Store) -> None:
    """From the moment that an action is superseded: before new units and new estimates are there."""
    assert analyze_stored(redone, "s", "org/model") > 0
    with open_views(redone) as views:
        rows = views.rows("results", stratum="pooled", quantity="gap").to_pylist()
        before = views.rows("estimates", action="kept", baseline=None)
    made_from = {(row["action"], row["action_revision"], row["baseline"], row["baseline_revision"]) for row in rows}
    assert made_from == {("kept", 0, "redone", 1), ("redone", 1, "kept", 0)}
    pairs = (("kept", "redone", 0, 1), ("redone", "kept", 1, 0), ("kept", "full", 0, 0))
    names = ("action", "baseline", "action_revision", "baseline_revision")
    add_rows(redone, "calibration", *(dict(zip(names, pair, strict=True)) for pair in pairs))
    add_rows(redone, "actions", action_row("redone", 2))
    with open_views(redone) as views:
        for view in ("estimates", "internal.results"):
            named = views.sql(f"select distinct action, baseline from {view}").fetchall()  # noqa: S608 - of this test
            assert named == [("kept", None)], view
        assert views.rows("estimates").equals(before)
        assert views.rows("calibration")["baseline"].to_pylist() == ["full"]
        assert views.sql("select count(*) from stored.calibration").fetchall() == [(3,)]


def test_a_plain_client_of_the_catalogue_sees_current_units_alone(redone: Store) -> None:
    with duckdb.connect(str(write_catalog(redone)), read_only=True) as connection:
        found = connection.sql("select action, count(*) from units group by action order by action").fetchall()
    assert found == [("kept", 2), ("redone", 3)]


def test_events_of_another_revision_than_the_units_are_refused(tmp_path: Path) -> None:
    unit = make_unit(action_revision=1)
    with pytest.raises(InputError, match="events: action_revision is '1', must be '0' as in the unit"):
        Store.create(tmp_path / "store").append_units([Unit(unit.record | {"action_revision": 0}, unit.events)])
