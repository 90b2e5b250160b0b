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
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction
from fixtures.altered_events import with_column
from fixtures.command import call
from fixtures.file_faults import faults, file_faults
from fixtures.refusals import refused
from fixtures.stored_units import derive, make_unit
from fixtures.swrb_events import drawn_unit, random_laws
from fixtures.table_rows import add_rows, sorted_rows, table_row

from kvdrift.log.checked_files import MEMORY
from kvdrift.log.delta.parquet_files import content_digest, encode_parquet
from kvdrift.log.last_times import FOLDER
from kvdrift.log.store import Store, Unit
from kvdrift.log.units.commits import FOOTER, UnitCommits
from kvdrift.log.units.unit import NUMBERED, conform_unit
from kvdrift.schema.errors import DamagedStoreError, InputError
from kvdrift.schema.tables import TABLES
from kvdrift.sql.catalog import Views, breaches, computed_views, open_views
from kvdrift.sql.catalog_file import catalog_fault, write_catalog
from kvdrift.sql.contracts import contract
from kvdrift.verification.repair import repair
from kvdrift.verification.units import ROUNDING, first_difference
from kvdrift.verification.whole_store import scrub, verify

H = 6
STUDY, MODEL = "s", "m/x"
DERIVED_TABLES = ("unit_moments", "trajectories", "steps", "branchings", "branching_depths")


# Stores to verify, and ways to damage them


def made_units(documents: int = 2, replicates: int = 3) -> list[Unit]:
    """Coupled pairs of an action and of a control, and residual branchings of the action."""
    units = []
    for number in range(documents):
        chance = np.random.default_rng(number)
        laws = random_laws(chance, H, apart=0.9)
        alike = dataclasses.replace(laws, q=laws.p)
        for action, estimator, law in (("snapkv", "plain", laws), ("snapkv", "swrb", laws), ("full", "plain", alike)):
            names = {"study": STUDY, "model": MODEL, "doc": f"d{number}", "action": action}
            measured = {"decode_seconds": 0.25, "kept_sha256": ["ab"]}
            units.append(drawn_unit(names, estimator, law, chance, range(replicates), **measured))
    return units


def document_row(number: int, split: str = "development") -> dict[str, Any]:
    return {"model": MODEL, "doc": f"d{number}", "split": split}


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "store"
    store = Store.create(folder)
    add_rows(store, "documents", document_row(0), document_row(1, "evaluation"))
    add_rows(store, "actions", {"action": "snapkv", "prespecified": True}, {"action": "full", "control": True})
    store.append_units(made_units())
    derive(store, DERIVED_TABLES)
    return folder


@pytest.fixture
def made(made_once: Path, tmp_path: Path) -> Store:
    """A small store of both estimators, to be damaged."""
    return Store(shutil.copytree(made_once, tmp_path / "made"))


@pytest.fixture
def study(copied: Path) -> Store:
    """The finished study's store, to be damaged."""
    return Store(copied)


def texts(store: Store) -> list[str]:
    return [str(fault) for fault in file_faults(store)]


def assert_found(store: Store, *patterns: str) -> None:
    """Each pattern is one fault's, and there are no others; each is a line."""
    found = texts(store)
    assert not any("\n" in line for line in found)
    for pattern in patterns:
        matching = [line for line in found if re.search(pattern, line)]
        assert len(matching) == 1, f"{pattern}: {found}"
        found.remove(matching[0])
    assert found == []


def contents(folder: str | Path) -> dict[str, str]:
    """Return digests of all files except the memory of checked files, and of when there was a check."""
    files = (path for path in Path(folder).rglob("*") if path.is_file() and not {MEMORY, FOLDER} & {*path.parts})
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def path_of(store: Store, table: str, **values: Any) -> str:
    """The first file of a table that has a row with some values."""
    for path in store.paths(table):
        rows = pq.read_table(place(store, table, path)).to_pylist()
        if any(matches(row, values) for row in rows):
            return path
    message = f"no row of {table} has {values}"
    raise ValueError(message)


def matches(row: dict[str, Any], values: dict[str, Any]) -> bool:
    return all(row[name] == value for name, value in values.items())


def place(store: Store, table: str, path: str) -> Path:
    return Path(store.location, table, path)


