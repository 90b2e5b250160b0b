"""``kvdrift verify``: sound stores of all kinds are called sound, and every damage is found, named and nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction
from fixtures.command import call
from fixtures.older_stores import SCHEMAS_1, make_store_1, put_1
from fixtures.stored_units import make_unit
from fixtures.swrb_events import plain_replicate, random_laws, swrb_replicate, unit
from log.appends import UNIT_FOOTER, unit_path
from log.projections import UnitRows

from log.delta.parquet_files import content_digest, encode_parquet
from log.store import Store, Unit
from schema.errors import InputError
from schema.tables import ACTIONS, CALIBRATION, DOCUMENTS, RESULTS, TABLES
from sql.catalog import Views
from sql.promises import breaches, computed_views
from transforms.segments import commit, derive_segment, pending
from verification.files import TableFiles
from verification.findings import Check, Fault
from verification.segments import ROUNDING, first_difference
from verification.whole_store import verify

H = 6
STUDY, MODEL = "s", "m/x"
ACTION_NAMES = {"snapkv": False, "full": True}  # name: control
DERIVED_TABLES = ("trajectories", "steps", "branchings", "branching_depths")


# Stores to verify, and ways to damage them


def made_units(documents: int = 2, replicates: int = 3) -> list[Unit]:
    """Coupled pairs of an action and of a control, and residual branchings of the action."""
    units = []
    for number in range(documents):
        chance = np.random.default_rng(number)
        laws = random_laws(chance, H, apart=0.9)
        alike = dataclasses.replace(laws, q=laws.p)
        for action, estimator, one, law in (
            ("snapkv", "plain", plain_replicate, laws),
            ("snapkv", "swrb", swrb_replicate, laws),
            ("full", "plain", plain_replicate, alike),
        ):
            names = {"study": STUDY, "model": MODEL, "doc": f"d{number}", "action": action}
            rows = [row for k in range(replicates) for row in one({**names, "replicate": k}, law, chance)]
            units.append(unit(rows, estimator, H, decode_seconds=0.25, kept_sha256=["ab"]))
    return units


def document_row(number: int, split: str = "development") -> dict[str, Any]:
    names = {"study": STUDY, "model": MODEL, "doc": f"d{number}", "cluster": f"d{number}"}
    return dict.fromkeys(DOCUMENTS.columns) | DOCUMENTS.defaults | names | {"split": split, "stratum": "all"}


def action_row(name: str) -> dict[str, Any]:
    fixed = {"selector": name, "keep": "all", "position_mode": "continued", "prespecified": True}
    fixed |= {"action_revision": 0, "dropped": False}
    return dict.fromkeys(ACTIONS.columns) | fixed | {"study": STUDY, "action": name, "control": ACTION_NAMES[name]}


def append(store: Store, table: str, *rows: dict[str, Any]) -> None:
    store.append_rows(table, pa.Table.from_pylist(list(rows), schema=TABLES[table].schema))


def derive(store: Store) -> None:
    version = store.version("events")
    commit(store, [derive_segment(store, segment) for segment in pending(store, version)], version, covered=True)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "store"
    store = Store.create(folder)
    append(store, "documents", document_row(0), document_row(1, "evaluation"))
    append(store, "actions", *map(action_row, ACTION_NAMES))
    store.append_units(made_units())
    derive(store)
    return folder


@pytest.fixture
def made(made_once: Path, tmp_path: Path) -> Store:
    """A small store of both estimators, to be damaged."""
    return Store(shutil.copytree(made_once, tmp_path / "made"))


@pytest.fixture
def study(finished: Path, tmp_path: Path) -> Store:
    """The finished study's store, to be damaged."""
    return Store(shutil.copytree(finished, tmp_path / "study"))


def faults(store: Store) -> list[str]:
    """The faults that a command finds, which opens the store anew: ``store`` may have loaded logs before a forgery."""
    return [str(fault) for check in verify(Store(store.location)) for fault in check.faults]


def file_faults(store: Store) -> list[str]:
    """The faults of everything but views, which are most of the work: those that no view is needed to find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verification.whole_store._check_views", lambda *_, **__: Check("views", "none", "left out"))
        return faults(store)


def assert_found(store: Store, *patterns: str) -> None:
    """Each pattern is one fault's, and there are no others; each is a line."""
    found = file_faults(store)
    assert not any("\n" in line for line in found)
    for pattern in patterns:
        matching = [line for line in found if re.search(pattern, line)]
        assert len(matching) == 1, f"{pattern}: {found}"
        found.remove(matching[0])
    assert found == []


