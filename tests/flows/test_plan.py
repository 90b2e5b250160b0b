"""Freezing a plan beside another run of the study, and what plans and estimates cite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.small_study import ADDED_ACTION, run_of, write_study
from fixtures.study_files import load_study

from flows import plan as planning
from flows import stages
from flows.analysis import stored
from flows.frozen_plan import find_plan
from flows.study_run import StudyRun
from schema.errors import PlanError
from sql.catalog import open_views
from transforms.pipeline import run_derivation


@pytest.fixture
def developed(prepared: StudyRun) -> StudyRun:
    """The small study, ready for its plan."""
    stages.develop(prepared)
    stages.derive(prepared)
    return prepared


def test_the_plan_of_another_run_is_adopted(developed: StudyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs look for a plan before either has frozen one; the later one goes on with the earlier one's."""
    first = stages.plan(developed)
    looked: list[None] = []

    def find_late(*arguments: Any) -> Any:
        if len(looked) < 2:  # what the stage and freeze_plan saw before the other run froze its plan
            looked.append(None)
            return None
        return find_plan(*arguments)

    monkeypatch.setattr(stages, "find_plan", find_late)
    monkeypatch.setattr(planning, "find_plan", find_late)
    assert stages.plan(run_of(developed.study, developed.location)) == first
    assert len(looked) == 2
    assert developed.store.read("plans").num_rows == 1


def test_the_plan_of_another_study_file_is_not(developed: StudyRun, tmp_path: Path) -> None:
    stages.plan(developed)
    changed = run_of(load_study(write_study(tmp_path, ("draws = 200", "draws = 300"))), developed.location)
    with pytest.raises(PlanError, match=r"\[plan\] or \[windows\] differ"):
        planning.freeze_plan(changed.store, changed.material, {"other": "content"}, 1)


def opening_after(commit: Callable[[], object]) -> Callable[..., Any]:
    """``open_views`` where another writer commits just before the views are opened."""

    def opened(*arguments: Any, **options: Any) -> Any:
        commit()
        return open_views(*arguments, **options)

    return opened


def test_plans_cite_the_version_that_their_views_show(developed: StudyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    other = run_of(developed.study.model_copy(update={"study": developed.study.study.model_copy(update={"name": "other"})}), developed.location)  # fmt: skip

    def commit() -> None:
        stages.prepare(other)
        stages.develop(other)
        stages.derive(other)

    before = developed.store.version("events")
    monkeypatch.setattr(stages, "open_views", opening_after(commit))
    stages.plan(developed)
    (row,) = developed.store.read("plans").to_pylist()
    assert row["events_version"] == developed.store.version("events") > before


def test_estimates_cite_the_version_that_their_views_show(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(load_study(write_study(tmp_path, ADDED_ACTION)), copied)
    stages.prepare(run)
    stages.develop(run)
    run_derivation(run.location)

    def commit() -> None:
        stages.evaluate(run)
        run_derivation(run.location)

    before = run.store.version("events")
    monkeypatch.setattr(stored, "open_views", opening_after(commit))
    assert stages.analyze(run) > 0
    assert stored.estimated_version(run.store, "small", "kvdrift/tiny") == run.store.version("events") > before
    actions = set(run.store.read("results", columns=["action"])["action"].to_pylist())
    assert "snapkv-100" in actions