def edited(store: Store, table: str, path: str, edit: Callable[[list[dict[str, Any]]], object], **values: Any) -> bytes:
    """Return the file's bytes as if some values of its rows had been others; its footer's records stay."""
    data = store.read_bytes(table, path)
    rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    own = [row for row in rows if matches(row, values)]
    others = [row for row in rows if not matches(row, values)]
    edit(own)
    record = pq.read_metadata(pa.BufferReader(data)).metadata or {}
    footer = {FOOTER: record[FOOTER.encode()].decode()} if FOOTER.encode() in record else None
    return encode_parquet(pa.Table.from_pylist([*own, *others], schema=TABLES[table].schema), footer)


def forge(store: Store, table: str, path: str, data: bytes | None, *, rows: int | None = None) -> str:
    """Put other bytes in a file's place and into the log, as if they had been committed, named by their digest.

    None takes the file out of the log. Returns the path that it has then.
    """
    named = path if data is None else f"{content_digest(data)}.parquet"
    for log in place(store, table, "_delta_log").glob("*.json"):
        actions = logged(log)
        own = [action for action in actions if action.get("add", {}).get("path") == path]
        for action in own:
            if data is None:
                actions.remove(action)
                actions[0]["commitInfo"]["kvdrift"]["actions"] -= 1
            else:
                rows = pq.read_metadata(pa.BufferReader(data)).num_rows if rows is None else rows
                action["add"] |= {"path": named, "size": len(data), "stats": json.dumps({"numRecords": rows})}
                place(store, table, named).write_bytes(data)
        log.write_text("".join(json.dumps(action) + "\n" for action in actions))
    return named


def logged(log: Path) -> list[dict[str, Any]]:
    """Return the actions of a log file, which no longer says from which log file the commit was made."""
    actions: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        action.get("commitInfo", {}).get("kvdrift", {}).pop("made_from", None)
    return actions


def forge_rows(store: Store, table: str, edit: Callable[[list[dict[str, Any]]], object], **values: Any) -> str:
    """Other rows in a file's place, whose name and place in the log are right; returns its path."""
    path = path_of(store, table, **values)
    return forge(store, table, path, edited(store, table, path, edit, **values))


def add_file(store: Store, table: str, data: bytes, path: str | None = None) -> None:
    """Commit one more file, by default named by its digest, without checking what the store has."""
    path = path or f"{content_digest(data)}.parquet"
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
    units, events = study.read("units").num_rows, study.read("events").num_rows
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
    assert checks["branchings"].looked_at == "6 rows of 2 units"
    assert checks["branching_depths"].looked_at == f"{6 * H} rows of 2 units"
    assert checks["trajectories"].looked_at == "12 rows of 4 units"
    assert checks["controls"].looked_at == "6 replicates"


