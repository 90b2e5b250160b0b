"""A plan's hash, its agreement with a study, freezing beside another run, and citations of plans and estimates."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fixtures.command import call
from fixtures.small_study import ADDED_ACTION, run_of, write_study
from fixtures.study_files import load_study

from kvdrift.flows.estimate import stored
from kvdrift.flows.estimate.moments import replicate_moments
from kvdrift.flows.estimate.scores import estimated_version
from kvdrift.flows.plan import making as planning
from kvdrift.flows.plan.frozen_plan import FrozenPlan, check_plan_agrees, find_plan, plan_differences
from kvdrift.flows.run import stages
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.log.store import Store
from kvdrift.plan_lines import plan_lines
from kvdrift.schema.errors import PlanError
from kvdrift.schema.frozen_text import frozen_sha256, frozen_text, with_measured
from kvdrift.sql.catalog import open_views
from kvdrift.stats.moments import ReplicateMoments
from kvdrift.transforms.pipeline import run_derivation


@pytest.fixture
def developed(prepared: StudyRun) -> StudyRun:
    """The small study, ready for its plan."""
    stages.develop(prepared)
    stages.derive(prepared)
    return prepared


def test_the_plan_of_another_run_is_adopted(developed: StudyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs look for a plan before either has frozen one; the later run goes on with the earlier run's plan.

    This also holds if the earlier run has evaluated its first documents by then.
    """
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
    evaluation = {document.doc for document in developed.material.of_split("evaluation")}
    monkeypatch.setattr(planning, "generated_documents", lambda *_: evaluation)
    looked.clear()
    assert stages.plan(run_of(developed.study, developed.location)) == first
    assert developed.store.read("plans").num_rows == 1


def test_the_plan_of_another_study_file_is_not(finished: Path, tmp_path: Path) -> None:
    changed = run_of(load_study(write_study(tmp_path, ("draws = 200", "draws = 300"))), finished)
    with pytest.raises(PlanError, match=r"\[plan\] or \[windows\] differ"):
        planning.freeze_plan(changed.store, changed.material, {"other": "content"}, 1)


def frozen(location: Path) -> FrozenPlan:
    plan = find_plan(Store.open(location), "small", "kvdrift/tiny")
    assert plan is not None
    return plan


def test_the_hash_of_a_plan_does_not_depend_on_measured_seconds(finished: Path, tmp_path: Path) -> None:
    run = run_of(load_study(write_study(tmp_path)), finished)
    with open_views(run.store) as views:
        development = replicate_moments(views, "small", "kvdrift/tiny", "development")
        units = views.rows("units", study="small", model="kvdrift/tiny")

    def planned(times: float) -> dict[str, Any]:
        slower = units
        for name in ("prefill_seconds", "decode_seconds"):
            at = slower.column_names.index(name)
            slower = slower.set_column(at, units.schema.field(name), pc.multiply(units[name], pa.scalar(times)))
        return planning.make_plan(run.material, development, slower, {"recent-half": times})

    plans = planned(1.0), planned(3.0)
    assert plans[0] != plans[1]
    assert len({frozen_sha256(frozen_text(plan)) for plan in plans}) == 1