def contents(folder: str | Path) -> dict[str, str]:
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def path_of(store: Store, table: str, words: str = "") -> str:
    """The first file of a table whose path has the words in it."""
    return next(path for path in store.paths(table) if words in path)


def place(store: Store, table: str, path: str) -> Path:
    return Path(store.location, table, path)


def edited(store: Store, table: str, path: str, edit: Callable[[list[dict[str, Any]]], object]) -> bytes:
    """The file's bytes had its rows been other ones; its footer's unit record stays."""
    data = store.read_bytes(table, path)
    rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    edit(rows)
    record = pq.read_metadata(pa.BufferReader(data)).metadata or {}
    footer = {UNIT_FOOTER: record[UNIT_FOOTER.encode()].decode()} if UNIT_FOOTER.encode() in record else None
    return encode_parquet(pa.Table.from_pylist(rows, schema=TABLES[table].schema), footer)


def forge(store: Store, table: str, path: str, data: bytes | None, *, named: str = "", rows: int | None = None) -> None:
    """Put other bytes in a file's place and into the log, as if they had been committed; None takes it out of the log."""
    named = named or path
    for log in place(store, table, "_delta_log").glob("*.json"):
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        own = [action for action in actions if action.get("add", {}).get("path") == path]
        for action in own:
            if data is None:
                actions.remove(action)
                actions[0]["commitInfo"]["kvdrift"]["actions"] -= 1
            else:
                rows = pq.read_metadata(pa.BufferReader(data)).num_rows if rows is None else rows
                action["add"] |= {"path": named, "size": len(data), "stats": json.dumps({"numRecords": rows})}
                place(store, table, named).write_bytes(data)
        if own:
            log.write_text("".join(json.dumps(action) + "\n" for action in actions))


def forge_events(store: Store, path: str, edit: Callable[[list[dict[str, Any]]], object]) -> str:
    """Other events in a file's place, whose name is right in turn; returns it. Nothing is derived from them."""
    data = edited(store, "events", path, edit)
    named = path.rpartition("-")[0] + f"-{content_digest(data)}.parquet"
    forge(store, "events", path, data, named=named)
    return named


def add_file(store: Store, table: str, path: str, data: bytes) -> None:
    """Commit one more file, without asking what is there."""
    place(store, table, path).write_bytes(data)
    rows = pq.read_metadata(pa.BufferReader(data)).num_rows
    added = AddAction(path, len(data), {}, 0, data_change=True, stats=json.dumps({"numRecords": rows}))
    DeltaTable(f"{store.location}/{table}").create_write_transaction([added], "append", TABLES[table].schema)


# Sound stores


def test_a_finished_study_is_sound_and_nothing_is_written(study: Store, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(study.location)
    code, out, err = call(capsys, "verify", study.location)
    assert code == 0
    lines = out.splitlines()
    assert lines[-1] == f"{study.location}: sound"
    assert "fault" not in out
    units, events = len(study.paths("events")), study.read("events").num_rows
    trajectories = study.read("trajectories").num_rows
    assert f"events: {units} units, {events:,} rows, whole and unique" in lines
    assert f"steps: {events:,} rows of {units} units, as their events give" in lines
    assert f"trajectories: {trajectories:,} rows of {units} units, as their events give" in lines
    assert "controls: 20 replicates, exactly 0" in lines  # 10 documents, K = 2
    assert "plans: 1 plan, hashed right, and frozen before the evaluation or marked seen" in lines
    assert any(re.match(r"views: \d+ views, \d+ promises, as their contracts say", line) for line in lines)
    assert f"verify: {units} of {units} units" in err
    assert contents(study.location) == before


def test_both_estimators(made: Store) -> None:
    checks = {check.subject: check for check in verify(made)}
    assert [str(check) for check in checks.values() if check.faults or check.notes] == []
    assert checks["branchings"].counted == "6 rows of 2 units"
    assert checks["branching_depths"].counted == f"{6 * H} rows of 2 units"
    assert checks["trajectories"].counted == "12 rows of 4 units"
    assert checks["controls"].counted == "6 replicates"


def test_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "verify", Store.create(tmp_path / "store").location)
    assert code == 0
    assert "events: 0 units, 0 rows, whole and unique" in out


