"""Copies of a store that another process writes to: each is whole, and goes on."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from fixtures.processes import start_process
from fixtures.stored_units import derive, make_unit

from kvdrift.log.store import Store
from kvdrift.verification.files import check_logs

COPIES = 5
FLOCK = shutil.which("flock")


def write_until(location: str, stop: Path) -> None:
    """Append units and derive them, one after the other, until a file is there."""
    store = Store.open(location)
    for number in itertools.count():
        if stop.exists():
            return
        store.append_units([make_unit(f"d{number}")])
        derive(store)


@pytest.mark.skipif(FLOCK is None, reason="util-linux is not installed")
@pytest.mark.slow
def test_copies_of_a_store_that_is_written_to(tmp_path: Path) -> None:
    store, stop = Store.create(tmp_path / "store"), tmp_path / "stop"
    writer = start_process(write_until, store.location, stop)
    counts = []
    copying = [shutil.which("rsync") or "cp", "-a"]
    for number in range(COPIES):
        wanted = store.row_count("units") + 1
        while store.row_count("units") < wanted and writer.is_alive():
            time.sleep(0.01)
        copy = tmp_path / f"copy {number}"
        copy.mkdir()
        subprocess.run([str(FLOCK), store.location, *copying, f"{store.location}/.", copy], check=True)
        opened = Store.create(copy)
        opened.check_made_from_events(opened.versions())
        assert check_logs(opened).faults == ()
        assert opened.row_count("events") == 32 * len(opened.units())
        counts.append(len(opened.units()))
        assert opened.append_units([make_unit("of the copy")]) == 1
    stop.touch()
    writer.join(120)
    assert writer.exitcode == 0
    assert counts == sorted(set(counts)), "the writer went on after each copy"
