"""Small files and memory of a live derivation: upkeep runs in another process; commands merge files by themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from fixtures.command import call
from fixtures.finite_study import write_finite_study
from fixtures.refusals import refused
from fixtures.small_study import run_of
from fixtures.stored_units import make_unit
from fixtures.study_files import load_study

from benchmarks.freshness import memory_load, observe
from kvdrift import upkeep
from kvdrift.flows.run import stages
from kvdrift.log.store import Store
from kvdrift.schema.errors import OperationError
from kvdrift.schema.own_process import OwnProcesses, own_environment
from kvdrift.transforms import watch as watching
from kvdrift.transforms.segments import DerivationReport
from kvdrift.upkeep import Upkeep


@pytest.mark.slow
def test_rows_that_came_are_in_the_catalogue_when_it_ends(tmp_path: Path) -> None:
    """Rows that come while it is under way are not left out."""
    store = Store.create(tmp_path / "store")
    kept = Upkeep(store.location)
    kept.begin_if_due()  # what was there before is in it too
    store.append_units([make_unit()])
    kept.rows_came()
    kept.begin_if_due()  # under way
    kept.finish()
    with duckdb.connect(str(tmp_path / "store" / "catalog.duckdb"), read_only=True) as catalog:
        assert catalog.sql("select count(*) from events").fetchall() == [(make_unit().events.num_rows,)]


def test_it_begins_with_new_rows_and_a_pause_after_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause is 29 times as long as the last upkeep took; nothing begins without rows."""
    now, begun = 1000.0, list[float]()

    def submit(*_: object, **__: object) -> Future[None]:
        nonlocal now
        begun.append(now)
        now += 10.0
        done = Future[None]()
        done.set_result(None)
        return done

    monkeypatch.setattr(upkeep.time, "perf_counter", lambda: now)
    monkeypatch.setattr(OwnProcesses, "submit", submit)
    kept = Upkeep("store")
    kept.begin_if_due()
    kept.begin_if_due()  # the upkeep has ended, and no rows came
    kept.rows_came()
    for _ in range(2):
        kept.begin_if_due()
        now += 289.0
    kept.begin_if_due()
    assert begun == [1000.0, 1588.0]


def test_what_it_could_not_do_is_said(tmp_path: Path) -> None:
    kept = Upkeep(str(tmp_path / "nowhere"))
    line = refused(kept.finish, error=OperationError)
    assert line.startswith(f"upkeep could not merge files or write the catalogue: {tmp_path}/nowhere ")


@pytest.mark.parametrize(("local", "compacts"), [(True, True), (True, False), (False, True)])
def test_files_are_put_together_if_wanted_and_a_store_on_a_disk_has_a_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, local: bool, compacts: bool
) -> None:
    Store.create(tmp_path / "store")
    monkeypatch.setattr(upkeep, "is_local", lambda _: local)
    called = []
    monkeypatch.setattr(Store, "gather", lambda store: called.append(store.location))
    upkeep.keep_up(str(tmp_path / "store"), compacts=compacts)
    assert len(called) == compacts
    assert (tmp_path / "store" / "catalog.duckdb").exists() == local


# The command ends at once, since there is no store, in a process that is then as the watching one.
_PROGRAM = """
import io, os, sys
from contextlib import suppress
from kvdrift.command import main
with suppress(SystemExit):
    main(["derive", "nowhere", "--watch"])
import pyarrow as pa, pyarrow.dataset as pads, pyarrow.parquet as pq
pq.write_table(pa.table({"tau": range(100_000)}), sys.argv[1])
pads.dataset(sys.argv[1]).to_table()
print(pa.default_memory_pool().backend_name, pa.mimalloc_memory_pool().max_memory(), os.environ["_RJEM_MALLOC_CONF"])
"""