def endless(doc: str, first: int = 0) -> Unit:
    """A unit neither of whose sides ends: after both ends there are no mismatches, as the views promise."""
    made = make_unit(doc, first=first)
    events, never = made.events, pa.repeat(pa.scalar(value=False), len(made.events))
    for name in ("x_eos", "y_eos"):
        events = events.set_column(events.schema.get_field_index(name), name, never)
    return Unit(made.record, events)


def test_a_store_of_version_1(tmp_path: Path) -> None:
    store = Store(make_store_1(tmp_path / "old", [endless("d0"), endless("d1", first=4)], lost_rows=1))
    names = {"study": "s", "model": "org/model"}
    rows = {"documents": [document_row(number) | names for number in (0, 1)], "actions": [action_row("snapkv")]}
    for table, of_version_1 in rows.items():
        data = encode_parquet(pa.Table.from_pylist(of_version_1, schema=SCHEMAS_1[table]))
        put_1(DeltaTable(f"{store.location}/{table}"), f"{content_digest(data)}.parquet", data, len(of_version_1), [])
    before = contents(store.location)
    checks = {check.subject: check for check in verify(store)}
    assert [fault for check in checks.values() for fault in check.faults] == []
    assert checks["events"].counted == "2 units, 64 rows"
    assert checks["units"].notes == ("units: 1 row still to come, from the footers of their events files",)
    assert checks["trajectories"].notes == ("trajectories: 2 units still to derive",)
    assert contents(store.location) == before
    derive(store)
    Store.create(store.location)  # upgrades it: its old files lack columns that the tables have now
    store.append_units([endless("d0", first=4)])
    assert faults(store) == []


