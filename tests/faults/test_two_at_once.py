"""Several of one command on one store at the same time: all end well, and the store is as after one."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.outcomes import SURVIVED, tell
from fixtures.processes import Command, run_command
from fixtures.small_study import run_of
from fixtures.stored_rows import rows
from fixtures.study_files import load_study

from flows import stages
from log.store import Store

TIMES = 5

pytestmark = pytest.mark.slow


def test_two_runs(finished_laws: Path, tmp_path: Path) -> None:
    for number in range(TIMES):
        store = tmp_path / str(number)
        runs = [Command("run", finished_laws / "laws.toml", "--store", store) for _ in range(2)]
        ended = [run.end() for run in runs]
        assert [code for code, _, _ in ended] == [0, 0], [err for _, _, err in ended]
        assert unmeasured(store) == unmeasured(finished_laws / "store")
        assert run_command("verify", store)[0] == 0
    tell("two runs at once", [SURVIVED] * TIMES)


def unmeasured(store: Path) -> dict[str, list[str]]:
    """All rows but what is estimated from measured seconds; of the plan, that there is one."""
    found = rows(store)
    estimates = [row for row in found["results"] if "second" not in json.loads(row)["quantity"]]
    return found | {"plans": ["one"] * len(found["plans"]), "results": estimates}


@pytest.mark.parametrize("watching", [False, True])
def test_derivations(finished_laws: Path, tmp_path: Path, *, watching: bool) -> None:
    """Three that each do it once, or two that watch until all is done."""
    run = run_of(load_study(finished_laws / "laws.toml"), tmp_path / "generated")
    stages.prepare(run)
    stages.develop(run)
    expected = Path(shutil.copytree(tmp_path / "generated", tmp_path / "expected"))
    assert run_command("derive", expected)[0] == 0
    for number in range(TIMES):
        store = Path(shutil.copytree(tmp_path / "generated", tmp_path / str(number)))
        options = ["--watch"] if watching else []
        commands = [Command("derive", store, *options) for _ in range(2 if watching else 3)]
        if watching:
            wait_until(lambda at=store: not Store.open(at).pending_segments(Store.open(at).version("events")))
            for command in commands:
                command.signal(signal.SIGTERM)
        ended = [command.end() for command in commands]
        assert {code for code, _, _ in ended} == {0}, [err for _, _, err in ended]
        assert rows(store) == rows(expected)
        assert run_command("verify", store)[0] == 0
    tell("two watchers at once" if watching else "three derivations at once", [SURVIVED] * TIMES)


def wait_until(done: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)
