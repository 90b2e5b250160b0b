"""The finite-state systems of a study, drawn or read: as documents, with their exact values.

The tables hold the law by which the study draws tokens. torch is needed only for a law other than the tables' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from kvdrift.generator.finite.enumeration import exact_rows
from kvdrift.generator.finite.system import FiniteSystem, mixture_system
from kvdrift.generator.finite.tables import read_system_file
from kvdrift.schema.document import SPLITS, Document
from kvdrift.schema.errors import InputError
from kvdrift.schema.sampling import FULL_SOFTMAX, SamplingLaw
from kvdrift.schema.study import FINITE_STATE, DocumentsSection, Study

Strata = dict[str, dict[str, list[FiniteSystem]]]
"""Systems by split and stratum."""


def file_systems(study: Study) -> list[FiniteSystem] | None:
    """Read all systems of the study's file, with the study's law; None if the study draws its systems."""
    file = study.model.tables_file
    return None if file is None else [_deployed(system, study.law) for system in read_system_file(file).values()]


def study_systems(study: Study, read: Iterable[FiniteSystem] | None = None) -> Strata:
    """Draw the systems of a finite-state study, or take them from ``read``, all systems of its file.

    Drawn systems are named ``system-1`` to ``system-N`` in the evaluation split and ``development-1`` to
    ``development-N`` in the development split, with the stratum's name in front if there are several strata. A file's
    systems are taken in its order, stratum by stratum, and within a stratum development first.
    """
    model = study.model
    read = file_systems(study) if read is None else read
    stored = None if read is None else _stored(study, read)
    strata: Strata = {split: {} for split in SPLITS}
    for section in study.documents:
        for split, count in (("development", section.development), ("evaluation", section.evaluation)):
            systems = _drawn(study, section, split, count) if stored is None else list(islice(stored, count))
            if len(systems) < count:
                raise InputError(
                    f"documents '{section.stratum_name}': {split} = {count}, but only {len(systems)} "
                    f"system(s) of {model.tables} are left for it"
                )
            strata[split][section.stratum_name] = systems
    return strata


def system_document(system: FiniteSystem, stratum: str) -> Document:
    """Return the document that stands for a system: its prompt has no tokens."""
    return Document(system.name, stratum, system.name, FINITE_STATE, FINITE_STATE, ())


def exact_value_rows(
    study: str, model: str, system: FiniteSystem, revisions: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of table ``exact_values`` for every action of a system, of the given revisions."""
    named = {"study": study, "model": model, "doc": system.name}
    return [
        {**named, "action": action, "action_revision": (revisions or {}).get(action, 0), **row}
        for action in system.actions
        for row in exact_rows(system, action)
    ]


def _drawn(study: Study, section: DocumentsSection, split: str, count: int) -> list[FiniteSystem]:
    kind = "system" if split == "evaluation" else split
    prefix = f"{section.stratum_name}-{kind}" if len(study.documents) > 1 else kind
    drawn = [
        mixture_system(
            study.study.seed, f"{prefix}-{number}", number, count, study.model.alphabet or 2, study.study.horizon,
            [action.name for action in study.actions],
        )
        for number in range(1, count + 1)
    ]  # fmt: skip
    return [_deployed(system, study.law) for system in drawn]


def _deployed(system: FiniteSystem, law: SamplingLaw) -> FiniteSystem:
    """Return the system with tables of the law by which tokens are drawn."""
    if law == FULL_SOFTMAX:
        return system
    from kvdrift.generator.coupling.sampling import deployed_table  # noqa: PLC0415 - torch is not loaded for the tables' own law

    return replace(
        system,
        reference=tuple(deployed_table(table, law) for table in system.reference),
        actions={name: tuple(deployed_table(table, law) for table in laws) for name, laws in system.actions.items()},
    )


def _stored(study: Study, read: Iterable[FiniteSystem]) -> Iterator[FiniteSystem]:
    """Yield the file's systems in order, cut to the study's actions and horizon."""
    names, horizon = [action.name for action in study.actions], study.study.horizon
    path = study.model.tables_file
    for system in read:
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
