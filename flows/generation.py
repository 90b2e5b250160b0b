"""What a study still lacks of events, and having it generated and stored."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from flows.frozen_plan import FrozenPlan, require_plan
from flows.material import Material, replicates_of, stored_identities
from flows.second_process import Part, SecondProcess, generate_beside
from generator.actions import Action
from generator.finite.model import finite_model
from generator.generation import PendingUnit, generate_documents, generate_together, together
from generator.identity import ActionIdentity
from generator.model import Model
from generator.transformer.fingerprints import model_identity
from generator.transformer.local_folders import model_folder, weight_files
from schema.document import Document
from schema.errors import InputError, OperationError
from schema.progress import Progress
from schema.store.appends import unit_name
from schema.store.revisions import newest_revisions
from schema.store.store import Store, Unit
from schema.study import FINITE_STATE, ModelSection, Study
from schema.tables import PLAIN, SWRB, UNITS

if TYPE_CHECKING:
    from generator.transformer.model import LoadedModel

_MUCH = 1 << 14  # pairs by positions: some 4 s of a small model, about what a process takes to start
_SMALL = 100 << 20  # bytes of weights

Work = list[tuple[Document, list[PendingUnit]]]
"""Documents, each with the units that it lacks."""

Generate = Callable[[Study, Work], Generator[list[Unit], None, None]]
"""Makes the units of a study's work: yields one list for each document, in any order."""


class Identify(Protocol):
    """Says what makes the units of a study's actions, whoever generates them."""

    def __call__(self, study: Study, *, required: bool) -> Callable[[Action], ActionIdentity]:
        """Return the identity by action; unless it is ``required``, that of the weights is None where it is not known.

        Raises:
            InputError: a file cannot be read, or an endpoint serves what no study asks for.
            OperationError: no endpoint says what it serves, and that is required.

        """


def stored_units(store: Store | None, material: Material) -> pa.Table:
    """Read the current units of a study and model; none before there is a store."""
    return UNITS.schema.empty_table() if store is None else store.units(material.study.name, material.model_id)


def pending_development(
    store: Store | None, material: Material, redone: Collection[str] = (), units: pa.Table | None = None
) -> Work:
    """Return what the development documents still lack; arguments are those of ``pending_work``."""
    planned = material.study.plan
    branched = material.measured_actions if planned.estimator != PLAIN else ()
    documents = material.of_split("development")
    return pending_work(store, material, documents, planned.development_replicates, branched, redone, units)


def pending_evaluation(store: Store, material: Material) -> Work:
    """Return what the frozen plan asks of the evaluation documents and the store lacks, as ``pending_work`` finds it.

    Raises:
        PlanError: there is no plan, or it disagrees with the study file.

    """
    return pending_of_plan(store, material, require_plan(store, material.study))


def pending_of_plan(
    store: Store, material: Material, plan: FrozenPlan, redone: Collection[str] = (), units: pa.Table | None = None
) -> Work:
    """Return what a plan asks of the evaluation documents and the store lacks.

    Under the estimator "swrb" an action that was added after the plan is branched as the planned ones are.
    """
    branched = material.measured_actions if material.study.plan.estimator == SWRB else plan.branched_actions
    documents = material.of_split("evaluation", plan.documents_per_stratum)
    return pending_work(store, material, documents, plan.replicates, branched, redone, units)


def lacking_actions(store: Store, material: Material, plan: FrozenPlan | None) -> set[str]:
    """Return the names of actions that lack units by a plan; without one, all of them."""
    if plan is None:
        return {action.name for action in material.actions}
    units = stored_units(store, material)
    work = pending_development(store, material, (), units) + pending_of_plan(store, material, plan, (), units)
    return {unit.action.name for _, pending in work for unit in pending}


