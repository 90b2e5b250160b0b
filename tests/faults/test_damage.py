"""Damage: lost, empty, torn or zeroed log files and flipped bits are refused in one line, or mended; no answer is wrong."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest
from faults.outcomes import MENDED, REFUSED, SURVIVED, tell
from fixtures.command import call
from fixtures.finite_study import write_smallest_study
from fixtures.refusals import refused
from fixtures.small_study import finish, run_of
from fixtures.stored_rows import assert_alike, unmeasured
from fixtures.study_files import load_study
from fixtures.table_rows import sorted_rows

import kvdrift
from kvdrift.flows.estimate.scores import estimates_are_current, record_tokens, score_stored
from kvdrift.log.checked_files import MEMORY
from kvdrift.log.delta.commits import changes_rows
from kvdrift.log.delta.table_log import RELIED_ON, TableLog
from kvdrift.log.store import Store
from kvdrift.schema.errors import DamagedStoreError, KvdriftError, OperationError
from kvdrift.schema.tables import TABLES
from kvdrift.sql.catalog import Views, open_views
from kvdrift.transforms.compaction import compact
from kvdrift.transforms.segments import commit, derive_segment, pending
from kvdrift.verification.files import Verified, check_leftovers, check_logs
from kvdrift.verification.repair import repair
from kvdrift.verification.whole_store import verify

# --- log files of any table ----------------------------------------------------------------------------------------------

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
    return sorted_rows(Store.open(location), *(table for table in TABLES if table not in COMPUTED))


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
@pytest.mark.by_default("zeros")
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
@pytest.mark.by_default("events")
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
    assert len(units) == sum("its derived rows are removed" in line for line in said) > 0
    store = Store.open(location)
    use(location)
    for table in ("units", "events", *DERIVED):
        assert units.isdisjoint(store.read(table, columns=["unit"])["unit"].to_pylist()), table
    assert not estimates_are_current(store, "small", "kvdrift/tiny")


@pytest.mark.slow
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


@pytest.mark.slow
def test_units_whose_rows_are_lost_are_read_from_their_events(location: Path) -> None:
    """If log file and data of ``units`` are lost, rows are restored from copies in the footers of files of events."""
    before = rows(location)
    newest(location, "units").write_bytes(bytes(9))
    for path in (location / "units").glob("*.parquet"):
        path.unlink()
    assert any(re.fullmatch(r"units: \d+ rows made again", line) for line in repair(Store(location)))
    use(location)
    assert rows(location) == before


@pytest.mark.slow
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


# --- flipped bits in Parquet files ---------------------------------------------------------------------------------------

FLIPPED = 30
FLIPPED_ANYWHERE = 300
QUERY = "select count(*) as n from events"


@pytest.fixture
def store(copied: Path) -> Store:
    """The store of the finished small study, to be damaged."""
    return Store.open(copied)


def flip(path: Path, chance: random.Random) -> bytes:
    """Change one bit in the middle of a file; return the earlier content."""
    before = path.read_bytes()
    rot(path, before, chance.randrange(4, len(before) * 2 // 3), chance)
    return before


def rot(path: Path, content: bytes, place: int, chance: random.Random) -> None:
    """Change one bit of a file's content, and keep the file's times, as a rotting disk does."""
    data, found = bytearray(content), path.stat()
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_flipped_bits_are_refused(store: Store) -> None:
    lines: list[str] = []
    chance, versions = random.Random(3), store.versions()  # noqa: S311
    files = [(table, path) for table in ("events", "trajectories", "steps", "results") for path in store.paths(table)]
    for table, name in chance.choices(files, k=FLIPPED):
        path = Path(store.location, table, name)
        before = flip(path, chance)
        lines.append(refused(store.check_files, {table: versions[table]}, error=DamagedStoreError))
        path.write_bytes(before)
    for line in lines:
        assert re.fullmatch(rf"{store.location}: \w+/.*: kvdrift verify {store.location} --repair", line)
    store.check_files(versions)


@pytest.mark.slow
def test_a_flipped_bit_anywhere(store: Store) -> None:
    """A flipped bit is refused, unless it is harmless: it may hit the name under which a file holds its digest."""
    outcomes, versions = [], store.versions()
    files = [(table, path) for table in TABLES for path in store.paths(table)]
    for number in range(FLIPPED_ANYWHERE):
        chance = random.Random(number)  # noqa: S311
        table, name = chance.choice(files)
        path = Path(store.location, table, name)
        rows, before = answered(path), path.read_bytes()
        rot(path, before, chance.randrange(len(before)), chance)
        try:
            store.check_files({table: versions[table]})
        except DamagedStoreError:
            outcomes.append(REFUSED)
        else:
            harmless = answered(path) == rows or any(check.faults for check in verify(store))
            outcomes.append(SURVIVED if harmless else "silently wrong")
        path.write_bytes(before)
    tell("damage", "a flipped bit anywhere in a file of any table, whose times stay", outcomes)
    assert "silently wrong" not in outcomes


def answered(path: Path) -> list[tuple[Any, ...]]:
    """Return what DuckDB reads."""
    return duckdb.execute("from read_parquet($file)", {"file": str(path)}).fetchall()


def test_small_files_are_always_read_and_large_ones_after_a_time(store: Store) -> None:
    versions = store.versions()
    store.check_files(versions)
    remembered = Path(store.location, MEMORY).read_text(encoding="utf-8").splitlines()
    assert len(remembered) == len(set(remembered)) >= sum(len(store.paths(table)) for table in versions)
    large, small = Path(store.files("steps")[0]), Path(store.files("results")[0])
    before = flip(large, random.Random(1))  # noqa: S311
    store.check_files(versions, within=60.0)
    refused(store.check_files, versions, error=DamagedStoreError)
    refused(store.check_files, versions, 60.0, error=DamagedStoreError)  # what was found damaged is forgotten
    large.write_bytes(before)
    flip(small, random.Random(1))  # noqa: S311
    refused(store.check_files, versions, 60.0, error=DamagedStoreError)
    small.unlink()
    assert "cannot be read" in refused(store.check_files, versions, error=DamagedStoreError)


def test_commands_refuse_a_damaged_file(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(store.files("trajectories")[0])
    flip(path, random.Random(2))  # noqa: S311
    Path(store.location, MEMORY).unlink(missing_ok=True)  # a report looks at large files once a week
    for arguments in (("report", store.location), ("sql", store.location, QUERY, "--checked")):
        code, out, err = call(capsys, *arguments)
        assert (code, out) == (1, "")
        assert re.search(r"kvdrift: .*: trajectories/.*: kvdrift verify .* --repair\n$", err)
    assert call(capsys, "sql", store.location, QUERY)[0] == 0
    shutil.rmtree(Path(store.location, "results"))
    Store.create(store.location)
    code, _, err = call(capsys, "analyze", store.location)
    assert code == 1
    assert "trajectories/" in err
    assert list((Path(store.location) / "results").glob("*.parquet")) == []


@pytest.mark.parametrize("how", ["no page", "no text", "no end", "empty"])
def test_a_query_that_meets_damage_names_the_command_that_repairs(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """DuckDB's messages about pages and texts name no file."""
    path = Path(store.files("trajectories")[0])
    whole = path.read_bytes()
    if how == "no page":
        path.write_bytes(whole[:4] + b"\x0e" * 40 + whole[44:])
    elif how == "no text":
        damaged = SimpleNamespace(to_arrow_table=b"\xf2".decode)
        monkeypatch.setattr(Views, "sql", lambda *_: damaged)
    elif how == "no end":
        path.write_bytes(whole[:-40])
    else:
        path.write_bytes(b"")
    code, out, err = call(capsys, "sql", store.location, "from trajectories")
    assert (code, out) == (1, "")
    assert re.fullmatch(rf"kvdrift: {store.location}: .*: kvdrift verify {store.location} --repair\n", err), err


