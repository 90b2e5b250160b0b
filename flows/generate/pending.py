"""The units that a study lacks, and the units that several temperatures of a model lack together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

import pyarrow as pa

from kvdrift.flows.material import Material
from kvdrift.flows.plan.frozen_plan import FrozenPlan
from kvdrift.flows.plan.left import LooksTaken, lacking, wanted_units
from kvdrift.generator.generation import PendingUnit, StudyLaw, Work
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import newest_revisions
from kvdrift.schema.document import Document
from kvdrift.schema.study import Study
from kvdrift.schema.tables import PLAIN, UNITS


def stored_units(store: Store | None, material: Material) -> pa.Table:
    """Read the current units of a study and model; none before there is a store."""
    return UNITS.schema.empty_table() if store is None else store.units(material.study.name, material.model_id)


def pending_development(
    store: Store | None, material: Material, redone: Collection[str] = (), units: pa.Table | None = None
) -> Work:
    """Return the units that development documents still lack; the arguments are those of ``pending_work``."""
    planned = material.study.plan
    branched = material.measured_actions if planned.estimator != PLAIN else ()
    documents = material.of_split("development")
    return pending_work(store, material, documents, planned.development_replicates, branched, redone, units)


def pending_of_plan(
    store: Store, material: Material, plan: FrozenPlan, redone: Collection[str] = (), units: pa.Table | None = None,
    *, at_most: bool = False,
) -> Work:  # fmt: skip
    """Return the units of evaluation documents that a plan asks for by now and the store lacks.

    ``at_most`` takes a sequential study that has not stopped to its N.
    """
    documents = wanted_documents(store, material, plan, at_most=at_most)
    branched = plan.branched(material.measured_actions)
    return pending_work(store, material, documents, plan.replicates, branched, redone, units)


def wanted_documents(store: Store, material: Material, plan: FrozenPlan, *, at_most: bool = False) -> list[Document]:
    """Return the evaluation documents that a plan asks for by now, in its order."""
    taken = LooksTaken.in_store(store, plan)
    if taken is None or (at_most and not taken.stopped):
        return material.of_split("evaluation", plan.documents_per_stratum)
    named = {document.doc: document for document in material.of_split("evaluation")}
    order = taken.looks.order
    return [named[doc] for stratum, count in taken.documents.items() for doc in order[stratum][:count]]


def pending_work(
    store: Store | None, material: Material, documents: Sequence[Document], replicates: int,
    branched: Collection[str], redone: Collection[str] = (), units: pa.Table | None = None,
) -> Work:  # fmt: skip
    """Return the documents that lack stored units, each with those units; [] if nothing lacks.

    ``store`` is None before there is one. Actions in ``branched`` get as many replicates of residual branching as of
    coupled pairs; the units of actions in ``redone`` are about to be superseded. ``units``, the result of
    ``stored_units``, is read if None.
    """
    revisions = {} if store is None else newest_revisions(store.read("actions"))
    units = stored_units(store, material) if units is None else units
    held = defaultdict[str, defaultdict[tuple[str, str], list[tuple[int, int]]]](lambda: defaultdict(list))
    columns = (
        units.column(name).to_pylist() for name in ("doc", "action", "estimator", "first_replicate", "replicates")
    )
    for doc, action, estimator, first, count in zip(*columns, strict=True):
        if action not in redone:
            held[doc][action, estimator].append((first, first + count))
    actions = {action.name: action for action in material.actions}
    wanted = wanted_units({name: action.control for name, action in actions.items()}, replicates, branched)
    work = []
    for document in documents:
        pending = [
            PendingUnit(
                actions[one.action], first, count, one.estimator, revisions.get((material.study.name, one.action), 0)
            )
            for one, first, count in lacking(held[document.doc], wanted)
        ]
        if pending:
            work.append((document, pending))
    return work


def of_all_laws(lacking: Sequence[tuple[Study, Work]]) -> Work:
    """Merge the work of studies of one file and model, which differ only in names and laws.

    Each document comes once, with all units that some study lacks; each unit names its study.
    """
    documents: dict[str, tuple[Document, list[PendingUnit]]] = {}
    for study, work in lacking:
        of = StudyLaw(study.name, study.law)
        for document, pending in work:
            _, together = documents.setdefault(document.doc, (document, []))
            together += [replace(unit, of=of) for unit in pending]
    return list(documents.values())
