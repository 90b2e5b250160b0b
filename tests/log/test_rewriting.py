"""Files rewritten by kvdrift or by any other Delta tool have the same rows, whoever reads or writes meanwhile."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from fixtures.command import call
from fixtures.refusals import refused
from fixtures.stored_units import content, derive, expected, make_unit
from fixtures.swrb_events import drawn_unit, random_laws
from fixtures.table_rows import add_rows, sorted_rows

from kvdrift.log import compaction
from kvdrift.log.compaction import too_many
from kvdrift.log.delta import parquet_files
from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.parquet_files import StoredFile, encode_parquet, replace_file
from kvdrift.log.store import Store, Unit
from kvdrift.log.units.unit import DERIVED_TABLES
from kvdrift.schema.errors import DamagedStoreError
from kvdrift.schema.tables import TABLES
from kvdrift.schema.windows import Windows
from kvdrift.sql.catalog import open_views, view_texts
from kvdrift.transforms.compaction import compact
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.verification.units import rows_by_unit

H = 6
NAMES = {"study": "s", "model": "m"}
ALL_DERIVED = tuple(DERIVED_TABLES)
FILES = ("events", *DERIVED_TABLES)


def some_units(doc: str, first: int = 0) -> list[Unit]:
    """Two coupled pairs and two residual branchings."""
    chance = np.random.default_rng([first, *doc.encode()])
    laws = random_laws(chance, H, apart=0.9)
    names = {**NAMES, "doc": doc, "action": "snapkv"}
    measured = {"decode_seconds": 0.25, "kept_sha256": ["ab"]}
    return [drawn_unit(names, one, laws, chance, range(first, first + 2), **measured) for one in ("plain", "swrb")]


def add_document(store: Store, doc: str) -> None:
    add_rows(store, "documents", {"model": "m", "doc": doc})


def add_action(store: Store, revision: int) -> None:
    add_rows(store, "actions", {"action": "snapkv", "action_revision": revision})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Three documents under both estimators, grown once; every table has several files."""
    store = Store.create(tmp_path_factory.mktemp("made") / "store")
    add_rows(store, "studies", {"model": "m", **vars(Windows.of(H))})
    add_action(store, 0)
    for doc in ("d2", "d0", "d1"):
        add_document(store, doc)
        store.append_units(some_units(doc))
    derive(store, ALL_DERIVED)
    store.append_units(some_units("d0", first=2))
    derive(store, ALL_DERIVED)
    return store


@pytest.fixture
def store(made: Store, tmp_path: Path) -> Store:
    """A copy of the store, for tests that write to it."""
    return Store.open(shutil.copytree(made.location, tmp_path / "it's a [store]* {x} b%ü#1"))


def assert_same(found: pa.Table, expected: pa.Table, what: str) -> None:
    """Numbers may differ by the rounding of a sum in another order."""
    assert found.schema.equals(expected.schema), what
    for name in expected.column_names:
        if pa.types.is_floating(expected.schema.field(name).type):
            values, wanted = (table[name].to_numpy() for table in (found, expected))
            np.testing.assert_allclose(values, wanted, rtol=1e-12, atol=1e-12, err_msg=f"{what}.{name}")
        else:
            assert found[name].equals(expected[name]), f"{what}.{name}"


def assert_whole(store: Store) -> None:
    """Nothing contradicts itself, and nothing is left to derive."""
    store.check_made_from_events(store.versions())
    assert store.all_underived().size == 0
    assert store.pending().whole
    assert store.reconcile() == 0


def assert_compacted(store: Store) -> None:
    assert all(len(store.paths(table)) == 1 for table in (*FILES, "unit_moments", "units", "documents"))


def test_rows_and_views_are_the_same(store: Store) -> None:
    views = sorted(view_texts())
    with open_views(store, kept=views) as opened:
        before = {view: opened.rows(view) for view in views}
    held, data = sorted_rows(store), {table: store.data_version(table) for table in TABLES}
    done = {table: (before.files, after.files) for table, (before, after) in compact(store).items()}
    assert done["events"] == (4, 1)
    assert done["steps"] == (2, 1)
    assert_compacted(store)
    assert_whole(store)
    assert sorted_rows(store) == held
    assert {table: store.data_version(table) for table in TABLES} == data, "a rewritten file is no new data"
    for table in ("events", "units", "documents", "trajectories", "branching_depths"):
        in_order = store.read(table).sort_by([(name, "ascending") for name in TABLES[table].key])
        assert store.read(table).equals(in_order), table
    with open_views(store, kept=views) as opened:
        for view in views:
            assert_same(opened.rows(view), before[view], view)
    assert compact(store) == {}, "nothing to compact"


