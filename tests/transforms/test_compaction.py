"""Compaction: the same rows in fewer files, whoever reads, writes or is killed meanwhile."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from fixtures.command import call
from fixtures.older_stores import make_store_1
from fixtures.refusals import refused
from fixtures.stored_units import content, expected, killed_in, make_unit
from fixtures.swrb_events import plain_replicate, random_laws, swrb_replicate, unit
from log.appends import DERIVED
from log.compaction.members import UNITS_FOOTER, units_footer
from log.compaction.packs import tiers
from log.projections import UnitRows

from log.compaction import packs
from log.delta.folder import DeltaFolder
from log.delta.parquet_files import StoredFile
from log.delta.table_log import CHECKPOINT_EVERY, TableLog
from log.store import Store, Unit
from schema.errors import DamagedStoreError
from schema.tables import TABLES
from schema.windows import Windows
from sql.catalog import open_views, view_texts
from sql.materialization import keep_up_moments, materialize_moments
from sql.stored_moments import stored_moments
from sql.view_texts import MATERIALIZED
from transforms.compaction import compact
from transforms.segments import commit, derive_segment, pending
from verification.findings import Check
from verification.repair import repair
from verification.whole_store import verify

H = 6
NAMES = {"study": "s", "model": "m"}
DERIVED_TABLES = tuple(table for tables in DERIVED.values() for table in tables)
FILES = ("events", *DERIVED_TABLES)


def some_units(doc: str, first: int = 0) -> list[Unit]:
    """Two coupled pairs and two residual branchings."""
    chance = np.random.default_rng([first, *doc.encode()])
    laws = random_laws(chance, H, apart=0.9)
    made = []
    for estimator, one in (("plain", plain_replicate), ("swrb", swrb_replicate)):
        names = {**NAMES, "doc": doc, "action": "snapkv"}
        rows = [row for k in (first, first + 1) for row in one({**names, "replicate": k}, laws, chance)]
        made.append(
            unit(rows, estimator, H, first_replicate=first, replicates=2, decode_seconds=0.25, kept_sha256=["ab"])
        )
    return made


def append(store: Store, table: str, *rows: dict[str, Any]) -> None:
    given = [dict.fromkeys(TABLES[table].columns) | NAMES | row for row in rows]
    columns = TABLES[table].columns
    rows_of_table = [{name: row[name] for name in columns} for row in given]
    store.append_rows(table, pa.Table.from_pylist(rows_of_table, schema=TABLES[table].schema))


def add_document(store: Store, doc: str) -> None:
    append(store, "documents", {"doc": doc, "cluster": doc, "split": "evaluation", "stratum": "all"})


def add_action(store: Store, revision: int) -> None:
    fixed = {"selector": "snapkv", "keep": "1/2", "position_mode": "on", "control": False, "prespecified": True}
    append(store, "actions", fixed | {"action": "snapkv", "dropped": False, "action_revision": revision})


def derive(store: Store) -> None:
    version = store.version("events")
    commit(store, [derive_segment(store, segment) for segment in pending(store, version)], version, covered=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Three documents under both estimators, grown once, with stored moments; every table has several files."""
    store = Store.create(tmp_path_factory.mktemp("made") / "store")
    append(store, "studies", {**vars(Windows.of(H)), "seed": 1, "study_sha256": "0", "temperature": 1.0})
    add_action(store, 0)
    for doc in ("d2", "d0", "d1"):
        add_document(store, doc)
        store.append_units(some_units(doc))
    derive(store)
    materialize_moments(store, 1)
    store.append_units(some_units("d0", first=2))
    derive(store)
    materialize_moments(store, 1)
    return store


@pytest.fixture
def store(made: Store, tmp_path: Path) -> Store:
    """A copy of that store, to write to."""
    return Store.open(shutil.copytree(made.location, tmp_path / "it's a [store]* {x}"))


