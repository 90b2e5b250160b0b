"""``run --redo`` again after a kill: the same revision goes on until its result was reported, whatever was whole."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.heard import Heard
from fixtures.processes import start_process
from fixtures.small_study import finish, run_of
from fixtures.study_files import load_study
from fixtures.table_systems import copy_study, study_of_tables, table_system, write_systems

from flows.pages import reports as pages
from flows.run import stages
from flows.run.revisions import begun_revisions, redo_actions
from flows.run.study_run import DocumentLimit, StudyRun

TEXT = (
    study_of_tables(4, 2, 3, "one", "two")
    + """
[plan]
baseline = "one"
primary = ["mismatch", "gap"]
replicates = 3
documents = 3
development_replicates = 2
draws = 100
exploratory_draws = 100
"""
)
STAGES = (
    stages.prepare, stages.develop, stages.derive, stages.plan, stages.evaluate, stages.derive, stages.score,
    stages.check, stages.analyze, stages.report,
)  # fmt: skip
KILLS = {
    "the row": 0,
    "a document": 2,
    "development": 2,
    "evaluation": 5,
    "derivation": 6,
    "estimates": 9,
    "figures": 10,
}
"""The number of finished stages when the redo is killed; after the figures, only the report of the page is left."""


def write_tables(folder: Path, law: float = 0.7) -> None:
    write_systems(folder / "tables.json", [table_system(4, 0.5, {"one": 0.6, "two": law}) for _ in range(5)])


def run_in(folder: Path, limit: int | None = None) -> StudyRun:
    (folder / "study.toml").write_text(TEXT)
    run = run_of(load_study(folder / "study.toml"), folder / "store")
    return replace(run, progress=Heard(), limit=DocumentLimit(limit))


def redo_until(folder: Path, last: str) -> None:
    """Begin to redo "two" as a run does, and kill this process at the named place."""
    os.chdir(folder)
    run = run_in(folder, 1 if last == "a document" else None)
    redo_actions([run], ["two"])
    if last == "figures":
        pages.record_inputs = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    for stage in STAGES[: KILLS[last]]:
        stage(run)
    os.kill(os.getpid(), signal.SIGKILL)


def revisions(run: StudyRun) -> list[int]:
    """The revisions of "two" that the store has a row of."""
    rows = run.store.read("actions").to_pylist()
    return sorted(row["action_revision"] for row in rows if row["action"] == "two")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose result was reported."""
    folder = tmp_path_factory.mktemp("reported")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_tables(folder)
        run = run_in(folder)
        finish(run)
        stages.report(run)
    return folder


@pytest.fixture
def laws(reported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    copy_study(reported, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_redo_that_is_killed_anywhere_is_gone_on_with_until_it_was_reported(laws: Path) -> None:
    for last in KILLS:
        process = start_process(redo_until, laws, last)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, last
        run = run_in(laws)
        assert revisions(run) == [0, 1], last
        assert begun_revisions([run], ["two"]) == [], last
    redo_actions([run], ["two"])
    assert isinstance(run.progress, Heard)
    assert run.progress.lines == ["--redo two: revision 1 was begun and has no reported result yet, so it is continued"]
    assert stages.evaluate(run) == 0
    finish(run)
    stages.report(run)
    assert stages.is_finished(run)
    redo_actions([run_in(laws)], ["two"])
    assert revisions(run) == [0, 1, 2], "what was reported is redone when asked again"


def test_another_identity_after_a_kill_begins_another_revision(laws: Path) -> None:
    run = run_in(laws)
    redo_actions([run], ["two"])
    stages.prepare(run)
    stages.develop(run)
    assert begun_revisions([run_in(laws)], ["two"]) == []
    write_tables(laws, 0.8)
    (row,) = begun_revisions([run_in(laws)], ["two"])
    assert row["action_revision"] == 2


def test_a_page_of_another_result_or_of_an_earlier_version_is_read_for_what_it_is(laws: Path) -> None:
    run = run_in(laws)
    redo_actions([run], ["two"])
    folder = run.page.parent
    assert pages.reported_revisions(folder) == {"one": 0, "two": 0}
    pages.write_report(run.store, "laws", "tables", folder)
    assert pages.reported_revisions(folder) == {"one": 0, "two": 0}, "a page in between has no result of the revision"
    finish(run)
    stages.report(run)
    recorded = json.loads((folder / "inputs.json").read_text())
    del recorded["action_revisions"]  # as earlier versions left it
    (folder / "inputs.json").write_text(json.dumps(recorded))
    assert pages.reported_revisions(folder) == {}
    assert stages.is_finished(run)
    (row,) = begun_revisions([run], ["two"])
    assert row["action_revision"] == 2, "the study is finished, so that its result was reported"