def test_what_is_not_there_yet_is_no_fault(made: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer killed between its two commits, and units that nobody derived."""
    monkeypatch.setattr(UnitRows, "append", lambda *_: 0)
    append(made, "documents", document_row(2))
    made.append_units([given for given in made_units(3) if given.record["doc"] == "d2"])
    notes = [note for check in verify(made) for note in check.notes]
    assert notes == [
        "trajectories: 2 units still to derive",
        "steps: 2 units still to derive",
        "branchings: 1 unit still to derive",
        "branching_depths: 1 unit still to derive",
        "units: 3 rows still to come, from the footers of their events files",
    ]
    assert file_faults(made) == []


def test_a_store_that_is_written_meanwhile_is_sound(made: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two versions that verification asks for, a unit is generated, derived and cited."""
    units = iter(made_units(20))
    version, watched = Store.version, Store(made.location)

    def busy_version(store: Store, table: str) -> int:
        if store is watched:
            given = next(units)
            number = int(given.record["doc"][1:])
            append(made, "documents", document_row(number, "evaluation" if number == 1 else "development"))
            made.append_units([given])
            derive(made)
            append(made, "results", result_row(made.version("events")))
        return version(store, table)

    monkeypatch.setattr(Store, "version", busy_version)
    checks = {check.subject: check for check in verify(watched)}
    assert [fault for check in checks.values() for fault in check.faults] == []
    assert checks["events"].counted != checks["units"].counted
    assert len(made.paths("events")) > 20, "it was written meanwhile"


def test_units_and_small_tables_may_be_compacted(made: Store) -> None:
    for table in ("units", "documents"):
        append(made, "documents", document_row(7))
        assert DeltaTable(f"{made.location}/{table}").optimize.compact()["numFilesAdded"] <= 1
    assert file_faults(made) == []


# Damage: each kind is found and named, and nothing else is


def test_a_flipped_byte_in_an_events_file(study: Store, capsys: pytest.CaptureFixture[str]) -> None:
    path = path_of(study, "events")
    data = bytearray(study.read_bytes("events", path))
    data[len(data) // 3] ^= 4
    place(study, "events", path).write_bytes(data)
    code, out, _ = call(capsys, "verify", study.location)
    assert code == 1
    digest = hashlib.sha256(data).hexdigest()[:16]
    named = path[-24:-8]
    assert f"  fault: events/{path}: the content has digest {digest}, must have {named} as its name says" in out
    assert out.splitlines()[-1] == f"{study.location}: 1 fault"


def test_a_deleted_derived_file(study: Store) -> None:
    path = path_of(study, "steps", "recent-half")
    place(study, "steps", path).unlink()
    assert_found(study, f"^steps/{path}: the file is missing or cannot be read, must be there$")


def test_a_truncated_file(study: Store) -> None:
    path = path_of(study, "trajectories")
    data = study.read_bytes("trajectories", path)
    place(study, "trajectories", path).write_bytes(data[:-100])
    assert_found(
        study, f"^trajectories/{path}: the file has {len(data) - 100:,} bytes, must have {len(data):,} as the log"
    )


def test_a_changed_trajectory(study: Store) -> None:
    path = path_of(study, "trajectories", "recent-half")

    def change(rows: list[dict[str, Any]]) -> None:
        rows[2]["occupation"] += 1

    forge(study, "trajectories", path, edited(study, "trajectories", path, change))
    ours, *views = faults(study)
    found = re.fullmatch(
        rf"trajectories/{re.escape(path)}: occupation is (\d+) at replicate 2, must be (\d+) as .*", ours
    )
    assert found
    assert int(found[1]) == int(found[2]) + 1
    assert any("view decomposition" in line and "'R = O + E C' does not hold" in line for line in views)
    assert all(line.startswith("view ") for line in views)


def test_an_edited_plan(study: Store) -> None:
    path = path_of(study, "plans")

    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["plan"] = rows[0]["plan"].replace('"replicates":5', '"replicates":9')

    data = edited(study, "plans", path, change)
    place(study, "plans", path).write_bytes(data)
    (row,) = study.read("plans").to_pylist()
    decided = {name: value for name, value in json.loads(row["plan"]).items() if name != "measured"}
    text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
    wrong = hashlib.sha256(text.encode()).hexdigest()
    assert_found(
        study,
        rf"^plans/{path}: the (file has|content has digest)",
        rf"^plans \(study=small, model=kvdrift/tiny, plan_revision=0\): plan has SHA-256 {wrong}, must have {row['plan_sha256']} as",
    )
    forge(study, "plans", path, data, named=f"{content_digest(data)}.parquet")
    assert_found(study, "^plans .*: plan has SHA-256 ")


def test_a_control_that_moved(study: Store) -> None:
    path = path_of(study, "events", "/full/")

    def move(rows: list[dict[str, Any]]) -> None:
        rows[3]["f"] = rows[5]["f"] = 0.25

    place(study, "events", path).write_bytes(edited(study, "events", path, move))
    assert_found(
        study,
        rf"^events/{path}: the (file has|content has digest)",
        rf"^events/{path}: f of a full-retention control is 0.25 at replicate 0, t 4 and 1 more, must be exactly 0$",
        rf"^steps/{path}: f is 0.0 at replicate 0, t 4 and 1 more, must be 0.25 as its events give$",
        rf"^trajectories/{path}: sum_f is 0.0 at replicate 0, must be 0.5 as its events give$",
    )


def test_a_second_file_with_the_same_replicates(study: Store) -> None:
    path = path_of(study, "events", "snapkv-half")
    (record,) = (row for row in study.units().to_pylist() if row.pop("path") == path)
    record["decode_seconds"] += 1
    events = pq.read_table(place(study, "events", path))
    data = encode_parquet(events, {UNIT_FOOTER: json.dumps(record)})
    again = unit_path(record, content_digest(data))
    add_file(study, "events", again, data)
    first, second = sorted([path, again])
    twice = rf"\[0, {record['replicates']}\)"
    assert_found(study, f"^events/{second}: replicates {twice} are in events/{first} too, must be in one unit$")


def test_a_missing_units_row(study: Store) -> None:
    path = path_of(study, "units")
    place(study, "units", path).write_bytes(edited(study, "units", path, list.pop))
    assert_found(study, rf"^units/{path}: the (file has|content has digest)")


def test_many_faults_are_counted(study: Store, capsys: pytest.CaptureFixture[str]) -> None:
    paths = study.paths("trajectories")
    for path in paths:
        place(study, "trajectories", path).unlink()
    code, out, _ = call(capsys, "verify", study.location)
    assert code == 1
    assert out.count("  fault: ") == 20
    assert f"  and {len(paths) - 20} more faults of trajectories" in out
    assert "not computed: there are files that cannot be read" in out
    assert out.splitlines()[-1] == f"{study.location}: {len(paths)} faults"


def change_first(column: str, value: Any) -> Callable[[list[dict[str, Any]]], object]:
    return lambda rows: rows[0].update({column: value})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (list.pop, r"\d+ rows for \(s, m/x, d0, snapkv\) replicates \[0, 3\), must be 18"),
        (lambda rows: rows.append(rows[0]), r"19 rows for .*, must be 18"),
        (change_first("t", 2), "t is 2 where .* needs 1"),
        (change_first("doc", "d1"), "doc is 'd1', must be 'd0' as in the unit"),
        (change_first("weight", 0.5), "weight is given in .*, must be null"),
    ],
)
def test_a_unit_that_is_not_whole(made: Store, edit: Callable[[list[dict[str, Any]]], object], message: str) -> None:
    """The file's name and its place in the log are right, so only its content tells."""
    old = next(path for path in made.paths("events") if "d0/snapkv/" in path and "swrb-" not in path)
    named = forge_events(made, old, edit)
    found = [line for line in file_faults(made) if line.startswith(f"events/{named}: ")]
    assert len(found) == 1
    assert re.search(message, found[0])


