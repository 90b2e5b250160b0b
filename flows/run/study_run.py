"""The run of one study: the objects that all stages share, made once, and the study's remaining work.

``forecast`` returns what a run would generate, and all other remaining work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from kvdrift.flows.estimate.scores import Scoring, answers_are_current, estimates_are_current
from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.storing import GenerateInto, Identify, stored_gpus
from kvdrift.flows.material import Material, gather_material
from kvdrift.flows.pages.reports import report_folder, report_is_current
from kvdrift.flows.plan.frozen_plan import (
    FrozenPlan,
    InterimLooksTaken,
    find_plan,
    grown_plan,
    lacking,
    wanted_by_stratum,
    wanted_units,
)
from kvdrift.flows.plan.making import NOTHING, evaluated_size, size_bounds
from kvdrift.flows.plan.stored_documents import held_documents
from kvdrift.generator.actions import Action
from kvdrift.generator.documents.source import NOTHING_HELD
from kvdrift.generator.engines.registry import tokenizer_location
from kvdrift.generator.generation import PendingUnit, StudySampling, Work
from kvdrift.generator.generation.units import gpu_here
from kvdrift.generator.identity import ActionIdentity, GpuKinds
from kvdrift.generator.transformer.files.tokenizer import text_decoder
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import newest_revisions
from kvdrift.schema.document import Document
from kvdrift.schema.errors import MissingStoreError
from kvdrift.schema.own_process import OwnProcesses
from kvdrift.schema.progress import SILENT, NamedProgress, Progress
from kvdrift.schema.study import Study
from kvdrift.schema.tables import PLAIN, UNITS
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.transforms.segments import DerivationReport


class DocumentLimit:
    """A limit on the number of documents that a run generates, shared by the studies of a file; None is no limit.

    Once a document is allowed, it stays so and counts once, even if a stage is retried.
    """

    def __init__(self, documents: int | None = None) -> None:
        self._documents = documents
        self._granted: set[tuple[str, str]] = set()
        self._kept_back: set[tuple[str, str]] = set()

    @property
    def left_over(self) -> int:
        """Return how many documents the limit has excluded so far."""
        return len(self._kept_back)

    def take(self, model: str, work: Work) -> Work:
        """Return the part of a model's work that the limit allows, and count the part's documents."""
        taken = []
        for document, pending in work:
            key = (model, document.doc)
            if key in self._granted or self._documents is None or len(self._granted) < self._documents:
                self._granted.add(key)
                self._kept_back.discard(key)
                taken.append((document, pending))
            else:
                self._kept_back.add(key)
        return taken


@dataclass(frozen=True, eq=False)
class StudyRun:
    """One study and model on the way from its documents to its report."""

    study: Study  # the study file, for one model
    location: str  # the store's present or future location: an absolute path or a URL
    made_by: GenerateInto  # generates the events and stores them
    progress: Progress = SILENT  # listener of the progress on the whole study file
    # how many documents may be generated before the run stops
    limit: DocumentLimit = field(default_factory=DocumentLimit)
    # returns the identity of units; by default, of units that this process generates
    identify: Identify = field(default_factory=lambda: LocalGenerator().identify)
    # derives the underived units of the store at a location; by default in this process
    derived_by: Callable[[str], DerivationReport] = run_derivation
    sides: Callable[[], OwnProcesses | None] = lambda: None  # returns the side processes, if there are any
    # whether to do without files of the model that are not on this machine; nothing can be generated then
    offline: bool = False
    replan: bool = False  # whether the plan is made anew, as a later revision of the present plan
    gathered: Callable[..., Material] = gather_material  # makes the study's documents and actions
    compacts: bool = True  # whether small files are merged at the end

    def say(self, line: str) -> None:
        """Print a line about this study, with the study's name if its file has several temperatures or models."""
        self.own_progress.say(line)

    @property
    def own_progress(self) -> Progress:
        """The listener of this study's progress, with its name if its file has several temperatures or models."""
        several = self.study.name != self.study.name_in_file
        return self._named(self.study.name if several else "")

    def progress_with(self, others: Sequence[StudyRun], *, all_laws: bool) -> Progress:
        """Return the listener of the common progress of this study and ``others`` of its model and file.

        ``all_laws`` says that this study and ``others`` are all studies of the model.
        """
        names = [self.study.name, *(other.study.name for other in others)]
        return self._named("all temperatures" if all_laws else ", ".join(names))

    def _named(self, name: str) -> Progress:
        model = self.study.model.id if self.study.several_models else ""
        label = " on ".join(filter(None, (name, model)))
        return NamedProgress(self.progress, label) if label else self.progress

    @cached_property
    def identity(self) -> Callable[[Action], ActionIdentity]:
        """The function that returns an action's identity without loading a model; a hash that stays unknown is None."""
        return self.identify(self.study, required=False)

    def whole_identity(self, action: Action) -> ActionIdentity:
        """Return the identity of an action; if a hash is unknown, the generator finds it, and may load the model."""
        known = self.identity(action)
        unknown = known.weights_sha256 is None or known.selector_sha256 is None
        return self._whole_identity(action) if unknown else known

    @cached_property
    def _whole_identity(self) -> Callable[[Action], ActionIdentity]:
        return self.identify(self.study, required=True)

    @cached_property
    def material(self) -> Material:
        """The study's documents, stored documents first, and its actions."""
        try:
            held = held_documents(self.store, self.study)
        except MissingStoreError:
            held = NOTHING_HELD
        return self.gathered(self.study, offline=self.offline, held=held)

    @cached_property
    def store(self) -> Store:
        """The study's store, opened.

        Raises:
            InputError: there is no store yet.
        """
        return Store.open(self.location)

    @property
    def stored(self) -> Store | None:
        """The study's store; None before it exists."""
        try:
            return self.store
        except MissingStoreError:
            return None

    @property
    def page(self) -> Path:
        """The path of the study's page, which need not exist yet."""
        model = self.study.model.id if self.study.several_models else None
        return report_folder(self.store, self.study.name, model) / "index.html"


