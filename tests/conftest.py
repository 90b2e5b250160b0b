"""What every test needs: one torch thread per process, and no network behind a mistyped model id."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fixtures.small_study import run_command, write_study

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the small study run to its end by the command; tests that write to it take a copy."""
    folder = tmp_path_factory.mktemp("finished")
    code, out, err = run_command("run", write_study(folder), "--store", folder / "store")
    assert code == 0, err
    assert "report: " in out
    return folder / "store"