def rows(store: Store, *tables: str) -> dict[str, list[str]]:
    """All rows of tables in one order; by default of all but the stored moments."""
    wanted = tables or tuple(table for table in TABLES if table != "document_moments")
    return {
        table: sorted(json.dumps(row, sort_keys=True, default=str) for row in store.read(table).to_pylist())
        for table in wanted
    }


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
    assert store.pending_segments(store.version("events")) == []
    assert store.reconcile() == 0


def assert_compacted(store: Store) -> None:
    assert [len(store.paths(table)) for table in FILES] == [2, 1, 1, 1, 1]
    assert store.paths("trajectories") + store.paths("branchings") == store.paths("events")
    assert all(len(store.paths(table)) == 1 for table in ("units", "documents", "document_moments"))


def file_faults(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("verification.whole_store._check_views", lambda *_, **__: Check("views", "none", "left out"))
    return [str(fault) for check in verify(store) for fault in check.faults]


def test_rows_and_views_are_the_same(store: Store) -> None:
    views = sorted(set(view_texts()) - {"document_moments"})
    with open_views(store, materialized=False, kept=views) as computed, open_views(store) as stored:
        before = {view: computed.rows(view) for view in views}
        moments = {view: stored.rows(view) for view in MATERIALIZED}
    held, data = rows(store, *TABLES), {table: store.data_version(table) for table in TABLES}
    done = {one.table: (one.before.files, one.after.files) for one in compact(store)}
    assert done["events"] == (8, 2)
    assert done["steps"] == (4, 1)
    assert_compacted(store)
    assert_whole(store)
    assert rows(store, *TABLES) == held
    assert {table: store.data_version(table) for table in TABLES} == data, "a rewritten file is no new data"
    assert stored_moments(store, store.versions()).waiting is None
    with open_views(store, materialized=False, kept=views) as computed, open_views(store) as stored:
        for view in views:
            assert_same(computed.rows(view), before[view], view)
        for view in MATERIALIZED:
            assert stored.rows(view).equals(moments[view]), view
    keep_up_moments(store)
    assert store.moments_cover(store.versions())
    assert stored_moments(store, store.versions()).waiting is None
    assert compact(store) == [], "nothing to compact"


def test_rows_are_sorted_by_their_keys(store: Store) -> None:
    compact(store)
    for table in ("units", "documents", "trajectories", "branching_depths"):
        sorted_rows = store.read(table).sort_by([(name, "ascending") for name in TABLES[table].key])
        assert store.read(table).equals(sorted_rows), table
    names = [tuple(row.values()) for row in store.read("events", columns=["doc", "replicate", "t"]).to_pylist()]
    plain = names[: 8 * H]
    assert plain == sorted(plain)


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
    derive(store)
    keep_up_moments(store)
    held = rows(store)
    compact(store)
    keep_up_moments(store)
    assert_compacted(store)
    assert_whole(store)
    assert rows(store) == held
    assert stored_moments(store, store.versions()).waiting is None


def test_a_writer_of_new_groups_reads_what_came_since(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    compact(store)
    store.append_units(some_units("new"))
    read, read_groups = [], UnitRows._read_groups

    def reading(rows: UnitRows, units: Any, path: str) -> frozenset[int]:
        read.append(path)
        return read_groups(rows, units, path)

    monkeypatch.setattr(UnitRows, "_read_groups", reading)
    assert store.append_units(some_units("newer")) == len(some_units("newer"))
    assert len(read) == 1, "the rows of the append before"
    assert store.append_units(some_units("newer")) == 0


def test_a_writer_looks_for_its_groups_in_the_row_groups_of_a_large_file(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("compaction.rows", "projections"):
        monkeypatch.setattr(f"log.{module}.ROW_GROUP_ROWS", 2)
    compact(store)
    (units,) = store.files("units")
    assert pq.read_metadata(units).num_row_groups > 1
    monkeypatch.setattr(UnitRows, "_read_groups", None)
    again = [one for doc in ("d0", "d1", "d2") for one in some_units(doc)]
    assert store.append_units(again) == 0
    wrong = Unit(again[0].record | {"first_replicate": 1, "replicates": 1}, again[0].events.slice(H, H))
    assert "overlaps the replicates [0, 2)" in refused(store.append_units, [wrong])
    assert store.append_units([*again, *some_units("d1", first=2)]) == 2


def test_what_replaced_many_files_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    """Or everybody who opens the table would read of all these files, and that they are gone."""
    store = Store.create(tmp_path / "store")
    store.append_units([make_unit(f"d{number}") for number in range(CHECKPOINT_EVERY)])
    (pack,) = store.rewriting.plan_packs()
    assert store.rewriting.pack_events(pack).file is not None
    assert TableLog(Path(store.location, "events")).checkpointed() == store.version("events")


def test_single_units_are_read(store: Store) -> None:
    path, *_ = (row["path"] for row in store.units().to_pylist() if row["doc"] == "d1")
    before = store.unit_events().read(path, ["doc", "t", "delta"])
    compact(store)
    assert store.unit_events().read(path, ["doc", "t", "delta"]).equals(before)
    assert set(before["doc"].to_pylist()) == {"d1"}
    assert "names it" in refused(store.unit_events().read, "elsewhere", ["t"])


def test_a_kill_before_any_commit_is_gone_on_from(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, real, location = rows(store), DeltaFolder.commit, store.location
    tables: list[str] = []

    def counted(folder: DeltaFolder, table: str, *arguments: Any, **options: Any) -> int:
        if len(tables) == kill_at:
            raise KeyboardInterrupt
        tables.append(table)
        return real(folder, table, *arguments, **options)

    for kill_at in range(12):
        killed = Store.open(shutil.copytree(location, tmp_path / str(kill_at)))
        tables.clear()
        monkeypatch.setattr(DeltaFolder, "commit", counted)
        try:
            compact(killed)
        except KeyboardInterrupt:
            killed = Store.open(killed.location)
        else:
            assert kill_at == len(tables) > len(FILES) + 2, "every commit had its turn"
            break
        finally:
            monkeypatch.setattr(DeltaFolder, "commit", real)
        assert rows(killed, *FILES) == {table: held[table] for table in FILES}, tables
        assert_whole(killed)
        assert killed.append_units(some_units("d0")) == 0
        compact(killed)
        assert_compacted(killed)
        assert rows(killed) == held, tables
    else:
        pytest.fail("the compaction did not end")


def test_readers_of_earlier_versions_go_on(store: Store) -> None:
    pinned = store.versions()
    with open_views(store) as views:
        compact(store)
        after = views.rows("decomposition")
    for versions in (pinned, {**store.versions(), "events": pinned["events"], "units": pinned["units"]}):
        assert store.pending_segments(versions["events"], versions) == []
        with open_views(store, versions) as again:
            assert again.rows("decomposition").equals(after)
    with open_views(store, {table: pinned[table] for table in DERIVED_TABLES}) as mixed:
        assert mixed.rows("decomposition").equals(after), "derived tables were looked at before the compaction"


def test_a_writer_and_a_deriver_beside_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, late = DeltaFolder.put, some_units("d1", first=2)
    store.append_units(some_units("d3"))
    version = store.version("events")
    outcomes = [derive_segment(store, segment) for segment in pending(store, version)]

    def put(folder: DeltaFolder, table: str, path: str, data: bytes) -> None:
        real(folder, table, path, data)
        if table == "events" and path.startswith("compacted-") and late:
            assert Store.open(store.location).append_units([late.pop()]) == 1

    monkeypatch.setattr(DeltaFolder, "put", put)
    compact(store)
    monkeypatch.undo()
    commit(store, outcomes, version, covered=True)
    assert not late
    derive(store)
    assert_whole(store)
    held = rows(store)
    assert all(len(found) == len(set(found)) for found in held.values()), "nothing is there twice"
    compact(store)
    assert rows(store) == held
    assert_compacted(store)


def test_two_at_once(store: Store) -> None:
    held = rows(store)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: compact(Store.open(store.location)), range(2)))
    assert_whole(store)
    assert rows(store) == held
    compact(store)
    assert_compacted(store)


def lose_newest(store: Store, table: str, *, checkpoint: bool) -> None:
    """The log loses its newest file, and the checkpoint that was made of it or not."""
    log = TableLog(Path(store.location, table))
    log.file(log.newest()).unlink()
    for path in log.folder.glob("*checkpoint*") if checkpoint else ():
        path.unlink()


@pytest.mark.parametrize("table", ["events", "steps", "branchings", "units"])
def test_a_lost_newest_log_file(store: Store, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compacted is there as it was before, or the store is refused until it is mended."""
    held = rows(store)
    compact(store)
    lose_newest(store, table, checkpoint=True)
    if table == "events":
        said = refused(Store.open, store.location, error=DamagedStoreError)
        assert "'events' has lost commits" in said
        list(repair(Store(store.location)))
    store = Store.create(store.location)
    derive(store)
    assert_whole(store)
    assert rows(store) == held
    if table == "steps":
        assert file_faults(store, monkeypatch) == []
    compact(store)
    assert rows(store) == held
    assert_compacted(store)


def use(location: str) -> None:
    Store.open(location).check_made_from_events({})


def test_a_lost_log_file_that_a_checkpoint_has(store: Store) -> None:
    held = rows(store)
    compact(store)
    for table in ("events", "steps"):
        DeltaTable(f"{store.location}/{table}").create_checkpoint()  # of few files, a compaction makes none
        lose_newest(store, table, checkpoint=False)
        said = refused(use, store.location, error=DamagedStoreError)
        assert f"table '{table}' is damaged (log file" in said
        assert " is missing)" in said
        list(repair(Store(store.location)))
        store = Store.open(store.location)
        assert_whole(store)
        assert rows(store) == held


def damage(file: str | Path) -> None:
    Path(file).write_bytes(Path(file).read_bytes()[:-7])


def test_damage_is_named_and_mended(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    held = rows(store)
    compact(store)
    assert file_faults(store, monkeypatch) == []
    counted = {check.subject: check.counted.partition(",")[0] for check in verify(store)}
    assert counted["events"] == "8 units"
    for table in ("units", "steps"):
        damage(store.files(table)[0])
    faults = [fault for check in verify(store) for fault in check.faults]
    assert {fault.where.partition("/")[0] for fault in faults} == {"units", "steps"}
    list(repair(store, faults))
    assert file_faults(store, monkeypatch) == []
    assert rows(store) == held
    damage(store.files("events")[0])
    (fault,) = file_faults(store, monkeypatch)
    assert fault.startswith(f"events/{store.paths('events')[0]}: the file has ")
    assert "events: 4 units of the files that it replaced, committed again" in list(repair(store))
    assert file_faults(store, monkeypatch) == []
    assert rows(store) == held


def test_the_command(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "compact", store.location)
    assert code == 0
    assert re.search(r"^events: 8 files, 0\.\d MB -> 2 files, 0\.\d MB$", out, re.MULTILINE)
    assert call(capsys, "compact", store.location)[:2] == (0, "nothing to compact\n")
    code, out, _ = call(capsys, "compact", store.location, "--vacuum")
    assert code == 0
    assert out.startswith("nothing to compact\nnothing to delete: no file was replaced before ")
    code, _, err = call(capsys, "compact", tmp_path / "nothing")
    assert (code, err) == (2, f"kvdrift: {tmp_path / 'nothing'} is not a kvdrift store: there is no such folder\n")


def test_replaced_files_are_deleted_later(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    held, pinned = rows(store), store.versions()
    compact(store)
    current = store.versions()
    code, out, _ = call(capsys, "compact", store.location, "--vacuum", "--keep-days", "0")
    assert code == 0
    assert "events: 8 files, 0.0 MB deleted, replaced before " in out
    left = [path.name for path in Path(store.location, "events").rglob("*.parquet") if "_delta_log" not in path.parts]
    assert sorted(left) == store.paths("events")
    store = Store.open(store.location)
    assert rows(store) == held
    with open_views(store, current) as views:
        assert views.rows("trajectories").num_rows == 8
    assert {table: store.data_version(table) for table in FILES} == {table: pinned[table] for table in FILES}
    said = refused(open_views, store, pinned)
    assert "of 'results' cannot" not in said
    assert "cannot be read any more: compact --vacuum has deleted its files; give " in said
    assert store.append_units(some_units("d0")) == 0
    assert store.append_units(some_units("d2", first=2)) == 2
    derive(store)
    assert_whole(store)
    assert len(store.paths("events", pinned["events"])) == 8, "the log tells what was there"


def test_a_store_of_version_1(tmp_path: Path) -> None:
    units = [make_unit(doc) for doc in ("d1", "d0", "d2")]
    store = Store.open(make_store_1(tmp_path / "old", units, lost_rows=1))
    held = content(store)
    compact(store)
    assert content(store).equals(held)
    assert content(store).equals(expected(units))
    assert list(store.files_by_missing_columns("events")) == [()]
    assert_whole(store)
    assert store.append_units([*units, make_unit("d0", first=4)]) == 1
    derive(store)
    compact(store)
    assert len(store.paths("events")) == 1
    assert content(store).equals(expected([*units, make_unit("d0", first=4)]))


def test_files_of_every_size_that_are_too_many_are_put_together() -> None:
    """Small ones that come all the time do not keep larger ones from it."""
    small, large, few = (
        [StoredFile(f"{rows}-{n}", 1, rows) for n in range(n)] for rows, n in ((20, 5), (90, 4), (2, 3))
    )
    assert tiers([*large, *few, *small], 3, 1 << 18) == [small, large]


def test_what_a_pack_holds_is_known_without_the_records_of_its_units(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many hundreds of records are large, and a live derivation asks again and again."""
    held = store.unit_paths()
    compact(store)
    monkeypatch.delattr("log.compaction.members.members_of")
    assert store.unit_paths() == held


def test_what_a_pack_of_an_earlier_version_holds_is_in_the_records_of_its_units(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = store.unit_paths()
    with monkeypatch.context() as patch:
        patch.setattr(packs, "units_footer", lambda members: {UNITS_FOOTER: units_footer(members)[UNITS_FOOTER]})
        compact(store)
    assert store.unit_paths() == held
    assert_whole(store)


def test_a_damaged_unit_stays_as_it_is(store: Store) -> None:
    path = next(path for path in store.paths("events") if "/d1/" in path and "swrb-" not in path)
    damage(Path(store.location, "events", path))
    said = refused(compact, store, error=Exception)
    assert f"events/{path}: the file has" in said
    assert said.endswith(f": kvdrift verify {store.location}")
    assert path in store.paths("events")
    assert len(store.paths("events")) == 3
    assert_whole(store)


def test_a_killed_append_after_a_compaction_is_healed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from log.projections import UnitRows  # noqa: PLC0415

    compact(store)
    with killed_in(monkeypatch, UnitRows, "append"):
        store.append_units(some_units("d1", first=2))
    assert store.read("units").num_rows + 2 == store.units().num_rows
    again = Store.create(store.location)
    assert again.read("units").num_rows == store.units().num_rows
    shutil.rmtree(Path(again.location, "units"))
    assert Store.create(again.location).read("units").num_rows == store.units().num_rows, "footers have all of them"