def test_what_is_not_there_yet_is_no_fault(made: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer was killed between its two commits, and some units are not derived."""
    monkeypatch.setattr(UnitCommits, "append_rows", lambda *_: 0)
    add_rows(made, "documents", document_row(2))
    made.append_units([given for given in made_units(3) if given.record["doc"] == "d2"])
    checks = verify(made)
    notes = [note for check in checks for note in check.notes]
    assert notes == [
        "unit_moments: 2 units still to derive",
        "trajectories: 2 units still to derive",
        "steps: 2 units still to derive",
        "branchings: 1 unit still to derive",
        "branching_depths: 1 unit still to derive",
        "units: 3 rows still to be made from their events",
    ]
    assert [fault for check in checks for fault in check.faults] == []


@pytest.mark.slow
def test_a_store_that_is_written_meanwhile_is_sound(made: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two versions that verification asks for, a unit is generated, derived and cited."""
    units = iter(made_units(24))
    version, watched = Store.version, Store(made.location)

    def busy_version(store: Store, table: str) -> int:
        if store is watched:
            given = next(units)
            number = int(given.record["doc"][1:])
            add_rows(made, "documents", document_row(number, "evaluation" if number == 1 else "development"))
            made.append_units([given])
            derive(made, DERIVED_TABLES)
            add_rows(made, "results", result_row(made.version("events")))
        return version(store, table)

    monkeypatch.setattr(Store, "version", busy_version)
    checks = {check.subject: check for check in verify(watched)}
    assert [fault for check in checks.values() for fault in check.faults] == []
    assert checks["events"].looked_at != checks["units"].looked_at
    assert len(made.paths("events")) > 20, "it was written meanwhile"


# Damage: each kind is found and named, and nothing else is


def test_changed_moments_of_a_unit(study: Store) -> None:
    (one,) = study.read("unit_moments").filter(pc.field("action") == "recent-half").slice(2, 1).to_pylist()

    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["scalar_occupation"] += 1

    forge_rows(study, "unit_moments", change, unit=one["unit"])
    ours, *views = map(str, faults(study))
    unit = rf"unit \(small, kvdrift/tiny, {one['doc']}, recent-half\) replicates \[\d+, \d+\)"
    assert re.fullmatch(rf"unit_moments: {unit}: scalar_occupation is \S+, must be \S+ as its events give", ours)
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
    forge(study, "plans", path, data)
    assert_found(study, "^plans .*: plan has SHA-256 ")


def test_a_control_that_moved(study: Store) -> None:
    """The events are in a file with a correct name, so the row of ``units`` and derived rows show the fault."""
    one = min((row for row in study.read("units").to_pylist() if row["action"] == "full"), key=lambda row: row["doc"])

    def move(rows: list[dict[str, Any]]) -> None:
        rows[3]["f"] = rows[5]["f"] = 0.25

    forge_rows(study, "events", move, unit=one["unit"])
    name = rf"unit \(small, kvdrift/tiny, {one['doc']}, full\) replicates \[0, \d+\)"
    assert_found(
        study,
        rf"^events: {name}: its events have SHA-256 \w+, must have {one['events_sha256']} as in units$",
        rf"^events: {name}: f of a full-retention control is 0.25 at replicate 0, t 4 and 1 more, must be exactly 0$",
    )


@pytest.mark.parametrize("table", [*NUMBERED, "units"])
@pytest.mark.by_default("events", "units", "trajectories")
def test_a_file_that_is_there_twice(made: Store, table: str) -> None:
    """Another program added the bytes again under another name: each unit in them is named, and repaired."""
    before, path = stored_rows(made), made.paths(table)[0]
    units = len(made.rows_by_unit(table, path)) if table in NUMBERED else made.row_count("units")
    data = made.read_bytes(table, path)
    add_file(made, table, data, "part-00000.parquet")
    refusing: list[Callable[[], object]] = [lambda: open_views(Store.open(made.location))]
    if table in ("events", "units"):  # which are held against each other by what counts and appends units, too
        refusing += [Store.open(made.location).units, lambda: Store.create(made.location)]
    for call_of in refusing:
        line = refused(call_of, error=DamagedStoreError)
        assert "twice" in line
        assert line.endswith(f": kvdrift verify {made.location} --repair")
    twice = {
        "events": r"events: unit \(.*\): has \d+ of \d+ rows$",
        "units": r"units \(.*\): 2 rows have this key, must be 1$",
    }
    said = twice.get(table, rf"{table}: unit \(.*\): there are \d+ rows, must be \d+ as its events give$")
    found = [line for line in texts(made) if re.match(said, line)]
    assert len(found) == units, file_faults(made)
    assert list(repair(made, file_faults(made)))
    assert_sound_again(made, before)


def test_replicates_in_two_units(made: Store) -> None:
    given = made_units()[0]
    completed, events = conform_unit(
        Unit(given.record | {"replicates": 2}, given.events.filter(pc.field("replicate") < 2))
    )
    made.adopt_units(events, [completed])
    name = r"\(s, m/x, d0, snapkv\) replicates"
    twice = rf"^events: unit {name} \[0, 3\) repeats replicates of {name} \[0, 2\), must not$"
    assert any(re.match(twice, line) for line in texts(made))


def test_many_faults_are_counted(made: Store, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(10, 34):
        add_rows(made, "tokens", {"token": number})
    paths = made.paths("tokens")
    for path in paths:
        place(made, "tokens", path).unlink()
    code, out, _ = call(capsys, "verify", made.location)
    assert code == 1
    assert out.count("  fault: ") == 20
    assert f"  and {len(paths) - 20} more faults of tokens" in out
    assert "not computed: there are files that cannot be read" in out
    assert out.splitlines()[-1] == f"{made.location}: {len(paths)} faults"


def change_first(column: str, value: Any) -> Callable[[list[dict[str, Any]]], object]:
    return lambda rows: rows[0].update({column: value})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (list.pop, r"has 17 of 18 rows"),
        (change_first("t", 2), "t is 2 where .* needs 1"),
        (change_first("x_token", 77), r"its events have SHA-256 \w+, must have \w+ as in units"),
        (change_first("weight", 1.5), r"weight is 1.5, must be within \[0, 1\]"),
    ],
)
def test_a_unit_that_is_not_whole(made: Store, edit: Callable[[list[dict[str, Any]]], object], message: str) -> None:
    """The file's name and its place in the log are right, so only its content tells."""
    branched = "weight" in message
    number = number_of(made, doc="d0", action="snapkv", estimator="swrb" if branched else "plain")
    forge_rows(made, "events", edit, unit=number)
    name = f"events: unit (s, m/x, d0, snapkv) {'swrb ' if branched else ''}replicates [0, 3): "
    found = [line for line in texts(made) if line.startswith(name)]
    assert len(found) == 1
    assert re.search(message, found[0])