def test_a_branching_that_is_not_whole(made: Store) -> None:
    named = forge_events(made, path_of(made, "events", "swrb-"), change_first("weight", 1.5))
    assert any(line.startswith(f"events/{named}: weight is 1.5, must be within [0, 1]") for line in file_faults(made))


def test_an_events_file_without_its_record_or_of_another_unit(made: Store) -> None:
    path = path_of(made, "events", "d0/full")
    rows = pq.read_table(place(made, "events", path))
    data = encode_parquet(rows)
    place(made, "events", path).write_bytes(data)
    assert any("the footer has no unit record, must have that of its unit" in line for line in file_faults(made))
    data = made.read_bytes("events", path_of(made, "events", "d1/full"))
    place(made, "events", path).write_bytes(data)
    assert any(
        re.search(r"the path is not that of \(s, m/x, d1, full\) .*, must be s/m-x/d1/full/", line)
        for line in file_faults(made)
    )


@pytest.mark.parametrize(
    ("table", "column", "at"),
    [
        ("trajectories", "sum_delta", "replicate 0"),
        ("steps", "delta", "replicate 0, t 1"),
        ("branchings", "mass", "replicate 0"),
        ("branching_depths", "capacity", "replicate 0, depth 1"),
    ],
)
def test_derived_rows_that_are_not_what_the_events_give(made: Store, table: str, column: str, at: str) -> None:
    path = path_of(made, table)
    forge(made, table, path, edited(made, table, path, change_first(column, 0.625)))
    found = file_faults(made)
    assert len(found) == 1
    assert re.match(rf"{table}/{path}: {column} is 0.625 at {at}, must be \d[\d.e-]* as its events give", found[0])


def test_derived_rows_that_are_missing_or_too_many(made: Store) -> None:
    path = path_of(made, "steps")
    forge(made, "steps", path, edited(made, "steps", path, list.pop))
    assert any(
        line.startswith(f"steps/{path}: the file has 17 rows, must have 18 as its") for line in file_faults(made)
    )


def test_a_derived_file_that_left_the_log_or_has_no_events(made: Store) -> None:
    steps, events = path_of(made, "steps"), path_of(made, "events", "swrb-")
    forge(made, "steps", steps, None)
    assert_found(
        made, f"^steps/{steps}: the file is not in the log, must be there: steps says that its events are derived$"
    )
    forge(made, "events", events, None)
    found = file_faults(made)
    for table in ("branchings", "branching_depths"):
        assert (
            f"{table}/{events}: the file is derived from no events file that is there, must have the path of one"
            in found
        )
    assert any(
        re.match(rf"units \(.*estimator=swrb.*\): path is {events}, must be that of an events file", line)
        for line in found
    )


def test_rows_that_are_not_of_the_declared_schema(made: Store) -> None:
    path = path_of(made, "steps")
    rows = pq.read_table(place(made, "steps", path))
    for changed, message in (
        (rows.set_column(5, "t", rows["t"].cast(pa.int64())), "column 't' is int64, must be int32"),
        (rows.drop_columns("lag"), "column 'lag' is missing"),
        (rows.append_column("more", rows["t"]), "unknown column 'more'"),
        (rows.set_column(5, "t", pa.nulls(len(rows), pa.int32())), r"column 't' is null in 18 row\(s\)"),
    ):
        forge(made, "steps", path, encode_parquet(changed))
        assert_found(made, f"^steps/{path}: {message}")
    lacking = pq.read_table(place(made, "events", path)).drop_columns("kind")
    place(made, "events", path).write_bytes(encode_parquet(lacking))
    assert any(line == f"events/{path}: column 'kind' is missing" for line in file_faults(made))


