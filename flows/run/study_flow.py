"""The Prefect flow of a file's studies: development -> plan -> evaluation -> estimates -> report.

Tasks are coarse and wrap plain functions; each task asks the store for its remaining work, so a flow that was killed
anywhere goes on. Each part of an analysis is a task; ``ABREAST`` parts run at once, in threads: numpy releases the
interpreter's lock while it multiplies and sorts, and each process would need its own moments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.flows.orchestration.page import FlowRunPage
from kvdrift.flows.orchestration.retries import retried
from kvdrift.flows.orchestration.server import orchestration
from kvdrift.flows.orchestration.termination import ended_by_sigterm
from kvdrift.flows.pages.reports import report_is_current
from kvdrift.flows.run import stages
from kvdrift.flows.run.comparison import check_agrees
from kvdrift.flows.run.laws_page import compare_laws, laws_are_compared, laws_folder
from kvdrift.flows.run.revisions import begun_revisions, redo_actions
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.flows.run.tasks import as_stage, as_task, estimate_in_tasks
from kvdrift.schema.location import is_local
from kvdrift.schema.locking import run_alone
from kvdrift.schema.study import FIXED, Study

FLOW = "kvdrift study"
ABREAST = max(2, min(os.cpu_count() or 2, 4))  # at most 4, since a part's draws take up to 400 MB


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    location: str  # the store
    pages: list[Path]  # the report of each model; none if the limit stopped the run before its reports
    documents_left: int  # how many documents the limit leaves to generate
    did_something: bool  # False if nothing was left to do


def run_studies(
    runs: Sequence[StudyRun],
    before: Callable[[], None] | None = None,
    redo: Sequence[str] = (),
    *,
    plan_only: bool = False,
    page: FlowRunPage | None = None,
) -> Outcome:
    """Run the studies of one file, one for each model and law, to their reports, or find them finished.

    ``before`` is called before anything is written, unless nothing is left to do. The units of actions in ``redo`` are
    superseded and generated anew. With ``plan_only`` the run stops when the plans are frozen, and the outcome has no
    pages. If the ``page`` on the user's Prefect server is open, the caller is in its flow run: the stages are tasks of
    that flow run, and a stage is retried if a retry may help.
    """
    location = runs[0].location
    growth = _growth(runs, redo)
    planned = plan_only and all(map(stages.is_planned, runs))
    if planned and not redo:
        return Outcome(location, [], 0, did_something=False)
    if not (growth or redo) and _is_finished(runs):
        return Outcome(location, _pages(runs), 0, did_something=False)
    if redo:
        begun_revisions(runs, redo)  # refuses actions that cannot be redone
    if before is not None:
        before()
    if redo:
        redo_actions(runs, redo)
    if planned:
        return Outcome(location, [], 0, did_something=False)
    for run in runs:
        stages.prepare(run, compared=True)  # before the orchestration starts, so that refusals come at once
    page = page or FlowRunPage()
    with run_alone(location, runs[0].progress.say):
        if page.is_open:
            return _through_stages(runs, page, plan_only=plan_only, scheduled=True)
        with orchestration((Path(location) if is_local(location) else Path.home()) / ".prefect") as shown:
            return _run_flow(runs, page if shown else None, plan_only=plan_only)


def _is_finished(runs: Sequence[StudyRun]) -> bool:
    """Tell whether nothing of a file's studies is left to do."""
    return all(map(stages.is_finished, runs)) and all(map(laws_are_compared, _several_laws(runs)))


def _growth(runs: Sequence[StudyRun], redo: Sequence[str]) -> bool:
    """Print what the study files ask for beyond the store's content; return whether they ask for anything."""
    growth = False
    for run in runs:
        for difference in check_agrees(run, redo):
            growth = True
            if not difference.planned:  # growth of the plan is told when the plan is frozen
                run.say(str(difference))
    return growth


def _plan(run: StudyRun) -> bool:
    """Freeze the plan; return whether that was still to be done."""
    frozen = stages.is_planned(run)
    stages.plan(run)
    return not frozen


def _analyze(run: StudyRun) -> int:
    return stages.analyze(run, estimate_in_tasks)


def _report(run: StudyRun, beside: Path | None) -> bool:
    """Write the report; return whether that was still to be done."""
    current = report_is_current(run.store, run.page.parent)
    stages.report(run, beside)
    return not current


def _compare(*runs: StudyRun) -> bool:
    """Write the page that compares several laws; return whether that was still to be done."""
    return compare_laws(runs)


def _take_looks(
    laws: Sequence[StudyRun], evaluate: Any, derive: Any, after: Sequence[Callable[[StudyRun], object]], look: Any
) -> None:
    """Evaluate until all sequential studies stop; other studies evaluate all documents at once."""
    while True:
        evaluate(*laws)
        derive(laws[0])
        for run in laws:
            for stage in after:
                stage(run)
        if laws[0].limit.left_over or laws[0].study.plan.stopping == FIXED:
            return
        more = [look(run) for run in laws]
        if not any(more):
            return


