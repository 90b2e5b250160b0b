"""Fixtures that the tests of flows share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures.sequential_study import begin, go_on, study_run, write_laws
from fixtures.shared import made_once
from fixtures.small_study import changed_run, finish, run_of, write_study
from fixtures.study_files import load_study
from fixtures.table_systems import PLANNED, copy_study, table_system, write_systems

from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import StudyRun


@pytest.fixture
def prepared(tmp_path: Path) -> StudyRun:
    """The small study before anything is generated."""
    run = run_of(load_study(write_study(tmp_path)), tmp_path / "store")
    stages.prepare(run)
    return run


@pytest.fixture(scope="session")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sequential study that stopped at its second look of four, run once for all workers."""

    def run(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            write_laws(folder)
            study = study_run(folder, "store")
            begin(study)
            go_on(study)
            stages.analyze(study)

    return made_once(tmp_path_factory, "stopped", run)


@pytest.fixture(scope="session")
def reported_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of eight systems, each with laws of its own, whose result was reported."""

    def run(folder: Path) -> None:
        laws = ({"one": 0.5 + 0.04 * number, "two": 0.8 - 0.03 * number} for number in range(8))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr("kvdrift.report.page.save", lambda *_: "<svg></svg>")
            write_systems(folder / "tables.json", [table_system(4, 0.5, actions) for actions in laws])
            study = changed_run(folder, "store", PLANNED)
            finish(study)
            stages.report(study)

    return made_once(tmp_path_factory, "reported", run)


def copy_of(once: str) -> Any:
    """A fixture: the working folder with the store of the study that another fixture runs once, to write to."""

    @pytest.fixture
    def copied_study(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        copy_study(request.getfixturevalue(once), tmp_path)
        return tmp_path

    return copied_study


stopped_laws, laws = copy_of("stopped_once"), copy_of("reported_once")