def test_a_plan_that_is_there_is_printed(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the study file asks for beyond the store is said, and waits for a run."""
    before, study = Store.open(finished).versions(), write_study(tmp_path, ("evaluation = 3", "evaluation = 5"))
    code, out, err = call(capsys, "run", study, "--store", finished, "--plan-only")
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("evaluation documents of needle: stored 3, requested 5; ")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "plan of study 'small', model kvdrift/tiny"
    assert lines[1].endswith(f"UTC, SHA-256 {frozen(finished).sha256}")
    assert [line.split()[:2] for line in lines[2:7]] == [
        ["seen", "no"], ["K", "5"], ["N", "3"], ["actions", "recent-half"], ["levels", "98.333%"]
    ]  # fmt: skip
    endpoints = r"gap recent-half − snapkv-half \S+ pp \S+ pp 98.333%"
    assert re.fullmatch(endpoints, next(line for line in lines if line.startswith("gap ")))
    assert sum(line.startswith("mismatch ") for line in lines) == 2
    assert lines[-1].endswith(f": kvdrift run {study} --store {finished}")
    assert Store.open(finished).versions() == before


@pytest.mark.parametrize(
    ("key", "frozen_value", "other"), [("interval", "studentized", "percentile"), ("variance", "plain", "reduced")]
)
def test_a_study_file_that_says_nothing_has_the_plans_interval_and_variance(
    finished: Path, tmp_path: Path, key: str, frozen_value: str, other: str
) -> None:
    plan = frozen(finished)
    assert plan.content[key] == frozen_value
    check_plan_agrees(plan, load_study(write_study(tmp_path)))
    same, unlike = (
        plan_differences(plan, load_study(write_study(tmp_path, ("draws = 200", f'{key} = "{value}"\ndraws = 200'))))
        for value in (frozen_value, other)
    )
    assert same == []
    ((what, before, asked),) = [(one.what, one.frozen, one.requested) for one in unlike if one.replanned]
    assert (what, before, asked) == (f"plan.{key}", frozen_value, other)
    assert planning.decides_the_same(plan.content, plan.content | {"reduction": []})
    assert not planning.decides_the_same(plan.content, plan.content | {key: other})


def test_a_plan_chooses_by_the_reduced_variance_and_says_what_that_saves(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_views(Store.open(finished)) as views:
        development = replicate_moments(views, "small", "kvdrift/tiny", "development")
        units = views.rows("units", study="small", model="kvdrift/tiny")

    def calmer(moments: ReplicateMoments) -> ReplicateMoments:
        """Replicates nearer to the mean of all."""
        means = {name: np.nanmean(values, axis=(0, 2), keepdims=True) for name, values in moments.scalars.items()}
        near = {name: mean + 0.5 * (moments.scalars[name] - mean) for name, mean in means.items()}
        return replace(moments, scalars=near)

    def planned(replicates: str, target: float, variance: str) -> dict[str, Any]:
        asked = f'replicates = {replicates}\ntarget_half_width = {target}\nvariance = "{variance}"'
        run = run_of(load_study(write_study(tmp_path, ("replicates = 5", asked))), finished)
        return with_measured(planning.make_plan(run.material, development, units, {}))

    monkeypatch.setattr(planning, "reduced_replicates", calmer)
    reached = max(row["expected_half_width"] for row in planned("40", 0.5, "plain")["primary_endpoints"])
    auto = '"auto"\nreplicates_between = [2, 40]'
    plans = {variance: planned(auto, 1.01 * reached, variance) for variance in ("plain", "reduced")}
    sizes = plans["plain"]["sizes"]
    assert sizes == plans["reduced"]["sizes"]
    assert sizes["reduced"]["replicates"] < sizes["plain"]["replicates"]
    for variance, plan in plans.items():
        assert {name: plan[name] for name in ("replicates", "documents_per_stratum")} == {
            name: sizes[variance][name] for name in ("replicates", "documents_per_stratum")
        }
        assert [row["variance_ratio"] for row in plan["reduction"]] == pytest.approx([0.25] * 3)
        frozen_plan = FrozenPlan("small", "kvdrift/tiny", "0" * 64, datetime.now(UTC), plan | {"seen": False})
        (line,) = [one for one in plan_lines(frozen_plan) if one.split()[0] == "saves"]
        assert f"{sizes['reduced']['replicates']} replicates instead of {sizes['plain']['replicates']}" in line
        assert ("with variance" in line) == (variance == "plain")


def opening_after(commit: Callable[[], object]) -> Callable[..., Any]:
    """Replace ``open_views`` by a function before whose call another writer commits."""

    def opened(*arguments: Any, **options: Any) -> Any:
        commit()
        return open_views(*arguments, **options)

    return opened


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert estimated_version(run.store, "small", "kvdrift/tiny") == run.store.version("events") > before
    with open_views(run.store) as views:
        planned = {row["action"]: row["prespecified"] for row in views.rows("actions").to_pylist()}
        added = views.rows("estimates", action="snapkv-100")
    assert planned == {"full": True, "recent-half": True, "snapkv-half": True, "snapkv-100": False}
    assert set(added["status"].to_pylist()) == {"exploratory"}
