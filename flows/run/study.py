"""The run of a study file: development -> plan -> evaluation -> estimates -> report.

Each stage asks the store for its remaining work, so a run that was killed anywhere goes on. On a Prefect server of the
user's, the stages are tasks of a flow.

Events come from this process, from a service, or from the workers of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvdrift.flows.cluster.address import ClusterAddress, default_location
from kvdrift.flows.generate.local import LocalGenerator, SideBySideGenerator
from kvdrift.flows.generate.storing import GenerateInto, Identify, storing
from kvdrift.flows.material import SharedMaterial
from kvdrift.flows.orchestration.flow_run import FlowRunPage, as_stage, retried
from kvdrift.flows.orchestration.server import named_server
from kvdrift.flows.pages.reports import present_inputs, record_inputs, report_is_current, samplings_report_folder
from kvdrift.flows.run import stages
from kvdrift.flows.run.checks import check_study, remarks
from kvdrift.flows.run.comparison import begun_revisions, check_agrees, redo_actions
from kvdrift.flows.run.study_run import DocumentLimit, StudyRun, check_gpu_here, forecast, gpus_of_units
from kvdrift.generator.identity import GpuKinds
from kvdrift.log.last_times import record_run
from kvdrift.schema.errors import InputError
from kvdrift.schema.location import absolute
from kvdrift.schema.locking import run_alone
from kvdrift.schema.own_process import OwnProcesses
from kvdrift.schema.progress import Progress
from kvdrift.schema.study import FIXED, Study
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.transforms.segments import DerivationReport

if TYPE_CHECKING:
    from kvdrift.generator.service.client import ServiceAddress

FLOW = "kvdrift study"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    location: str  # the store
    pages: list[Path]  # the report of each model; none if the limit stopped the run before its reports
    documents_left: int  # how many documents the limit leaves to generate
    did_something: bool  # False if nothing was left to do


def run_file(
    studies: Sequence[Study],
    store: str | Path | None,
    address: ServiceAddress | None,
    progress: Progress,
    limit: int | None = None,
    redo: Sequence[str] = (),
    *,
    plan_only: bool = False,
    replan: bool = False,
    cluster: ClusterAddress | None = None,
    compacts: bool = True,
) -> Outcome:
    """Run the studies of one file, one for each model and temperature.

    If neither the ``address`` of a service nor a ``cluster`` is given, this process generates. The run stops after
    ``limit`` documents, and with ``plan_only`` after freezing the plans. The units of the actions ``redo`` are
    superseded first, and with ``replan`` the plans are made anew. With ``compacts`` the run merges small files at its
    end. If ``progress`` is the open page of a flow run, the stages are tasks of that run.
    """
    location = absolute(store if store is not None else default_location(studies))
    shared, gathered = DocumentLimit(limit), SharedMaterial()
    page = progress if isinstance(progress, FlowRunPage) else FlowRunPage(progress)
    with generators(studies, address, cluster, page) as by:
        runs = [
            StudyRun(
                study, location, by.made_by, page, shared, by.identify, by.derived_by, by.sides,
                replan=replan, gathered=gathered, compacts=compacts,
            )
            for study in studies
        ]  # fmt: skip
        for run in runs:
            check_study(run, served=by.served)
        for line in remarks(runs):
            page.say(line)
        outcome = run_studies(runs, lambda: by.get_ready(runs, redo), redo, plan_only=plan_only, page=page)
    for study in studies:
        record_run(location, study.name, study.model.id)
    return outcome


def run_studies(
    runs: Sequence[StudyRun],
    before: Callable[[], None] | None = None,
    redo: Sequence[str] = (),
    *,
    plan_only: bool = False,
    page: FlowRunPage | None = None,
) -> Outcome:
    """Run the studies of one file, one for each model and temperature, to their reports, or find them finished.

    ``before`` is called before anything is written, unless nothing is left to do. The units of actions in ``redo`` are
    superseded and generated anew. With ``plan_only`` the run stops when the plans are frozen, and the outcome has no
    pages. If the ``page`` on the user's Prefect server is open, the caller is in its flow run: the stages are tasks of
    that flow run, and a stage is retried if a retry may help.
    """
    location, page = runs[0].location, page or FlowRunPage()
    growth = _growth(runs, redo)
    planned = plan_only and all(map(stages.is_planned, runs))
    if planned and not redo:
        return Outcome(location, [], 0, did_something=False)
    if not (growth or redo) and _is_finished(runs):
        return Outcome(location, _pages(runs), 0, did_something=False)
    if redo:
        begun_revisions(runs, redo)  # refuses actions that cannot be redone
    if not page.is_open:
        with named_server():  # asked first, since the documents and actions in a store bind later study files
            pass
    if before is not None:
        before()
    if redo:
        redo_actions(runs, redo)
    if planned:
        return Outcome(location, [], 0, did_something=False)
    for run in runs:
        stages.prepare(run, compared=True)  # before any flow starts, so that refusals come at once
    with run_alone(location, runs[0].progress.say):
        return _run(runs, page, plan_only=plan_only)


def _growth(runs: Sequence[StudyRun], redo: Sequence[str]) -> bool:
    """Print what the study files request beyond the store's content; return whether they request anything more."""
    growth = False
    for run in runs:
        for difference in check_agrees(run, redo):
            growth = True
            if not difference.planned:  # growth of the plan is printed when the plan is frozen
                run.say(str(difference))
    return growth


