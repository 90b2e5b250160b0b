"""Taking a look at a sequential study: its primary endpoints with repeated intervals, as rows of ``looks``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import pyarrow as pa

from kvdrift.flows.estimate.answers import answer_moments
from kvdrift.flows.estimate.estimation import action_revisions, document_moments, documents_revision
from kvdrift.flows.estimate.scores import Scoring, known_answers
from kvdrift.flows.plan.frozen_plan import FrozenPlan
from kvdrift.flows.plan.looks_taken import LooksTaken, Row
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, OperationError
from kvdrift.schema.tables import LOOKS, RESULTS
from kvdrift.sql.catalog import Views
from kvdrift.stats.endpoints import Endpoint
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.quantities.answers import ANSWER_QUANTITIES
from kvdrift.stats.sequential.repeated import repeated_intervals
from kvdrift.stats.sequential.resolution import EQUIVALENCE

REPEATED = "repeated"


def take_due_looks(store: Store, views: Views, plan: FrozenPlan) -> None:
    """Take the looks whose documents and replicates are all there, as a run does.

    Estimates are made once for a version of the events. So a look at these events comes before them, lest the
    estimates keep the intervals of the look before.
    """
    while _is_due(store, views, plan):
        take_look(store, views, plan)


def _is_due(store: Store, views: Views, plan: FrozenPlan) -> bool:
    taken = LooksTaken.in_store(store, plan)
    if taken is None or taken.stopped:
        return False
    columns = ["doc", "action", "replicates"]
    rows = views.rows("moments", columns, study=plan.study, model=plan.model, split="evaluation").to_pylist()
    whole = {(row["doc"], row["action"]) for row in rows if row["replicates"] >= plan.replicates}
    if not whole.issuperset(product(taken.looks.names(taken.wanted), plan.actions)):
        return False
    of_answers = any(endpoint.quantity in ANSWER_QUANTITIES for endpoint in plan.family.endpoints)
    return not of_answers or not Scoring.stored(store, plan.study, plan.model).unscored_pairs["evaluation"]


def take_look(store: Store, views: Views, plan: FrozenPlan) -> LooksTaken:
    """Take the look of a sequential study whose documents are complete, store it, and return all looks taken."""
    taken = _require(store, plan)
    look = taken.wanted
    names = taken.looks.names(look)
    version = store.data_version("events", views.versions["events"])
    moments = document_moments(views, plan.study, plan.model, "evaluation").of_documents(names)
    moments = moments.of_actions(plan.actions)
    if set(moments.documents.tolist()) != names or not moments.present.all():
        raise OperationError(f"study '{plan.study}': documents of look {look} are missing; run the command again")
    revisions, documents = action_revisions(views, plan.study), documents_revision(views, plan.study, plan.model)
    said = {_place(row) for row in taken.rows} if taken.lacking else set()
    endpoints = [endpoint for endpoint in plan.family.endpoints if endpoint not in said]
    of_answers = [endpoint for endpoint in endpoints if endpoint.quantity in ANSWER_QUANTITIES]
    parts = [(moments, [endpoint for endpoint in endpoints if endpoint not in of_answers])]
    if of_answers:
        parts.append((_answers(store, views, plan, moments), of_answers))
    constant = taken.looks.constants[look - 1]
    last = look == len(taken.looks)
    resolution = taken.looks.resolution
    within = resolution.bound if resolution.rule == EQUIVALENCE else 0.0
    rows = []
    for found in (
        one
        for measured, own in parts
        if own
        for one in repeated_intervals(
            measured, own, constant=constant, draws=plan.draws, seed=plan.seed, last=last, alike_within=within
        )
    ):
        endpoint = found.endpoint
        rows.append({
            "study": plan.study, "model": plan.model, "look": look, "stratum": endpoint.stratum,
            "action": endpoint.action, "baseline": endpoint.baseline, "quantity": endpoint.quantity,
            "estimate": _number(found.estimate), "low": _number(found.low), "high": _number(found.high),
            "level": plan.family.level, "constant": constant, "interval": found.method, "draws": found.draws,
            "documents": found.documents, "clusters": found.clusters,
            "resolved": taken.looks.resolution.holds(found.low, found.high),
            "action_revision": revisions[endpoint.action], "baseline_revision": revisions[endpoint.baseline],
            "events_version": version, "plan_sha256": plan.sha256, "documents_revision": documents,
        })  # fmt: skip
    try:
        store.append_rows("looks", pa.Table.from_pylist(rows, schema=LOOKS.schema))
    except InputError:  # another run has just taken this look, unless something else is wrong with the rows
        if _require(store, plan).wanted == look:
            raise
    return _require(store, plan)


def _answers(store: Store, views: Views, plan: FrozenPlan, of_look: DocumentMoments) -> DocumentMoments:
    """Read the moments of a look's documents that have answers."""
    known = known_answers(store, plan.study, plan.model)
    found = answer_moments(views, plan.study, plan.model, "evaluation", of_look.windows, known)
    if found is None:
        raise OperationError(f"study '{plan.study}': a primary endpoint is of answers, which are not all scored")
    return found.of_documents(set(of_look.documents.tolist())).of_actions(plan.actions)


def with_looks(results: pa.Table, store: Store, plan: FrozenPlan) -> pa.Table:
    """Return rows of ``results``; rows of primary endpoints get the estimate and interval of the last look.

    Before the first look primary endpoints have no interval. Reduced estimates never have an interval here, since
    theirs ignore looks.
    """
    taken = LooksTaken.in_store(store, plan)
    if taken is None:
        return results
    looks = {_place(row): row for row in taken.rows}
    family = set(plan.family.endpoints)
    rows = [_seen_at(row, looks) if _place(row) in family and row["x"] is None else row for row in results.to_pylist()]
    return pa.Table.from_pylist(rows, schema=RESULTS.schema)


def _seen_at(row: Row, looks: Mapping[Endpoint, Row]) -> Row:
    """Return a row of ``results`` with the numbers of its look."""
    look = looks.get(_place(row))
    row = row | {"low": None, "high": None, "low_reduced": None, "high_reduced": None, "interval": REPEATED}
    if look is None:
        return row
    taken = ("estimate", "low", "high", "level", "draws", "documents", "clusters")
    return row | {name: look[name] for name in taken}


def _place(row: Row) -> Endpoint:
    return Endpoint(row["quantity"], row["action"], row["baseline"], row["stratum"])


def _require(store: Store, plan: FrozenPlan) -> LooksTaken:
    taken = LooksTaken.in_store(store, plan)
    if taken is None:
        raise OperationError(f"study '{plan.study}' has no looks")
    return taken


def _number(value: float) -> float | None:
    """Replace NaN by None, since an undefined number is null in the store."""
    return None if math.isnan(value) else value
