"""Generation of a study's units: what is missing in the store, document by document, one commit each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from flows.plan import require_plan
from flows.preparation import Material, replicates_of
from flows.progress import progress
from generator.actions import Action
from generator.generation import PendingUnit, generate_units
from generator.models import LoadedModel, load_model
from schema.document import Document
from schema.store import Store

Work = list[tuple[Document, list[PendingUnit]]]


def pending_work(store: Store, material: Material, documents: Sequence[Document], replicates: int) -> Work:
    """What the store still lacks of ``replicates`` replicates for each document and action; [] when all is there."""
    units = store.units(material.study.name, material.model_id)
    covered: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    columns = (units.column(name).to_pylist() for name in ("doc", "action", "first_replicate", "replicates"))
    for doc, action, first, count in zip(*columns, strict=True):
        covered[doc, action].append((first, first + count))
    work = []
    for document in documents:
        pending = [
            unit
            for action in material.actions
            for unit in _gaps(action, covered[document.doc, action.name], replicates_of(action, replicates))
        ]
        if pending:
            work.append((document, pending))
    return work


def generate_development(store: Store, material: Material) -> int:
    """Generate what development documents still lack; returns the number of new units."""
    work = pending_work(store, material, material.of_split("development"), material.study.plan.development_replicates)
    return _generate(store, material, work, "development documents")


def generate_evaluation(store: Store, material: Material) -> int:
    """Generate what the frozen plan asks for and the store lacks; PlanError without a plan."""
    plan = require_plan(store, material)
    work = pending_work(store, material, plan.documents(material), plan.replicates)
    return _generate(store, material, work, "evaluation documents")


@lru_cache(maxsize=1)
def study_model(model_id: str, device: str, dtype: str, revision: str | None) -> LoadedModel:
    """The study's model, loaded once per process."""
    return load_model(model_id, device=device, dtype=dtype, revision=revision)


def _generate(store: Store, material: Material, work: Work, stage: str) -> int:
    if not work:
        return 0
    study = material.study
    model = study_model(study.model.id, study.model.device, study.model.dtype, study.model.revision)
    progress().begin(stage, len(work), "documents")
    new = 0
    for document, pending in work:
        units = generate_units(model, study.name, document, pending, study.study.horizon, study.study.seed)
        new += store.append_units(units)
        progress().advance(1)
    return new


def _gaps(action: Action, covered: list[tuple[int, int]], replicates: int) -> list[PendingUnit]:
    """Ranges of 0..replicates-1 that no stored unit covers."""
    gaps, position = [], 0
    for first, last in [*sorted(covered), (replicates, replicates)]:
        if first > position:
            gaps.append(PendingUnit(action, position, min(first, replicates) - position))
        position = max(position, last)
        if position >= replicates:
            break
    return gaps
