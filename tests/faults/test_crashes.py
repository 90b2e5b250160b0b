"""Crashes: a power cut, a killed process or scheduler. Nothing acknowledged is missing, and the next call goes on."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.disk.crash_states import Disk, Operation, State, put_down, record
from faults.disk.recorded_commits import STORE, go_on
from faults.outcomes import MENDED, SURVIVED, tell
from fixtures.dask_cluster import DaskCluster
from fixtures.finite_study import write_smallest_study
from fixtures.house import ROOT
from fixtures.processes import Command, run_command
from fixtures.removed_documents import DOC, grown, state, traces
from fixtures.stored_rows import unmeasured

from kvdrift.flows.run import forgetting
from kvdrift.flows.run.forgetting import find_removal, remove_document
from kvdrift.log.delta import folder as delta_folder
from kvdrift.log.delta.table_log import TableLog
from kvdrift.log.store import Store
from kvdrift.verification.files import check_logs

# --- power cuts: every state that the fsyncs of real commits allow -------------------------------------------------------

PROGRAM = Path(__file__).parent / "disk" / "recorded_commits.py"
TRIED = 6  # states in the default suite


@pytest.fixture(scope="module")
def operations(library: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    return record(library, tmp_path_factory.mktemp("recorded"), [str(PROGRAM)], [ROOT, ROOT / "tests"])


def crash_states(operations: list[Operation]) -> Iterator[tuple[State, tuple[str, ...]]]:
    """Every state once, with everything acknowledged before the first power cut that can leave this state."""
    disk, seen = Disk(), set[tuple[object, ...]]()
    for operation in operations:
        disk.do(operation)
        for after in disk.states():
            key = (*sorted((path, hash(data)) for path, data in after.items()), len(disk.acknowledged))
            if key not in seen:
                seen.add(key)
                yield after, tuple(disk.acknowledged)


def test_what_is_acknowledged_is_durable(operations: list[Operation]) -> None:
    """When a call has returned, no power cut can change its files, log files and folders."""
    disk, told = Disk(), []
    for operation in operations:
        before = len(disk.acknowledged)
        disk.do(operation)
        if len(disk.acknowledged) > before:
            assert disk.not_durable() == [], disk.acknowledged
            told = disk.acknowledged
    assert told == ["store", "documents", "d0", "d1", "d2", "derived", "catalogue", "d3"]


def test_a_power_cut_loses_nothing_acknowledged(operations: list[Operation], tmp_path: Path) -> None:
    """A few states are tried, chosen anew if the operations change; ``make faults`` tries all states."""
    every = list(crash_states(operations))
    chosen = random.Random(len(every)).sample(every, TRIED)  # noqa: S311
    outcomes = Counter(survive(state, told, tmp_path / str(at)) for at, (state, told) in enumerate(chosen))
    assert outcomes[MENDED] + outcomes[SURVIVED] == TRIED


@pytest.mark.slow
def test_no_power_cut_loses_anything_acknowledged(operations: list[Operation], tmp_path: Path) -> None:
    every = list(crash_states(operations))
    outcomes = Counter(survive(state, told, tmp_path / str(at)) for at, (state, told) in enumerate(every))
    tell("crash", "power cut at every point of a small store's commits", outcomes.elements())


def survive(state: State, told: tuple[str, ...], folder: Path) -> str:
    """Return the outcome of using the store that a power cut left."""
    put_down(state, folder)
    return go_on(folder / STORE, told)


# --- a removal of a document that is killed at one of its steps ----------------------------------------------------------


def steps(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Have the step ``at`` of a removal be the last one, as of a process that is killed then; return what was done."""
    done: list[str] = []

    def ending(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def step(*arguments: Any, **options: Any) -> Any:
            if len(done) == at:
                raise Killed
            done.append(name)
            return whole(*arguments, **options)

        monkeypatch.setattr(owner, name, step)

    ending(forgetting, "add_forgotten")
    ending(Store, "rewrite_rows")
    ending(delta_folder, "replace_file")
    ending(delta_folder.DeltaFolder, "make_durable")
    ending(TableLog, "delete_before")
    ending(Path, "unlink")
    ending(forgetting.shutil, "rmtree")
    ending(forgetting, "refresh_catalog")
    return done


class Killed(BaseException):
    """The end of the process."""


@pytest.fixture(scope="module")
def removed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """A store before a removal, what is left after it, and its steps."""
    folder = tmp_path_factory.mktemp("removed")
    grown(folder / "store")
    shutil.copytree(folder / "store", folder / "after")
    store = Store.open(folder / "after")
    with pytest.MonkeyPatch.context() as patch:
        done = steps(patch, -1)
        remove_document(store, find_removal(store, DOC, None), lambda _: None)
    return folder / "store", state(Store(folder / "after")), done


@pytest.mark.parametrize("part", [*range(2), *(pytest.param(part, marks=pytest.mark.slow) for part in range(2, 64))])
def test_a_removal_that_was_killed_is_finished_by_the_next_call(
    removed: tuple[Path, dict[str, Any], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    before, wanted, done = removed
    at = (part * 37 + 11) % len(done)
    location = Path(shutil.copytree(before, tmp_path / "store"))
    store = Store.open(location)
    with monkeypatch.context() as patch:
        steps(patch, at)
        with pytest.raises(Killed):
            remove_document(store, find_removal(store, DOC, None), lambda _: None)
    store = Store.open(location)
    kept = {row["doc"] for row in store.read("events").to_pylist()} - {DOC}
    assert kept == {"d0", "d1"}
    remove_document(store, find_removal(store, DOC, None), lambda _: None)
    assert traces(location, DOC) == []
    assert state(Store.create(location)) == wanted
    assert check_logs(Store(location)).faults == ()
    tell("crash", "a removal of a document killed at one of its steps; then the same call", [SURVIVED])


# --- the scheduler of a Dask cluster -------------------------------------------------------------------------------------

KILLED_AT = (1, 2, 4)  # visible units


@pytest.mark.slow
def test_a_killed_scheduler(finished_study: Path, tmp_path: Path) -> None:
    outcomes = []
    for units in KILLED_AT:
        folder = tmp_path / str(units)
        folder.mkdir()
        study, store = write_smallest_study(folder), folder / "store"
        outcomes.append(outcome(study, store, units))
        cluster = DaskCluster(folder)
        try:
            cluster.add_worker()
            code, _, err = run_command("run", study, "--store", store, "--cluster", cluster.address)
        finally:
            cluster.close()
        assert code == 0, err
        assert unmeasured(store) == unmeasured(finished_study / "store")
        assert run_command("verify", store)[0] == 0
    tell("crash", "the scheduler of a cluster killed amid a run, which goes on with another cluster", outcomes)
    assert set(outcomes) == {SURVIVED}


def outcome(study: Path, store: Path, units: int) -> str:
    """Kill the scheduler when this many units are visible; return the outcome of the run."""
    folder = study.parent / "killed"
    folder.mkdir()
    cluster = DaskCluster(folder)
    try:
        cluster.add_worker()
        command = Command("run", study, "--store", store, "--cluster", cluster.address)
        while command.running and not visible(store) >= units:
            time.sleep(0.002)
        assert command.running, command.err()
        cluster.scheduler.kill()
        code, _, err = command.end(120)
    finally:
        cluster.close()
    said = [line for line in err.splitlines() if line.startswith("kvdrift: ")]
    if "Traceback" in err:
        return "traceback"
    return SURVIVED if code == 1 and len(said) == 1 else f"ended with {code} and {len(said)} lines: {err[-600:]}"


def visible(store: Path) -> int:
    """Return the number of visible units, 0 if there is no store yet."""
    if not (store / "events" / "_delta_log").is_dir():
        return 0
    return Store(store).row_count("units")
