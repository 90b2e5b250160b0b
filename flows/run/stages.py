"""The stages of a study, in their order, as plain functions of its run; each stage does only its remaining work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.estimate.moments import replicate_answers, replicate_moments
from kvdrift.flows.estimate.scores import record_tokens, score_stored
from kvdrift.flows.estimate.stored import analyze_stored, take_interim_look
from kvdrift.flows.generate.storing import generate, record_identities, record_material, record_prompts
from kvdrift.flows.pages.reports import report_is_current, write_report
from kvdrift.flows.plan.frozen_plan import (
    FrozenPlan,
    InterimLooksTaken,
    find_plan,
    grown_plan,
    interim_look_line,
    plan_differences,
    require_plan,
)
from kvdrift.flows.plan.making import decides_the_same, evaluated_size, freeze_plan, make_plan
from kvdrift.flows.run.checks import check_controls, check_equal_bytes, floor_line
from kvdrift.flows.run.comparison import check_agrees
from kvdrift.flows.run.study_run import StudyRun, forecast, of_all_laws, pending_development, pending_of_plan
from kvdrift.generator.engines.registry import tokenizer_location
from kvdrift.generator.generation import Work
from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.log.checked_files import WEEK
from kvdrift.log.store import Store
from kvdrift.schema.frozen_text import with_measured
from kvdrift.schema.study import FINITE_STATE, POOLED, Study
from kvdrift.sql.catalog import MOMENT_VIEWS, open_views
from kvdrift.sql.catalog_file import refresh_catalog
from kvdrift.stats.ends import STUDENTIZED
from kvdrift.stats.reduction import saving


def prepare(run: StudyRun, *, compared: bool = False) -> None:
    """Make the store, and write documents, actions and parameters to it.

    ``compared`` means that the study file has just been compared with the store.
    """
    store = Store.create(run.location)
    if not compared:
        check_agrees(run)
    plan = find_plan(store, run.study.name, run.study.model.id)
    record_material(store, run.material, None if plan is None or run.replan else plan.actions)
    record_identities(store, run.material, run.whole_identity)
    if run.study.study.store_prompts and run.study.model.kind != FINITE_STATE:
        record_prompts(store, run.material)


def develop(*runs: StudyRun) -> int:
    """Generate the missing units of development documents, within the runs' limit; return the number of new units.

    The runs are those of one model, one for each temperature.
    """
    return _generate(runs, [pending_development(run.store, run.material) for run in runs], "development documents")


def derive(run: StudyRun) -> int:
    """Derive the underived units; return their number."""
    done = run.derived_by(run.location).units
    if done:
        run.progress.say(f"derived {done} new units")
    return done


def score(run: StudyRun) -> int:
    """Score the unscored pairs of documents with answers; return their number.

    The texts of the model's tokens are recorded too. If the tokenizer cannot be loaded, one line reports it for the
    scores, and another one for the texts.
    """
    model = run.study.model
    if model.kind == FINITE_STATE:
        return 0
    store, study, place = run.store, run.study.name, tokenizer_location(model)
    record_tokens(store, study, model.id, revision=model.revision, location=place, progress=run.own_progress)
    done = score_stored(store, study, model.id, revision=model.revision, location=place, progress=run.own_progress)
    if done:
        run.say(f"scored {done} pairs against their documents' answers")
    return done


def plan(run: StudyRun) -> str:
    """Freeze the plan, made from the development documents, unless a frozen plan agrees with the study file.

    If the study file requests a larger K or N, or the run plans anew, a later revision is frozen. Return the plan's
    hash.

    Raises:
        PlanError: evaluation events exist without a plan, or the frozen plan disagrees with the study file.
    """
    study, model = run.study.name, run.study.model.id
    before = find_plan(run.store, study, model)
    grown = None if before is None or run.replan else grown_plan(before, run.study)
    if before is not None and grown is before:
        return before.sha256
    with open_views(run.store, checked_within=WEEK) as views:
        version = run.store.data_version("events", views.versions["events"])
        units = views.rows("units", study=study, model=model)
        development = replicate_moments(views, study, model, "development")
        answers = replicate_answers(views, study, model, "development", development.windows)
        rows = views.rows("swrb_efficiency", study=study, model=model, split="development", stratum=POOLED)
    efficiency = dict(zip(rows["action"].to_pylist(), rows["efficiency_in_seconds"].to_pylist(), strict=True))
    names = [document.doc for document in run.material.of_split("development")]
    units = units.filter(pc.is_in(units["doc"], value_set=pa.array(names)))
    evaluated = evaluated_size(run.store, run.material)
    interval = STUDENTIZED if before is None else before.interval
    content = make_plan(
        run.material, development, units, efficiency, answers, grown=grown, evaluated=evaluated, interval=interval
    )
    if before is not None and decides_the_same(before.content, content):
        run.say(f"plan {before.sha256[:12]} is unchanged: a new plan would decide the same")
        return before.sha256
    frozen = freeze_plan(run.store, run.material, content, version, before)
    run.say(_frozen_line(frozen, before, run.study))
    return frozen.sha256


def evaluate(*runs: StudyRun) -> int:
    """Generate the planned units of evaluation documents, within the limit; return the number of new units.

    The runs are those of one model, one for each temperature, and each has a plan.
    """
    plans = [require_plan(run.store, run.study) for run in runs]
    lacking = [pending_of_plan(run.store, run.material, plan) for run, plan in zip(runs, plans, strict=True)]
    return _generate(runs, lacking, "evaluation documents")


def check(run: StudyRun) -> None:
    """Check the conditions of any conclusion: controls exactly 0, equal bytes at equal retention.

    Raises:
        ControlError: a full-retention control has delta or f other than 0.
        OperationError: two actions keep equally many entries in unequal bytes.
    """
    controls = check_controls(run.store, run.material)
    pairs = check_equal_bytes(run.store, run.material)
    exact = floor_line(run.store, run.study) or f"{controls} full-retention controls exactly 0"
    run.say(f"{exact}; {pairs} pairs of actions that keep equally many entries hold equal bytes")


def look(run: StudyRun) -> bool:
    """Take the interim look whose documents are complete; return whether another interim look is to follow."""
    plan = require_plan(run.store, run.study)
    taken = InterimLooksTaken.in_store(run.store, plan)
    if taken is None or taken.stopped:
        return False
    with open_views(run.store, kept=MOMENT_VIEWS, checked_within=WEEK) as views:
        taken = take_interim_look(run.store, views, plan)
    run.say(interim_look_line(taken))
    return not taken.stopped


def analyze(run: StudyRun) -> int:
    """Estimate the evaluation documents unless the estimates are current; return the number of new estimates."""
    return analyze_stored(run.store, run.study.name, run.study.model.id, run.own_progress)


def report(run: StudyRun, beside: Path | None = None) -> Path:
    """Write the report unless it is current with the tables; return the path of its page.

    The page ``beside`` will compare this study with those of other temperatures.
    """
    page = run.page
    if not report_is_current(run.store, page.parent):
        model = run.study.model
        text = None if model.kind == FINITE_STATE else token_reader(tokenizer_location(model), revision=model.revision)
        write_report(
            run.store, run.study.name, model.id, page.parent,
            token_text=text, progress=run.own_progress, sides=run.sides(), beside=beside,
        )  # fmt: skip
    return page


def keep_up(run: StudyRun) -> None:
    """Merge small files and write the catalogue, once, at the end of a run."""
    if run.compacts:
        run.store.gather()
    refresh_catalog(run.store)


def is_planned(run: StudyRun) -> bool:
    """Return whether there is a frozen plan that agrees with the study file, and no new plan is requested."""
    store = run.stored
    plan = None if store is None else find_plan(store, run.study.name, run.study.model.id)
    return plan is not None and not run.replan and grown_plan(plan, run.study) is plan


def is_finished(run: StudyRun) -> bool:
    """Return whether nothing of the study is left to do: units, derivation, estimates and report are complete."""
    return forecast(run).finished


def _frozen_line(plan: FrozenPlan, before: FrozenPlan | None, study: Study) -> str:
    frozen, reason = f"plan {plan.sha256[:12]} frozen", plan.content["reason"]
    k, n = f"K = {plan.replicates} replicates", f"N = {plan.documents_per_stratum} documents per stratum"
    saved = saving(with_measured(plan.content))
    reason += f"; {saved}" if saved else ""
    if before is None:
        return f"{frozen}: {k}, {n}; {reason}"
    changed = "".join(
        f", {difference.what} = {difference.requested} (was {difference.before})"
        for difference in plan_differences(before, study)
    )
    sizes = f"{k} (was {before.replicates}), {n} (was {before.documents_per_stratum})"
    seen = f", planned after {plan.evaluated} evaluation documents were seen" if plan.evaluated else ""
    return f"{frozen}, revision {plan.revision}{changed}: {sizes}{seen}; {reason}"


def _generate(runs: Sequence[StudyRun], lacking: Sequence[Work], stage: str) -> int:
    """Generate the missing units of one model's runs; one prefill of a document serves the units of all runs."""
    having = [(run, work) for run, work in zip(runs, lacking, strict=True) if work]
    if len(having) > 1 and not runs[0].study.model.finite:
        (first, _), *others = having
        progress = first.progress_with([run for run, _ in others], all_laws=len(having) == len(runs))
        parts = [(first, of_all_laws([(run.study, work) for run, work in having]), progress)]
    else:
        parts = [(run, work, run.own_progress) for run, work in having]
    return sum(
        generate(run.store, run.study, run.limit.take(run.study.model.id, work), run.made_by, stage, progress)
        for run, work, progress in parts
    )
