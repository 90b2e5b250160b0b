"""The store on real Delta tables: visibility and exactly-once commits, despite kills and races of writers."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from fixtures.refusals import refused
from fixtures.stored_units import (
    HORIZON,
    content,
    edit,
    expected,
    killed_in,
    make_unit,
)
from fixtures.table_rows import table_rows

from kvdrift.log.delta.versions import has_gap, listed
from kvdrift.log.store import Store, Unit
from kvdrift.log.units.commits import UnitCommits
from kvdrift.schema.errors import DamagedStoreError, InputError, KvdriftError, OperationError
from kvdrift.schema.tables import DOCUMENTS, EVENTS, SCHEMA_VERSION, STEPS, TABLES, UNITS
from kvdrift.transforms.derivation import derive_trajectories


def keys(units: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in units.select(["doc", "action", "first_replicate"]).to_pylist())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store that takes nothing."""
    return Store.create(tmp_path_factory.mktemp("empty") / "store")


# What is appended, and what can be read of it


def test_units_come_back_as_they_were(store: Store) -> None:
    units = [make_unit("d0"), make_unit("d1"), make_unit("d1", "streaming")]
    before = store.version("events")
    assert store.append_units(units) == 3
    assert store.version("events") == before + 1, "several units are one commit"
    assert content(store).equals(expected(units))
    assert store.read("events").schema.equals(EVENTS.schema)
    records = store.read("units")
    assert records.schema.equals(UNITS.schema)
    assert keys(records) == [("d0", "snapkv", 0), ("d1", "snapkv", 0), ("d1", "streaming", 0)]
    assert records.column("kept_sha256").to_pylist() == [["ab", "cd"]] * 3
    assert records.column("event_rows").to_pylist() == [32] * 3
    numbers = set(records.column("unit").to_pylist())
    assert len(numbers) == 3
    assert set(store.read("events", columns=["unit"])["unit"].to_pylist()) == numbers
    assert store.units("s", "org/model").equals(records)
    assert store.units("another").num_rows == 0


def test_columns_and_rows_may_be_in_any_order_and_those_with_a_default_be_left_out(store: Store) -> None:
    unit = make_unit()
    shuffled = unit.events.take(np.random.default_rng(1).permutation(unit.events.num_rows))
    record = {name: value for name, value in unit.record.items() if name != "estimator"}
    names = [name for name in reversed(shuffled.column_names) if name not in {"kind", "weight"}]
    store.append_units([Unit(record, shuffled.select(names))])
    assert store.read("events").drop_columns(["unit"]).equals(expected([unit]))
    assert store.units().column("estimator").to_pylist() == ["plain"]
    assert store.append_units([unit]) == 0


def test_columns_are_read_in_the_order_asked_for(store: Store) -> None:
    store.append_units([make_unit()])
    assert store.read("events", columns=["t", "doc"]).column_names == ["t", "doc"]
    assert "events: no column 'dleta'; did you mean 'delta'" in refused(store.read, "events", columns=["dleta"])


def test_the_same_unit_again_changes_nothing(store: Store) -> None:
    unit = make_unit()
    assert store.append_units([unit, unit]) == 1
    versions = store.versions()
    assert store.append_units([make_unit(prefill_seconds=9.0)]) == 0
    assert Store.open(store.location).append_units([unit]) == 0
    assert store.versions() == versions
    assert store.read("units").column("prefill_seconds").to_pylist() == [0.25]