def test_a_row_group_has_its_own_words_alone() -> None:
    """Rows that are put together come with one dictionary of all their words."""
    rows = pa.table({"word": [f"{number:064x}" for number in range(1000)], "number": range(1000)})
    coded = rows.set_column(0, "word", rows["word"].dictionary_encode())
    assert encode_parquet(coded, row_group=10) == encode_parquet(rows, row_group=10)


def test_what_is_there_is_there_once(store: Store) -> None:
    compact(store)
    before = store.versions()
    again = [one for doc in ("d0", "d1", "d2") for one in some_units(doc)]
    assert Store.open(store.location).append_units(again) == 0
    assert store.versions() == before
    wrong = Unit(again[0].record | {"first_replicate": 1, "replicates": 1}, again[0].events.slice(H, H))
    assert "overlaps the replicates [0, 2)" in refused(store.append_units, [wrong])
    assert store.append_units([*again, *some_units("d1", first=2)]) == 2
    add_action(store, 1)
    redone = [
        Unit(one.record | {"action_revision": 1}, one.events.drop_columns(["action_revision"]))
        if "action_revision" in one.events.column_names else Unit(one.record | {"action_revision": 1}, one.events)
        for one in some_units("d2")
    ]  # fmt: skip
    assert store.append_units(redone) == 2
    assert store.units().num_rows == 2
    derive(store, ALL_DERIVED)
    held = sorted_rows(store)
    compact(store)
    assert_compacted(store)
    assert_whole(store)
    assert sorted_rows(store) == held


