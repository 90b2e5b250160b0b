"""Stores of older schema versions, written here in their form: read unchanged, upgraded once, nothing lost."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from fixtures import older_stores
from fixtures.branched_units import make_rows, swrb_unit
from fixtures.older_stores import (
    LATER,
    STUDIES_2,
    append_1,
    make_empty_store,
    make_store_1,
    make_store_2,
    put_1,
)
from fixtures.processes import run_at_once
from fixtures.refusals import refused
from fixtures.stored_units import content, derive, expected, killed_in, make_unit

from kvdrift.log.delta import folder as delta_folder
from kvdrift.log.delta.parquet_files import encode_parquet
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.schema.tables import SCHEMA_VERSION, TABLES
from kvdrift.sql.catalog import open_views
from kvdrift.sql.catalog_file import write_catalog
from kvdrift.transforms.pipeline import run_derivation

PRESENT = str(SCHEMA_VERSION)


def files_of(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def schema_versions(store: Store) -> dict[str, str]:
    made = {table: DeltaTable(f"{store.location}/{table}") for table in TABLES}
    return {table: loaded.metadata().configuration["kvdrift.schema_version"] for table, loaded in made.items()}


OLD = [make_unit("d0"), make_unit("d1", seed=7), make_unit("d0", first=4)]
NEW = [make_unit("d2", pair_evaluations=9), make_unit("d1", first=4)]


@pytest.fixture
def old(tmp_path: Path) -> str:
    return make_store_1(tmp_path / "old", OLD, lost_rows=1)


# Read as it is


def test_a_store_of_version_1_is_read_as_it_is(old: str) -> None:
    before = files_of(old)
    store = Store.open(old)
    assert content(store).equals(expected(OLD))
    assert store.read("events", columns=["kind"]).column("kind").to_pylist() == ["coupled"] * 96
    assert store.read("events", columns=["weight", "doc"]).column("weight").null_count == 96
    assert store.read("events", 2, ["kind"]).num_rows == 64
    units = store.units("s").sort_by([("doc", "ascending"), ("first_replicate", "ascending")])
    assert store.read("units").num_rows == 2, "the killed writer's row is in a footer, which has no estimator"
    assert units.column("estimator").to_pylist() == ["plain"] * 3
    assert units.select(["doc", "first_replicate", "seed", "pair_evaluations"]).to_pylist() == [
        {"doc": "d0", "first_replicate": 0, "seed": None, "pair_evaluations": None},
        {"doc": "d0", "first_replicate": 4, "seed": None, "pair_evaluations": None},
        {"doc": "d1", "first_replicate": 0, "seed": 7, "pair_evaluations": None},
    ]
    assert store.all_underived().size == 2, "the third has no row yet"
    with open_views(store) as views:
        assert views.rows("events").num_rows == 96
        assert set(views.rows("events", kind="coupled", weight=None).column("doc").to_pylist()) == {"d0", "d1"}
        assert views.rows("units").column("estimator").to_pylist() == ["plain"] * 2
        assert [views.rows(table).num_rows for table in LATER] == [0] * len(LATER)
    assert files_of(old) == before


def test_what_an_older_release_compacted_is_read_before_and_after_an_upgrade(tmp_path: Path) -> None:
    """A compacted file, too, lacks the columns that came since."""
    location = make_empty_store(tmp_path / "old", 8)
    row = {
        "study": "s", "action": "a", "selector": "snapkv", "keep": "1/2", "position_mode": "they go on from n",
        "control": False, "prespecified": True, "action_revision": 0, "dropped": False,
    }  # fmt: skip
    data = encode_parquet(pa.Table.from_pylist([row], schema=older_stores.before("actions", 8)))
    put_1(DeltaTable(f"{location}/actions"), "compacted-0000000000000000.parquet", data, 1, [])
    for prepare in (lambda _: None, Store.make_tables):
        store = Store.open(location)
        prepare(store)
        (read,) = store.read("actions").to_pylist()
        assert {name: read[name] for name in row} == row
        with open_views(store) as views:
            assert views.rows("actions").num_rows == 1
        write_catalog(store)


def test_texts_of_units_come_as_codes_too(old: str) -> None:
    """Columns that files lack, their defaults, and a row that is in a footer alone are coded as all others."""
    names = ["doc", "action", "estimator", "weights_sha256", "replicates"]
    plain, coded = (Store.open(old).units("s", columns=names, coded=coded) for coded in (False, True))
    kinds = [pa.dictionary(pa.int32(), pa.string())] * 4 + [pa.int32()]
    assert coded.schema.types == kinds
    assert coded.cast(plain.schema).equals(plain)
    assert len({tuple(chunk.dictionary.to_pylist()) for chunk in coded["doc"].chunks}) == 1, "codes can be compared"


def test_a_table_that_came_later_is_empty_at_version_0(old: str) -> None:
    store = Store.open(old)
    assert set(store.versions()) == set(TABLES)
    for table in LATER:
        assert (store.version(table), store.paths(table)) == (0, [])
        assert store.read(table, 0).schema.equals(TABLES[table].schema)
        assert store.covered_version(table, "derive") is None
        with pytest.raises(InputError, match=f"'{table}' has no version 1; its versions are 0..0"):
            store.read(table, 1)
    upgraded = Store.create(old)
    assert [upgraded.version(table) for table in LATER] == [0] * len(LATER)


def test_a_table_of_the_present_version_must_be_there(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    Path(store.location, "branchings").rename(tmp_path / "elsewhere")
    assert "it has no 'branchings' table" in refused(store.read, "branchings")


def test_what_an_older_version_has_can_be_written_as_it_is(tmp_path: Path) -> None:
    store = Store.open(make_empty_store(tmp_path / "old", 7))
    row = dict.fromkeys(("study", "model", "doc", "action", "quantity"), "x") | {"value": 1.0, "action_revision": 0}
    rows = pa.Table.from_pylist([row], schema=TABLES["exact_values"].schema)
    assert store.append_rows("exact_values", rows) == 1
    assert DeltaTable(f"{store.location}/events").metadata().configuration["kvdrift.schema_version"] == "7"
    assert store.read("scores").num_rows == 0


def test_what_a_table_has_got_since_is_written_after_an_upgrade(old: str) -> None:
    store = Store.open(old)
    row = dict.fromkeys(TABLES["documents"].columns) | dict.fromkeys(("study", "model", "doc", "stratum"), "x")
    row |= {"split": "development", "cluster": "x", "scoring": "part"}
    assert store.append_rows("documents", pa.Table.from_pylist([row], schema=TABLES["documents"].schema)) == 1
    assert set(schema_versions(store).values()) == {PRESENT}
    assert derive(store) == 3, "the derived tables have got a column since"
    assert store.all_underived().size == 0


def test_a_derivation_upgrades_an_older_store(old: str) -> None:
    assert run_derivation(old).units == 3
    store = Store.open(old)
    assert set(schema_versions(store).values()) == {PRESENT}
    assert store.all_underived().size == 0


def study_row(**changes: Any) -> dict[str, Any]:
    row = dict.fromkeys(TABLES["studies"].columns, 3) | {"study": "s", "model": "m", "study_sha256": "0"}
    return row | {"revision": None, "settings": None, **dict.fromkeys(("top_p", "top_k")), "temperature": 1.0} | changes


def test_a_study_of_version_2_has_no_revision(tmp_path: Path) -> None:
    folder = make_store_2(tmp_path / "old", [{name: study_row()[name] for name in STUDIES_2.names}])
    store, before = Store.open(folder), files_of(folder)
    assert store.read("studies").to_pylist() == [study_row()]
    with open_views(store) as views:
        assert views.rows("studies").to_pylist() == [study_row()]
    assert files_of(folder) == before
    rows = pa.Table.from_pylist([study_row(), study_row(model="n", revision="abc")], schema=TABLES["studies"].schema)
    assert store.append_rows("studies", rows) == 1
    assert set(schema_versions(store).values()) == {PRESENT}
    assert sorted(map(str, store.read("studies").column("revision").to_pylist())) == ["None", "abc"]
    with open_views(store) as views:
        assert views.rows("studies", model="n").column("revision").to_pylist() == ["abc"]


# Upgraded


def test_an_upgrade_changes_nothing_that_was_there(old: str) -> None:
    before, versions = files_of(old), Store.open(old).versions()
    store = Store.create(old)
    after = files_of(old)
    assert {path: after[path] for path in before} == before
    assert content(store).equals(expected(OLD))
    assert set(schema_versions(store).values()) == {PRESENT}
    assert store.units().equals(store.read("units")), "and the rows of the killed writer are put back"
    for table in TABLES:
        there = {field.name for field in DeltaTable(f"{old}/{table}").schema().fields}
        assert there >= set(TABLES[table].columns)
        assert there <= {*TABLES[table].columns, "path"}, "which units had before version 11"
    assert store.read("events", versions["events"]).num_rows == 96
    now = store.versions()
    assert Store.create(old).versions() == now
    assert now["events"] == versions["events"] + 3, "the version, the columns, and the rows with their units"
    units = store.read("units")
    assert units["event_rows"].to_pylist() == [32] * 3
    assert set(store.read("events", columns=["unit"])["unit"].to_pylist()) == set(units["unit"].to_pylist())
    new = Store.create(f"{old}-new")
    new.append_units(OLD)
    wanted = new.read("units").select(["unit", "event_rows", "events_sha256"])
    assert units.select(wanted.column_names).sort_by("unit").equals(wanted.sort_by("unit"))


def check_mix(store: Store) -> None:
    units = [*OLD, *NEW, swrb_unit(make_rows())]
    assert store.append_units(NEW) == 2
    assert store.append_units([*OLD, swrb_unit(make_rows())]) == 1, "the old units are known"
    assert "overlaps" in refused(store.append_units, [make_unit("d1", first=2)])
    assert content(store).equals(expected(units))
    assert store.units().equals(store.read("units"))
    assert sorted(store.units().column("estimator").to_pylist()) == ["plain"] * 5 + ["swrb"]
    assert store.read("events", columns=["unit"])["unit"].null_count == 0
    with open_views(store) as views:
        check_views(views.connection)
        for table in ("events", "units"):
            order = [(name, "ascending") for name in TABLES[table].key]
            by_views = views.rows(table).cast(TABLES[table].schema)
            assert by_views.sort_by(order).equals(store.read(table).sort_by(order))


def check_views(connection: duckdb.DuckDBPyConnection) -> None:
    kinds = connection.sql("select kind, count(*), count(weight) from events group by kind order by kind").fetchall()
    assert kinds == [("branch", 5, 0), ("coupled", 160, 0), ("scan", 11, 11)]
    query = "select estimator, count(*), sum(pair_evaluations) from units group by estimator order by estimator"
    assert connection.sql(query).fetchall() == [("plain", 5, 9), ("swrb", 1, None)]


def test_old_and_new_files_are_read_together(old: str) -> None:
    store = Store.create(old)
    check_mix(store)
    assert store.all_underived().size == 6
    with duckdb.connect(str(write_catalog(store)), read_only=True) as connection:
        check_views(connection)


def test_the_first_write_that_needs_it_upgrades(old: str, tmp_path: Path) -> None:
    check_mix(Store.open(old))
    other = Store.open(make_store_1(tmp_path / "other", OLD))
    row = {"study": "s", "model": "m", "doc": "d0", "action": "a", "quantity": "risk", "x": None, "value": 0.25}
    row["action_revision"] = 0
    rows = pa.Table.from_pylist([row], schema=TABLES["exact_values"].schema)
    assert [other.append_rows("exact_values", rows) for _ in range(2)] == [1, 0]
    assert set(schema_versions(other).values()) == {PRESENT}


def test_a_compaction_after_the_upgrade_leaves_the_defaults(old: str) -> None:
    store = Store.create(old)
    store.append_units([*NEW, swrb_unit(make_rows())])
    for table in ("events", "units"):
        assert DeltaTable(f"{old}/{table}").optimize.compact()["numFilesAdded"] == 1
    assert list(store.files_by_missing_columns("events")) == [()]
    assert content(store).equals(expected([*OLD, *NEW, swrb_unit(make_rows())]))
    assert store.append_units([*OLD, swrb_unit(make_rows())]) == 0
    with open_views(store) as views:
        check_views(views.connection)


# At once, and broken off


@pytest.mark.parametrize("way", ["create", "append_units"])
@pytest.mark.by_default("append_units")
def test_an_upgrade_broken_off_is_gone_on_with(old: str, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    for _ in range(3):
        with killed_in(monkeypatch, delta_folder, "added_columns"):
            Store.create(old)
        store = Store.open(old)
        assert content(store).equals(expected(OLD))
        assert store.units().num_rows == 3
        with open_views(store) as views:
            assert views.rows("events", kind="coupled").num_rows == 96
    if way == "create":
        Store.create(old)
    check_mix(Store.open(old))
    assert set(schema_versions(store).values()) == {PRESENT}


def test_a_version_1_writer_about_to_commit_is_refused(old: str) -> None:
    table = DeltaTable(f"{old}/events")
    Store.create(old)
    with pytest.raises(CommitFailedError, match="Metadata changed"):
        put_1(table, "late.parquet", b"", 0, [])


def test_what_a_version_1_writer_commits_during_an_upgrade_is_old(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = delta_folder.added_columns
    late = [make_unit("d7"), make_unit("d8")]

    def overtaken(table: str, *rest: Any) -> Any:
        fields = real(table, *rest)
        if late and table == "events":
            append_1(Path(old), late.pop())  # as one may that had not looked since before the upgrade
        return fields

    monkeypatch.setattr(delta_folder, "added_columns", overtaken)
    store = Store.create(old)
    assert not late
    assert content(store).equals(expected([*OLD, make_unit("d7"), make_unit("d8")]))
    assert store.read("units").num_rows == 5


def test_processes_and_threads_upgrade_at_once(old: str) -> None:
    versions = Store.open(old).versions()
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(Store.create, [old] * 6))
    twice = ["events", "documents", "actions", "studies", "trajectories", "steps", "plans", "results", "calibration"]
    changes = dict.fromkeys(twice, 2) | dict.fromkeys(LATER, 0)
    changes |= {"events": 3, "units": 4}  # rows with their units; one of ``units`` is the row of the killed writer
    assert Store.open(old).versions() == {table: version + changes.get(table, 1) for table, version in versions.items()}


def create_and_append(location: str, docs: list[str]) -> None:
    store = Store.create(location)
    for doc in docs:
        store.append_units([make_unit(doc)])


@pytest.mark.slow
def test_processes_upgrade_and_append_at_once(old: str) -> None:
    run_at_once(create_and_append, [(old, [f"own{number}", "shared"]) for number in range(3)])
    new = [make_unit(doc) for doc in ("own0", "own1", "own2", "shared")]
    store = Store.open(old)
    assert content(store).equals(expected([*OLD, *new]))
    assert store.read("units").num_rows == 7


def test_an_upgrade_that_cannot_be_written_is_one_line(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(delta_folder, "added_columns", refuse)
    line = refused(Store.create, old)
    assert re.search(rf"cannot upgrade 'documents' to schema version {PRESENT} \(.*Permission denied", line)
