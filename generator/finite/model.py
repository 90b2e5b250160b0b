"""Finite-state systems in the place of a model: every system is a document, and an action is one of its kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from generator.actions import Action
from generator.coupling.streams import Savings
from generator.finite.enumeration import exact_rows
from generator.finite.families import mixture_system
from generator.finite.kernels import FiniteKernels
from generator.finite.system import FiniteSystem
from generator.finite.tables import read_systems
from schema.document import SPLITS, Document
from schema.errors import InputError
from schema.study import FINITE_STATE, DocumentsSection, Study

Strata = dict[str, dict[str, list[FiniteSystem]]]  # split -> stratum -> systems


@dataclass(frozen=True)
class FiniteModel:
    """A study's systems by document; ``generator.generation.Model``."""

    id: str
    systems: Mapping[str, FiniteSystem]
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[str] = "float64"
    batch_deviation: ClassVar[float] = 0.0  # laws are looked up

    def prepare(self, document: Document, actions: Sequence[Action], horizon: int) -> PreparedSystem:  # noqa: ARG002
        """See ``Model.prepare``; a study's systems end at its horizon."""
        system = self.systems[document.doc]
        controls = {action.name: system.reference for action in actions if action.control}
        controlled = replace(system, actions={**system.actions, **controls})
        return PreparedSystem(controlled, [action.name for action in actions])


@dataclass(frozen=True)
class PreparedSystem:
    """One system and the actions asked of it; ``generator.generation.PreparedDocument``."""

    system: FiniteSystem
    actions: list[str]

    def kernels(self, streams: int, savings: Savings) -> FiniteKernels:  # noqa: ARG002 - they take no room
        """See ``PreparedDocument``."""
        return FiniteKernels(self.system, self.actions)

    def replicates_at_once(self, actions: int, estimator: str) -> int:  # noqa: ARG002 - histories take no room
        """See ``PreparedDocument``: all of them."""
        return sys.maxsize

    def record(self, number: int, streams: int) -> dict[str, Any]:  # noqa: ARG002 - nothing is kept of a prompt
        """See ``PreparedDocument``: there is no prompt, so nothing to prefill or to keep."""
        return {"prefill_seconds": 0.0}


def study_systems(study: Study) -> Strata:
    """The systems of a finite-state study, drawn or read; InputError for a faulty file or one of too few systems.

    A family's systems are named ``system-1`` to ``system-N`` on the evaluation side, after the stratum where there are
    several; a file's are taken in its order, development first, stratum by stratum.
    """
    model = study.model
    stored = _stored(study, Path(model.tables).expanduser()) if model.tables is not None else None
    strata: Strata = {split: {} for split in SPLITS}
    for section in study.documents:
        for split, count in (("development", section.development), ("evaluation", section.evaluation)):
            systems = _drawn(study, section, split, count) if stored is None else list(islice(stored, count))
            if len(systems) < count:
                raise InputError(
                    f"documents '{section.stratum_name}': {split} = {count}, but {model.tables} has only "
                    f"{len(systems)} system(s) left for it"
                )
            strata[split][section.stratum_name] = systems
    return strata


def finite_model(study: Study) -> FiniteModel:
    """The study's systems as its model; raises as ``study_systems``."""
    strata = study_systems(study)
    systems = [system for split in strata.values() for stratum in split.values() for system in stratum]
    return FiniteModel(study.model.id, {system.name: system for system in systems})


def system_document(system: FiniteSystem, stratum: str) -> Document:
    """A system as a document: a prompt of no tokens."""
    return Document(system.name, stratum, system.name, FINITE_STATE, FINITE_STATE, ())


def exact_value_rows(study: str, model: str, system: FiniteSystem) -> list[dict[str, Any]]:
    """Rows of ``exact_values`` for every action of a system, by enumeration."""
    named = {"study": study, "model": model, "doc": system.name}
    return [{**named, "action": action, **row} for action in system.actions for row in exact_rows(system, action)]


def _drawn(study: Study, section: DocumentsSection, split: str, count: int) -> list[FiniteSystem]:
    kind = "system" if split == "evaluation" else split
    prefix = f"{section.stratum_name}-{kind}" if len(study.documents) > 1 else kind
    return [
        mixture_system(
            study.study.seed,
            f"{prefix}-{number}",
            number,
            count,
            study.model.alphabet or 2,
            study.study.horizon,
            [action.name for action in study.actions],
        )
        for number in range(1, count + 1)
    ]


def _stored(study: Study, path: Path) -> Iterator[FiniteSystem]:
    """The file's systems in order, cut to the study's actions and horizon."""
    names, horizon = [action.name for action in study.actions], study.study.horizon
    for system in read_systems(path).values():
        if system.horizon < horizon:
            raise InputError(
                f"{path}: system '{system.name}' ends at position {system.horizon}, before study.horizon = {horizon}"
            )
        yield replace(
            system,
            horizon=horizon,
            reference=system.reference[:horizon],
            actions={name: system.laws(name)[:horizon] for name in names},
        )