def _is_finished(runs: Sequence[StudyRun]) -> bool:
    compared = (
        report_is_current(runs_of_model[0].store, _samplings_page(runs_of_model).parent)
        for runs_of_model in _several_samplings(runs)
    )
    return all(map(stages.is_finished, runs)) and all(compared)


def _run(runs: Sequence[StudyRun], page: FlowRunPage, *, plan_only: bool) -> Outcome:
    """Take prepared studies through their stages: in the current flow run, in a new one, or without a server."""
    if page.is_open:
        return _through_stages(runs, page, partial(as_stage, **retried()), plan_only=plan_only)
    with named_server() as named:
        if named:
            return _run_flow(runs, page, plan_only=plan_only)
    return _through_stages(runs, page, lambda stage, *_: stage, plan_only=plan_only)


def _run_flow(runs: Sequence[StudyRun], page: FlowRunPage, *, plan_only: bool) -> Outcome:
    """Run the stages in a new flow; ``page`` shows the flow on the user's server."""
    from prefect import flow, tags  # noqa: PLC0415

    name, models = runs[0].study.name_in_file, list(dict.fromkeys(run.study.model.id for run in runs))

    def flow_run_name() -> str:  # Prefect would read a text as a template, and names may contain braces
        return run_name([run.study for run in runs])

    @flow(name=FLOW, flow_run_name=flow_run_name, persist_result=False)
    def study_flow(study: str, models: list[str], store: str) -> Outcome:  # noqa: ARG001 - Prefect shows them
        page.open(study)
        return _through_stages(runs, page, as_stage, plan_only=plan_only)

    with tags("kvdrift", name, *models):
        outcome: Outcome = study_flow(name, models, runs[0].location)
    return outcome


def run_name(studies: Sequence[Study]) -> str:
    """Return the name of a flow run of a file's studies."""
    return f"{studies[0].name_in_file}, {', '.join(dict.fromkeys(study.model.id for study in studies))}"


def _through_stages(
    runs: Sequence[StudyRun], page: FlowRunPage, staged: Callable[..., Any], *, plan_only: bool
) -> Outcome:
    """Take the studies through their stages in order; ``staged`` is as in ``_tasks``."""
    tasks, limit = _tasks(staged), runs[0].limit
    for runs_of_model in _by_model(runs):
        develop(runs_of_model, tasks, plan_only=plan_only)
        if not (limit.left_over or plan_only):
            _evaluate(runs_of_model, tasks)
    stopped = limit.left_over or plan_only
    for run in [] if stopped else runs:  # estimates and reports record the version of all models' events
        tasks.analyze(run)
    tasks.keep_up(runs[0])
    if stopped:
        return Outcome(runs[0].location, [], limit.left_over, did_something=True)
    for run in runs:
        tasks.report(run, _page_beside(run, runs))
    for runs_of_model in _several_samplings(runs):
        tasks.compare(*runs_of_model)
    for run in runs:
        page.publish(run.store, run.study.name, run.study.model.id, run.page)
    return Outcome(runs[0].location, _pages(runs), 0, did_something=True)


