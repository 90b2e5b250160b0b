"""Generation of the units that a study lacks, and their storage.

If a document fails, the others are generated all the same. Documents are generated side by side, so several fail at
first. Then each is tried alone until the faulty document is known, and the rest are generated together again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.generate.stored_material import stored_identities
from kvdrift.generator.actions import Action
from kvdrift.generator.generation import PendingUnit, Work
from kvdrift.generator.identity import ActionIdentity, GpuKinds
from kvdrift.log.store import Store, Unit
from kvdrift.log.units.unit import unit_name, unit_number
from kvdrift.schema.document import Document
from kvdrift.schema.errors import (
    DamagedStoreError,
    InputError,
    KvdriftError,
    NobodyLeftError,
    OperationError,
    UnlikeUnitsError,
    is_disk_fault,
)
from kvdrift.schema.progress import Progress
from kvdrift.schema.study import Study

IN_A_ROW = 3
"""The number of documents that may fail in a row; generation then stops, since the cause lies elsewhere."""

Identities = Mapping[tuple[str, str, int], ActionIdentity]
"""The identity of each study, action and revision, as the store has it."""

Generate = Callable[[Study, Work], Generator[list[Unit], None, None]]
"""Makes the units of a study's work: yields one list for each document, in any order."""

GenerateInto = Callable[[Store, Study, Work, Identities], Generator[tuple[int, int], None, None]]
"""Makes the units of a study's work and stores them: yields of each commit the numbers of documents and of new units.

A document is yielded when its commit is durable. Units that were not made by the identities are refused.
"""


Identify = Callable[..., Callable[[Action], ActionIdentity]]
"""Returns the identity by action of a study's units, whoever generates them.

Its arguments are the study and ``required``, without which unknown weights are None.
"""


class Trying:
    """The parts of some work that are still to be tried.

    If several documents fail in a row, the cause lies elsewhere, and no more documents are tried.
    """

    def __init__(self, work: Work) -> None:
        self._documents = len(work)
        self._parts = deque([work])
        self._failed: dict[str, KvdriftError] = {}
        self._in_a_row = 0
        self._any = False

    def parts(self) -> Iterator[Work]:
        """Yield the parts to try, as long as there are any."""
        while self._parts:
            yield self._parts.popleft()

    def document_done(self) -> None:
        """Count a document that was generated."""
        self._in_a_row, self._any = 0, True

    def part_failed(self, left: Work, error: KvdriftError) -> None:
        """Record that a part failed; ``left`` are its documents that were not generated."""
        if len(left) > 1:
            self._parts.extendleft([one] for one in reversed(left))
            return
        self._failed[left[0][0].doc] = error
        self._in_a_row += 1
        rest = [*itertools.chain(*self._parts)] if self._in_a_row < IN_A_ROW else []
        self._parts = deque([rest] if rest else [])

    def check(self) -> None:
        """Check that no document failed.

        Raises:
            KvdriftError: The error itself if nothing was generated or there is one document; else a line that names
                the documents that failed.
        """
        if not self._failed:
            return
        if self._documents == 1 or not self._any:
            raise next(iter(self._failed.values()))
        said = [
            str(error) if doc in str(error) else f"document '{doc}': {error}" for doc, error in self._failed.items()
        ]
        what = f"{len(said)} of {self._documents} documents failed; everything else that could be generated is stored"
        of_user = all(isinstance(error, InputError) for error in self._failed.values())
        raise (InputError if of_user else OperationError)(f"{what}: {'; '.join(said)}")


class _OtherIdentityError(OperationError):
    """The identity of units changed during the run."""


_ENDING = (
    DamagedStoreError,
    NobodyLeftError,
    UnlikeUnitsError,
    _OtherIdentityError,
)  # every other document would fail too