@pytest.mark.parametrize(("first", "replicates"), [(0, 3), (0, 5), (3, 4), (1, 2)])
def test_an_overlapping_range_is_refused(store: Store, first: int, replicates: int) -> None:
    store.append_units([make_unit()])
    before = store.versions()
    with pytest.raises(InputError, match=r"\(s, org/model, d0, snapkv\) replicates \[.*overlaps.*\[0, 4\)"):
        store.append_units([make_unit("d9"), make_unit(first=first, replicates=replicates)])
    assert store.versions() == before
    assert "overlaps" in refused(store.append_units, [make_unit("d5"), make_unit("d5", first=2)])


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (edit(make_unit(), "doc", 3, "other"), "events: doc is 'other', must be 'd0'"),
        (edit(make_unit(), "t", 3, 9), r"events: t is 5 where .* needs 4 \(sorted row 4\)"),
        (edit(make_unit(), "t", 0, 2), "events: t is 2 where .* needs 1"),
        (edit(make_unit(), "replicate", 31, 7), "events: replicate is 7 where .* needs 3"),
        (edit(make_unit(), "delta", 0, None), "events: column 'delta' is null in 1 row"),
        (Unit(make_unit().record, make_unit().events.slice(1)), r"events: 31 rows for .* must be 32 \(4 replicates x 8"),
        (Unit(make_unit().record, make_unit().events.drop_columns(["f"])), "events: column 'f' is missing"),
        (edit(make_unit(), "kind", 5, None), "events: column 'kind' is null in 1 row"),
        (edit(make_unit(), "kind", 5, "scan"), r"events: kind is 'scan' in \(s, .*\[0, 4\), must be 'coupled'"),
        (edit(make_unit(), "weight", 5, 0.5), "events: weight is given in .*, must be null: only a scan has weights"),
        (make_unit(estimator="swbr"), "units: estimator is 'swbr'; did you mean 'swrb'"),
        (make_unit(estimator=None), "units: column 'estimator' is null"),
        (make_unit(estimator="swrb"), r"events: kind is 'coupled' in .*\) swrb replicates .* must be 'scan' or 'branch'"),
        (Unit(make_unit().record, make_unit().events.rename_columns({"f": "g"})), "events: unknown column 'g'; did you mean|events: unknown column 'g'; known"),
        (Unit(make_unit().record, make_unit().events.set_column(8, "delta", pa.array([0.0] * 32))), "events: column 'delta' is double, must be float"),
        (make_unit(horizon=9), "events: 32 rows"),
        (make_unit(replicates_=4), "units: unknown field 'replicates_'; did you mean 'replicates'"),
        (make_unit(horizon=None), "units: column 'horizon' is null"),
        (make_unit(seed="x"), "units: seed is 'x', must be int64"),
        (make_unit(first_replicate=-1), "units: first_replicate is -1, must be at least 0"),
        (make_unit(decode_seconds=float("nan")), "units: decode_seconds of .* is nan, must be finite"),
    ],
)  # fmt: skip
def test_events_that_are_not_the_units_are_refused(empty: Store, unit: Unit, message: str) -> None:
    before = empty.versions()
    assert re.search(message, refused(empty.append_units, [make_unit("good"), unit]))
    assert empty.versions() == before


def test_names_may_hold_any_character(store: Store) -> None:
    names = ["..", "a/b", "a-b", "a%20b", "é" * 200, "_hidden", "x=1", " "]
    units = [make_unit(doc, "50 %") for doc in names]
    assert store.append_units(units) == len(names)
    assert content(store).equals(expected(units))


# Versions, files and what other readers see


def test_a_pinned_version_does_not_see_later_commits(store: Store) -> None:
    store.append_units([make_unit("d0")])
    pinned = store.version("events")
    files = store.files("events", pinned)
    store.append_units([make_unit("d1")])
    assert store.read("events", pinned).drop_columns(["unit"]).equals(expected([make_unit("d0")]))
    assert store.files("events", pinned) == files
    assert len(store.files("events")) == 2
    assert store.read("events", 0).num_rows == 0
    for version in (99, -1):
        with pytest.raises(InputError, match=r"'events' has no version -?\d+; its versions are 0..2"):
            store.read("events", version)