def test_rows_that_are_not_as_many_as_the_log_says(made: Store) -> None:
    path = path_of(made, "branchings")
    forge(made, "branchings", path, made.read_bytes("branchings", path), rows=4)
    assert_found(made, f"^branchings/{path}: the file has 3 rows, must have 4 as the log says$")


def test_units_rows_that_are_not_the_footers(made: Store) -> None:
    path = path_of(made, "units")
    data = edited(made, "units", path, change_first("decode_seconds", 7.0))
    forge(made, "units", path, data, named=f"{content_digest(data)}.parquet")
    assert_found(made, r"^units \(study=s, .*\): decode_seconds is 7.0, must be 0.25 as in the footer of events/s/m-x/")


def test_keys_that_are_there_twice(made: Store) -> None:
    data = made.read_bytes("documents", path_of(made, "documents"))
    again = encode_parquet(pq.read_table(pa.BufferReader(data)).slice(1))
    add_file(made, "documents", f"{content_digest(again)}.parquet", again)
    assert (
        r"documents (study=s, model=m/x, doc=d1, document_revision=0): 2 rows have this key, must be 1"
        in file_faults(made)
    )


def test_units_of_unknown_documents_and_actions(made: Store) -> None:
    made.append_units([make_unit("d9", "other")])
    assert_found(
        made,
        r"^documents \(study=s, model=org/model, doc=d9\): the row is missing, must be there for events/s/org-model/d9/",
        r"^actions \(study=s, action=other, action_revision=0\): the row is missing, must be there for events/s/org-model/d9/other/",
    )


def plan_row(events_version: int, number: int = 0, /, **content: Any) -> dict[str, Any]:
    text = json.dumps({"replicates": 3} | content)
    row = {"study": STUDY, "model": MODEL, "plan_revision": number, "frozen_at": 0, "events_version": events_version}
    row |= {"plan": text}
    return row | {"plan_sha256": hashlib.sha256(text.encode()).hexdigest()}


def result_row(events_version: int, plan: str | None = None) -> dict[str, Any]:
    numbers = {"estimate": 0.5, "level": 0.95, "draws": 1, "documents": 1, "events_version": events_version}
    numbers |= {"action_revision": 0, "baseline_revision": 0, "interval": "percentile"}
    words = {
        "split": "evaluation", "stratum": "all", "action": "snapkv", "quantity": "mismatch", "status": "exploratory",
    }  # fmt: skip
    return (
        dict.fromkeys(RESULTS.columns)
        | RESULTS.defaults
        | {"study": STUDY, "model": MODEL, "plan_sha256": plan}
        | words
        | numbers
    )


def test_a_plan_from_after_the_evaluation_began(made: Store) -> None:
    """Document d1 is an evaluation document, whose units came with the first version that has any."""
    early, late = 0, made.version("events")
    append(made, "plans", plan_row(late))
    assert_found(
        made,
        rf"^plans \(study=s, model=m/x, plan_revision=0\): events_version is {late}, must be one before the first .*: events/s/m-x/d1/",
    )
    (path,) = made.paths("plans")
    data = edited(made, "plans", path, change_first("events_version", early))
    forge(made, "plans", path, data, named=f"{content_digest(data)}.parquet")
    assert file_faults(made) == []


def test_later_revisions_of_a_plan(made: Store) -> None:
    """They may come after evaluation documents, which they say, and what is estimated under them says so too."""
    late = made.version("events")
    append(made, "plans", plan_row(0), plan_row(late, 1, revision=1, seen=True))
    seen = plan_row(late, 1, revision=1, seen=True)["plan_sha256"]
    append(made, "results", result_row(late, plan_row(0)["plan_sha256"]), result_row(late, seen))
    assert faults(made) == []
    append(made, "results", result_row(late - 1, seen) | {"status": "prespecified", "family": "primary"})
    append(made, "plans", plan_row(late, 3, revision=2))
    named = r"^plans \(study=s, model=m/x, plan_revision=3\): "
    assert_found(
        made,
        rf"{named}plan_revision is 3, must be 2 as its plan says$",
        rf"{named}revision 2 is missing, must be there$",
        rf"{named}it is not marked seen, must be: it was made after events/s/m-x/d1/",
        rf"^results \(study=s, model=m/x\), 1 row: status is prespecified, must be seen as plan {seen} is$",
    )