def number_of(store: Store, **values: Any) -> int:
    return next(int(row["unit"]) for row in store.read("units").to_pylist() if matches(row, values))


def test_events_of_no_unit(made: Store) -> None:
    """Neither a row of ``units`` nor a footer names their unit, and they are not the whole unit."""
    rows = made.read("events").slice(0, 5)
    add_file(made, "events", encode_parquet(with_column(rows, "unit", [7] * 5)))
    assert_found(made, "^events: 5 rows of no unit, must be of a unit in table units$")


@pytest.mark.parametrize(
    ("table", "column", "at"),
    [
        ("trajectories", "sum_delta", "replicate 0"),
        ("steps", "delta", "replicate 0, t 1"),
        ("branchings", "mass", "replicate 0"),
        ("branching_depths", "capacity", "replicate 0, depth 1"),
    ],
)
@pytest.mark.by_default("trajectories", "branching_depths")
def test_derived_rows_that_are_not_what_the_events_give(made: Store, table: str, column: str, at: str) -> None:
    forge_rows(made, table, change_first(column, 0.625), doc="d0", action="snapkv")
    found = texts(made)
    assert len(found) == 1
    name = r"unit \(s, m/x, d0, snapkv\) (swrb )?replicates \[0, 3\)"
    assert re.match(rf"{table}: {name}: {column} is 0.625 at {at}, must be \d[\d.e-]* as its events give", found[0])
    assert list(repair(made, file_faults(made)))
    assert file_faults(made) == []


def test_derived_rows_that_are_missing_or_have_no_events(made: Store) -> None:
    steps, events = forge_rows(made, "steps", list.pop, doc="d0", action="snapkv"), path_of(made, "events")
    named = r"^steps: unit \(.*d0, snapkv\) replicates \[0, 3\)"
    assert_found(made, rf"{named}: there are 17 rows, must be 18 as its events give$")
    forge(made, "steps", steps, None)
    found = texts(made)
    assert len(found) == 4
    assert all(
        re.match(
            r"steps: unit \(.*\) replicates \[0, 3\) has no rows, must have them: steps says that its events are derived$",
            line,
        )
        for line in found
    )
    forge(made, "events", events, None)
    found = texts(made)
    assert sum(line.startswith("events: unit (s, m/x, d") and "has 0 of " in line for line in found) == 6


def test_derived_rows_of_units_that_are_lost(made: Store) -> None:
    made.withdraw_units("units", (number := [number_of(made, estimator="swrb", doc="d0")]))
    made.withdraw_units("events", number)
    assert_found(
        made,
        r"^branchings: 3 rows of 1 unit that events do not have, must be of units that are stored$",
        rf"^branching_depths: {3 * H} rows of 1 unit that events do not have, must be of units that are stored$",
    )


def test_rows_that_are_not_of_the_declared_schema(made: Store) -> None:
    path = path_of(made, "steps")
    rows = pq.read_table(place(made, "steps", path))
    for changed, message in (
        (rows.set_column(5, "t", rows["t"].cast(pa.int64())), "column 't' is int64, must be int32"),
        (rows.drop_columns("lag"), "column 'lag' is missing"),
        (rows.set_column(5, "t", pa.nulls(len(rows), pa.int32())), r".*column 't'|.*'t' with null values"),
    ):
        path = forge(made, "steps", path, encode_parquet(changed))
        assert_found(made, f"^steps/{path}: {message}")
    events = path_of(made, "events")
    lacking = pq.read_table(place(made, "events", events)).drop_columns("kind")
    events = forge(made, "events", events, encode_parquet(lacking))
    assert any(line == f"events/{events}: column 'kind' is missing" for line in texts(made))