def test_a_log_is_loaded_once_until_it_changes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log is also loaded again if its newest commit was lost and another of the same version came."""
    other, log = Store(store.location), Path(store.location, "events", "_delta_log")
    other.append_units([make_unit("d0")])
    (first,) = store.paths("events")
    with monkeypatch.context() as patch:
        patch.setattr("kvdrift.log.delta.versions.OpenTables.take", None)
        assert store.paths("events") == store.paths("events", store.version("events")) == [first]
    for table in ("events", "units"):
        max(Path(store.location, table, "_delta_log").glob("*.json")).unlink()
    Store(store.location).append_units([make_unit("d1")])
    assert len([*log.glob("*.json")]) == store.version("events") + 1 == other.version("events") + 1
    assert store.paths("events") == other.paths("events") != [first]


def test_pages_have_checksums_and_damage_is_noticed(store: Store) -> None:
    store.append_units([make_unit(replicates=64)])
    (path,) = store.files("events")
    column = pq.read_metadata(path).row_group(0).column(EVENTS.columns.index("delta"))
    assert column.compression == "ZSTD"
    data = bytearray(Path(path).read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    Path(path).write_bytes(data)
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(path, page_checksum_verification=True)
    assert "table 'events' is damaged" in refused(store.read, "events", error=DamagedStoreError)


# Writers at once, and killed ones


def test_threads_at_once_on_one_unit_and_overlapping_ranges(store: Store) -> None:
    def append(first: int) -> int | str:
        try:
            seconds = time.perf_counter()  # no two writers' files are equal
            units = [make_unit(doc, first=at, prefill_seconds=seconds) for doc, at in (("d0", first), ("same", 0))]
            return Store.open(store.location).append_units(units)
        except InputError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(append, [0, 1, 2, 3, 0, 1, 2, 3]))
    refused = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert all("overlaps" in line for line in refused)
    assert sum(outcome for outcome in outcomes if isinstance(outcome, int)) == 2
    assert content(store).num_rows == 2 * 4 * HORIZON
    assert store.read("units").num_rows == 2


@pytest.mark.parametrize("way", ["create", "append_units", "reconcile"])
def test_rows_of_units_are_made_after_a_kill(store: Store, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    store.append_units([make_unit("d0")])

    with killed_in(monkeypatch, UnitCommits, "append_rows"):
        store.append_units([make_unit("d1"), make_unit("d2", decode_seconds=2.5)])
    assert keys(store.read("units")) == [("d0", "snapkv", 0)]
    wanted = [(doc, "snapkv", 0) for doc in ("d0", "d1", "d2")]
    assert keys(store.units()) == wanted, "the gap is not visible here"
    if way == "create":
        Store.create(store.location)
    elif way == "append_units":
        store.append_units([])  # the instance knows that its last append broke
    else:
        assert Store.open(store.location).reconcile() == 2
    healed = store.read("units")
    assert keys(healed) == wanted
    assert healed.filter(pc.equal(healed.column("doc"), "d2")).column("decode_seconds").to_pylist() == [2.5]
    assert store.reconcile() == 0


@pytest.mark.parametrize(
    ("fault", "error", "line"),
    [
        (OSError(28, "No space left on device"), OperationError, r"cannot write events/.*No space left"),
        (PermissionError(13, "Permission denied"), InputError, "cannot be written: permission denied for events/"),
    ],
)
def test_a_put_is_whole_or_not_there(
    store: Store, monkeypatch: pytest.MonkeyPatch, fault: OSError, error: type[KvdriftError], line: str
) -> None:
    def fail(_: int) -> None:
        raise fault

    before = sorted(Path(store.location, "events").rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        assert re.search(line, refused(store.append_units, [make_unit()], error=error))
    assert [path for path in Path(store.location, "events").rglob("*") if path.is_file() and path not in before] == []
    assert store.append_units([make_unit()]) == 1


@pytest.mark.slow
def test_many_commits_are_put_together_in_a_checkpoint(store: Store) -> None:
    for i in range(110):
        store.append_units([make_unit(f"d{i}", replicates=1)])
    log = Path(store.location, "events", "_delta_log")
    assert list(log.glob("*.checkpoint.parquet"))
    assert Store.open(store.location).read("events", 3).num_rows == 3 * HORIZON, "old versions stay after a checkpoint"


# Small keyed tables


HALF = {"action": "half", "window": 64}


def actions(**half: Any) -> pa.Table:
    return table_rows("actions", {"action": "full", "control": True}, HALF | half)


def test_rows_are_appended_once(store: Store) -> None:
    assert store.append_rows("actions", actions()) == 2
    versions = store.versions()
    assert store.append_rows("actions", actions()) == 0
    assert store.versions() == versions
    assert store.append_rows("actions", table_rows("actions", HALF, {"action": "other"})) == 1
    assert sorted(store.read("actions").column("action").to_pylist()) == ["full", "half", "other"]
    assert store.append_rows("actions", actions().slice(0, 0)) == 0


def test_a_row_with_another_value_is_refused(store: Store) -> None:
    store.append_rows("actions", actions())
    versions = store.versions()
    with pytest.raises(
        InputError, match=r"actions \(study=s, action=half, action_revision=0\): window is 32, but the store has 64"
    ):
        store.append_rows("actions", actions(window=32))
    with pytest.raises(InputError, match=r"action=new\): selector is 'b', but the store has 'a'|selector is 'b'"):
        store.append_rows("actions", table_rows("actions", *({"action": "new", "selector": name} for name in "ab")))
    assert "column 'control' is null" in refused(store.append_rows, "actions", actions(control=None))
    assert "rows cannot be appended to 'events'" in refused(store.append_rows, "events", make_unit().events)
    assert store.versions() == versions


def results(estimate: float, baseline: str | None, x: int | None) -> pa.Table:
    return table_rows("results", {"quantity": "gap", "baseline": baseline, "x": x, "estimate": estimate})


def test_null_keys_are_equal_keys(store: Store) -> None:
    nan = float("nan")
    rows = [results(0.5, None, None), results(0.6, None, 1), results(0.7, "full", None), results(nan, "full", 1)]
    assert [store.append_rows("results", row) for row in rows] == [1, 1, 1, 1]
    assert [store.append_rows("results", row) for row in rows] == [0, 0, 0, 0]
    with pytest.raises(InputError, match=r"x=None.*estimate is 0.4, but the store has 0.5"):
        store.append_rows("results", results(0.4, None, None))


def test_the_same_rows_from_many_writers_are_there_once(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda _: Store.open(store.location).append_rows("actions", actions()), range(8)))
    assert sum(counts) == 2
    assert store.read("actions").num_rows == 2


# Derived rows


def test_derived_rows_are_committed_exactly_once(store: Store) -> None:
    store.append_units([make_unit("d0"), make_unit("d1")])
    covered = store.version("events")
    numbers = sorted(store.read("units")["unit"].to_pylist())
    assert store.underived()["steps"].tolist() == numbers
    rows = derive_trajectories(store.read("events")).steps
    own = rows.filter(pc.equal(rows["unit"], numbers[0]))
    file = store.put_derived("steps", own)
    assert store.paths("steps") == [], "written is not visible"
    assert (file.file.rows, file.units) == (32, (numbers[0],))
    assert store.commit_derived("steps", [file], "derive", covered) == 1
    versions = store.versions()
    assert store.commit_derived("steps", [file], "derive", covered) == 0
    assert store.versions() == versions
    assert store.covered_version("steps", "derive") == covered
    assert store.covered_version("trajectories", "derive") is None
    assert store.read("steps").schema.equals(STEPS.schema)
    both = store.put_derived("steps", rows)
    assert store.commit_derived("steps", [both], "derive", covered) == 1, "one of the two is there"
    assert store.read("steps").num_rows == 64
    assert store.underived()["trajectories"].tolist() == numbers
    assert store.all_underived().tolist() == numbers, "trajectories are still missing"


def test_rows_that_are_derived_say_their_unit(store: Store) -> None:
    store.append_units([make_unit()])
    rows = derive_trajectories(make_unit().events).steps
    assert "column 'unit' is null in 32 row(s)" in refused(store.put_derived, "steps", rows)
    assert "'units' is not a derived table" in refused(store.put_derived, "units", rows)


def test_a_unit_between_its_two_commits_is_not_derived_yet(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row makes a derivation find it; until the row exists, no commit says that everything is derived."""
    store.append_units([make_unit("d0")])
    with killed_in(monkeypatch, UnitCommits, "append_rows"):
        store.append_units([make_unit("d1")])
    found = Store.open(store.location).pending()
    assert (len(found.lacking["steps"]), found.whole) == (1, False)
    Store.open(store.location).reconcile()
    found = store.pending()
    assert (len(found.lacking["steps"]), found.whole) == (2, True)


