"""What every test needs: one torch thread per process, and no network behind a mistyped model id."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures.shared import made_once
from fixtures.small_study import write_study

from schema.store.store import Store
from sql.catalog import refresh_catalog

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The small study run to its end by the command, once for all workers: its store, what it printed and what it said.

    Nothing may be written to this store, which every worker reads.
    """

    def run(folder: Path) -> None:
        command = [sys.executable, "-m", "kvdrift", "run", write_study(folder), "--store", folder / "store"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "report: " in done.stdout
        (folder / "said.json").write_text(json.dumps([done.stdout, done.stderr]))

    folder = made_once(tmp_path_factory, "unbroken", run)
    out, err = json.loads((folder / "said.json").read_text())
    return folder / "store", out, err


@pytest.fixture(scope="session")
def finished(unbroken: tuple[Path, str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the unbroken run, copied for this worker; tests that write to it take a copy."""
    location = tmp_path_factory.mktemp("finished") / "store"
    shutil.copytree(unbroken[0], location, ignore=shutil.ignore_patterns(".prefect"))
    refresh_catalog(Store.open(location))
    return location