def test_rows_that_are_not_as_many_as_the_log_says(made: Store) -> None:
    path = path_of(made, "branchings")
    forge(made, "branchings", path, data := made.read_bytes("branchings", path), rows=4)
    count = pq.read_metadata(pa.BufferReader(data)).num_rows
    assert_found(made, f"^branchings/{path}: the file has {count} rows, must have 4 as the log says$")


def test_a_row_of_units_with_another_number(made: Store) -> None:
    forge_rows(made, "units", change_first("unit", 12), doc="d0", action="full")
    assert any(
        re.match(
            r"units: unit \(s, m/x, d0, full\) replicates \[0, 3\): unit is 12, must be \d+ as its key gives$", line
        )
        for line in texts(made)
    )


def test_units_of_unknown_documents_and_actions(made: Store) -> None:
    made.append_units([make_unit("d9", "other")])
    assert_found(
        made,
        r"^documents \(study=s, model=org/model, doc=d9\): the row is missing, must be there for unit \(s, org/model, d9, other\)",
        r"^actions \(study=s, action=other, action_revision=0\): the row is missing, must be there for unit \(s, org/model, d9, other\)",
    )


def plan_row(events_version: int, number: int = 0, /, **content: Any) -> dict[str, Any]:
    text = json.dumps({"replicates": 3} | content)
    row = {"study": STUDY, "model": MODEL, "plan_revision": number, "frozen_at": 0, "events_version": events_version}
    row |= {"plan": text}
    return row | {"plan_sha256": hashlib.sha256(text.encode()).hexdigest()}


def result_row(events_version: int, plan: str | None = None) -> dict[str, Any]:
    cited = {"events_version": events_version, "plan_sha256": plan}
    return {"model": MODEL, "action": "snapkv", "quantity": "mismatch", "estimate": 0.5, "level": 0.95} | cited


def test_a_plan_from_after_the_evaluation_began(made: Store) -> None:
    """Document d1 is an evaluation document, whose units came with the first version that has any."""
    early, late = 0, made.version("events")
    add_rows(made, "plans", plan_row(late))
    assert_found(
        made,
        rf"^plans \(study=s, model=m/x, plan_revision=0\): events_version is {late}, must be one without evaluation units: it has unit \(s, m/x, d1, ",
    )
    (path,) = made.paths("plans")
    data = edited(made, "plans", path, change_first("events_version", early))
    forge(made, "plans", path, data)
    assert file_faults(made) == []


def test_later_revisions_of_a_plan(made: Store) -> None:
    """Later revisions may come after evaluation documents, which they state; estimates under them state it, too."""
    late = made.version("events")
    add_rows(made, "plans", plan_row(0), plan_row(late, 1, revision=1, seen=True))
    seen = plan_row(late, 1, revision=1, seen=True)["plan_sha256"]
    add_rows(made, "results", result_row(late, plan_row(0)["plan_sha256"]), result_row(late, seen))
    assert file_faults(made) == []
    add_rows(made, "results", result_row(late - 1, seen) | {"status": "prespecified", "family": "primary"})
    add_rows(made, "plans", plan_row(late, 3, revision=2))
    named = r"^plans \(study=s, model=m/x, plan_revision=3\): "
    assert_found(
        made,
        rf"{named}plan_revision is 3, must be 2 as its plan says$",
        rf"{named}revision 2 is missing, must be there$",
        rf"{named}it is not marked seen, must be: it was made after unit \(s, m/x, d1, ",
        rf"^results \(study=s, model=m/x\), 1 row: status is 'prespecified', must be 'seen': plan {seen} is marked seen$",
    )


def test_citations_of_what_is_not_there(made: Store) -> None:
    latest = made.version("events")
    add_rows(made, "results", result_row(latest + 1), result_row(latest, "ab"))
    add_rows(made, "calibration", {"model": MODEL, "action": "snapkv", "baseline": "full", "events_version": -1})
    assert_found(
        made,
        rf"^results \(study=s, model=m/x\), 1 row: events_version is {latest + 1}, must be one of 0..{latest}$",
        r"^results \(study=s, model=m/x\), 1 row: plan_sha256 is ab, must be null: the study has no plan$",
        rf"^calibration \(study=s, model=m/x\), 1 row: events_version is -1, must be one of 0..{latest}$",
    )
    add_rows(made, "plans", plan_row(0))
    assert any(f"plan_sha256 is ab, must be {plan_row(0)['plan_sha256']} as in plans" in line for line in texts(made))


