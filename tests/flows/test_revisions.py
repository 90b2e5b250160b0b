"""Redo and drop actions of a finished study: exact results, resumption after a break, and refusals."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from fixtures.small_study import ADDED_ACTION, finish, run_of, write_study
from fixtures.study_files import load_study

from flows.run import stages
from flows.run.comparison import check_agrees
from flows.run.revisions import drop_action, redo_actions
from flows.run.study_run import DocumentLimit, StudyRun
from log.store import Store
from schema.errors import InputError, PlanError
from sql.catalog import Views, open_views

QUARTER = ('selector = "recent"\nkeep = "1/2"', 'selector = "recent"\nkeep = "1/4"')
VIEWS = ("events", "trajectories", "steps", "moments", "position_moments", "lag_moments", "decomposition", "contrasts")
SECONDS = {"prefill_seconds", "decode_seconds"}


def rows(views: Views, view: str) -> pa.Table:
    found = views.rows(view)
    left_out = {"action_revision", "unit", "events_version", "plan_sha256", "status"} | SECONDS
    return found.select([name for name in found.column_names if name not in left_out])


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which only the changed action ever was."""
    folder = tmp_path_factory.mktemp("fresh")
    run = run_of(load_study(write_study(folder, QUARTER)), folder / "store")
    finish(run)
    return Path(run.location)


def test_a_redone_action_is_that_of_a_fresh_store_also_after_a_break(copied: Path, fresh: Path, tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, QUARTER))
    run = StudyRun(study, str(copied), run_of(study, copied).made_by, limit=DocumentLimit(1))
    before = Store.open(copied).read("events").num_rows
    redo_actions([run], ["recent-half"])
    check_agrees(run)
    with open_views(run.store) as views:
        assert set(views.rows("trajectories")["action"].to_pylist()) == {"full", "snapkv-half"}, (
            "nothing stale is shown"
        )
    stages.prepare(run)
    assert stages.develop(run) == 1, "of 4 documents; here the run breaks off"
    again = run_of(study, copied)
    redo_actions([again], ["recent-half"])
    finish(again)
    store = Store.open(copied)
    revisions = {row["action_revision"] for row in store.units().to_pylist() if row["action"] == "recent-half"}
    assert revisions == {1}, "the revision that was begun is gone on with"
    assert store.read("events").num_rows == before * 3 // 2 - 10 * 2 * 12 // 2, "and the old events stay"
    with open_views(store) as ours, open_views(Store.open(fresh)) as theirs:
        for view in VIEWS:
            assert rows(ours, view).equals(rows(theirs, view)), view
        assert rows(ours, "estimates").num_rows > 0
        assert rows(ours, "estimates").equals(rows(theirs, "estimates"))
    assert stages.check(again) is None


def test_a_whole_revision_is_redone_when_asked_again(copied: Path, tmp_path: Path) -> None:
    run = run_of(load_study(write_study(tmp_path)), copied)
    redo_actions([run], ["recent-half", "recent-half"])
    assert run.store.read("actions")["action_revision"].to_pylist().count(1) == 1


def test_what_cannot_be_redone(copied: Path, tmp_path: Path) -> None:
    run = run_of(load_study(write_study(tmp_path)), copied)
    with pytest.raises(InputError, match=r"--redo recent: no such action in the study file; .*'recent-half'"):
        redo_actions([run], ["recent"])


def test_an_action_that_no_plan_names_can_be_dropped_and_made_again(copied: Path, tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, ADDED_ACTION))
    run = run_of(study, copied)
    stages.prepare(run)
    stages.evaluate(run)
    stages.derive(run)
    store = Store.open(copied)
    made = store.units().num_rows
    assert drop_action(store, "snapkv-100") == 6
    assert store.units().num_rows == made - 6
    with open_views(store) as views:
        assert "snapkv-100" not in views.rows("decomposition")["action"].to_pylist()
        assert "snapkv-100" not in views.rows("actions")["action"].to_pylist()
    assert stages.is_finished(run) is False
    stages.prepare(run)
    assert stages.evaluate(run) == 6
    assert {row["action_revision"] for row in store.units().to_pylist() if row["action"] == "snapkv-100"} == {2}


@pytest.mark.parametrize(
    ("action", "line"),
    [
        (
            "recent-half",
            "action 'recent-half' is in the frozen plan of study 'small', and what was planned is reported",
        ),
        ("full", "action 'full' is the full-retention control, which every study has"),
        ("recent-hal", "no action 'recent-hal'; did you mean 'recent-half'"),
    ],
)
def test_what_cannot_be_dropped(finished: Path, action: str, line: str) -> None:
    with pytest.raises((InputError, PlanError), match=line):
        drop_action(Store.open(finished), action)
