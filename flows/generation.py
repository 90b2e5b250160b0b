"""What a study still lacks of events, and having it generated and stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing

from flows.frozen_plan import require_plan
from flows.material import Material, replicates_of
from generator.finite.model import finite_model
from generator.generation import PendingUnit, generate_units
from generator.model import Model
from generator.transformer.loading import load_model
from generator.transformer.model import LoadedModel
from schema.document import Document
from schema.progress import Progress
from schema.store.revisions import newest_revisions
from schema.store.store import Store, Unit
from schema.study import FINITE_STATE, ModelSection, Study
from schema.tables import PLAIN, SWRB

Work = list[tuple[Document, list[PendingUnit]]]
"""Documents, each with the units that it lacks."""

Generate = Callable[[Study, Work], Generator[list[Unit], None, None]]
"""Makes the units of a study's work: yields one list for each document, in any order."""


def pending_development(store: Store, material: Material) -> Work:
    """Return what the development documents still lack."""
    planned = material.study.plan
    branched = material.measured_actions if planned.estimator != PLAIN else ()
    documents = material.of_split("development")
    return pending_work(store, material, documents, planned.development_replicates, branched)


def pending_evaluation(store: Store, material: Material) -> Work:
    """Return what the frozen plan asks of the evaluation documents and the store lacks.

    Under the estimator "swrb" an action that was added after the plan is branched as the planned ones are.

    Raises:
        PlanError: there is no plan, or it disagrees with the study file.

    """
    plan = require_plan(store, material.study)
    branched = material.measured_actions if material.study.plan.estimator == SWRB else plan.branched_actions
    documents = material.of_split("evaluation", plan.documents_per_stratum)
    return pending_work(store, material, documents, plan.replicates, branched)


def pending_work(
    store: Store, material: Material, documents: Sequence[Document], replicates: int, branched: Collection[str]
) -> Work:
    """Compare documents and actions with the stored units.

    Args:
        store: the study's store.
        material: the study with its documents and actions.
        documents: the documents that are wanted.
        replicates: how many replicates of each document and action are wanted.
        branched: names of actions that get as many replicates of residual branching too.

    Returns:
        Documents that lack units, each with those units; [] where everything is there.

    """
    revisions = newest_revisions(store.read("actions"))
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
            PendingUnit(action, first, count, estimator, revisions.get((material.study.name, action.name), 0))
            for action, estimator in wanted
            for first, count in _gaps(covered[document.doc, action.name, estimator], replicates_of(action, replicates))
        ]
        if pending:
            work.append((document, pending))
    return work


class LocalGenerator:
    """Generates in this process, with one model in memory at a time."""

    def __init__(self) -> None:
        self._study: Study | None = None  # whose model is held
        self._model: Model | None = None

    def __call__(self, study: Study, work: Work) -> Generator[list[Unit], None, None]:
        """Yield the units of each document, in the order of the work."""
        name, horizon, seed = study.name, study.study.horizon, study.study.seed
        return (generate_units(self.model(study), name, document, pending, horizon, seed) for document, pending in work)

    def model(self, study: Study) -> Model:
        """Return the study's model, loaded where another one is held or none; that one is released before.

        Raises:
            InputError: the model cannot be loaded.

        """
        if self._model is None or self._study is None or self._study.model != study.model:
            self._model = None
            finite = study.model.kind == FINITE_STATE
            self._model, self._study = finite_model(study) if finite else load_transformer(study.model), study
        return self._model


def load_transformer(section: ModelSection) -> LoadedModel:
    """Load the model of a study file's ``[model]``.

    Raises:
        InputError: it cannot be loaded.

    """
    return load_model(
        section.id,
        device=section.device,
        dtype=section.dtype,
        revision=section.revision,
        device_map=section.device_map,
    )


def generate(store: Store, study: Study, work: Work, made_by: Generate, stage: str, progress: Progress) -> int:
    """Generate work and store it, one commit a document; returns the number of new units.

    Raises:
        InputError: a model, an endpoint or the store refuses the work.
        OperationError: the work failed.

    """
    if not work:
        return 0
    new = 0
    with closing(made_by(study, work)) as made:
        progress.begin(stage, len(work), "documents")
        for units in made:
            new += store.append_units(units)
            progress.advance(1)
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
