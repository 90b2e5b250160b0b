"""Fixtures that the tests of flows share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fixtures.small_study import run_of, write_study
from fixtures.study_files import load_study

from flows.run import stages
from flows.run.study_run import StudyRun


@pytest.fixture
def prepared(tmp_path: Path) -> StudyRun:
    """The small study before anything is generated."""
    run = run_of(load_study(write_study(tmp_path)), tmp_path / "store")
    stages.prepare(run)
    return run


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The finished store of the small study, to write to."""
    return Path(shutil.copytree(finished, tmp_path / "store"))
