"""The estimates of a stored study, made if the store lacks estimates of its present events."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from kvdrift.flows.estimate.answers import answer_moments, answers_are_current
from kvdrift.flows.estimate.calibration import calibrate_study
from kvdrift.flows.estimate.current import estimates_are_current, pairs_are_current
from kvdrift.flows.estimate.estimation import (
    analyzed_splits,
    document_moments,
    estimate_study,
    replicate_moments,
    study_windows,
)
from kvdrift.flows.estimate.parts import Analysis, Runner, Subject, one_by_one, with_progress
from kvdrift.flows.estimate.scores import Scoring, known_answers
from kvdrift.flows.estimate.taking_looks import take_due_looks, with_looks
from kvdrift.flows.plan.frozen_plan import find_plan
from kvdrift.flows.plan.seen import seen_actions
from kvdrift.flows.plan.stored_documents import changed_answers
from kvdrift.log.checked_files import WEEK
from kvdrift.log.last_times import record_estimates
from kvdrift.log.store import Store
from kvdrift.log.waiting import count_waiting
from kvdrift.schema.errors import InputError
from kvdrift.schema.progress import SILENT, Progress
from kvdrift.sql.catalog import MOMENT_VIEWS, Views, open_views
from kvdrift.stats.moments import Float
from kvdrift.stats.reduction.coefficients import fit_coefficients
from kvdrift.stats.reduction.control_variates import NO_COEFFICIENTS


def analyze_stored(store: Store, study: str, model: str, run: Runner = one_by_one, progress: Progress = SILENT) -> int:
    """Estimate a study as its frozen plan says or, without a plan, every split as exploratory.

    ``run`` estimates the parts of an analysis. The number of new estimates is returned; 0 if the store has those of the
    present events.
    """
    current = estimates_are_current(store, study, model)
    scoring = Scoring.stored(store, study, model)
    answered, compared = answers_are_current(store, study, model, scoring), pairs_are_current(store, study, model)
    if current and answered and compared:
        return 0

    _say_what_waits(store, study, model, progress)

    def wanted(subject: Subject) -> bool:
        return not current or (subject.answers and not answered) or (subject.together and not compared)

    frozen = find_plan(store, study, model)
    with open_views(store, kept=MOMENT_VIEWS, checked_within=WEEK) as views:
        # Only what these views show is estimated, whatever other writers commit meanwhile.
        version = store.data_version("events", views.versions["events"])
        if pending := store.all_underived(views.versions).size:
            raise InputError(f"{pending} units are not derived: kvdrift derive {store.location}")
        seen = () if frozen is None else seen_actions(store, frozen)
        splits = analyzed_splits(views, study, model)
        if frozen is not None:
            take_due_looks(store, views, frozen)
            analyses = [Analysis.planned(frozen, seen, answers_changed=changed_answers(store, frozen))]
        else:
            analyses = [Analysis.exploratory(views, study, model, split) for split in splits]
        if not analyses or any(analysis.split not in splits for analysis in analyses):
            what = "evaluation" if frozen is not None else "measured"
            raise InputError(f"study '{study}', model '{model}': no complete {what} trajectories, nothing to estimate")
        windows = study_windows(views, study, model)
        coefficients = _coefficients(views, study, model) if "development" in splits else NO_COEFFICIENTS
        moments = {split: document_moments(views, study, model, split, windows) for split in splits}
        # Written before the estimates, which mark this version as done: after a kill in between both are made again.
        count = 0
        if frozen is not None and not current:
            count = calibrate_study(store, views, frozen, version, moments, seen)
        known = known_answers(store, study, model) if scoring.documents else {}
        rows = []
        for analysis in analyses:
            fitted = NO_COEFFICIENTS if analysis.split == "development" else coefficients
            answers = answer_moments(views, study, model, analysis.split, windows, known) if known else None
            estimates = estimate_study(
                store, views, analysis, version, moments[analysis.split], with_progress(run, progress), fitted, answers,
                wanted=wanted,
            )  # fmt: skip
            if not estimates.new:
                progress.say(
                    f"estimates of {analysis.split} documents are up to date: none of their moments has changed"
                )
            elif estimates.made < estimates.subjects:
                what = f"{estimates.made} of {estimates.subjects} actions and contrasts"
                progress.say(
                    f"estimates of {what} are made on {analysis.split} documents; the other estimates are unchanged"
                )
            count += estimates.new
            rows.append(estimates.rows if frozen is None else with_looks(estimates.rows, store, frozen))
        record_estimates(store.location, study, model, version)
        # A single commit, since any row of this events version says that the analysis is done.
        store.append_rows("results", pa.concat_tables(rows))
    return count


def _say_what_waits(store: Store, study: str, model: str, progress: Progress) -> None:
    if (study, model) in (waiting := count_waiting(store)):
        progress.say(f"{waiting[study, model]} wait for positions, and are in no estimate")


def _coefficients(views: Views, study: str, model: str) -> Mapping[str, Float]:
    """Fit the coefficients of control variates on the present development documents.

    Plans do not fix coefficients: these depend on development documents alone, so that estimates of evaluation
    documents are unbiased for any coefficients. So plans frozen before coefficients existed, and actions that were
    added or redone, have them too.
    """
    return fit_coefficients(replicate_moments(views, study, model, "development"))