def _tasks(staged: Callable[..., Any]) -> SimpleNamespace:
    """Return the stages as ``staged`` returns each, called with the stage and the reason why it may have no work."""
    current = "the page is up to date with the tables"
    return SimpleNamespace(
        develop=staged(stages.develop, "the development documents have all their units"),
        derive=staged(stages.derive, "all units are derived"),
        score=staged(stages.score, "all pairs of documents with answers are scored, or the tokenizer is not here"),
        plan=staged(_plan, "the plan is frozen"),
        evaluate=staged(stages.evaluate, "the evaluation documents have all units of the plan"),
        check=staged(stages.check),
        look=staged(stages.look),
        keep_up=staged(stages.keep_up),
        analyze=staged(stages.analyze, "the estimates are up to date with the moments"),
        report=staged(_report, current),
        compare=staged(_compare, current),
    )


def develop(runs: Sequence[StudyRun], tasks: SimpleNamespace, *, plan_only: bool) -> None:
    """Generate the units of development documents, and freeze the plans of one model's runs, one for each temperature.

    All plans are frozen before any run evaluates, so that no plan depends on outcomes. If the limit stops the runs, no
    plan is frozen. With ``plan_only`` the development units are derived even if all plans are frozen already.
    """
    limit = runs[0].limit
    tasks.develop(*runs)
    if limit.left_over or plan_only or not all(map(stages.is_planned, runs)):
        _derive(runs, tasks)  # else one derivation covers the evaluation documents too
    for run in runs if not limit.left_over else []:
        tasks.plan(run)


def _evaluate(runs: Sequence[StudyRun], tasks: SimpleNamespace) -> None:
    """Evaluate until all sequential studies stop; studies of fixed size evaluate all documents in one round."""
    more = True
    while more:
        tasks.evaluate(*runs)
        _derive(runs, tasks)
        for run in runs:
            tasks.check(run)
        if runs[0].limit.left_over or runs[0].study.plan.stopping == FIXED:
            return
        taken = [tasks.look(run) for run in runs]
        more = any(taken)


def _derive(runs: Sequence[StudyRun], tasks: SimpleNamespace) -> None:
    """Derive the units of one model's runs, and score their answers."""
    tasks.derive(runs[0])
    for run in runs:
        tasks.score(run)


def _plan(run: StudyRun) -> bool:
    """Freeze the plan; return whether that was still to be done."""
    frozen = stages.is_planned(run)
    stages.plan(run)
    return not frozen


def _report(run: StudyRun, beside: Path | None) -> bool:
    """Write the report; return whether that was still to be done."""
    current = report_is_current(run.store, run.page.parent)
    stages.report(run, beside)
    return not current


def _compare(*runs: StudyRun) -> bool:
    """Write the page that compares one model's temperatures, unless it is current; return whether it was written."""
    store, folder = runs[0].store, _samplings_page(runs).parent
    if report_is_current(store, folder):
        return False
    from kvdrift.flows.pages.side_by_side import write_comparison  # noqa: PLC0415 - a current page needs no libraries

    inputs, names = present_inputs(store), [run.study.name for run in runs]
    write_comparison([store.location], folder, names, runs[0].progress, model=runs[0].study.model.id)
    record_inputs(folder, inputs, {})
    return True


def _by_model(runs: Sequence[StudyRun]) -> list[list[StudyRun]]:
    models = dict.fromkeys(run.study.model.id for run in runs)
    return [[run for run in runs if run.study.model.id == model] for model in models]


