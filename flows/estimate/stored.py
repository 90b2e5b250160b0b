"""The estimates of a stored study as rows of its store: interim looks, calibration and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import product
from typing import Any

import pyarrow as pa

from kvdrift.flows.estimate.estimation import (
    Analysis,
    Subject,
    estimate_study,
    inputs_sha256,
    standing_rows,
)
from kvdrift.flows.estimate.moments import (
    action_revisions,
    analyzed_splits,
    answer_moments,
    document_moments,
    documents_revision,
    replicate_moments,
    study_windows,
)
from kvdrift.flows.estimate.scores import (
    Scoring,
    answers_are_current,
    estimates_are_current,
    known_answers,
    record_tokens,
    score_stored,
)
from kvdrift.flows.plan.frozen_plan import FrozenPlan, InterimLooksTaken, Row, find_plan, number
from kvdrift.flows.plan.stored_documents import changed_answers, seen_actions
from kvdrift.log.checked_files import WEEK
from kvdrift.log.last_times import record_estimates
from kvdrift.log.store import Store
from kvdrift.log.studies import count_waiting, model_revisions
from kvdrift.schema.errors import InputError, OperationError
from kvdrift.schema.estimate_tables import CALIBRATION, LOOKS, RESULTS
from kvdrift.schema.progress import SILENT, Progress
from kvdrift.sql.catalog import MOMENT_VIEWS, Views, open_views
from kvdrift.stats.bootstrap import EXPLORATORY, planned_status
from kvdrift.stats.calibration import Calibration, calibrate
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.quantities import ANSWER_QUANTITIES
from kvdrift.stats.reduction import NO_COEFFICIENTS, fit_coefficients
from kvdrift.stats.repeated import repeated_intervals
from kvdrift.stats.sequential import EQUIVALENCE

REPEATED = "repeated"


def take_due_interim_looks(store: Store, views: Views, plan: FrozenPlan) -> None:
    """Take the interim looks whose documents and replicates are complete; to be called before events are estimated.

    Each version of the events is estimated only once. If a due interim look were taken later, the estimates would keep
    the intervals of the previous interim look.
    """
    while _is_due(store, views, plan):
        take_interim_look(store, views, plan)


def _is_due(store: Store, views: Views, plan: FrozenPlan) -> bool:
    taken = InterimLooksTaken.in_store(store, plan)
    if taken is None or taken.stopped:
        return False
    columns = ["doc", "action", "replicates"]
    rows = views.rows("moments", columns, study=plan.study, model=plan.model, split="evaluation").to_pylist()
    whole = {(row["doc"], row["action"]) for row in rows if row["replicates"] >= plan.replicates}
    if not whole.issuperset(product(taken.looks.names(taken.wanted), plan.actions)):
        return False
    of_answers = any(endpoint.quantity in ANSWER_QUANTITIES for endpoint in plan.family.endpoints)
    return not of_answers or not Scoring.stored(store, plan.study, plan.model).unscored_pairs["evaluation"]


def take_interim_look(store: Store, views: Views, plan: FrozenPlan) -> InterimLooksTaken:
    """Take and store the interim look whose documents are complete; return all interim looks taken."""
    taken = _require(store, plan)
    interim_look = taken.wanted
    names = taken.looks.names(interim_look)
    version = store.data_version("events", views.versions["events"])
    moments = document_moments(views, plan.study, plan.model, "evaluation").of_documents(names)
    moments = moments.of_actions(plan.actions)
    if set(moments.documents.tolist()) != names or not moments.present.all():
        raise OperationError(
            f"study '{plan.study}': documents of interim look {interim_look} are missing; run the command again"
        )
    revisions, documents = action_revisions(views, plan.study), documents_revision(views, plan.study, plan.model)
    reported = {_place(row) for row in taken.rows} if taken.lacking else set()
    endpoints = [endpoint for endpoint in plan.family.endpoints if endpoint not in reported]
    of_answers = [endpoint for endpoint in endpoints if endpoint.quantity in ANSWER_QUANTITIES]
    parts = [(moments, [endpoint for endpoint in endpoints if endpoint not in of_answers])]
    if of_answers:
        parts.append((_answers(store, views, plan, moments), of_answers))
    constant = taken.looks.constants[interim_look - 1]
    last = interim_look == len(taken.looks)
    resolution = taken.looks.resolution
    within = resolution.bound if resolution.rule == EQUIVALENCE else 0.0
    rows = []
    for interval in (
        repeated
        for measured, part_endpoints in parts
        if part_endpoints
        for repeated in repeated_intervals(
            measured,
            part_endpoints,
            constant=constant,
            draws=plan.draws,
            seed=plan.seed,
            last=last,
            alike_within=within,
        )
    ):
        endpoint = interval.endpoint
        rows.append({
            "study": plan.study, "model": plan.model, "look": interim_look, "stratum": endpoint.stratum,
            "action": endpoint.action, "baseline": endpoint.baseline, "quantity": endpoint.quantity,
            "estimate": number(interval.estimate), "low": number(interval.low), "high": number(interval.high),
            "level": plan.family.level, "constant": constant, "interval": interval.method, "draws": interval.draws,
            "documents": interval.documents, "clusters": interval.clusters,
            "resolved": taken.looks.resolution.holds(interval.low, interval.high),
            "action_revision": revisions[endpoint.action], "baseline_revision": revisions[endpoint.baseline],
            "events_version": version, "plan_sha256": plan.sha256, "documents_revision": documents,
        })  # fmt: skip
    try:
        store.append_rows("looks", pa.Table.from_pylist(rows, schema=LOOKS.schema))
    except InputError:  # another run has just taken this interim look, unless the rows have another fault
        if _require(store, plan).wanted == interim_look:
            raise
    return _require(store, plan)


def _answers(store: Store, views: Views, plan: FrozenPlan, of_look: DocumentMoments) -> DocumentMoments:
    known = known_answers(store, plan.study, plan.model)
    moments = answer_moments(views, plan.study, plan.model, "evaluation", of_look.windows, known)
    if moments is None:
        raise OperationError(
            f"study '{plan.study}': a primary endpoint needs answers, but those of evaluation documents are unknown or "
            f"not all scored; scoring needs the tokenizer of '{plan.model}'"
        )
    return moments.of_documents(set(of_look.documents.tolist())).of_actions(plan.actions)


def with_interim_looks(results: pa.Table, store: Store, plan: FrozenPlan) -> pa.Table:
    """Return ``results`` with the values of the last interim look in the rows of primary endpoints.

    Before the first interim look primary endpoints have no interval. Reduced estimates never have an interval here,
    since their intervals do not account for interim looks.
    """
    taken = InterimLooksTaken.in_store(store, plan)
    if taken is None:
        return results
    interim_rows = {_place(row): row for row in taken.rows}
    family = set(plan.family.endpoints)
    rows = [
        _seen_at(row, interim_rows) if _place(row) in family and row["x"] is None else row
        for row in results.to_pylist()
    ]
    return pa.Table.from_pylist(rows, schema=RESULTS.schema)


def _seen_at(row: Row, interim_rows: Mapping[Endpoint, Row]) -> Row:
    interim_row = interim_rows.get(_place(row))
    row = row | {"low": None, "high": None, "low_reduced": None, "high_reduced": None, "interval": REPEATED}
    if interim_row is None:
        return row
    taken = ("estimate", "low", "high", "level", "draws", "documents", "clusters")
    return row | {name: interim_row[name] for name in taken}


def _place(row: Row) -> Endpoint:
    return Endpoint(row["quantity"], row["action"], row["baseline"], row["stratum"])


def _require(store: Store, plan: FrozenPlan) -> InterimLooksTaken:
    taken = InterimLooksTaken.in_store(store, plan)
    if taken is None:
        raise OperationError(f"study '{plan.study}' has no interim looks")
    return taken


def calibrate_study(
    store: Store,
    views: Views,
    plan: FrozenPlan,
    events_version: int,
    moments: Mapping[str, DocumentMoments],
    seen: tuple[str, ...] = (),
) -> int:
    """Fit predictors on development documents, judge them on evaluation documents, and append to ``calibration``.

    Nothing is written unless the baseline and another action have moments in both splits. Rows of a contrast with
    unchanged inputs are kept. A contrast of two planned actions has the status prespecified, but the status seen if the
    outcomes of either action were known before the plan.

    Return the number of rows that were made anew. ``events_version`` is the version that the views show.
    """
    if not {"development", "evaluation"} <= moments.keys():
        return 0
    development, evaluation, baseline = moments["development"], moments["evaluation"], plan.content["baseline"]
    actions = set(development.actions) & set(evaluation.actions)
    if baseline not in actions:
        return 0
    revisions = action_revisions(views, plan.study)
    settings = {
        "baseline": baseline, "draws": plan.draws, "seed": plan.seed, "alpha": plan.content["alpha"],
        "margin": plan.content["calibration"]["margin"], "interval": plan.interval,
    }  # fmt: skip
    inputs = {}
    for action in sorted(actions - {baseline}):
        pair = (baseline, action)
        pair_moments = [split.of_actions(pair) for split in (development, evaluation)]
        inputs[action] = inputs_sha256(
            settings, plan.sha256, [name in plan.actions for name in pair], [name in seen for name in pair],
            [revisions[name] for name in pair], *pair_moments,
        )  # fmt: skip
    cited = {"events_version": events_version, "documents_revision": documents_revision(views, plan.study, plan.model)}
    standing = standing_rows(store, "calibration", inputs.values(), cited)
    there = set(standing["inputs_sha256"].to_pylist())
    rows = [
        _row(judged, plan, seen, action, baseline) | cited
        | {"action_revision": revisions[action], "baseline_revision": revisions[baseline], "inputs_sha256": sha256}
        for action, sha256 in inputs.items() if sha256 not in there
        for judged in calibrate(development, evaluation, action=action, **settings)
    ]  # fmt: skip
    new = pa.Table.from_pylist(rows, schema=CALIBRATION.schema)
    order = [(name, "ascending") for name in ("action", "observation", "candidate")]
    store.append_rows("calibration", pa.concat_tables([standing, new]).sort_by(order))
    return len(rows)


def _row(judged: Calibration, plan: FrozenPlan, seen: tuple[str, ...], action: str, baseline: str) -> dict[str, Any]:
    values = {
        name: number(value) if isinstance(value, float) else value for name, value in dataclasses.asdict(judged).items()
    }
    planned = {action, baseline} <= set(plan.actions)
    return values | {
        "study": plan.study,
        "model": plan.model,
        "action": action,
        "baseline": baseline,
        "status": planned_status(seen, action, baseline) if planned else EXPLORATORY,
        "plan_sha256": plan.sha256,
    }


def analyze_stored(store: Store, study: str, model: str, progress: Progress = SILENT) -> int:
    """Estimate a study as its frozen plan says; without a plan, make exploratory estimates of every split.

    Return the number of new estimates; 0 if the store has estimates of the present events.
    """
    current = estimates_are_current(store, study, model)
    scoring = Scoring.stored(store, study, model)
    answered = answers_are_current(store, study, model, scoring)
    if current and answered:
        return 0

    _say_what_waits(store, study, model, progress)

    def wanted(subject: Subject) -> bool:
        return not current or (subject.answers and not answered)

    frozen = find_plan(store, study, model)
    with open_views(store, kept=MOMENT_VIEWS, checked_within=WEEK) as views:
        # Only what these views show is estimated, whatever other writers commit meanwhile.
        version = store.data_version("events", views.versions["events"])
        if pending := store.all_underived(views.versions).size:
            raise InputError(f"{pending} units are not derived: kvdrift derive {store.location}")
        seen = () if frozen is None else seen_actions(store, frozen)
        splits = analyzed_splits(views, study, model)
        if frozen is not None:
            take_due_interim_looks(store, views, frozen)
            analyses = [Analysis.planned(frozen, seen, answers_changed=changed_answers(store, frozen))]
        else:
            analyses = [Analysis.exploratory(views, study, model, split) for split in splits]
        if not analyses or any(analysis.split not in splits for analysis in analyses):
            what = "evaluation documents" if frozen is not None else "any action but the control"
            raise InputError(
                f"study '{study}', model '{model}': no complete trajectories of {what}, so nothing can be estimated; "
                f"kvdrift status {store.location} shows what is missing"
            )
        windows = study_windows(views, study, model)
        # Of the present documents, so that actions that were added or redone have coefficients too. A plan need not fix
        # them: they depend on development documents alone, so estimates of other documents stay unbiased.
        development = replicate_moments(views, study, model, "development") if "development" in splits else None
        coefficients = NO_COEFFICIENTS if development is None else fit_coefficients(development)
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
                store, views, analysis, version, moments[analysis.split], progress, fitted, answers,
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
            rows.append(estimates.rows if frozen is None else with_interim_looks(estimates.rows, store, frozen))
        record_estimates(store.location, study, model, version)
        # A single commit, since any row of this events version says that the analysis is done.
        store.append_rows("results", pa.concat_tables(rows))
    return count


def _say_what_waits(store: Store, study: str, model: str, progress: Progress) -> None:
    if (study, model) in (waiting := count_waiting(store)):
        progress.say(
            f"{waiting[study, model]} wait for missing positions, and are in no estimate; kvdrift ingest adds positions"
        )


def estimate_stored(store: Store, study: str, model: str, progress: Progress) -> tuple[int, int, int]:
    """Record token texts, score answers and estimate; return the numbers of new texts, scored pairs and estimates."""
    revision = model_revisions(store).get((study, model))
    texts = record_tokens(store, study, model, revision=revision, progress=progress)
    scored = score_stored(store, study, model, revision=revision, progress=progress)
    return texts, scored, analyze_stored(store, study, model, progress)
