"""Stores that grow by many small files: commands put these together by themselves, and with --no-compact never."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.command import call
from fixtures.finite_study import write_finite_study
from fixtures.small_study import run_of
from fixtures.stored_units import make_unit
from fixtures.study_files import load_study

from kvdrift.flows.run import stages
from kvdrift.log.store import Store
from kvdrift.transforms import watch as watching
from kvdrift.transforms.segments import DerivationReport

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
