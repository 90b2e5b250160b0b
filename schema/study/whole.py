"""A whole study, and the checks that need several of its sections."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, model_validator

from kvdrift.schema.errors import InputError, nearest
from kvdrift.schema.sampling import Sampling
from kvdrift.schema.study.actions import CONTROL_ACTION, FLOOR_ACTION, KERNEL_FLOOR_ACTION, ActionSection
from kvdrift.schema.study.design import DocumentsSection, PlanSection, StudySection, WindowsSection
from kvdrift.schema.study.model import FINITE_STATE, ModelSection
from kvdrift.schema.study.section import MOST_DOCUMENTS, MOST_EVENTS, MOST_LISTED, Section, meaning, missing
from kvdrift.schema.windows import Windows

POOLED = "pooled"

# Keys of the model that decide no event: a permission, and the addresses and limits of servers.
_PLACES = {"mixed_gpus", "url", "requests"}


class Study(Section):
    """A whole study file."""

    study: StudySection = meaning("The study's name, the number of positions to compare, and how tokens are drawn.")
    model: ModelSection = meaning("The model to measure, and how to run it.")
    documents: Annotated[list[DocumentsSection], Field(min_length=1, max_length=MOST_LISTED)] = meaning(
        "The prompts of one stratum and their number; one such section for each stratum."
    )
    actions: Annotated[list[ActionSection], Field(min_length=1, max_length=MOST_LISTED)] = meaning(
        "A way to make the cache smaller: a selector, a codec, both, or a policy; one such section for each action."
    )
    plan: PlanSection = meaning("The questions of the study, and the settings that fix its size.")
    windows: WindowsSection = meaning(
        "The windows of quantities, if they should not follow from H.", default=WindowsSection()
    )
    _several_models: bool = PrivateAttr(default=False)
    _file_name: str | None = PrivateAttr(default=None)
    _folder: Path | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _with_floors(self) -> Self:
        """Add an engine's floors to the actions, so that floors are planned and estimated like actions."""
        floors: dict[str, dict[str, Any]] = {FLOOR_ACTION: {}} if self.model.has_floor else {}
        if (kernel := self.model.other_kernel) is not None:
            floors[KERNEL_FLOOR_ACTION] = {"settings": kernel}
        for name, keys in floors.items():
            if all(action.name != name for action in self.actions):
                self.actions.append(ActionSection.model_validate({"name": name, **keys}))
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.study.check_sampling()
        self.model.check()
        if self.study.horizon == 1 and not (self.model.finite or self.model.engine or self.own_weights):
            raise InputError(
                "study.horizon = 1: the first token is drawn before anything is left out of a cache, so that nothing "
                "can differ; write 2 or more"
            )
        if self.model.finite and self.study.eos is not None:
            raise InputError("study.eos: unknown key; a finite-state system names its own EOS tokens")
        self._check_documents()
        self._check_actions()
        self._check_plan()
        _ = self.window_values
        return self

    def _check_documents(self) -> None:
        for number, section in enumerate(self.documents):
            where = f"documents[{number}]"
            if (section.source == FINITE_STATE) != self.model.finite:
                raise InputError(
                    f"{where}.source = '{section.source}': not a source of a {self.model.kind} model; "
                    f'finite-state systems, and only they, have source = "{FINITE_STATE}"'
                )
            for name in ("length", "exclude") if self.model.finite else ():
                if getattr(section, name):
                    raise InputError(f"{where}.{name}: unknown key; finite-state systems have no prompts")
            if not self.model.finite and not section.length:
                raise InputError(missing(DocumentsSection, where, "length"))
            which, parts = section.part_of_clusters
            if which > parts:
                raise InputError(f"{where}.part = '{section.part}': write 1/{parts} to {parts}/{parts}")
        if (requested := sum(section.development + section.evaluation for section in self.documents)) > MOST_DOCUMENTS:
            raise InputError(
                f"documents: {requested:,} documents are requested; a study has at most {MOST_DOCUMENTS:,}, since all "
                "are made before the first is measured"
            )
        strata = [section.stratum_name for section in self.documents]
        check_distinct("strata", strata)
        if POOLED in strata:
            raise InputError(f"strata: '{POOLED}' is the name of rows that pool all strata; choose another name")

    def _check_actions(self) -> None:
        for number, action in enumerate(self.actions):
            action.check_kind(f"actions[{number}]", finite=self.model.finite, engine=self.model.engine)
        names = [action.name for action in self.actions]
        check_distinct("actions", names)
        urls = [
            url.rstrip("/") for url in (self.model.url, *(action.url for action in self.actions)) if url is not None
        ]
        check_distinct("url", urls)
        if CONTROL_ACTION in names:
            raise InputError(f"actions: kvdrift adds the control '{CONTROL_ACTION}' to every study; remove it")
        for action in self.actions:
            try:
                _ = action.retention
            except InputError as error:
                raise InputError(f"action '{action.name}': {error}") from None

    def _check_plan(self) -> None:
        names = [action.name for action in self.actions]
        if self.plan.baseline not in names:
            hint = nearest(self.plan.baseline, names)
            raise InputError(f"plan.baseline = '{self.plan.baseline}': no such action; {hint}")
        least = min(part.evaluation for part in self.documents)
        key = "documents_at_least" if self.plan.documents == "auto" else "documents"
        if (requested := getattr(self.plan, key)) > least:
            raise InputError(
                f"plan.{key} = {requested}: a stratum has only {least} evaluation documents; write {least} or fewer "
                "here, or a larger evaluation under [[documents]]"
            )
        self._check_events()
        low, high = self.plan.replicates_between
        if low > high:
            raise InputError(f"plan.replicates_between = [{low}, {high}]: the first bound is above the second")
        self.plan.check_stopping()

    def _check_events(self) -> None:
        pairs = {"development_replicates": self.plan.development_replicates}
        if self.plan.replicates == "auto":
            pairs["replicates_between"] = max(self.plan.replicates_between)
        else:
            pairs["replicates"] = self.plan.replicates
        for key, most in pairs.items():
            if (events := most * self.study.horizon) > MOST_EVENTS:
                raise InputError(
                    f"plan.{key}: {most:,} pairs times study.horizon = {self.study.horizon:,} are {events:,} events of "
                    f"one document and action, which are in memory together; {MOST_EVENTS:,} are the most"
                )

    @property
    def name(self) -> str:
        """The study's name."""
        return self.study.name

    @property
    def sampling(self) -> Sampling:
        """The temperature and truncation with which both sides draw tokens."""
        return self.study.sampling

    @property
    def estimated(self) -> list[str]:
        """The names of the actions with primary endpoints: all actions except an engine's floors."""
        floors = (FLOOR_ACTION, KERNEL_FLOOR_ACTION) if self.model.has_floor else ()
        return [action.name for action in self.actions if action.name not in floors]

    @property
    def own_weights(self) -> dict[str, str]:
        """The weights of each action that has other weights than the reference, by action name."""
        return {action.name: action.weights for action in self.actions if action.weights is not None}

    @property
    def several_models(self) -> bool:
        """Whether the study file names several models, for each of which there is a ``Study``."""
        return self._several_models

    @property
    def folder(self) -> Path | None:
        """The absolute path of the study file's folder, in which custom modules are found; None without a file."""
        return self._folder

    @property
    def name_in_file(self) -> str:
        """The study's name as written in the file; for one of several temperatures, without the temperature."""
        return self._file_name or self.name

    def of_file(self, folder: Path, name: str, *, several_models: bool) -> None:
        """Set the study file's folder, its name for the study, and whether it names several models."""
        self._folder, self._file_name, self._several_models = folder, name, several_models
        self.model.of_folder(folder)

    @cached_property
    def window_values(self) -> Windows:
        """All windows; a window that ``[windows]`` does not set scales with the horizon."""
        return Windows.of(self.study.horizon, **self.windows.model_dump())

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of ``settings``."""
        return hashlib.sha256(self.settings.encode()).hexdigest()

    @cached_property
    def settings(self) -> str:
        """The settings that decide the events, as JSON: horizon, seed, sampling, model and document sources.

        Actions are left out, so that a study can add actions later.
        """
        deciding = {
            "study": self.study.model_dump(exclude={"store_prompts"}),  # no event depends on it
            # Each unit records its GPU or its server's report.
            "model": self.model.model_dump(exclude=_PLACES),
            # A path says nothing about a file's content: a document that changed is known by its prompt_sha256.
            "documents": [
                part.model_dump(exclude={"development", "evaluation", "path", "exclude"}) for part in self.documents
            ],
        }
        return json.dumps(deciding, sort_keys=True)

    def agrees_with(self, settings: str | None) -> bool:
        """Tell whether stored settings are equal to the study's settings.

        The paths of files do not count, so that files can be moved. The order of document sections does not matter,
        unless they take their systems in turn from one file.
        """
        return settings is not None and _deciding(settings) == _deciding(self.settings)


def _deciding(settings: str) -> dict[str, Any]:
    """Return the part of the settings that decides events, in a form that can be compared."""
    content: dict[str, Any] = json.loads(settings)
    if content["model"].pop("tables", None) is None:
        content["documents"].sort(key=lambda section: json.dumps(section, sort_keys=True))
    return content


def check_distinct(what: str, given: Sequence[object]) -> None:
    """Check that each name or number occurs once."""
    for one in given:
        if given.count(one) > 1:
            raise InputError(f"{what}: {one!r} is given {given.count(one)} times; each must be different")
