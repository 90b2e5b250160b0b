"""Processes beside one: they do not run its script again, are silent, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from fixtures.house import ROOT

from kvdrift.schema.own_process import OwnProcesses

SCRIPT = """
import os, signal, sys
from kvdrift.schema.own_process import OwnProcesses
print("once")
with OwnProcesses(1, print, "begun") as processes:
    processes.submit(print, "silent").result()
    processes.submit(os.kill, processes.submit(os.getpid).result(), signal.SIGINT).result()
    print(processes.submit(os.getpid).result(), flush=True)
    {last}
"""


def run_script(folder: Path, last: str) -> subprocess.CompletedProcess[str]:
    """A script without a guard against running again when it is imported."""
    (folder / "script.py").write_text(SCRIPT.format(last=last))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(folder / "script.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("last", "code"), [("pass", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)])
def test_a_process_is_silent_and_ends_with_the_script_that_began_it(tmp_path: Path, last: str, code: int) -> None:
    done = run_script(tmp_path, last)
    once, process = done.stdout.split()
    assert (done.returncode, once) == (code, "once")
    assert "begun" not in done.stderr
    assert code or done.stderr == "", "of one that is killed, multiprocessing says what it cleans up"
    end = time.monotonic() + 60
    while Path(f"/proc/{process}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{process}").exists()


def test_after_some_calls_another_process_takes_over() -> None:
    with OwnProcesses(1, times=2) as processes:
        first, second, third = (processes.submit(os.getpid).result() for _ in range(3))
    assert first == second != third


def test_what_is_killed_says_so() -> None:
    """A killed process also leaves no thread behind, whose pipe the interpreter would find half closed at its end."""
    before = threading.active_count()
    processes = OwnProcesses(1)
    under_way = processes.submit(time.sleep, 1e6)
    while not under_way.running():
        time.sleep(0.01)
    assert threading.active_count() > before
    processes.kill()
    assert threading.active_count() == before
    with pytest.raises(BrokenProcessPool):
        under_way.result()


def test_what_never_worked_is_killed_too() -> None:
    OwnProcesses(1).kill()