def test_a_query_of_another_unreadable_file_names_no_repair(store: Store, tmp_path: Path) -> None:
    (tmp_path / "mine.parquet").write_bytes(b"PAR1" * 20)
    with kvdrift.open(store.location) as views:
        line = refused(views.table, f"from '{tmp_path}/mine.parquet'", error=OperationError)
    assert "mine.parquet" in line
    assert "verify" not in line


# --- a run over a damaged store ends with the rows of an undamaged run, or with one line ---------------------------------

RANDOM_STATES = 25


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study of both estimators."""
    folder = tmp_path_factory.mktemp("smallest")
    finish(run_of(load_study(write_smallest_study(folder)), folder / "store"))
    return folder


def outcome(whole: Path, damaged: Path) -> str:
    """Return the outcome of a run over a damaged store, with repair and another run if the store is refused."""
    lines: list[str] = []

    def ends() -> bool:
        try:
            finish(run_of(load_study(whole / "finite.toml"), damaged))
        except KvdriftError as error:
            lines.append(str(error))
            return False
        assert_alike(unmeasured(damaged), unmeasured(whole / "store"))
        return True

    if ends():
        return SURVIVED
    lines += repair(Store(damaged))
    mended = ends()
    assert not any("\n" in line for line in lines)
    return MENDED if mended else REFUSED


def tried(whole: Path, folder: Path, damages: Iterable[Callable[[Path], None]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for damage in damages:
        store = Path(shutil.copytree(whole / "store", folder / "store"))
        damage(store)
        found[outcome(whole, store)] += 1
        shutil.rmtree(store)
    return found


def spoil(log: Path, kind: str) -> None:
    if kind == "lost":
        log.unlink()
    else:
        log.write_bytes(DAMAGE[kind](log.read_bytes()))


def logs(store: Path, table: str) -> list[Path]:
    return sorted((store / table / "_delta_log").glob("*.json"))


@pytest.mark.slow
def test_the_newest_log_file_of_any_table(whole: Path, tmp_path: Path) -> None:
    cases = [(table, kind) for table in TABLES for kind in ("lost", *DAMAGE)]
    found = tried(whole, tmp_path, [lambda store, t=t, k=k: spoil(logs(store, t)[-1], k) for t, k in cases])
    tell(
        "damage",
        "the newest log file of each table lost, empty, torn, torn at a line, zeroed; then `run`",
        found.elements(),
    )
    assert set(found) == {SURVIVED, MENDED}


@pytest.mark.slow
def test_random_sets_of_log_files_and_data_files(whole: Path, tmp_path: Path) -> None:
    """If log and data of a table that others rely on are both lost, the store stays refused."""

    def damage(chance: random.Random) -> Callable[[Path], None]:
        def do(store: Path) -> None:
            for table in TABLES:
                if chance.random() < 0.25:
                    newest = logs(store, table)[-1]
                    spoil(newest if chance.random() < 0.7 else chance.choice(logs(store, table)), chance.choice(["lost", *DAMAGE]))  # fmt: skip
                    data = sorted((store / table).rglob("*.parquet"))
                    if data and chance.random() < 0.2:
                        chance.choice(data).unlink()

        return do

    found = tried(whole, tmp_path, [damage(random.Random(seed)) for seed in range(RANDOM_STATES)])  # noqa: S311
    tell(
        "damage",
        "random sets of tables with damaged or lost log files, some with a lost data file; then `run`",
        found.elements(),
    )
