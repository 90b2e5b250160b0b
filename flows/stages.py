"""The stages of a study, in their order, as plain functions of its run: each does what is left of it, once."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from flows.analysis.estimation import Runner, in_sequence, replicate_moments
from flows.analysis.stored import analyze_stored
from flows.checks import check_controls, check_equal_bytes
from flows.comparison import check_agrees
from flows.forecast import forecast, stored
from flows.frozen_plan import check_plan_agrees, find_plan
from flows.generation import Work, generate, pending_development, pending_evaluation
from flows.material import record_identities, record_material
from flows.pages import page_of, report_is_current, write_report
from flows.planning.plan import freeze_plan, make_plan
from flows.study_run import StudyRun
from generator.transformer.tokenizer import token_reader
from schema.store.store import Store
from schema.study import FINITE_STATE, POOLED
from sql.catalog import Views, open_views, refresh_catalog
from transforms.pipeline import run_derivation


def prepare(run: StudyRun) -> None:
    """Make the store, and write documents, actions and parameters to it.

    Raises:
        InputError: the store cannot be written, or what makes the units is not known.
        OperationError: no endpoint says what it serves.
        PlanError: the study file disagrees with its frozen plan, or with what the store holds of the study.

    """
    store = Store.create(run.location)
    check_agrees(run)
    plan = find_plan(store, run.study.name, run.study.model.id)
    if plan is not None:
        check_plan_agrees(plan, run.study)
    record_material(store, run.material, None if plan is None else plan.actions)
    record_identities(store, run.material, run.whole_identity)


def develop(run: StudyRun) -> int:
    """Generate what the development documents lack, as far as the run's limit allows; return the number of new units.

    Raises:
        InputError: a model, an endpoint or the store refuses the work.
        OperationError: the work failed.

    """
    return _generate(run, pending_development(run.store, run.material), "development documents")


def derive(run: StudyRun) -> int:
    """Derive what is not derived yet, and refresh the catalogue; return the number of new segments.

    Raises:
        OperationError: segments could not be derived.

    """
    done = run_derivation(run.location).segments
    if done:
        run.progress.say(f"derived {done} new segments")
        refresh_catalog(run.store)
    return done


def plan(run: StudyRun) -> str:
    """Freeze the plan, made from the development documents, unless it is frozen; return its hash.

    Raises:
        PlanError: evaluation events exist though no plan does, or the plan that is there disagrees with the study file.

    """
    study, model = run.study.name, run.study.model.id
    frozen = find_plan(run.store, study, model)
    if frozen is None:
        with open_views(run.store) as views:
            version = views.versions["events"]
            units = views.rows("units", study=study, model=model)
            development = replicate_moments(views, study, model, "development")
            efficiency = branching_efficiency(views, study, model, "development")
        names = [document.doc for document in run.material.of_split("development")]
        units = units.filter(pc.is_in(units["doc"], value_set=pa.array(names)))
        frozen = freeze_plan(run.store, run.material, make_plan(run.material, development, units, efficiency), version)
        run.progress.say(
            f"plan {frozen.sha256[:12]} frozen: K = {frozen.replicates} replicates, "
            f"N = {frozen.documents_per_stratum} documents per stratum; {frozen.content['reason']}"
        )
    return frozen.sha256


def evaluate(run: StudyRun) -> int:
    """Generate what the plan asks of the evaluation documents, as far as the limit allows; return the number of units.

    Raises:
        PlanError: there is no plan, or it disagrees with the study file.
        InputError: a model, an endpoint or the store refuses the work.
        OperationError: the work failed.

    """
    return _generate(run, pending_evaluation(run.store, run.material), "evaluation documents")


def check(run: StudyRun) -> None:
    """Check what must hold before anything is concluded: controls exactly 0, equal bytes at equal retention.

    Raises:
        ControlError: a full-retention control has delta or f other than 0.
        OperationError: two actions keep equally many entries in unequal bytes.

    """
    controls = check_controls(run.store, run.material)
    pairs = check_equal_bytes(run.store, run.material)
    run.progress.say(f"{controls} full-retention controls exactly 0; {pairs} pairs of equal retention hold equal bytes")


def analyze(run: StudyRun, estimate: Runner = in_sequence) -> int:
    """Estimate the evaluation documents unless that is done for the present events; return the number of estimates.

    Args:
        run: the study's run.
        estimate: estimates the parts of an analysis.

    Raises:
        InputError: events are not derived, or there is nothing to estimate.

    """
    return analyze_stored(run.store, run.study.name, run.study.model.id, estimate, run.progress)


def report(run: StudyRun) -> Path:
    """Write the report unless it is there for the present tables; return the path of its page."""
    page = page_of(run)
    if not report_is_current(run.store, page.parent):
        model = run.study.model
        text = None if model.kind == FINITE_STATE else token_reader(model.id, revision=model.revision)
        write_report(run.store, run.study.name, model.id, page.parent, token_text=text, progress=run.progress)
    return page


def is_planned(run: StudyRun) -> bool:
    """Whether the study's plan is frozen."""
    store = stored(run)
    return store is not None and find_plan(store, run.study.name, run.study.model.id) is not None


def is_finished(run: StudyRun) -> bool:
    """Whether nothing of the study is left to do: units, derivation, estimates and report are all there."""
    return forecast(run).finished


def branching_efficiency(views: Views, study: str, model: str, split: str) -> dict[str, float | None]:
    """Return the efficiency in seconds of residual branching by action, pooled; None where it is undefined."""
    rows = views.rows("swrb_efficiency", study=study, model=model, split=split, stratum=POOLED)
    return dict(zip(rows["action"].to_pylist(), rows["efficiency_in_seconds"].to_pylist(), strict=True))


def _generate(run: StudyRun, work: Work, stage: str) -> int:
    return generate(run.store, run.study, run.limit.take(work), run.made_by, stage, run.progress)
