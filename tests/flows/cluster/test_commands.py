"""Whole runs of the command on clusters, as docs/clusters.md starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from distributed import Client
from fixtures.dask_cluster import wait_for
from fixtures.finished_studies import OWN_LINES
from fixtures.house import ROOT
from fixtures.processes import Command, run_command
from fixtures.small_study import write_study
from fixtures.stored_rows import assert_same


@pytest.mark.slow
def test_the_command_on_workers_of_the_command_line(finished: Path, tmp_path: Path) -> None:
    """One worker is killed by ``kill -9`` amid generation, and its nanny starts another worker."""
    file = tmp_path / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    own = ["--scheduler-file", file, "--no-dashboard"]
    commands = [[*dask, "scheduler", "--host", "127.0.0.1", "--port", "0", *own]]
    commands += [[*dask, "worker", "--nthreads", "1", "--memory-limit", "0", "--host", "127.0.0.1", *own]] * 2
    with ExitStack() as stack:
        for command in commands:
            stack.callback(subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT).terminate)
        wait_for(file.exists)
        address = json.loads(file.read_text())["address"]
        run = Command("run", write_study(tmp_path), "--store", tmp_path / "store", "--cluster", address)
        with Client(address, set_as_default=False) as client:
            wait_for(lambda: len(list((tmp_path / "store" / "events").rglob("*.parquet"))) > 3, 200)
            os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        code, out, err = run.end()
    assert code == 0, err
    assert "report: " in out
    assert_same(tmp_path / "store", finished)


@pytest.mark.slow
def test_local_workers(finished: Path, tmp_path: Path) -> None:
    code, _, err = run_command("run", write_study(tmp_path), "--store", tmp_path / "store", "--cluster", "local:2")
    assert code == 0, err
    first, *others = (line for line in err.splitlines() if not line.startswith("loading libraries, "))
    assert re.fullmatch(r"cluster local:2: 2 workers(; dashboard http://127.0.0.1:\d+/status)?", first)
    assert [line for line in others if not re.match(OWN_LINES, line)] == []
    assert_same(tmp_path / "store", finished)