def test_what_cannot_be_read_is_not_blamed_on_others(made: Store) -> None:
    """Results cite a plan, and units name documents and actions; with those files gone nothing can be said."""
    add_rows(made, "plans", plan_row(0))
    add_rows(made, "results", result_row(1, plan_row(0)["plan_sha256"]))
    assert file_faults(made) == []
    paths = {table: path_of(made, table) for table in ("plans", "documents", "actions", "units")}
    for table, path in paths.items():
        place(made, table, path).unlink()
    assert_found(made, *(f"^{table}/{path}: the file is missing" for table, path in paths.items()))


def test_page_checksums_and_text_that_is_no_text(made: Store) -> None:
    """A file of another program has no digest in its name, so a first check has only the pages' checksums."""
    DeltaTable(f"{made.location}/steps").optimize.z_order(["t"])
    path = path_of(made, "steps")
    rows = pq.read_table(place(made, "steps", path))
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, write_page_checksum=True)
    data = bytes(sink.getvalue())

    def put(content: bytes) -> None:
        place(made, "steps", path).write_bytes(content)
        for log in place(made, "steps", "_delta_log").glob("*.json"):
            lines = logged(log)
            for line in lines:
                if line.get("add", {}).get("path") == path:
                    line["add"]["size"] = len(content)
            log.write_text("".join(json.dumps(line) + "\n" for line in lines))

    put(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    assert any(re.match(f"steps/{path}: the file cannot be read .* checksums$", line) for line in texts(made))
    names = pa.array([b"\xff"] * len(rows)).cast(pa.string(), safe=False)
    pq.write_table(rows.set_column(2, "doc", names), sink := pa.BufferOutputStream())
    put(bytes(sink.getvalue()))
    assert_found(made, f"^steps/{path}: the file cannot be read .*UTF8")


def test_a_file_of_another_program_has_the_digest_of_the_first_look(made: Store) -> None:
    DeltaTable(f"{made.location}/steps").optimize.z_order(["t"])
    path = path_of(made, "steps")
    assert file_faults(made) == []
    data = bytearray(made.read_bytes("steps", path))
    data[data.index(b"delta-rs")] ^= 1  # what wrote the file, in its footer: no reader minds
    place(made, "steps", path).write_bytes(data)
    wrong = rf"^steps/{path}: the content has digest {content_digest(data)}, had \w+ when it was read first$"
    assert_found(made, wrong)
    assert_found(made, wrong)


def test_a_scrub_reads_what_was_not_read_lately(made: Store, capsys: pytest.CaptureFixture[str]) -> None:
    count = sum(len(made.paths(table)) for table in TABLES)
    reads = [check.looked_at for check in scrub(made, 3600.0)][1:]
    assert sum(int(line.split()[0]) for line in reads) == count
    code, out, _ = call(capsys, "verify", made.location, "--since", "1h")
    assert (code, out.splitlines()[-1]) == (0, f"{made.location}: sound")
    assert f"steps: 0 files read, {len(made.paths('steps'))} read before, whole" in out
    path = place(made, "steps", path_of(made, "steps"))
    path.write_bytes(path.read_bytes()[:-1])
    assert call(capsys, "verify", made.location, "--since", "90m")[0] == 0, "it was read a moment ago"
    code, out, _ = call(capsys, "verify", made.location, "--since", "0m")
    size = path.stat().st_size
    assert code == 1
    assert f"  fault: steps/{path.name}: the file has {size:,} bytes, must have {size + 1:,} as the log" in out
    assert call(capsys, "verify", made.location, "--since", "7d")[0] == 1, "what was found damaged is read again"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--since", "7w"), "--since: '7w' is no age, must be minutes, hours or days such as 90m, 12h or 7d"),
        (("--since", "7d", "--repair"), "--since and --repair: a repair reads all files first"),
    ],
)
def test_ages_that_are_none(
    made: Store, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    code, out, err = call(capsys, "verify", made.location, *options)
    assert (code, out) == (2, "")
    assert message in err


def damaged(store: Store, table: str, **values: Any) -> Path:
    """Cut a file of a table."""
    path = place(store, table, path_of(store, table, **values))
    path.write_bytes(path.read_bytes()[:-1])
    return path


@pytest.mark.slow
def test_a_damaged_file_that_took_the_place_of_others_is_mended_from_them(made: Store) -> None:
    add_rows(made, "documents", document_row(2))
    made.append_units([given for given in made_units(3) if given.record["doc"] == "d2"])
    derive(made, DERIVED_TABLES)
    before = stored_rows(made)
    for table in ("events", "units"):
        DeltaTable(f"{made.location}/{table}").optimize.compact()
    for table in before:
        damaged(made, table)
    said = list(repair(Store(made.location)))
    assert "events: 1 damaged file set aside" in said
    assert "events: 9 units of files that are still there, committed again" in said
    assert_sound_again(made, before)


def test_a_unit_whose_rows_lie_in_two_files_of_which_one_is_damaged(made: Store) -> None:
    before = stored_rows(made)
    add_halves(made)
    damaged(made, "events", replicate=0)
    assert list(repair(Store(made.location)))
    assert_sound_again(made, before)


def add_halves(store: Store) -> None:
    """Put the rows of ``events`` into two files by another program, each with some rows of every unit."""
    table = DeltaTable(f"{store.location}/events")
    table.alter.set_table_properties({"delta.appendOnly": "false"})
    rows = store.read("events")
    for number, mode in ((0, "overwrite"), (1, "append")):
        write_deltalake(table, rows.filter(pa.array(rows["replicate"].to_numpy() % 2 == number)), mode=mode)


def test_doubled_and_deleted_rows_are_mended(made: Store) -> None:
    before = stored_rows(made)
    rows = made.read("events")
    table = DeltaTable(f"{made.location}/events")
    table.alter.set_table_properties({"delta.appendOnly": "false"})
    table.delete("doc = 'd1' and action = 'full'")
    assert_found(made, r"^events: unit \(s, m/x, d1, full\) replicates \[0, 3\): has 0 of 18 rows$")
    add_file(made, "events", encode_parquet(rows.filter((pc.field("action") == "full") & (pc.field("doc") == "d0"))))
    assert "events: 2 units of files that are still there, committed again" in list(repair(Store(made.location)))
    assert_sound_again(made, before)


def stored_rows(store: Store) -> dict[str, list[str]]:
    return sorted_rows(Store(store.location), "events", "units", *DERIVED_TABLES)


def assert_sound_again(store: Store, before: dict[str, list[str]]) -> None:
    assert stored_rows(store) == before
    assert file_faults(store) == []


def test_a_catalogue_of_another_store(made: Store, tmp_path: Path) -> None:
    write_catalog(made)
    assert catalog_fault(made) is None
    copy = Store(shutil.copytree(made.location, tmp_path / "copy"))
    assert catalog_fault(copy) is None, "a copy is the same store"
    other = write_catalog(Store.create(tmp_path / "other"))
    shutil.copy(other, made.location)
    assert_found(made, r"^catalog.duckdb: it was written for another store \(events table .*\), must be of this one")


# Parts


def test_sums_may_differ_by_rounding_and_nothing_else_may() -> None:
    schema = TABLES["branchings"].schema
    row = table_row("branchings", doc="x", replicate=4, complete=True, mass=0.3, mismatches=2)

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
    row = dict.fromkeys(contract("decomposition").columns, 0.0)
    row |= {"study": "s", "model": "m", "split": "evaluation", "stratum": "pooled", "action": "a", "documents": 3}
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


def test_prompts_of_other_tokens_or_there_twice(study: Store) -> None:
    rows = study.read("prompts").to_pylist()
    own = next(row for row in rows if row["tokens"])
    study.withdraw_files("prompts", study.paths("prompts"))
    study.append_prompts([{**row, "tokens": row["tokens"][::-1]} if row is own else row for row in rows])
    wrong = rf"^prompts \(study=.*, doc={own['doc']}, .*: tokens have SHA-256 .* as prompt_sha256 of the document says$"
    assert_found(study, wrong)
    twice = pa.Table.from_pylist([own], schema=TABLES["prompts"].schema)
    add_file(study, "prompts", encode_parquet(twice))
    assert_found(study, wrong, r"^prompts \(.*\): 2 rows have this key, must be 1$")
