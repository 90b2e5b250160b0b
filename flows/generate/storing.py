"""Generating what a study lacks, and storing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from flows.generate.failures import Trying
from flows.generate.stored_material import stored_identities
from generator.actions import Action
from generator.generation import Work
from generator.identity import ActionIdentity, GpuKinds
from log.store import Store, Unit
from log.units.unit import unit_name
from schema.errors import (
    DamagedStoreError,
    InputError,
    KvdriftError,
    NobodyLeftError,
    OperationError,
    UnlikeUnitsError,
    is_disk_fault,
)
from schema.progress import Progress
from schema.study import Study

Identities = Mapping[tuple[str, str, int], ActionIdentity]
"""What makes the units of each study, action and revision, as the store has it."""

Generate = Callable[[Study, Work], Generator[list[Unit], None, None]]
"""Makes the units of a study's work: yields one list for each document, in any order."""

GenerateInto = Callable[[Store, Study, Work, Identities], Generator[int, None, None]]
"""Makes the units of a study's work and stores them, a document by one commit: yields each one's number of new units.

Units that were not made by the identities are refused.
"""


class _OtherIdentityError(OperationError):
    """What makes units changed during the run."""


_ENDING = (
    DamagedStoreError,
    NobodyLeftError,
    UnlikeUnitsError,
    _OtherIdentityError,
)  # no other document would fare better


class Identify(Protocol):
    """Says what makes the units of a study's actions, whoever generates them."""

    def __call__(self, study: Study, *, required: bool) -> Callable[[Action], ActionIdentity]:
        """Return the identity by action; unless ``required``, that of the weights is None if it is not known."""


def generate(store: Store, study: Study, work: Work, made_by: GenerateInto, stage: str, progress: Progress) -> int:
    """Generate work and store it, one commit a document; returns the number of new units.

    A unit of another law says which study it belongs to.

    A document that fails does not keep the others from being generated. If several documents fail in a row, the cause
    lies elsewhere, and no more documents are tried.

    Raises:
        InputError: a model, an endpoint or the store refuses the work, or documents of it.
        OperationError: the work or documents of it failed, or what came was not made as the store has it.

    """
    if not work:
        return 0
    asked = {(unit.study(study.name), unit.action.name, unit.revision) for _, pending in work for unit in pending}
    known = {
        (name, *key): identity
        for name in studies_of(study, work)
        for key, identity in stored_identities(store, name, study.model.id).items()
    }
    for name, action, revision in sorted(asked):
        if (name, action, revision) not in known:
            raise InputError(
                f"action '{action}' of study '{name}': it is not known what made its units; "
                f"kvdrift run --redo {action} generates them anew"
            )
    new, trying = 0, Trying(work)
    progress.begin(stage, len(work), "documents")
    for part in trying.parts():
        try:
            with closing(made_by(store, study, part, known)) as stored:
                for units in stored:
                    new += units
                    trying.document_done()
                    progress.advance(1)
        except KvdriftError as error:
            left = _not_stored(store, study, part)
            if not left or isinstance(error, _ENDING) or is_disk_fault(error):
                raise
            trying.part_failed(left, error)
    trying.check()
    return new


def studies_of(study: Study, work: Work) -> list[str]:
    """Return the names of the studies whose units are in some work, studies of other laws included."""
    return list(dict.fromkeys(unit.study(study.name) for _, pending in work for unit in pending))


def _not_stored(store: Store, study: Study, work: Work) -> Work:
    """The documents of some work that the store does not have all units of."""
    names = ["doc", "action", "estimator", "first_replicate"]
    there = set()
    for one in studies_of(study, work):
        rows = store.units(one, study.model.id, names)
        there |= set(zip([one] * len(rows), *(rows[name].to_pylist() for name in names), strict=True))
    return [
        (document, pending)
        for document, pending in work
        if any(
            (unit.study(study.name), document.doc, unit.action.name, unit.estimator, unit.first) not in there
            for unit in pending
        )
    ]


def stored_gpus(store: Store, study: str, model: str, redone: Collection[str] = ()) -> GpuKinds:
    """Return the GPU models that made the current units of a study and model, without the actions ``redone``."""
    units = store.units(study, model, ["action", "versions"])
    kept = units.filter(pc.invert(pc.is_in(units["action"], value_set=pa.array(list(redone), pa.string()))))
    return GpuKinds.of_units(kept["versions"].unique().to_pylist())


def storing(made_by: Generate) -> GenerateInto:
    """Have what generates units store them from this process."""

    def generate_into(store: Store, study: Study, work: Work, known: Identities) -> Generator[int, None, None]:
        with closing(made_by(study, work)) as made:
            for units in made:
                yield store_units(store, units, known, prompts=study.study.store_prompts)

    return generate_into


def store_units(store: Store, units: Sequence[Unit], known: Identities, *, prompts: bool) -> int:
    """Append units by one commit, with what they keep of the prompt if ``prompts``; returns the number of new ones.

    Raises:
        InputError: the store refuses them.
        UnlikeUnitsError: they keep or read other entries than the stored units of their document and action.
        OperationError: they were not made as the store has it, or writing failed.

    """
    for unit in units:
        _check_identity(unit, known)
    return store.append_units(units if prompts else [replace(unit, kept=()) for unit in units])


def _check_identity(unit: Unit, known: Identities) -> None:
    """Refuse a unit whose identity is not the one that the store has of its revision: it changed during the run."""
    record = unit.record
    for name, value in known[record["study"], record["action"], record["action_revision"]].columns.items():
        if record[name] != value:
            raise _OtherIdentityError(
                f"unit {unit_name(record)}: {name} is {record[name]}, but the store has {value} of the action; "
                "what makes its units changed during the run: run the command again"
            )
