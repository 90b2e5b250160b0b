"""The run of one study: the objects that all stages share, made once and handed down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.storing import GenerateInto, Identify
from kvdrift.flows.material import Material, gather_material
from kvdrift.flows.pages.reports import report_folder
from kvdrift.flows.plan.stored_documents import held_documents
from kvdrift.generator.actions import Action
from kvdrift.generator.documents.source import NOTHING_HELD
from kvdrift.generator.generation import Work
from kvdrift.generator.identity import ActionIdentity
from kvdrift.log.store import Store
from kvdrift.schema.errors import MissingStoreError
from kvdrift.schema.own_process import OwnProcesses
from kvdrift.schema.progress import SILENT, NamedProgress, Progress
from kvdrift.schema.study import Study
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.transforms.segments import DerivationReport


class DocumentLimit:
    """The number of documents that may still be generated, shared by the studies of a file; None is no limit.

    A granted document stays granted, so that a retried stage counts none twice.
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
        """Take as much of a model's work as the limit allows, and count its documents."""
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
        """Return the listener of the common progress of this study and others of its model and file."""
        names = [self.study.name, *(other.study.name for other in others)]
        return self._named("all temperatures" if all_laws else ", ".join(names))

    def _named(self, name: str) -> Progress:
        model = self.study.model.id if self.study.several_models else ""
        told = " on ".join(filter(None, (name, model)))
        return NamedProgress(self.progress, told) if told else self.progress

    @cached_property
    def identity(self) -> Callable[[Action], ActionIdentity]:
        """The function that returns an action's identity without a model; weights not known yet are None."""
        return self.identify(self.study, required=False)

    def whole_identity(self, action: Action) -> ActionIdentity:
        """Return the identity of an action; if its model is missing here, download and load the model first."""
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
        """The study's store; None before there is one."""
        try:
            return self.store
        except MissingStoreError:
            return None

    @property
    def page(self) -> Path:
        """The path of the study's page, which need not exist yet."""
        model = self.study.model.id if self.study.several_models else None
        return report_folder(self.store, self.study.name, model) / "index.html"