def pending_work(
    store: Store | None, material: Material, documents: Sequence[Document], replicates: int,
    branched: Collection[str], redone: Collection[str] = (), units: pa.Table | None = None,
) -> Work:  # fmt: skip
    """Compare documents and actions with the stored units.

    Args:
        store: the study's store; None before there is one.
        material: the study with its documents and actions.
        documents: the documents that are wanted.
        replicates: how many replicates of each document and action are wanted.
        branched: names of actions that get as many replicates of residual branching too.
        redone: names of actions whose stored units are about to be superseded.
        units: what ``stored_units`` has read; None to read it.

    Returns:
        Documents that lack units, each with those units; [] where everything is there.

    """
    revisions = {} if store is None else newest_revisions(store.read("actions"))
    units = stored_units(store, material) if units is None else units
    covered: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
    columns = (
        units.column(name).to_pylist() for name in ("doc", "action", "estimator", "first_replicate", "replicates")
    )
    for doc, action, estimator, first, count in zip(*columns, strict=True):
        if action not in redone:
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
    """Generates on this machine, with one model in memory at a time: much work of a small model in two processes."""

    def __init__(self) -> None:
        self._study: Study | None = None  # whose model is held
        self._model: Model | None = None
        self._second: SecondProcess | None = None

    def __call__(self, study: Study, work: Work) -> Generator[list[Unit], None, None]:
        """Yield the units of each document, in any order."""
        self.get_ready(study, work)  # before the model is loaded here, so that both processes do so at once
        model = self.model(study)
        if self._second is None or not model.pairs_at_once:
            yield from generate_documents(model, study.name, work, study.study.horizon, study.study.seed)
            return
        whole = False
        try:
            parts = list(together(model, work, 2))
            yield from generate_beside(self._second, study, parts, self.generate_part)
            whole = True
        finally:
            if not whole:
                self._second = None

    def get_ready(self, study: Study, work: Work) -> None:
        """Start a second process, which takes some seconds, where so much work of a small model is to come."""
        alone = self._second is None and len(os.sched_getaffinity(0)) > 1
        if alone and _is_much(work, study) and _is_small(study):
            self._second = SecondProcess(study)

    def generate_part(self, study: Study, part: Part) -> list[list[Unit]]:
        """Generate a part of the work in this thread; the model is loaded for it, or for none."""
        model = self.model(study)
        return generate_together(model, study.name, part, study.study.horizon, study.study.seed) if part else []

    def close(self) -> None:
        """End the second process, if there is one."""
        if self._second is not None:
            self._second.close()
            self._second = None

    def identify(self, study: Study, *, required: bool) -> Callable[[Action], ActionIdentity]:
        """Return what makes the units of the study's actions; a model is loaded only if it is to be downloaded first.

        Raises:
            InputError: a file cannot be read, or the model cannot be loaded.

        """
        if study.model.kind == FINITE_STATE:
            return finite_model(study).identity
        files = model_identity(study.model.id, study.model.revision)
        if required and files.weights_sha256 is None:
            return self.model(study).identity
        return lambda action: files.of(action.selector)

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


def _is_much(work: Work, study: Study) -> bool:
    return sum(unit.count for _, units in work for unit in units) * study.study.horizon >= _MUCH


def _is_small(study: Study) -> bool:
    """Whether the model may be one of those that decode in one thread; it is not loaded for that."""
    model = study.model
    if model.kind == FINITE_STATE or model.device != "cpu":
        return False
    folder = model_folder(model.id, model.revision)
    return folder is not None and sum(file.stat().st_size for file in weight_files(folder)) < _SMALL


def load_transformer(section: ModelSection) -> LoadedModel:
    """Load the model of a study file's ``[model]``.

    Raises:
        InputError: it cannot be loaded.

    """
    from generator.transformer.loading import load_model  # noqa: PLC0415 - what is left to do shows without a model

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
        OperationError: the work failed, or what came was not made as the store has it.

    """
    if not work:
        return 0
    known = stored_identities(store, study.name, study.model.id)
    for action, revision in sorted({(unit.action.name, unit.revision) for _, pending in work for unit in pending}):
        if (action, revision) not in known:
            raise InputError(
                f"action '{action}' of study '{study.name}': it is not known what made its units; "
                f"kvdrift run --redo {action} generates them anew"
            )
    new = 0
    with closing(made_by(study, work)) as made:
        progress.begin(stage, len(work), "documents")
        for units in made:
            for unit in units:
                _check_identity(unit, known)
            new += store.append_units(units)
            progress.advance(1)
    return new


def _check_identity(unit: Unit, known: Mapping[tuple[str, int], ActionIdentity]) -> None:
    """Refuse a unit that was not made as the store has it of its revision: what makes units changed meanwhile.

    Raises:
        OperationError: names what is another one.

    """
    record = unit.record
    for name, value in known[record["action"], record["action_revision"]].columns.items():
        if record[name] != value:
            raise OperationError(
                f"unit {unit_name(record)}: {name} is {record[name]}, but the store has {value} of the action; "
                "what makes its units changed during the run: run the command again"
            )


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
