"""Sequential studies that are killed between two looks, looked at in between, or given more documents after a stop."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fixtures.processes import start_process
from fixtures.refusals import refused
from fixtures.sequential_study import begin, go_on, kept, looks_of, rows, study_run, write_laws
from fixtures.stored_rows import OF_THE_RUN
from fixtures.table_systems import copy_study

from flows.estimate.gate import gate_stored
from flows.estimate.gate_question import GateQuestion
from flows.run import stages
from flows.run.forecast import forecast
from flows.run.study_run import StudyRun

CYCLE = (stages.evaluate, stages.derive, stages.check, stages.look)
KILLS = {"the first look": 0, "a document": 1, "documents": 1, "derivation": 2, "the second look": 4}
"""How many stages of the second look are done at the kill; of "a document", one document is generated."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study that stopped at its second look of four, without a kill."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_laws(folder, 24)
        run = study_run(folder, "store")
        begin(run)
        go_on(run)
        stages.analyze(run)
        assert (looks_of(run).reached, looks_of(run).stopped) == (2, True)
    return folder


@pytest.fixture
def laws(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder with that study's store."""
    monkeypatch.chdir(tmp_path)
    copy_study(whole, tmp_path)
    return tmp_path


def run_until(folder: Path, place: str) -> None:
    """Run a study to the first look and a part of the second, and kill this process."""
    os.chdir(folder)
    # 2 documents of development, and 4 of the first look
    run = study_run(folder, "killed", limit=7 if place == "a document" else None)
    begin(run)
    for stage in (*CYCLE, *CYCLE[: KILLS[place]]):
        stage(run)
    os.kill(os.getpid(), signal.SIGKILL)


def estimates(run: StudyRun) -> list[dict[str, Any]]:
    """Return all estimates, without columns that differ between two runs of one study."""
    found = [{name: value for name, value in row.items() if name not in OF_THE_RUN} for row in rows(run, "estimates")]
    return sorted(found, key=str)


@pytest.mark.parametrize(
    "place", [one if one == "a document" else pytest.param(one, marks=pytest.mark.slow) for one in KILLS]
)
def test_a_study_that_is_killed_between_looks_says_what_it_says_without_a_kill(laws: Path, place: str) -> None:
    process = start_process(run_until, laws, place)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    run = study_run(laws, "killed")
    assert looks_of(run).reached == (2 if place == "the second look" else 1)
    assert forecast(run).finished is False
    # Whoever estimates when the documents of a look are all there takes that look.
    look_between(run, 1 if place in {"the first look", "a document"} else 2)
    begin(run)
    go_on(run)
    stages.analyze(run)
    other = study_run(laws, "store")
    for table in ("looks", "units", "events", "trajectories"):
        assert kept(laws / "killed", table) == kept(laws / "store", table), table
    assert estimates(run) == estimates(other)


def look_between(run: StudyRun, look: int) -> None:
    """Estimate at a moment that no plan has: primary endpoints have the interval of a look, and a gate refuses."""
    stages.derive(run)
    stages.analyze(run)
    last = {row["action"]: row for row in rows(run, "sequence", look=look)}
    primary = [row for row in rows(run, "estimates", quantity="mismatch", stratum="pooled") if row["family"]]
    assert (looks_of(run).reached, len(primary)) == (look, 2)
    for row in primary:
        said = last[row["action"]]
        assert (row["interval"], row["documents"]) == ("repeated", 4 * look)
        assert all(row[name] == said[name] for name in ("estimate", "low", "high", "level"))
    question = GateQuestion("mismatch", "two", "one", margin=0.02)
    assert "is sequential" in refused(gate_stored, run.store, question)


@pytest.mark.slow
def test_documents_that_a_source_brings_after_a_stop_change_nothing(laws: Path) -> None:
    """The plan is frozen with its documents; a larger N is a plan of its own, whose findings are labelled seen."""
    run = study_run(laws, "store", ("evaluation = 16", "evaluation = 22"))
    before, looks = estimates(run), kept(laws / "store", "looks")
    begin(run)
    go_on(run)
    assert stages.analyze(run) == 0
    assert not any(split.work for split in forecast(run).splits)
    assert (looks_of(run).reached, looks_of(run).stopped) == (2, True)
    assert kept(laws / "store", "looks") == looks
    assert estimates(run) == before