def test_citations_of_what_is_not_there(made: Store) -> None:
    latest = made.version("events")
    append(made, "results", result_row(latest + 1), result_row(latest, "ab"))
    calibrated = dict.fromkeys(CALIBRATION.columns, 0.0) | {"study": STUDY, "model": MODEL, "action": "snapkv"}
    calibrated |= {
        "baseline": "full", "observation": "o", "candidate": "c", "selected": True, "documents": 1, "draws": 1,
    }  # fmt: skip
    calibrated |= {"decision": None, "status": "exploratory", "events_version": -1, "plan_sha256": None}
    calibrated |= {"low": None, "high": None, "action_revision": 0, "baseline_revision": 0, "inputs_sha256": None}
    calibrated |= {"interval": "percentile", "documents_revision": 0}
    append(made, "calibration", calibrated)
    assert_found(
        made,
        rf"^results \(study=s, model=m/x\), 1 row: events_version is {latest + 1}, must be one of 0..{latest}$",
        r"^results \(study=s, model=m/x\), 1 row: plan_sha256 is ab, must be null: the study has no plan$",
        rf"^calibration \(study=s, model=m/x\), 1 row: events_version is -1, must be one of 0..{latest}$",
    )
    append(made, "plans", plan_row(0))
    assert any(
        f"plan_sha256 is ab, must be {plan_row(0)['plan_sha256']} as in plans" in line for line in file_faults(made)
    )


def test_what_cannot_be_read_is_not_blamed_on_others(made: Store) -> None:
    """Results cite a plan, units name documents and actions: with those files gone there is no telling."""
    append(made, "plans", plan_row(0))
    append(made, "results", result_row(1, plan_row(0)["plan_sha256"]))
    assert file_faults(made) == []
    paths = {table: path_of(made, table) for table in ("plans", "documents", "actions", "units")}
    for table, path in paths.items():
        place(made, table, path).unlink()
    assert_found(made, *(f"^{table}/{path}: the file is missing" for table, path in paths.items()))


def test_a_damaged_log(made: Store, capsys: pytest.CaptureFixture[str]) -> None:
    place(made, "results", "_delta_log/00000000000000000000.json").write_text("{")
    code, out, _ = call(capsys, "verify", made.location)
    assert code == 1
    assert "  fault: results/_delta_log/00000000000000000000.json: the log file is not whole\n" in out
    assert "events" not in out


@pytest.mark.parametrize("options", [(), ("--repair",)])
def test_what_is_no_store_is_the_users_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    """Also where it might be mended: no store is made of another folder."""
    code, out, err = call(capsys, "verify", tmp_path, *options)
    assert (code, out) == (2, "")
    assert "is not a kvdrift store" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("table", ["events", "trajectories", "branching_depths", "units"])
def test_no_flipped_bit_changes_a_row_unnoticed(made: Store, table: str) -> None:
    """One bit anywhere: the file has a fault or other rows than before, unless it is in what holds no rows.

    That is, in a derived file, statistics and the names in the footer of what wrote it.
    """
    path = path_of(made, table)
    data = made.read_bytes(table, path)
    files = TableFiles(made, table, made.version(table))
    sound = files.read(path)
    assert sound.rows is not None
    assert sound.faults == ()
    chance = np.random.default_rng(5)
    found = 0
    for at in chance.choice(len(data), 200, replace=False):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(chance.integers(8))
        place(made, table, path).write_bytes(flipped)
        reading = files.read(path)
        if reading.faults or first_difference(table, reading.rows, sound.rows):
            found += 1
        else:
            assert table in DERIVED_TABLES, "the name of every other file holds its digest"
    assert found == 200 or (table in DERIVED_TABLES and found > 100)


def test_page_checksums_that_do_not_fit(made: Store) -> None:
    """Flipped bits that a reader sees by the checksum alone, in a file of before files held digests of themselves."""
    path = path_of(made, "steps")
    data = encode_parquet(pq.read_table(pa.BufferReader(made.read_bytes("steps", path))))
    forge(made, "steps", path, data)
    files = TableFiles(Store(made.location), "steps", made.version("steps"))
    rows = pq.read_table(pa.BufferReader(data))

    def still_reads(flipped: bytes) -> bool:
        try:
            return bool(pq.read_table(pa.BufferReader(flipped)).equals(rows))
        except (pa.ArrowException, OSError, UnicodeDecodeError):
            return False

    found = []
    for at in range(4, 64):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        if still_reads(flipped):
            place(made, "steps", path).write_bytes(flipped)
            found += [fault.what for fault in files.read(path).faults]
    assert found
    assert all("CRC" in line and line.endswith("must be Parquet with right page checksums") for line in found)


