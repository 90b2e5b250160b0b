"""Several commands and other programs use one store at the same time: all end well, and rows are those of one run."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from faults.disk.failing import start
from faults.outcomes import SURVIVED, tell
from fixtures.processes import Command, run_command
from fixtures.small_study import run_of
from fixtures.stored_rows import assert_alike, rows, unmeasured
from fixtures.study_files import load_study

from kvdrift.flows.run import stages
from kvdrift.log.delta.commits import Commit
from kvdrift.log.delta.folder import DeltaFolder
from kvdrift.log.delta.versions import Snapshot
from kvdrift.log.store import Store

TIMES = 5

pytestmark = pytest.mark.slow


def test_two_runs(finished_study: Path, tmp_path: Path) -> None:
    for number in range(TIMES):
        store = tmp_path / str(number)
        runs = [Command("run", finished_study / "finite.toml", "--store", store) for _ in range(2)]
        ended = [run.end() for run in runs]
        assert [code for code, _, _ in ended] == [0, 0], [err for _, _, err in ended]
        assert unmeasured(store) == unmeasured(finished_study / "store")
        assert run_command("verify", store)[0] == 0
    tell("concurrency", "two runs at once", [SURVIVED] * TIMES)


def test_two_runs_beside_compaction(finished_study: Path, tmp_path: Path) -> None:
    """Kvdrift compacts; another Delta program rewrites and checkpoints a table after each commit of a run."""
    told = tmp_path / "rewritten"
    for number in range(TIMES):
        store, rewriting = tmp_path / str(number), partial(rewrite_amid_commits, told)
        runs = [Command("run", finished_study / "finite.toml", "--store", store, before=rewriting) for _ in range(2)]
        while any(run.running for run in runs):
            if (store / "events" / "_delta_log").is_dir():
                assert run_command("compact", store)[0] == 0
        ended = [run.end() for run in runs]
        assert [code for code, _, _ in ended] == [0, 0], [err for _, _, err in ended]
        assert_alike(unmeasured(store), unmeasured(finished_study / "store"))
        assert run_command("verify", store)[0] == 0
    assert {"events", "units"} <= {*told.read_text().split()}
    tell(
        "concurrency",
        "two runs at once beside `compact` and beside another program's `optimize` of every table",
        [SURVIVED] * TIMES,
    )


def rewrite_amid_commits(told: Path) -> None:
    """Have another program commit between the preparation of each of this process' commits and the commit itself.

    Args:
        told: A file to which the name of each table is written that the other program has rewritten.
    """
    commit = DeltaFolder.commit

    def amid(folder: DeltaFolder, table: str, attempt: Callable[[Snapshot], Commit | None], **options: Any) -> int:
        def tried(loaded: Snapshot) -> Commit | None:
            made = attempt(loaded)
            if rewrite(Path(folder.location, table)):
                with told.open("a") as file:
                    file.write(f"{table}\n")
            return made

        return commit(folder, table, tried, **options)

    DeltaFolder.commit = amid  # type: ignore[method-assign]


def rewrite(table: Path) -> int:
    """Merge a table's files by Delta Lake's own tools; return how many, 0 if another commit was first."""
    try:
        loaded = DeltaTable(table)
        replaced = loaded.optimize.compact()["numFilesRemoved"]
        loaded.create_checkpoint()
    except DeltaError:
        return 0
    return int(replaced)


@pytest.mark.parametrize("seconds", [60, 86_400, 40 * 86_400, 400 * 86_400])
def test_a_clock_that_goes_back(library: Path, finished_study: Path, tmp_path: Path, seconds: int) -> None:
    """Half of a study is run, then the clock is set back, and the other half is run."""
    run = run_of(load_study(finished_study / "finite.toml"), tmp_path / "store")
    stages.prepare(run)
    stages.develop(run)
    arguments = ("run", finished_study / "finite.toml", "--store", tmp_path / "store")
    program = start(library, "failing_command.py", tmp_path / "store", "CLOCK", seconds, *arguments)
    _, err = program.communicate(timeout=300)
    assert program.returncode == 0, err
    assert unmeasured(tmp_path / "store") == unmeasured(finished_study / "store")
    assert run_command("verify", tmp_path / "store")[0] == 0
    assert run_command("compact", tmp_path / "store", "--vacuum")[0] == 0
    assert unmeasured(tmp_path / "store") == unmeasured(finished_study / "store")
    tell(
        "concurrency", "the clock set back amid a study, by a minute to 400 days, and further at each look", [SURVIVED]
    )


@pytest.mark.parametrize("watching", [False, True])
def test_derivations(finished_study: Path, tmp_path: Path, *, watching: bool) -> None:
    """Three processes derive once each, or two processes watch until everything is derived."""
    run = run_of(load_study(finished_study / "finite.toml"), tmp_path / "generated")
    stages.prepare(run)
    stages.develop(run)
    expected = Path(shutil.copytree(tmp_path / "generated", tmp_path / "expected"))
    assert run_command("derive", expected)[0] == 0
    for number in range(TIMES):
        store = Path(shutil.copytree(tmp_path / "generated", tmp_path / str(number)))
        options = ["--watch"] if watching else []
        commands = [Command("derive", store, *options, before=unheeding) for _ in range(2 if watching else 3)]
        if watching:
            wait_until(lambda at=store: Store.open(at).all_underived().size == 0)
            for command in commands:
                stop(command)
        ended = [command.end() for command in commands]
        assert {code for code, _, _ in ended} == {0}, [err for _, _, err in ended]
        assert rows(store) == rows(expected)
        assert run_command("verify", store)[0] == 0
    tell("concurrency", "two watchers at once" if watching else "three derivations at once", [SURVIVED] * TIMES)


def unheeding() -> None:
    """Ignore SIGTERM until the command handles it: one watcher may have derived everything while the other starts."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def stop(command: Command) -> None:
    while command.running:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            command.signal(signal.SIGTERM)
        time.sleep(0.1)


def wait_until(done: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)