def _several_samplings(runs: Sequence[StudyRun]) -> list[list[StudyRun]]:
    return [model_runs for model_runs in _by_model(runs) if len(model_runs) > 1]


def _samplings_page(runs: Sequence[StudyRun]) -> Path:
    """Return the path of the page that compares one model's temperatures, beside the pages of its studies."""
    study = runs[0].study
    model = study.model.id if study.several_models else None
    return samplings_report_folder(runs[0].store, study.name_in_file, model) / "index.html"


def _page_beside(run: StudyRun, runs: Sequence[StudyRun]) -> Path | None:
    """Return the path of the page that compares the temperatures of the run's model; None if it has only one."""
    return next((_samplings_page(model_runs) for model_runs in _several_samplings(runs) if run in model_runs), None)


def _pages(runs: Sequence[StudyRun]) -> list[Path]:
    return [*(run.page for run in runs), *map(_samplings_page, _several_samplings(runs))]


@dataclass(frozen=True)
class Generators:
    """The functions and processes that do the work of a run."""

    made_by: GenerateInto  # Generates events and stores them
    identify: Identify  # Returns the identity of units
    # Called with all runs and the names of redone actions before anything is written, if there is work
    get_ready: Callable[[Sequence[StudyRun], Collection[str]], None]
    # Derives the underived units of the store at a location
    derived_by: Callable[[str], DerivationReport] = run_derivation
    sides: Callable[[], OwnProcesses | None] = lambda: None  # Returns the side processes, if there are any
    served: bool = True  # Whether another machine may generate, so that this machine's devices do not matter


@contextmanager
def generators(
    studies: Sequence[Study],
    address: ServiceAddress | None,
    cluster: ClusterAddress | None,
    progress: Progress,
) -> Iterator[Generators]:
    """Give the generators of a file's studies: a service, a cluster, or by default this process."""
    engine = next((study.model.engine for study in studies if study.model.engine is not None), None)
    if engine is not None and (address or cluster) is not None:
        raise InputError(
            f"model.engine = '{engine}': decodes in this process; run it without --endpoint, --cluster and --gpus"
        )
    named = next((name for study in studies for name in study.own_weights), None)
    if address is not None and named is not None:
        raise InputError(
            f"action '{named}': has other weights, but a service has the weights of one model; "
            "run it without --endpoint"
        )
    if address is not None:
        from kvdrift.generator.service.client import RemoteGenerator  # noqa: PLC0415 - only if a service generates

        remote = RemoteGenerator(address, studies, progress.say)

        def check_endpoint(runs: Sequence[StudyRun], redo: Collection[str]) -> None:
            remote.check(GpuKinds.together(gpus_of_units(run, redo) for run in runs))

        yield Generators(storing(remote.generate), remote.identify, check_endpoint)
    elif cluster is not None:
        from kvdrift.flows.cluster.connection import Cluster, derive_on  # noqa: PLC0415 - Dask may not be installed
        from kvdrift.flows.cluster.generator import ClusterGenerator  # noqa: PLC0415 - as above

        with Cluster(cluster, progress.say) as connection:
            there = ClusterGenerator(connection)

            def check_workers(runs: Sequence[StudyRun], redo: Collection[str]) -> None:
                there.check([(run.study, gpus_of_units(run, redo)) for run in runs])

            yield Generators(there, there.identify, check_workers, partial(derive_on, connection))
    else:
        with closing(SideBySideGenerator(local := LocalGenerator(progress.say))) as beside:

            def get_ready(runs: Sequence[StudyRun], redo: Collection[str]) -> None:
                for run in runs:
                    check_gpu_here(run, redo)
                first = [run for run in runs if run.study.model == runs[0].study.model]
                splits = [split for run in first for split in forecast(run, redo).splits]
                beside.get_ready(runs[0].study, [item for split in splits for item in split.work])

            yield Generators(storing(beside), local.identify, get_ready, sides=lambda: beside.sides, served=False)