def test_all_of_arrow_allocates_where_a_live_derivation_gives_back(tmp_path: Path) -> None:
    """Arrow's own parts would otherwise use their own pool, whatever pool Python's callers choose."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, tmp_path / "rows.parquet"],
        env=own_environment() | {"_RJEM_MALLOC_CONF": "narenas:3"},  # what the user chose stays
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "system 0 narenas:3\n"
    assert "kvdrift: " in ended.stderr
    assert "nowhere" in ended.stderr


@pytest.mark.slow
def test_memory_stays_what_it_was_after_a_hundred_commits(tmp_path: Path) -> None:
    """Within a tenth, while files of all sizes are put together."""
    seen = observe(tmp_path, memory_load(1200, 50.0))
    assert seen.late <= 1.1 * seen.early


# Commands merge small files by themselves, and with --no-compact never


FILES = 17  # of one size, which is one more than stay
CHOICES = [((), True), (("--no-compact",), False)]  # what is added to a command, and whether it compacts


def append_one_by_one(store: Store) -> None:
    for number in range(FILES):
        store.append_units([make_unit(f"d{number}")])


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store.create(tmp_path_factory.mktemp("grown") / "store")
    append_one_by_one(store)
    return Path(store.location)


@pytest.mark.parametrize(("option", "compacts"), CHOICES)
def test_derive(
    grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, ...], *, compacts: bool
) -> None:
    store = Store.open(shutil.copytree(grown, tmp_path / "store"))
    before = store.read("events")
    code, out, _ = call(capsys, "derive", store.location, *option)
    assert (code, out.split(",")[0]) == (0, f"derived {FILES} units")
    assert [len(store.paths(table)) for table in ("events", "units")] == [1 if compacts else FILES] * 2
    order = [("doc", "ascending"), ("replicate", "ascending"), ("t", "ascending")]
    assert store.read("events").sort_by(order).equals(before.sort_by(order))
    assert (tmp_path / "store" / "catalog.duckdb").exists()


@pytest.mark.parametrize(("option", "compacts"), CHOICES)
def test_derive_watch(
    grown: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: tuple[str, ...], *, compacts: bool
) -> None:  # fmt: skip
    """The option reaches the derivation and the upkeep process beside it."""
    told = list[bool]()

    class Upkeep:
        def __init__(self, _: str, *, compacts: bool) -> None:
            told.append(compacts)

        def finish(self) -> None:
            pass

    def watch(*_: object, compacts: bool) -> DerivationReport:
        told.append(compacts)
        return DerivationReport.of([], 0, 0.0)

    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr("kvdrift.commands.derive.bound_memory", lambda: None)
    monkeypatch.setattr("kvdrift.upkeep.Upkeep", Upkeep)
    monkeypatch.setattr("kvdrift.transforms.watch.watch", watch)
    assert call(capsys, "derive", grown, "--watch", *option)[0] == 0
    assert told == [compacts, compacts]


def test_a_live_derivation_leaves_files_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gathering = list[str](), watching.Gathering

    def begins(location: str) -> object:
        begun.append(location)
        return gathering(location)

    monkeypatch.setattr(watching, "Gathering", begins)
    store = Store.create(tmp_path / "store")
    for count, compacts in enumerate((False, True)):
        append_one_by_one(store)
        watching.watch(store.location, 0.0, iter([False, True]).__next__, compacts=compacts)
        assert len(begun) == count


@pytest.mark.parametrize(("option", "compacts"), CHOICES)
def test_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: tuple[str, ...], *, compacts: bool
) -> None:  # fmt: skip
    class ToldError(Exception):
        pass

    def told(runs: list[Any], *_: object, **__: object) -> None:
        raise ToldError([run.compacts for run in runs])

    monkeypatch.setattr("kvdrift.flows.run.study.run_studies", told)
    code, _, err = call(capsys, "run", write_finite_study(tmp_path), "--store", tmp_path / "store", *option)
    assert code == 1
    assert f"ToldError: [{compacts}]" in err


def test_the_end_of_a_run(grown: Path, tmp_path: Path) -> None:
    store = Store.open(shutil.copytree(grown, tmp_path / "store"))
    run = run_of(load_study(write_finite_study(tmp_path)), store.location)
    for compacts in (False, True):
        (tmp_path / "store" / "catalog.duckdb").unlink(missing_ok=True)
        stages.keep_up(replace(run, compacts=compacts))
        assert len(store.paths("events")) == (1 if compacts else FILES)
        assert (tmp_path / "store" / "catalog.duckdb").exists()
