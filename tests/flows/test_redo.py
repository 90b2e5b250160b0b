"""Redo and drop actions of a finished study: resumption after a kill until the result was reported, and refusals."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.heard import Heard
from fixtures.processes import start_process
from fixtures.small_study import ADDED_ACTION, finish, run_of, write_study
from fixtures.study_files import load_study
from fixtures.table_systems import PLANNED, table_system, write_systems

from kvdrift.flows.pages import reports as pages
from kvdrift.flows.run import stages
from kvdrift.flows.run.comparison import begun_revisions, drop_action, redo_actions
from kvdrift.flows.run.study_run import DocumentLimit, StudyRun
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, PlanError
from kvdrift.sql.catalog import open_views

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


def run_in(folder: Path, limit: int | None = None) -> StudyRun:
    (folder / "study.toml").write_text(PLANNED)
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
    assert (
        run.progress.lines == [line for line in run.progress.lines if line.startswith("--redo two: revision 1 ")] != []
    )
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
    write_systems(laws / "tables.json", [table_system(4, 0.5, {"one": 0.6, "two": 0.9})] * 5)
    (row,) = begun_revisions([run_in(laws)], ["two"])
    assert row["action_revision"] == 2


@pytest.mark.slow
def test_a_page_that_was_written_in_between_has_no_result_of_the_revision(laws: Path) -> None:
    run = run_in(laws)
    redo_actions([run], ["two"])
    folder = run.page.parent
    assert pages.reported_revisions(folder) == {"one": 0, "two": 0}
    pages.write_report(run.store, "laws", "tables", folder)
    assert pages.reported_revisions(folder) == {"one": 0, "two": 0}
    finish(run)
    stages.report(run)
    assert stages.is_finished(run)
    (row,) = begun_revisions([run], ["two"])
    assert row["action_revision"] == 2, "the study is finished, so that its result was reported"


def test_what_cannot_be_redone(copied: Path, tmp_path: Path) -> None:
    run = run_of(load_study(write_study(tmp_path)), copied)
    with pytest.raises(InputError, match=r"^--redo recent: .*'recent-half'"):
        redo_actions([run], ["recent"])


def test_an_action_that_no_plan_names_can_be_dropped_and_made_again(copied: Path, tmp_path: Path) -> None:
    """The action that is redone has units of two of the six evaluation documents."""
    study = load_study(write_study(tmp_path, ADDED_ACTION))
    run = replace(run_of(study, copied), limit=DocumentLimit(2))
    stages.prepare(run)
    stages.evaluate(run)
    stages.derive(run)
    store = Store.open(copied)
    made = store.units().num_rows
    assert drop_action(store, "snapkv-100") == 2
    assert store.units().num_rows == made - 2
    with open_views(store) as views:
        assert "snapkv-100" not in views.rows("decomposition")["action"].to_pylist()
        assert "snapkv-100" not in views.rows("actions")["action"].to_pylist()
    assert stages.is_finished(run) is False
    run = replace(run, limit=DocumentLimit(2))
    stages.prepare(run)
    assert stages.evaluate(run) == 2
    assert {row["action_revision"] for row in store.units().to_pylist() if row["action"] == "snapkv-100"} == {2}


@pytest.mark.parametrize(
    ("action", "line"),
    [
        ("recent-half", "action 'recent-half' is in the frozen plan of study 'small'"),
        ("full", "action 'full' is the full-retention control"),
        ("recent-hal", "no action 'recent-hal'; .*'recent-half'"),
    ],
)
def test_what_cannot_be_dropped(finished: Path, action: str, line: str) -> None:
    with pytest.raises((InputError, PlanError), match=line):
        drop_action(Store.open(finished), action)
