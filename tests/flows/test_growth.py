"""Growth of a finished study's plan, and new plans, exact and marked seen if made after outcomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.heard import Heard
from fixtures.refusals import refused
from fixtures.small_study import changed_run, finish
from fixtures.table_systems import PLANNED

from kvdrift.commands.status import status_lines
from kvdrift.dry_run.description import describe_studies
from kvdrift.flows.estimate.scores import estimates_are_current
from kvdrift.flows.estimate.stored import analyze_stored
from kvdrift.flows.plan.frozen_plan import FrozenPlan, find_plan
from kvdrift.flows.plan.stored_documents import seen_actions
from kvdrift.flows.run import stages
from kvdrift.flows.run.comparison import check_agrees
from kvdrift.flows.run.study_run import DocumentLimit, StudyRun
from kvdrift.plan_lines import plan_lines
from kvdrift.schema.errors import PlanError
from kvdrift.sql.catalog import open_views
from kvdrift.verification.whole_store import verify

K = ("replicates = 3\n", "replicates = 5\n")
N = ("documents = 3\n", "documents = 4\n")
MORE = ("evaluation = 3", "evaluation = 5")
AUTO = ("documents = 3\n", 'documents = "auto"\ndocuments_at_least = 2\ntarget_half_width = 0.0001\n')


def study_run(folder: Path, store: str, *changes: tuple[str, str], replan: bool = False) -> StudyRun:
    return replace(changed_run(folder, store, PLANNED, *changes), replan=replan)


def said(run: StudyRun) -> list[str]:
    assert isinstance(run.progress, Heard)
    return run.progress.lines


def plan_of(run: StudyRun) -> FrozenPlan:
    plan = find_plan(run.store, "laws", "tables")
    assert plan is not None
    return plan


def statuses(run: StudyRun) -> set[tuple[str, str]]:
    """Status and plan of the primary estimates and of the calibration, as the views show them."""
    with open_views(run.store) as views:
        rows = views.rows("estimates", family="primary").to_pylist() + views.rows("calibration").to_pylist()
    return {(row["status"], row["plan_sha256"]) for row in rows}


def faults(run: StudyRun, last: str = "calibration") -> list[str]:
    """Return the faults that ``verify`` finds up to its check of this subject; checks of views come later."""
    found = []
    for check in verify(run.store):
        found += map(str, check.faults)
        if check.subject == last:
            break
    return found


@pytest.mark.slow
def test_a_grown_study_is_marked_seen(laws: Path) -> None:
    """More replicates and documents; the run breaks off after the plan, and again after the first document.

    ``test_edits.py`` compares such a store with one made at once.
    """
    first = plan_of(study_run(laws, "store"))
    run = study_run(laws, "store", K, N, MORE)
    assert [str(one) for one in check_agrees(run)] == [
        "evaluation documents of all: stored 3, requested 5",
        "plan.replicates: frozen 3, requested 5",
        "plan.documents: frozen 3, requested 4",
    ]
    assert not stages.is_planned(run)
    lines = [line for line in describe_studies([run.study], run.location) if not line.startswith("plan.draws")]
    assert lines[1].endswith("; it grows to K = 5, N = 4")
    assert lines[3].startswith("  evaluation: 4 documents, 9 units besides 9 ")
    stages.prepare(run)
    stages.plan(run)
    plan = plan_of(run)
    grown = "plan.replicates = 5 (was 3), plan.documents = 4 (was 3)"
    assert said(run)[0].startswith(f"plan {plan.sha256[:12]} frozen, revision 1, {grown}: ")
    assert (plan.revision, plan.seen, plan.evaluated) == (1, True, 3)
    assert any(line.startswith("  seen     yes: ") for line in plan_lines(plan))
    rows = {row["plan_revision"]: row for row in run.store.read("plans").to_pylist()}
    assert (rows[0]["plan_sha256"], json.loads(rows[0]["plan"])) == (first.sha256, first.content), "as it was written"
    assert not estimates_are_current(run.store, "laws", "tables")
    assert any(line.startswith("  estimates: none ") for line in status_lines(run.store))

    again = replace(study_run(laws, "store", K, N, MORE), limit=DocumentLimit(1))
    assert stages.is_planned(again)
    stages.prepare(again)
    assert stages.evaluate(again) > 0
    assert again.limit.left_over == 3
    again = study_run(laws, "store", K, N, MORE)
    finish(again)
    assert said(again)[0].startswith("derived "), "no further revision is made"
    assert statuses(again) == {("seen", plan.sha256)}
    assert faults(again, "views") == []
    assert any(f"{plan.sha256[:12]}, revision 1, " in line for line in status_lines(again.store))
    with open_views(again.store) as views:
        assert views.rows("superseded_plans")["plan_sha256"].to_pylist() == [first.sha256]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("replicates = 3\n", "replicates = 2\n"), "plan.replicates: frozen 3, requested 2"),
        (("replicates = 3\n", 'replicates = "auto"\n'), "plan.replicates: frozen 3, requested auto"),
        (("draws = 100\n", "draws = 100\nalpha = 0.1\n"), "plan.alpha: frozen 0.05, requested 0.1"),
        (('["mismatch", "gap"]', '["gap"]'), "plan.primary: frozen ['mismatch', 'gap'], requested ['gap']"),
    ],
)  # fmt: skip
@pytest.mark.by_default("plan.replicates: frozen 3, requested 2")
def test_another_plan_is_refused_with_the_command_that_accepts_it(
    laws: Path, change: tuple[str, str], line: str
) -> None:
    run = study_run(laws, "store", change)
    before = run.store.versions()
    told = refused(check_agrees, run, error=PlanError)
    assert f": {line}; " in told
    assert "kvdrift run STUDY.toml --replan" in told
    refused(stages.prepare, run, error=PlanError)
    assert run.store.versions() == before
    assert check_agrees(replace(run, replan=True)) == []


def test_windows_cannot_be_planned_anew(laws: Path) -> None:
    run = study_run(laws, "store", ("[plan]", "[windows]\nagreement_run = 2\n\n[plan]"), replan=True)
    told = refused(check_agrees, run, error=PlanError)
    assert "windows.agreement_run: frozen 16, requested 2; " in told
    assert "--replan" not in told


@pytest.mark.slow
def test_a_study_planned_anew_is_estimated_anew_from_the_same_events(laws: Path) -> None:
    """Another baseline and level, fewer replicates than there are, and an action that was explored."""
    changes = [('baseline = "one"', 'baseline = "two"'), ("draws = 100\n", "draws = 100\nalpha = 0.1\n")]
    run = study_run(laws, "store", *changes, ("replicates = 3\n", "replicates = 2\n"), replan=True)
    first, events = plan_of(run), run.store.version("events")
    finish(run)
    plan = plan_of(run)
    assert (plan.revision, plan.seen, plan.replicates, plan.documents_per_stratum) == (1, True, 3, 3)
    assert plan.content["reason"].endswith(" K = 3 and N = 3 already")
    assert run.store.version("events") == events
    assert statuses(run) == {("seen", plan.sha256)}
    with open_views(run.store) as views:
        assert set(views.rows("calibration")["baseline"].to_pylist()) == {"two"}
        assert set(views.rows("estimates", family="primary")["level"].to_pylist()) == {1 - 0.1 / 3}
        assert {row["value"] for row in views.rows("plan", key="baseline").to_pylist()} == {"two"}
    results = run.store.read("results")
    assert set(results["plan_sha256"].to_pylist()) == {first.sha256, plan.sha256}
    assert set(results["events_version"].to_pylist()) == {events}, "two plans at the same events"
    assert faults(run) == []
    assert check_agrees(replace(run, replan=False)) == [], "the study file has the plan now"
    stages.plan(run)
    assert said(run)[-1].startswith(f"plan {plan.sha256[:12]} is unchanged: ")
    assert analyze_stored(run.store, "laws", "tables") == 0


@pytest.mark.slow
def test_a_plan_made_anew_before_the_evaluation_is_not_seen(laws: Path) -> None:
    for replan, alpha in ((False, 0.05), (True, 0.1)):
        run = study_run(laws, "early", ("draws = 100\n", f"draws = 100\nalpha = {alpha}\n"), replan=replan)
        stages.prepare(run)
        stages.develop(run)
        stages.derive(run)
        stages.plan(run)
    plan = plan_of(run)
    assert (plan.revision, plan.seen, plan.content["alpha"]) == (1, False, 0.1)
    assert seen_actions(run.store, plan) == ()
    assert stages.evaluate(run) == 9
    assert faults(run) == []


@pytest.mark.slow
def test_more_documents_alone_keep_the_plan_and_the_run_says_what_takes_them(laws: Path) -> None:
    note = "; the plan keeps N = 3, a larger plan.documents takes more"
    assert [str(one) for one in check_agrees(study_run(laws, "store", MORE))] == [
        f"evaluation documents of all: stored 3, requested 5{note}"
    ]
    chosen = study_run(laws, "auto", AUTO)
    for stage in (stages.prepare, stages.develop, stages.derive, stages.plan, stages.evaluate):
        stage(chosen)
    assert plan_of(chosen).documents_per_stratum == 3
    run = study_run(laws, "auto", AUTO, MORE)
    note = "; the plan keeps N = 3, kvdrift run STUDY.toml --replan plans anew"
    assert [str(one) for one in check_agrees(run)] == [f"evaluation documents of all: stored 3, requested 5{note}"]
    stages.prepare(run)
    assert stages.plan(run) == plan_of(chosen).sha256
    assert stages.evaluate(run) == 0
    assert check_agrees(run) == []
    again = study_run(laws, "auto", AUTO, MORE, replan=True)
    told = describe_studies([run.study], run.location, replan=True)
    assert any(line.startswith("  evaluation: at most 5 documents, 6 units besides 9 ") for line in told)
    stages.plan(again)
    assert plan_of(again).documents_per_stratum == 5
    assert stages.evaluate(again) == 2 * 3
    number = study_run(laws, "auto", ("documents = 3\n", "documents = 5\n"), MORE)
    assert "plan.documents: frozen auto (5), requested 5" in refused(check_agrees, number, error=PlanError)