def generate(store: Store, study: Study, work: Work, made_by: GenerateInto, stage: str, progress: Progress) -> int:
    """Generate work and store it; return the number of new units.

    A unit of another law names its study.

    If a document fails, the others are still generated. If several documents fail in a row, the cause
    lies elsewhere, and no more documents are tried.

    Raises:
        InputError: a model, an endpoint or the store refuses the work or some documents.
        OperationError: the work or some documents failed, or units came with another identity than the store's.
    """
    if not work:
        return 0
    known = {
        (name, *key): identity
        for name in studies_of(study, work)
        for key, identity in stored_identities(store, name, study.model.id).items()
    }
    asked = {(unit.study(study.name), unit.action.name, unit.revision) for _, pending in work for unit in pending}
    for name, action, revision in sorted(asked - known.keys()):
        raise InputError(
            f"action '{action}' of study '{name}': the origin of its units of revision {revision} is unknown; "
            f"kvdrift run --redo {action} generates them again"
        )
    new, trying = 0, Trying(work)
    progress.begin(stage, len(work), "documents")
    for part in trying.parts():
        try:
            with closing(made_by(store, study, part, known)) as stored:
                for documents, units in stored:
                    new += units
                    trying.document_done()
                    progress.advance(documents)
        except KvdriftError as error:
            left = not_stored(store, study, part)
            if not left or isinstance(error, _ENDING) or is_disk_fault(error):
                raise
            trying.part_failed(left, error)
    trying.check()
    return new


def studies_of(study: Study, work: Work) -> list[str]:
    """Return the names of the studies whose units are in some work, studies of other laws included."""
    return list(dict.fromkeys(unit.study(study.name) for _, pending in work for unit in pending))


def not_stored(store: Store, study: Study, work: Work) -> Work:
    """Return the documents of some work for which the store lacks units, each with the units that it lacks."""
    records = [[_span(study, document, unit) for unit in pending] for document, pending in work]
    there = store.stored_units([*itertools.chain(*records)])
    lacking = [
        (document, [unit for unit, record in zip(pending, own, strict=True) if unit_number(record) not in there])
        for (document, pending), own in zip(work, records, strict=True)
    ]
    return [(document, pending) for document, pending in lacking if pending]


def _span(study: Study, document: Document, unit: PendingUnit) -> dict[str, Any]:
    """Return what tells a unit of a document from all others, by the names of ``SPAN``."""
    return {
        "study": unit.study(study.name), "model": study.model.id, "doc": document.doc, "action": unit.action.name,
        "action_revision": unit.revision, "estimator": unit.estimator, "first_replicate": unit.first,
        "replicates": unit.count,
    }  # fmt: skip


def stored_gpus(store: Store, study: str, model: str, redone: Collection[str] = ()) -> GpuKinds:
    """Return the GPU models that made the current units of a study and model, without the actions ``redone``."""
    units = store.units(study, model, ["action", "versions"])
    kept = units.filter(pc.invert(pc.is_in(units["action"], value_set=pa.array(list(redone), pa.string()))))
    return GpuKinds.of_units(kept["versions"].unique().to_pylist())


def storing(made_by: Generate) -> GenerateInto:
    """Wrap a generator of units so that this process stores them, a document by one commit."""

    def generate_into(
        store: Store, study: Study, work: Work, known: Identities
    ) -> Generator[tuple[int, int], None, None]:
        with closing(made_by(study, work)) as made:
            for units in made:
                yield 1, store_units(store, units, known, prompts=study.study.store_prompts)

    return generate_into


def store_units(store: Store, units: Sequence[Unit], known: Identities, *, prompts: bool) -> int:
    """Append units by one commit, with their kept prompt entries if ``prompts``; return the number of new units.

    Raises:
        InputError: the store refuses the units.
        UnlikeUnitsError: the units keep or read other entries than the stored units of the same document and action.
        OperationError: the units have another identity than the store's, or writing failed.
    """
    for unit in units:
        _check_identity(unit, known)
    return store.append_units(units if prompts else [replace(unit, kept=()) for unit in units])


def _check_identity(unit: Unit, known: Identities) -> None:
    """Refuse a unit whose identity differs from the stored identity of its revision: it changed during the run."""
    record = unit.record
    for name, value in known[record["study"], record["action"], record["action_revision"]].columns.items():
        if record[name] != value:
            raise _OtherIdentityError(
                f"unit {unit_name(record)}: {name} is {record[name]}, but the store has {value} of the action; "
                "the settings or files behind the action changed during the run: run the command again"
            )