def stored_units(store: Store | None, material: Material) -> pa.Table:
    """Read the current units of a study and model; none before there is a store."""
    return UNITS.schema.empty_table() if store is None else store.units(material.study.name, material.model_id)


def pending_development(
    store: Store | None, material: Material, redone: Collection[str] = (), units: pa.Table | None = None
) -> Work:
    """Return the missing units of development documents; for the arguments see ``pending_work``."""
    planned = material.study.plan
    branched = material.measured_actions if planned.estimator != PLAIN else ()
    documents = material.of_split("development")
    return pending_work(store, material, documents, planned.development_replicates, branched, redone, units)


def pending_of_plan(
    store: Store, material: Material, plan: FrozenPlan, redone: Collection[str] = (), units: pa.Table | None = None,
    *, at_most: bool = False,
) -> Work:  # fmt: skip
    """Return the units of evaluation documents that a plan needs by now and the store lacks.

    With ``at_most``, a sequential study that has not stopped needs its N documents too.
    """
    documents = wanted_documents(store, material, plan, at_most=at_most)
    branched = plan.branched(material.measured_actions)
    return pending_work(store, material, documents, plan.replicates, branched, redone, units)


def wanted_documents(store: Store, material: Material, plan: FrozenPlan, *, at_most: bool = False) -> list[Document]:
    """Return the evaluation documents that a plan needs, in order; ``at_most`` is as in ``pending_of_plan``."""
    taken = InterimLooksTaken.in_store(store, plan)
    if taken is None or (at_most and not taken.stopped):
        return material.of_split("evaluation", plan.documents_per_stratum)
    named = {document.doc: document for document in material.of_split("evaluation")}
    order = taken.looks.order
    return [named[doc] for stratum, count in taken.documents.items() for doc in order[stratum][:count]]


def pending_work(
    store: Store | None, material: Material, documents: Sequence[Document], replicates: int,
    branched: Collection[str], redone: Collection[str] = (), units: pa.Table | None = None,
) -> Work:  # fmt: skip
    """Return those of ``documents`` that lack stored units, each with the missing units; [] if nothing is missing.

    ``store`` is None before it exists. Actions in ``branched`` get as many replicates of residual branching as of
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
                actions[unit.action], first, count, unit.estimator, revisions.get((material.study.name, unit.action), 0)
            )
            for unit, first, count in lacking(held[document.doc], wanted)
        ]
        if pending:
            work.append((document, pending))
    return work


def of_all_laws(lacking: Sequence[tuple[Study, Work]]) -> Work:
    """Merge the work of studies of one file and model, which differ only in name and temperature.

    Each document comes once, with all units that some study lacks; each unit names its study.
    """
    documents: dict[str, tuple[Document, list[PendingUnit]]] = {}
    for study, work in lacking:
        of = StudySampling(study.name, study.sampling)
        for document, pending in work:
            _, together = documents.setdefault(document.doc, (document, []))
            together += [replace(unit, of=of) for unit in pending]
    return list(documents.values())


@dataclass(frozen=True)
class SplitForecast:
    """The stored and the missing units of a split."""

    split: str
    # how many documents of each stratum there will be, from the fewest to the most
    documents: dict[str, tuple[int, int]]
    replicates: tuple[int, int]  # replicates of each document, from the fewest to the most
    stored: int  # how many units of these documents are stored
    work: Work  # the most that is to be generated

    @property
    def bounded(self) -> bool:
        """Whether the work may turn out smaller: the plan is still to be made, or a sequential study may stop."""
        return self.replicates[0] < self.replicates[1] or any(fewest < most for fewest, most in self.documents.values())

    @property
    def pending(self) -> Counter[str]:
        """Return how many units of each action are to be generated."""
        return Counter(unit.action.name for _, units in self.work for unit in units)


@dataclass(frozen=True)
class Forecast:
    """The stored and the missing parts of a study."""

    plan: FrozenPlan | None  # the frozen plan, None before it exists
    # the plan with the study file's K and N, equal to ``plan`` unless these grow; None if a plan is to be made
    requested_plan: FrozenPlan | None
    splits: tuple[SplitForecast, SplitForecast]  # development and evaluation
    underived: int = 0  # how many stored units are still to be derived
    unscored: int = 0  # how many stored pairs are still to be scored, if the model's tokenizer is here
    estimated: bool = False  # whether the estimates are current with events and scores
    reported: bool = False  # whether the page is current with the tables
    stopped: bool = True  # whether a sequential study has stopped; true for other studies

    @property
    def finished(self) -> bool:
        """Whether nothing of the study is left to do."""
        return (
            self.plan is not None
            and self.plan is self.requested_plan
            and not any(split.work for split in self.splits)
            and not self.underived
            and not self.unscored
            and self.estimated
            and self.reported
            and self.stopped
        )


def forecast(run: StudyRun, redone: Collection[str] = ()) -> Forecast:
    """Compare a study with its store; the store need not exist yet, and the study file must agree with it.

    The stored units of actions in ``redone`` are about to be superseded.
    """
    store = run.stored
    plan = None if store is None else find_plan(store, run.study.name, run.study.model.id)
    grown = None if plan is None or run.replan else grown_plan(plan, run.study)
    units = stored_units(store, run.material)
    splits = (
        _development(store, run.material, redone, units), _evaluation(store, run.material, grown, redone, units)
    )  # fmt: skip
    if store is None:
        return Forecast(plan, grown, splits)
    named, model = (run.study.name, run.study.model.id), run.study.model
    scoring = Scoring.stored(store, *named)
    unscored = scoring.unscored_pairs.total()
    if unscored and text_decoder(tokenizer_location(model), revision=model.revision) is None:
        unscored = 0
    return Forecast(
        plan,
        grown,
        splits,
        underived=store.all_underived().size,
        unscored=unscored,
        estimated=estimates_are_current(store, *named) and answers_are_current(store, *named, scoring),
        reported=report_is_current(store, run.page.parent),
        stopped=grown is None or (taken := InterimLooksTaken.in_store(store, grown)) is None or taken.stopped,
    )


def gpus_of_units(run: StudyRun, redone: Collection[str] = ()) -> GpuKinds:
    """Return the GPU models that made a study's units, without units of actions that are about to be redone."""
    store = run.stored
    return GpuKinds.of_units([]) if store is None else stored_gpus(store, run.study.name, run.study.model.id, redone)