@pytest.mark.slow
def test_a_kill_before_any_commit_is_gone_on_from(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, real, location = sorted_rows(store), DeltaFolder.commit, store.location
    tables: list[str] = []

    def counted(folder: DeltaFolder, table: str, *arguments: Any, **options: Any) -> int:
        if len(tables) == kill_at:
            raise KeyboardInterrupt
        tables.append(table)
        return real(folder, table, *arguments, **options)

    for kill_at in range(14):
        killed = Store.open(shutil.copytree(location, tmp_path / str(kill_at)))
        tables.clear()
        monkeypatch.setattr(DeltaFolder, "commit", counted)
        try:
            compact(killed)
        except KeyboardInterrupt:
            killed = Store.open(killed.location)
        else:
            assert kill_at == len(tables) > len(FILES) + 1, "every commit had its turn"
            break
        finally:
            monkeypatch.setattr(DeltaFolder, "commit", real)
        assert sorted_rows(killed, *FILES) == {table: held[table] for table in FILES}, tables
        assert_whole(killed)
        assert killed.append_units(some_units("d0")) == 0
        compact(killed)
        assert_compacted(killed)
        assert sorted_rows(killed) == held, tables
    else:
        pytest.fail("the compaction did not end")


def test_readers_of_earlier_versions_go_on(store: Store) -> None:
    """A vacuum leaves files that were replaced just before, as a vacuum of any Delta table does."""
    pinned = store.versions()
    with open_views(store) as views, open_views(store) as others:
        before = others.rows("decomposition")
        compact(store)
        for table in TABLES:
            DeltaTable(f"{store.location}/{table}").vacuum(dry_run=False)
        assert views.rows("decomposition").equals(before)
        assert others.rows("decomposition").equals(before)
    for versions in (pinned, {**store.versions(), "events": pinned["events"], "units": pinned["units"]}):
        assert store.all_underived(versions).size == 0
        with open_views(store, versions) as again:
            assert again.rows("decomposition").equals(before)
    with open_views(store, {table: pinned[table] for table in ALL_DERIVED}) as mixed:
        assert mixed.rows("decomposition").equals(before), "derived tables were looked at before the compaction"


@pytest.mark.parametrize(("owner", "step"), [(compaction, "by_first_rows"), (DeltaFolder, "put_rows")])
@pytest.mark.by_default("put_rows")
def test_a_compaction_that_another_overtakes(
    store: Store, monkeypatch: pytest.MonkeyPatch, owner: object, step: str
) -> None:
    """Before it reads the files that it has chosen, or before the commit of their rows."""
    held, real = sorted_rows(store), getattr(owner, step)

    def overtaken(*given: Any, **options: Any) -> Any:
        with monkeypatch.context() as other:
            other.setattr(owner, step, real)
            compact(Store.open(store.location))
        return real(*given, **options)

    monkeypatch.setattr(owner, step, overtaken)
    compact(store)
    assert_whole(store)
    assert_compacted(store)
    assert sorted_rows(store) == held


def test_rows_are_counted_while_files_are_replaced(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, real = rows_by_unit(store, "events"), Store.paths

    def overtaken(of: Store, table: str, version: int | None = None) -> list[str]:
        found = real(of, table, version)
        with monkeypatch.context() as other:
            other.setattr(Store, "paths", real)
            compact(Store.open(store.location))
        return found

    monkeypatch.setattr(Store, "paths", overtaken)
    assert rows_by_unit(Store.open(store.location), "events") == counted


def test_the_command(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "compact", store.location)
    assert code == 0
    assert re.search(r"^events: 4 files, 0\.\d MB -> 1 file, 0\.\d MB$", out, re.MULTILINE)
    assert call(capsys, "compact", store.location)[:2] == (0, "nothing to compact\n")
    code, out, _ = call(capsys, "compact", store.location, "--vacuum")
    assert code == 0
    assert out.startswith("nothing to compact\nnothing to delete: no file was replaced at least 7 days ago")
    code, _, err = call(capsys, "compact", tmp_path / "nothing")
    assert (code, err) == (2, f"kvdrift: {tmp_path / 'nothing'} is not a kvdrift store: there is no such folder\n")


def test_replaced_files_are_deleted_later(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    held, pinned = sorted_rows(store), store.versions()
    compact(store)
    current = store.versions()
    code, out, _ = call(capsys, "compact", store.location, "--vacuum", "--keep-days", "0")
    assert code == 0
    assert "events: 4 files, 0.0 MB deleted, replaced at least 0 days ago" in out
    left = [path.name for path in Path(store.location, "events").rglob("*.parquet") if "_delta_log" not in path.parts]
    assert sorted(left) == store.paths("events")
    store = Store.open(store.location)
    assert sorted_rows(store) == held
    with open_views(store, current) as views:
        assert views.rows("trajectories").num_rows == 8
    assert {table: store.data_version(table) for table in FILES} == {table: pinned[table] for table in FILES}
    said = refused(open_views, store, pinned)
    assert "of 'results' cannot" not in said
    assert "cannot be read any more: compact --vacuum has deleted its files; give " in said
    assert store.append_units(some_units("d0")) == 0
    assert store.append_units(some_units("d2", first=2)) == 2
    derive(store, ALL_DERIVED)
    assert_whole(store)
    assert len(store.paths("events", pinned["events"])) == 4, "the log tells what was there"


def test_temporary_files_of_killed_writers_are_deleted_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(store.location, "events")
    (folder / ".left.parquet.0.part").write_bytes(b"half")
    found = list[int]()

    def sweeping(_: int) -> None:
        found.append(len([*folder.glob(".*.part")]))
        store.delete_replaced("events", timedelta())
        found.append(len([*folder.glob(".*.part")]))

    with monkeypatch.context() as patch:
        patch.setattr(parquet_files.os, "fsync", sweeping)
        replace_file(folder / "new.parquet", b"rows")
    assert found == [2, 1], "the file that is being written stays"
    assert (folder / "new.parquet").read_bytes() == b"rows"


def test_files_of_every_size_that_are_too_many_are_put_together() -> None:
    """Small files that keep coming do not prevent merging larger ones."""
    small, large, few = (
        [StoredFile(f"{rows}-{n}", 1, rows) for n in range(n)] for rows, n in ((20, 20), (900, 18), (2, 3))
    )
    assert too_many([*large, *few, *small], 1 << 18) == [small, large]


@pytest.mark.slow
def test_a_store_that_grows_gathers_its_files(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    units = [make_unit(f"d{number:02}") for number in range(40)]
    for one in units:
        store.append_units([one])
        derive(store, ALL_DERIVED)
        store.gather()
    assert all(len(store.paths(table)) <= 20 for table in (*FILES, "units"))
    assert content(store).equals(expected(units))
    assert_whole(store)


def test_a_damaged_file_stays_as_it_is(store: Store) -> None:
    held = store.read("units").num_rows
    path = store.paths("events")[0]
    file = Path(store.location, "events", path)
    file.write_bytes(file.read_bytes()[:-7])
    said = refused(compact, store, error=Exception)
    assert f"events/{path}" in said
    assert said.endswith(f": kvdrift verify {store.location}")
    assert path in store.paths("events")
    assert len(store.paths("events")) == 2
    assert store.read("units").num_rows == held


# Other programs


def test_lost_events_beside_a_unit_without_a_row(store: Store) -> None:
    """The message counts the events that units with a row lack, although events outnumber those of all such units."""
    store.withdraw_units("units", store.stored_units([one.record for one in some_units("d2")]))

    def without_one(rows: pa.Table) -> pa.Table:
        kept = np.ones(rows.num_rows, dtype=np.bool_)
        kept[np.flatnonzero(rows["doc"].to_numpy() == "d0")[:1]] = False
        return rows if kept.all() else rows.filter(pa.array(kept))

    store.rewrite_rows("events", without_one)
    line = refused(Store.open(store.location).units, error=DamagedStoreError)
    assert (
        f"{store.location}: 'events' lacks 2 row(s) of units that 'units' has; to repair the store: kvdrift verify"
        in line
    )


def _rewrite(table: DeltaTable) -> None:
    """Write all rows again, as Spark or Polars do that know nothing of kvdrift; files have no statistics of ours."""
    rows = table.to_pyarrow_table()
    table.alter.set_table_properties({"delta.appendOnly": "false"})
    write_deltalake(table, rows.take(pa.array(np.random.default_rng(1).permutation(rows.num_rows))), mode="overwrite")
    DeltaTable(table.table_uri).alter.set_table_properties({"delta.appendOnly": "true"})


def _clean_up(table: DeltaTable) -> None:
    """Delete the files that a checkpoint makes unnecessary, whatever their age."""
    table.create_checkpoint()
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
    again = DeltaTable(table.table_uri)
    again.create_checkpoint()
    again.cleanup_metadata()


def _z_order(table: DeltaTable) -> None:
    column = "replicate" if "replicate" in {field.name for field in table.schema().fields} else "study"
    table.optimize.z_order([column])


TOOLS: dict[str, Callable[[DeltaTable], object]] = {
    "compact": lambda table: table.optimize.compact(),
    "compact into small files": lambda table: table.optimize.compact(target_size=1_000),
    "z-order": _z_order,
    "vacuum": lambda table: table.vacuum(dry_run=False),
    "checkpoint": lambda table: table.create_checkpoint(),
    "clean-up": _clean_up,
    "rewrite": _rewrite,
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.slow
def test_any_delta_tool_may_work_on_any_table(store: Store, tmp_path: Path, tool: str) -> None:
    """A Delta tool works between two steps of every operation, and after it: every row is there once, and work goes on."""
    whole, store = store, Store.open(shutil.copytree(store.location, tmp_path / "plain"))  # delta-rs writes to no other
    for one in (store, whole):
        one.append_units(some_units("d1", first=2))  # not derived yet
    for table in TABLES:
        TOOLS[tool](DeltaTable(f"{store.location}/{table}"))
    store = Store.open(store.location)
    for one in (store, whole):
        assert len(one.all_underived()) == 2
        assert one.append_units([*some_units("d0"), *some_units("d2", first=2)]) == 2
        assert run_derivation(one.location).units == 4
    for table in TABLES:
        TOOLS[tool](DeltaTable(f"{store.location}/{table}"))
    store = Store.open(store.location)
    assert_whole(store)
    assert sorted_rows(store) == sorted_rows(whole)
    with open_views(store) as found, open_views(whole) as wanted:
        for view in (*FILES, "units", "moments", "decomposition", "swrb_risk"):
            assert_same(found.rows(view), wanted.rows(view), view)
    assert compact(store) is not None
    store.gather()
    assert sorted_rows(store) == sorted_rows(whole)
    assert_whole(store)


@pytest.mark.parametrize("tool", [name for name in TOOLS if name != "rewrite"])
@pytest.mark.by_default("compact", "z-order", "clean-up")
def test_a_rewritten_file_is_no_new_data(store: Store, tool: str) -> None:
    before = {table: store.data_version(table) for table in TABLES}
    for table in TABLES:
        if tool != "clean-up":
            TOOLS[tool](DeltaTable(f"{store.location}/{table}"))
    assert {table: Store.open(store.location).data_version(table) for table in TABLES} == before