def _run_flow(runs: Sequence[StudyRun], page: FlowRunPage | None, *, plan_only: bool) -> Outcome:
    """Run the stages in a new flow; ``page`` shows the flow on the user's server."""
    from prefect import flow, tags  # noqa: PLC0415
    from prefect.task_runners import ThreadPoolTaskRunner  # noqa: PLC0415

    name, models = runs[0].study.name_in_file, list(dict.fromkeys(run.study.model.id for run in runs))
    threads: Any = ThreadPoolTaskRunner(max_workers=ABREAST)  # Prefect's flows declare another type

    def flow_run_name() -> str:  # Prefect would read a text as a template, and names may contain braces
        return run_name([run.study for run in runs])

    @flow(name=FLOW, flow_run_name=flow_run_name, task_runner=threads, persist_result=False)
    def study_flow(study: str, models: list[str], store: str) -> Outcome:  # noqa: ARG001 - Prefect shows them
        if page is not None:
            page.open(study)
        return _through_stages(runs, page, plan_only=plan_only, scheduled=False)

    with tags("kvdrift", name, *models):
        outcome: Outcome = study_flow(name, models, runs[0].location)
    return outcome


def run_name(studies: Sequence[Study]) -> str:
    """Return the name of a flow run of a file's studies."""
    return f"{studies[0].name_in_file}, {', '.join(dict.fromkeys(study.model.id for study in studies))}"


def _through_stages(runs: Sequence[StudyRun], page: FlowRunPage | None, *, plan_only: bool, scheduled: bool) -> Outcome:
    """Take the studies through their stages, as tasks of the current flow, which SIGTERM ends."""
    with ended_by_sigterm():
        return _in_order(runs, page, plan_only=plan_only, scheduled=scheduled)


def _in_order(runs: Sequence[StudyRun], page: FlowRunPage | None, *, plan_only: bool, scheduled: bool) -> Outcome:
    again = retried() if scheduled else {}
    develop = as_stage(stages.develop, "the development documents have all their units", **again)
    derive = as_stage(stages.derive, "all units are derived", **again)
    score = as_stage(
        stages.score, "all pairs of documents with answers are scored, or their tokenizer is not here", **again
    )
    plan = as_stage(_plan, "the plan is frozen", **again)
    evaluate = as_stage(stages.evaluate, "the evaluation documents have all units that the plan asks for", **again)
    check, look, keep_up = as_task(stages.check), as_task(stages.look, **again), as_task(stages.keep_up, **again)
    analyze = as_stage(_analyze, "the estimates are up to date with the moments", **again)
    report = as_stage(_report, "the page is up to date with the tables", **again)
    compare = as_stage(_compare, "the page is up to date with the tables", **again)
    for laws in _by_model(runs):
        _develop(laws, develop, derive, score, plan_only=plan_only)
        if not laws[0].limit.left_over:
            for run in laws:  # freeze all plans before any evaluation, whose outcomes later plans would have seen
                plan(run)
        if not (laws[0].limit.left_over or plan_only):
            _take_looks(laws, evaluate, derive, (score, check), look)
    store, left = runs[0].location, runs[0].limit.left_over
    if not (left or plan_only):
        # Estimates and reports record the version of all events, so every model's events come first.
        for run in runs:
            analyze(run)
    keep_up(runs[0])
    if left or plan_only:
        return Outcome(store, [], left, did_something=True)
    for run in runs:
        report(run, _page_beside(run, runs))
    for laws in _several_laws(runs):
        compare(*laws)
    return Outcome(store, _shown_pages(runs, page), 0, did_something=True)


def _develop(laws: Sequence[StudyRun], develop: Any, derive: Any, score: Any, *, plan_only: bool) -> None:
    """Generate development documents; derive them now unless one derivation will cover the evaluation documents too."""
    develop(*laws)
    if laws[0].limit.left_over or plan_only or not all(map(stages.is_planned, laws)):
        derive(laws[0])
        for run in laws:
            score(run)


def _by_model(runs: Sequence[StudyRun]) -> list[list[StudyRun]]:
    """Group the runs by model; a model has a run for each law."""
    models = dict.fromkeys(run.study.model.id for run in runs)
    return [[run for run in runs if run.study.model.id == model] for model in models]


def _several_laws(runs: Sequence[StudyRun]) -> list[list[StudyRun]]:
    """Return the groups of runs of each model that has several laws."""
    return [laws for laws in _by_model(runs) if len(laws) > 1]


def _page_beside(run: StudyRun, runs: Sequence[StudyRun]) -> Path | None:
    """Return the page that will compare a run's law with the model's other laws; None if there is only one law."""
    laws = [other for other in runs if other.study.model.id == run.study.model.id]
    return laws_folder(laws) / "index.html" if len(laws) > 1 else None


def _shown_pages(runs: Sequence[StudyRun], page: FlowRunPage | None) -> list[Path]:
    """Return the reports of the studies, after showing their results on the flow run's page."""
    if page is not None:
        for run in runs:
            page.publish(run.store, run.study.name, run.study.model.id, run.page)
    return _pages(runs)


def _pages(runs: Sequence[StudyRun]) -> list[Path]:
    """Return the report of each study, and for each model with several laws the page that compares them."""
    return [*(run.page for run in runs), *(laws_folder(laws) / "index.html" for laws in _several_laws(runs))]