def test_text_that_is_no_text(made: Store) -> None:
    path = path_of(made, "steps")
    rows = pq.read_table(place(made, "steps", path))
    names = pa.array([b"\xff"] * len(rows)).cast(pa.string(), safe=False)
    forge(made, "steps", path, encode_parquet(rows.set_column(2, "doc", names)))
    assert_found(made, f"^steps/{path}: the file cannot be read .*UTF8")


# Parts


def test_sums_may_differ_by_rounding_and_nothing_else_may() -> None:
    schema = TABLES["branchings"].schema
    row = dict.fromkeys(schema.names, "x") | {
        "replicate": 4,
        "horizon": 8,
        "complete": True,
        "scanned": 8,
        "mass": 0.3,
        "action_revision": 0,
    }
    row |= {"branch": None, "mismatches": 2}

    def difference(**changed: Any) -> str | None:
        tables = (pa.Table.from_pylist([given], schema=schema) for given in (row | changed, row))
        return first_difference("branchings", *tables)

    assert difference() is None
    assert difference(mass=0.3 * (1 + ROUNDING / 2)) is None
    assert difference(mass=0.3 * (1 + 3 * ROUNDING)) is not None
    assert ROUNDING > 2 * 2048 * 2.0**-53, "what 2 H additions can be off by, at horizons up to 2048"
    assert np.finfo(np.float32).eps / 1e4 > ROUNDING, "and far below any change of an event's distance"
    assert difference(mass=float("nan")) is not None
    assert difference(branch=3) == "branch is 3 at replicate 4, must be null as its events give"
    assert difference(mismatches=3) == "mismatches is 3 at replicate 4, must be 2 as its events give"
    assert difference(doc="y") == "doc is 'y' at replicate 4, must be 'x' as its events give"
    assert difference(complete=False) == "complete is False at replicate 4, must be True as its events give"


def test_broken_promises_are_named_with_an_example() -> None:
    row = {"study": "s", "model": "m", "split": "evaluation", "stratum": "pooled", "action": "a", "documents": 3}
    row |= {"trajectories": 9, "mismatch": 0.5, "rollout_tv": 0.5, "fixed_history_tv": 0.1, "occurrence": 0.1}
    row |= {"exposure": 0.5, "occupation": 0.4, "mismatch_rate": 0.8, "divergence_probability": 1.0, "mean_entry": 2.0}
    row |= {"written": 1.0, "mismatch_written": 0.5, "exposure_written": 0.5}
    wrong = row | {"action": "b", "mismatch": 0.625}
    null = row | {"action": "c", "rollout_tv": None}
    connection = duckdb.connect()
    for rows, found in (
        ([row], []),
        ([row, wrong], [("R = O + E C", 1, "b")]),
        ([row, null], [("rollout_tv is never null", 1, "c")]),
        ([row | {"mismatch": None}], [("mismatch is never null", 1, "a"), ("R = O + E C", 1, "a")]),
        (
            [row, row, wrong],
            [("one row for each study, model, split, stratum, action", 1, "a"), ("R = O + E C", 1, "b")],
        ),
    ):
        connection.register("decomposition", pa.Table.from_pylist(rows))
        broken = breaches(Views(connection, {}), "decomposition")
        assert [(breach.promise, breach.rows, breach.example["action"]) for breach in broken] == found
    with pytest.raises(InputError, match="no view 'decompositions'; did you mean 'decomposition'"):
        breaches(Views(connection, {}), "decompositions")


def test_all_views_with_identities_are_checked() -> None:
    assert {"decomposition", "contrasts", "entry", "eos_partition", "swrb_risk", "calibration"} <= set(computed_views())
    assert not set(computed_views()) & {"events", "steps", "trajectories", "units"}


def test_the_line_of_a_check() -> None:
    assert str(Check("events", "1 unit", "whole")) == "events: 1 unit, whole"
    fault = Fault("events/a", "x is 1, must be 2")
    assert str(Check("events", "1 unit", "whole", (fault,))) == "events: 1 unit, 1 fault"
    assert str(Check("events", "1 unit", "whole", (fault, fault))) == "events: 1 unit, 2 faults"
