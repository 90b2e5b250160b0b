"""If the scheduler of a Dask cluster is killed, the run says so; another run with another cluster goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from faults.disk.laws import write_laws
from faults.outcomes import SURVIVED, tell
from fixtures.dask_cluster import DaskCluster
from fixtures.processes import Command, run_command
from fixtures.stored_rows import unmeasured

from kvdrift.log.store import Store

KILLED_AT = (1, 2, 4)  # visible units

pytestmark = pytest.mark.slow


def test_a_killed_scheduler(finished_laws: Path, tmp_path: Path) -> None:
    outcomes = []
    for units in KILLED_AT:
        folder = tmp_path / str(units)
        folder.mkdir()
        study, store = write_laws(folder), folder / "store"
        outcomes.append(outcome(study, store, units))
        cluster = DaskCluster(folder)
        try:
            cluster.add_worker()
            code, _, err = run_command("run", study, "--store", store, "--cluster", cluster.address)
        finally:
            cluster.close()
        assert code == 0, err
        assert unmeasured(store) == unmeasured(finished_laws / "store")
        assert run_command("verify", store)[0] == 0
    tell("the scheduler of a cluster killed amid a run, which goes on with another cluster", outcomes)
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
