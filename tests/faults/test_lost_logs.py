"""Lost, empty, torn or zeroed log files of any table are refused in one line, or mended; no answer is wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.command import call
from fixtures.refusals import refused

from kvdrift.flows.estimate.current import estimates_are_current
from kvdrift.flows.estimate.scores import record_tokens, score_stored
from kvdrift.log.delta.commits import changes_rows
from kvdrift.log.delta.table_log import RELIED_ON, TableLog
from kvdrift.log.store import Store
from kvdrift.schema.errors import DamagedStoreError
from kvdrift.schema.tables import TABLES
from kvdrift.sql.catalog import open_views
from kvdrift.transforms.compaction import compact
from kvdrift.transforms.segments import commit, derive_segment, pending
from kvdrift.verification.files import Verified
from kvdrift.verification.logs import check_leftovers, check_logs
from kvdrift.verification.repair import repair

DERIVED = ("unit_moments", "trajectories", "steps")
COMPUTED = ("looks", "results", "calibration")
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "torn": lambda data: data[: len(data) // 2],
    "torn at a line": lambda data: data.splitlines(keepends=True)[0],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.fixture(params=["as written", pytest.param("compacted", marks=pytest.mark.slow)])
def location(copied: Path, request: pytest.FixtureRequest) -> Path:
    """The store of the finished small study, as written or compacted by commits without checkpoints."""
    if request.param == "compacted":
        compact(Store.open(copied))
        for path in copied.glob("*/_delta_log/*checkpoint*"):
            path.unlink()
    return copied


def newest(location: Path, table: str) -> Path:
    log = TableLog(location / table)
    return log.file(log.newest())


def is_relied_on(location: Path, table: str, version: int) -> bool:
    """Whether a commit of another table says that it relies on a version of ``table``."""
    return any(TableLog(location / other).seen().get(table, -1) >= version for other in TABLES)


def rows(location: Path) -> dict[str, list[str]]:
    """Return all rows in one order, without the columns that a second run computes anew."""
    store = Store.open(location)
    tables = {table: store.read(table) for table in TABLES if table not in COMPUTED}
    return {
        table: sorted(json.dumps(row, sort_keys=True, default=str) for row in found.to_pylist())
        for table, found in tables.items()
    }


def use(location: Path) -> None:
    """What a run does with a store first: open it, derive and score what is pending, record tokens, read its units."""
    store = Store.create(location)
    work = pending(store)
    commit(store, [derive_segment(store, one) for one in work.segments], work.events_version, covered=work.whole)
    record_tokens(store, "small", "kvdrift/tiny")
    score_stored(store, "small", "kvdrift/tiny")
    store.units()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "torn" else pytest.mark.slow) for kind in DAMAGE]
)
def test_a_damaged_newest_log_file_is_refused(location: Path, kind: str) -> None:
    for table in TABLES:
        path = newest(location, table)
        data = path.read_bytes()
        path.write_bytes(DAMAGE[kind](data))
        line = refused(lambda name=table: Store.open(location).version(name), error=DamagedStoreError)
        assert re.search(rf"table '{table}' is damaged \(log file {path.name} (is|holds) ", line)
        assert line.endswith(f": kvdrift verify {location} --repair")
        assert [fault.where for fault in check_logs(Store(location)).faults] == [f"{table}/_delta_log/{path.name}"]
        path.write_bytes(data)


@pytest.mark.parametrize(("kind", "relied_on"), [("zeros", True), ("torn", False)])
def test_damaged_newest_log_files_are_mended(location: Path, kind: str, *, relied_on: bool) -> None:
    """The newest log files of all tables that others rely on are damaged at once; or those of all other tables."""
    before, damaged = rows(location), []
    for table in TABLES:
        if (table in RELIED_ON) == relied_on:
            path = newest(location, table)
            damaged.append(DAMAGE[kind](path.read_bytes()))
            path.write_bytes(damaged[-1])
    lines = list(repair(Store(location)))
    assert not any("\n" in line for line in lines)
    aside = [path.read_bytes() for path in (location / "set-aside").rglob("*.json")]
    assert sorted(aside) == sorted(damaged), "nothing is deleted"
    use(location)
    assert rows(location) == before
    assert not estimates_are_current(Store.open(location), "small", "kvdrift/tiny"), "they are made again"


def test_a_lost_newest_log_file(location: Path) -> None:
    """A lost log file is refused if other tables rely on the table; otherwise the rows are made again.

    No later commit tells of the last commit of a compaction. Without that commit, the earlier files are visible again.
    """
    before = rows(location)
    for table in TABLES:
        path = newest(location, table)
        data = path.read_bytes()
        if path.name == f"{0:020d}.json":
            continue
        path.unlink()
        if not changes_rows(data.splitlines()) and not is_relied_on(location, table, int(path.stem)):
            assert rows(location) == before
        elif table in RELIED_ON:
            line = refused(Store.open, location, error=DamagedStoreError)
            assert line.startswith(f"{location}: table '{table}' has lost commits: '")
            assert line == refused(Store.create, location, error=DamagedStoreError)
            assert [fault.where for fault in check_logs(Store(location)).faults] == [table]
        elif table == "results":
            assert not estimates_are_current(Store.open(location), "small", "kvdrift/tiny")
        path.write_bytes(data)
    for table in ("units", *DERIVED):
        newest(location, table).unlink()
    use(location)
    assert rows(location) == before
    for table in RELIED_ON:
        newest(location, table).unlink()
    assert len(list(repair(Store(location)))) > len(RELIED_ON)
    use(location)
    assert rows(location) == before


@pytest.mark.parametrize("table", ["events", "steps"])
@pytest.mark.parametrize("first", [True, False])
def test_a_log_file_lost_below_the_newest(location: Path, table: str, *, first: bool) -> None:
    before = rows(location)
    lost = TableLog(location / table).file(0 if first else int(newest(location, table).stem) - 1)
    lost.unlink()
    line = refused(use, location, error=DamagedStoreError)
    assert "lost commits" in line or f"log file {lost.name} is missing" in line
    assert f"{table}/_delta_log/{lost.name}: the log file is missing" in map(str, check_logs(Store(location)).faults)
    assert f"{table}: log file {lost.name} is lost: an empty commit stands in for it" in list(repair(Store(location)))
    use(location)
    assert rows(location) == before


@pytest.mark.parametrize("location", ["as written"], indirect=True)  # a compaction that is lost loses no events
def test_events_that_are_lost_for_good(location: Path) -> None:
    """If log file and data are lost, the units cannot be restored, and all rows made from them are removed."""
    path = newest(location, "events")
    store = Store.open(location)
    lost = {json.loads(line)["add"]["path"] for line in path.read_bytes().splitlines() if b'"add"' in line}
    units = {number for name in lost for number in store.rows_by_unit("events", name)}
    for name in (path, *(location / "events" / name for name in lost)):
        name.unlink()
    said = list(repair(Store(location)))
    assert len(units) == sum("what was made from it goes" in line for line in said) > 0
    store = Store.open(location)
    use(location)
    for table in ("units", "events", *DERIVED):
        assert units.isdisjoint(store.read(table, columns=["unit"])["unit"].to_pylist()), table
    assert not estimates_are_current(store, "small", "kvdrift/tiny")


@pytest.mark.parametrize("location", ["as written"], indirect=True)
def test_rows_ahead_of_events_in_a_store_whose_commits_say_nothing(location: Path) -> None:
    """In a store of an older kvdrift, derived rows and rows of units show that their events are lost."""
    before = rows(location)
    for path in location.rglob("_delta_log/*.json"):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        for action in actions:
            action.get("commitInfo", {}).pop("kvdrift", None)
        path.write_text("\n".join(map(json.dumps, actions)))
    newest(location, "events").unlink()
    store = Store.open(location)
    assert "events are lost" in refused(store.units, error=DamagedStoreError)
    assert "events are lost" in refused(open_views, store, error=DamagedStoreError)
    for table in DERIVED:
        shutil.rmtree(location / table)
    assert "events are lost" in refused(Store.create, location, error=DamagedStoreError), "the rows of units alone tell"
    list(repair(Store(location)))
    use(location)
    assert rows(location) == before


def test_a_damaged_checkpoint(location: Path) -> None:
    before = rows(location)
    log = TableLog(location / "events")
    from deltalake import DeltaTable  # noqa: PLC0415

    DeltaTable(str(location / "events")).create_checkpoint()
    checkpoint = log.folder / f"{log.checkpointed():020d}.checkpoint.parquet"
    checkpoint.write_bytes(bytes(1000))
    assert "is no checkpoint that can be read" in refused(Store.open, location, error=DamagedStoreError)
    assert any("is no checkpoint" in line for line in repair(Store(location)))
    assert rows(location) == before


def test_the_command_mends_and_says_so(location: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(location)
    derived, estimates = (location / table / store.paths(table)[0] for table in ("steps", "results"))
    newest(location, "units").write_bytes(b"")
    derived.write_bytes(derived.read_bytes()[:-10])
    estimates.unlink()
    (location / "catalog.duckdb").write_bytes(b"torn")
    code, out, _ = call(capsys, "verify", location)
    assert code == 1
    assert "fault: units/_delta_log/" in out
    code, out, _ = call(capsys, "verify", location, "--repair")
    said = [line for line in out.splitlines() if line.startswith("repaired ")]
    assert (code, out.splitlines()[-1]) == (0, f"{location}: sound")
    assert any(re.match(r"repaired units: log file \d+.json is empty: it is set aside", line) for line in said)
    assert {f"repaired {table}: 1 damaged file set aside" for table in ("steps", "results")} <= set(said)
    assert "repaired catalog.duckdb: written again" in said


def test_units_whose_rows_are_lost_are_read_from_their_events(location: Path) -> None:
    """If log file and data of ``units`` are lost, rows are restored from copies in the footers of files of events."""
    before = rows(location)
    newest(location, "units").write_bytes(bytes(9))
    for path in (location / "units").glob("*.parquet"):
        path.unlink()
    assert any(re.fullmatch(r"units: \d+ rows made again", line) for line in repair(Store(location)))
    use(location)
    assert rows(location) == before


def test_units_whose_commit_and_whose_rows_are_lost(location: Path) -> None:
    before, visible = rows(location), Path(Store.open(location).files("units")[0])
    newest(location, "events").unlink()
    visible.unlink()
    # The commit of a compaction had no rows of its own: what it replaced is in view again, and is derived.
    assert any(re.search("committed again|rows made again", line) for line in list(repair(Store(location))))
    use(location)
    assert rows(location) == before


def test_leftovers_are_named_and_are_no_fault(location: Path) -> None:
    def found() -> Verified:
        return check_leftovers(Store(location))

    assert (found().looked_at, found().notes) == ("0 files", ())
    left = (
        "events/x/.unit.parquet.0.part",
        "steps/_delta_log/00000000000000000009.json#1",
        ".temporary-0/catalog.duckdb",
    )
    for name in left:
        (location / name).parent.mkdir(exist_ok=True)
        (location / name).write_bytes(b"half")
    assert found().notes == tuple(f"{name}: no commit names this file" for name in left)
    assert found().faults == ()
    Store.open(location)
