"""The upkeep of a live derivation: in another process, in a small part of the time, and never silently left out."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from fixtures.refusals import refused
from fixtures.stored_units import derive, make_unit

from kvdrift.live import upkeep
from kvdrift.live.upkeep import Upkeep
from log.store import Store
from schema.errors import OperationError


def test_rows_that_came_are_in_the_catalogue_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come while it is under way are not left out, and nothing begins again without rows."""
    store = Store.create(tmp_path / "store")
    kept = Upkeep(store.location)
    kept.begin_if_due()  # what was there before is in it too
    assert kept._under_way is not None
    store.append_units([make_unit()])
    kept.rows_came()
    kept.begin_if_due()  # under way
    kept.finish()
    with duckdb.connect(str(tmp_path / "store" / "catalog.duckdb"), read_only=True) as catalog:
        assert catalog.sql("select count(*) from events").fetchall() == [(make_unit().events.num_rows,)]
    monkeypatch.setattr(upkeep, "_SHARE", 0)
    kept.begin_if_due()
    assert kept._under_way is None


def test_it_is_left_alone_for_long_after_it_took_long(tmp_path: Path) -> None:
    kept = Upkeep(str(tmp_path))
    kept._cost, kept._ended = 1e6, 0.0
    kept.begin_if_due()
    assert kept._under_way is None


def test_what_it_could_not_do_is_said(tmp_path: Path) -> None:
    kept = Upkeep(str(tmp_path / "nowhere"))
    line = refused(kept.finish, error=OperationError)
    assert line == f"upkeep: {tmp_path}/nowhere is not a kvdrift store: there is no such folder"


def test_a_store_behind_a_url_has_files_to_keep_up_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.create(tmp_path / "store")
    monkeypatch.setattr(upkeep, "is_local", lambda _: False)
    called = []
    monkeypatch.setattr(Store, "gather", lambda store: called.append(store.location))
    upkeep.keep_up(str(tmp_path / "store"), compacts=True)
    assert len(called) == 1
    assert not (tmp_path / "store" / "catalog.duckdb").exists()


def test_files_that_a_derivation_left_are_put_together(tmp_path: Path) -> None:
    """Files that are too large for the derivation's own process are merged, too; with --no-compact none is."""
    tables = ("events", "units", "trajectories", "steps")
    store = Store.create(tmp_path / "store")
    for number in range(20):
        store.append_units([make_unit(f"d{number}")])
        derive(store)
    before = {table: store.read(table).sort_by("doc") for table in tables}
    left = Upkeep(store.location, compacts=False)
    left.finish()
    assert [len(store.paths(table)) for table in tables] == [20, 20, 20, 20]
    assert (tmp_path / "store" / "catalog.duckdb").exists()
    Upkeep(store.location).finish()
    assert [len(store.paths(table)) for table in tables] == [1, 1, 1, 1]
    assert {table: store.read(table).sort_by("doc") for table in tables} == before