def check_gpu_here(run: StudyRun, redone: Collection[str] = ()) -> None:
    """Check that this machine's GPU is of the model that made the stored units, if units are to be generated."""
    made_on, gpu = gpus_of_units(run, redone), gpu_here(run.study.model)
    if made_on.difference("", gpu) is not None and any(split.work for split in forecast(run, redone).splits):
        made_on.check("this machine", gpu, run.study.model)


def _development(store: Store | None, material: Material, redone: Collection[str], units: pa.Table) -> SplitForecast:
    replicates = material.study.plan.development_replicates
    documents = {
        stratum: (len(stratum_documents),) * 2
        for stratum, stratum_documents in material.documents["development"].items()
    }
    work = pending_development(store, material, redone, units)
    names = {document.doc for document in material.of_split("development")}
    count = _count(units, material, names, redone)
    return SplitForecast("development", documents, (replicates, replicates), count, work)


def _evaluation(
    store: Store | None, material: Material, plan: FrozenPlan | None, redone: Collection[str], units: pa.Table
) -> SplitForecast:
    """Return the evaluation's stored and missing units; without a plan, those of the largest possible plan."""
    planned, strata = material.study.plan, material.documents["evaluation"]
    available = {stratum: len(documents) for stratum, documents in strata.items()}
    if plan is not None:
        taken = None if store is None else InterimLooksTaken.in_store(store, plan)
        by_now, at_most = (wanted_by_stratum(plan, taken, at_most=most) for most in (False, True))
        documents = {
            stratum: (min(by_now[stratum], most), min(at_most[stratum], most)) for stratum, most in available.items()
        }
        replicates = plan.replicates, plan.replicates
    else:
        evaluated = NOTHING if store is None else evaluated_size(store, material)
        replicates, per_stratum = size_bounds(material.study, evaluated)
        documents = dict.fromkeys(available, per_stratum)
    wanted = [document for stratum, (_, most) in documents.items() for document in strata[stratum][:most]]
    if plan is not None and store is not None:
        wanted = wanted_documents(store, material, plan, at_most=True)
        work = pending_of_plan(store, material, plan, redone, units, at_most=True)
    else:
        branched = material.measured_actions if planned.estimator != PLAIN else ()
        work = pending_work(store, material, wanted, replicates[1], branched, redone, units)
    count = _count(units, material, {document.doc for document in wanted}, redone)
    return SplitForecast("evaluation", documents, replicates, count, work)


def _count(units: pa.Table, material: Material, names: Collection[str], redone: Collection[str]) -> int:
    """Count the stored units of the documents ``names``, under the study's actions that are not redone."""
    actions = {action.name for action in material.actions} - set(redone)
    pairs = zip(units["doc"].to_pylist(), units["action"].to_pylist(), strict=True)
    return sum(doc in names and action in actions for doc, action in pairs)