# Errors are one line, and nothing is harmed


def fails(location: object, message: str, *, make: bool = False) -> None:
    assert message in refused(Store.create if make else Store.open, str(location))


def test_places_that_are_no_store(tmp_path: Path) -> None:
    fails(tmp_path / "nothing", "is not a kvdrift store")
    assert not (tmp_path / "nothing").exists(), "looking makes nothing"
    file = tmp_path / "file"
    file.write_text("mine")
    fails(file, "is a file, not a store")
    fails(file, "cannot make a store here", make=True)
    fails(file / "below", "cannot make a store here", make=True)
    fails("/proc/store", "cannot make a store here", make=True)
    fails(tmp_path / "a%20b", "cannot hold a '%'", make=True)
    fails(tmp_path / "a?b", "cannot hold a '?'", make=True)
    fails("nonsense://bucket/store", "not a URL that can be read")
    assert file.read_text() == "mine"
    assert "no table 'event'; did you mean 'events'" in refused(Store.create(tmp_path / "store").version, "event")


def test_damaged_and_foreign_tables(store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store.append_units([make_unit()])
    log = Path(store.location, "events", "_delta_log")
    commit = log / f"{1:020d}.json"
    text = commit.read_text()
    commit.write_text(text[: len(text) // 2])
    said = refused(lambda: Store.open(store.location).paths("events"), error=DamagedStoreError)
    assert said.endswith(
        f"(log file {commit.name} is not whole); to repair the store: kvdrift verify {store.location} --repair"
    )
    commit.write_text(text)
    assert store.read("events").num_rows == 32
    Path(store.files("events")[0]).unlink()
    assert "table 'events' is damaged" in refused(store.read, "events", error=DamagedStoreError)
    DeltaTable.create(tmp_path / "foreign" / "events", schema=EVENTS.schema)
    fails(tmp_path / "foreign", "was not made by kvdrift")
    assert capfd.readouterr() == ("", "")


def test_an_old_log_file_that_was_cut_at_the_end_of_a_line_is_refused(store: Store) -> None:
    for number in range(7):
        row = {"study": "s", "model": "m", "doc": f"d{number}", "split": "evaluation", "stratum": "a", "cluster": "c"}
        assert store.append_rows("documents", pa.Table.from_pylist([row], schema=DOCUMENTS.schema)) == 1
    commit = Path(store.location, "documents", "_delta_log", f"{2:020d}.json")
    commit.write_bytes(commit.read_bytes().splitlines(keepends=True)[0])
    said = refused(lambda: Store.open(store.location).read("documents"), error=DamagedStoreError)
    assert commit.name in said
    assert "0 of 2 Delta actions" in said


def test_an_empty_log_file_is_harmless_if_a_checkpoint_has_its_content(store: Store) -> None:
    store.append_units([make_unit("d0"), make_unit("d1")])
    rows, version = content(store), store.version("events")
    DeltaTable(f"{store.location}/events").create_checkpoint()
    Path(store.location, "events", "_delta_log", f"{version:020d}.json").write_bytes(b"")
    assert content(Store.open(store.location)).equals(rows)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0])
def test_a_store_of_another_schema_version_is_refused(store: Store, version: int) -> None:
    first = Path(store.location, "events", "_delta_log", f"{0:020d}.json")
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    for line in lines:
        if "metaData" in line:
            line["metaData"]["configuration"]["kvdrift.schema_version"] = str(version)
    first.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    for make in (False, True):
        fails(store.location, f"schema version {version}, this kvdrift reads version {SCHEMA_VERSION}", make=make)


def test_many_make_a_store_at_once_and_making_it_again_keeps_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        (store, *_) = pool.map(Store.create, [tmp_path / "store"] * 6)
        assert store.versions() == dict.fromkeys(TABLES, 0)
        store.append_units([make_unit()])
        versions = store.versions()
        list(pool.map(Store.create, [store.location] * 4))
    assert store.versions() == versions


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_log_that_seems_to_have_a_gap_is_listed_again(tmp_path: Path, *, checkpoint: bool) -> None:
    """A file system that lists a folder may show a later name and miss an earlier one that came meanwhile."""
    store = Store.create(tmp_path / "store")
    for number in range(5):
        store.append_units([make_unit(f"d{number}")])
        if checkpoint and number == 1:
            DeltaTable(f"{store.location}/events").create_checkpoint()
    late = Path(store.location, "events", "_delta_log", f"{3:020d}.json")
    content = late.read_bytes()
    late.unlink()
    with pytest.raises(DeltaError) as error:
        DeltaTable(f"{store.location}/events")
    assert has_gap(error.value)
    threading.Timer(0.05, late.write_bytes, [content]).start()
    assert listed(lambda: DeltaTable(f"{store.location}/events")).version() == 5
