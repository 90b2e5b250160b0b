"""Generation of a study's units: what is missing in the store, document by document, one commit each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from functools import lru_cache

from flows.material import Material, replicates_of
from flows.plan import require_plan
from generator.finite.model import finite_model
from generator.generation import PendingUnit, generate_units
from generator.model import Model
from generator.transformer.loading import load_model
from generator.transformer.model import LoadedModel
from schema.document import Document
from schema.progress import progress
from schema.store.store import Store, Unit
from schema.study import FINITE_STATE, ModelSection, Study
from schema.tables import PLAIN, SWRB

Work = list[tuple[Document, list[PendingUnit]]]
Generate = Callable[[Study, Work], Generator[list[Unit], None, None]]
"""Whatever makes the units of a study's work: one list for each document, in any order."""


def pending_work(
    store: Store, material: Material, documents: Sequence[Document], replicates: int, branched: Collection[str]
) -> Work:
    """What the store still lacks of ``replicates`` replicates for each document and action; [] when all is there.

    Actions named in ``branched`` get so many replicates of residual branching too.
    """
    units = store.units(material.study.name, material.model_id)
    covered: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
    columns = (
        units.column(name).to_pylist() for name in ("doc", "action", "estimator", "first_replicate", "replicates")
    )
    for doc, action, estimator, first, count in zip(*columns, strict=True):
        covered[doc, action, estimator].append((first, first + count))
    wanted = [(action, PLAIN) for action in material.actions]
    wanted += [(action, SWRB) for action in material.actions if action.name in branched]
    work = []
    for document in documents:
        pending = [
            PendingUnit(action, first, count, estimator)
            for action, estimator in wanted
            for first, count in _gaps(covered[document.doc, action.name, estimator], replicates_of(action, replicates))
        ]
        if pending:
            work.append((document, pending))
    return work


def pending_development(store: Store, material: Material) -> Work:
    """What development documents still lack."""
    planned = material.study.plan
    branched = material.measured_actions if planned.estimator != PLAIN else ()
    documents = material.of_split("development")
    return pending_work(store, material, documents, planned.development_replicates, branched)


def pending_evaluation(store: Store, material: Material) -> Work:
    """What the frozen plan asks of the evaluation documents and the store lacks; PlanError without a plan."""
    plan = require_plan(store, material)
    return pending_work(store, material, plan.documents(material), plan.replicates, plan.branched_actions(material))


def generate_development(store: Store, material: Material) -> int:
    """Generate what development documents still lack; returns the number of new units."""
    return _generate(store, material, pending_development(store, material), "development documents")


def generate_evaluation(store: Store, material: Material) -> int:
    """Generate what the frozen plan asks for and the store lacks; PlanError without a plan."""
    work = pending_evaluation(store, material)
    return _generate(store, material, work, "evaluation documents")


@lru_cache(maxsize=1)
def study_model(section: ModelSection) -> LoadedModel:
    """The study's model, loaded once per process."""
    return load_model(
        section.id,
        device=section.device,
        dtype=section.dtype,
        revision=section.revision,
        device_map=section.device_map,
    )


def generate_here(study: Study, work: Work) -> Generator[list[Unit], None, None]:
    """Units of each document, made in this process."""
    finite = study.model.kind == FINITE_STATE
    model: Model = finite_model(study) if finite else study_model(study.model)
    name, horizon, seed = study.name, study.study.horizon, study.study.seed
    return (generate_units(model, name, document, pending, horizon, seed) for document, pending in work)


_generator: ContextVar[Generate] = ContextVar("kvdrift_generator", default=generate_here)


@contextmanager
def generating_by(generate: Generate) -> Iterator[None]:
    """Have units made by ``generate`` inside the block, instead of in this process."""
    token = _generator.set(generate)
    try:
        yield
    finally:
        _generator.reset(token)


def _generate(store: Store, material: Material, work: Work, stage: str) -> int:
    if not work:
        return 0
    new = 0
    # No endpoint serves systems that are looked up faster than they are sent.
    generate = generate_here if material.study.model.kind == FINITE_STATE else _generator.get()
    with closing(generate(material.study, work)) as made:
        progress().begin(stage, len(work), "documents")
        for units in made:
            new += store.append_units(units)
            progress().advance(1)
    return new


def _gaps(covered: list[tuple[int, int]], replicates: int) -> list[tuple[int, int]]:
    """Ranges (first, count) of 0..replicates-1 that no stored unit covers."""
    gaps, position = [], 0
    for first, last in [*sorted(covered), (replicates, replicates)]:
        if first > position:
            gaps.append((position, min(first, replicates) - position))
        position = max(position, last)
        if position >= replicates:
            break
    return gaps
