"""The storage of a study's parameters, documents, actions, identities, prompts and units, and the units that it lacks.

If a document fails, the others are generated all the same. Documents are generated side by side, so several fail
together at first. Then each is tried alone until the faulty document is known, and the rest are generated together
again.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.material import Material
from kvdrift.flows.plan.stored_documents import CHANGEABLE, changed
from kvdrift.generator.actions import Action
from kvdrift.generator.documents.answers import find_records
from kvdrift.generator.engines.registry import tokenizer_location
from kvdrift.generator.finite.model import finite_model
from kvdrift.generator.finite.study_systems import exact_value_rows
from kvdrift.generator.generation import PendingUnit, Work
from kvdrift.generator.identity import IDENTITY_COLUMNS, ActionIdentity, GpuKinds
from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.log.forgotten import forgotten_documents
from kvdrift.log.store import Store, Unit
from kvdrift.log.units.revisions import current_actions, newest_revisions
from kvdrift.log.units.unit import unit_name, unit_number
from kvdrift.schema.document import SPLITS, Document
from kvdrift.schema.errors import (
    DamagedStoreError,
    InputError,
    KvdriftError,
    NobodyLeftError,
    OperationError,
    UnlikeUnitsError,
    is_disk_fault,
)
from kvdrift.schema.estimate_tables import EXACT_VALUES
from kvdrift.schema.progress import Progress
from kvdrift.schema.study import FINITE_STATE, Study
from kvdrift.schema.tables import ACTIONS, DOCUMENTS, IDENTITIES, STUDIES


def record_material(store: Store, material: Material, planned_actions: list[str] | None) -> None:
    """Write study parameters, documents and actions; existing rows stay.

    A document whose answers, scoring or cluster have changed gets a further revision. A new action outside of
    ``planned_actions``, those of the plan, counts as added after the plan; ``planned_actions`` is None without a plan.
    """
    study, model = material.study, material.model_id
    parameters = {
        "study": study.name,
        "model": model,
        "seed": study.study.seed,
        "study_sha256": study.sha256,
        "revision": study.model.revision,
        "settings": study.settings,
        **asdict(study.sampling),
        **asdict(study.window_values),
    } | _moved_settings(store, study)
    store.append_rows("studies", pa.Table.from_pylist([parameters], schema=STUDIES.schema))
    store.append_rows("documents", pa.Table.from_pylist(document_rows(store, material), schema=DOCUMENTS.schema))
    stored = store.read("actions")
    there, revisions = current_actions(stored, study.name), newest_revisions(stored)
    actions = []
    for action in material.actions:
        prespecified = planned_actions is None or action.control or action.name in planned_actions
        if action.name in there:  # stays as stored, by the newest plan of that time
            prespecified = there[action.name]["prespecified"]
        revision = revisions.get((study.name, action.name), -1) + (action.name not in there)
        actions.append(action.row(study.name, prespecified=prespecified, revision=revision))
    store.append_rows("actions", pa.Table.from_pylist(actions, schema=ACTIONS.schema))
    if material.study.model.kind == FINITE_STATE:
        forgotten = forgotten_documents(store.location).of(study.name, model)
        systems = [system for system in finite_model(material.study).systems.values() if not forgotten.has(system.name)]
        current = {row["action"]: row["action_revision"] for row in actions}
        exact = [row for system in systems for row in exact_value_rows(study.name, model, system, current)]
        store.append_rows("exact_values", pa.Table.from_pylist(exact, schema=EXACT_VALUES.schema))


def record_identities(store: Store, material: Material, identity: Callable[[Action], ActionIdentity]) -> None:
    """Write the identity of each action's current revision, before its first unit is generated.

    The identity of units that another generator stored stays unknown.
    """
    study, model = material.study.name, material.model_id
    newest, stored = newest_revisions(store.read("actions")), stored_identities(store, study, model)
    units = store.units(study, model)
    made = set(zip(units["action"].to_pylist(), units["action_revision"].to_pylist(), strict=True))
    rows = []
    for action in material.actions:
        key = (action.name, newest[study, action.name])
        if key in stored or key not in made:
            named = {"study": study, "model": model, "action": action.name, "action_revision": key[1]}
            rows.append(named | identity(action).columns)
    store.append_rows("identities", pa.Table.from_pylist(rows, schema=IDENTITIES.schema))


def stored_identities(store: Store, study: str, model: str) -> dict[tuple[str, int], ActionIdentity]:
    """Return the recorded identities of a study and model, by (action, revision)."""
    return {
        (row["action"], row["action_revision"]): ActionIdentity(**{name: row[name] for name in IDENTITY_COLUMNS})
        for row in store.read("identities").to_pylist()
        if (row["study"], row["model"]) == (study, model)
    }


def _moved_settings(store: Store, study: Study) -> dict[str, Any]:
    """Return the stored ``study_sha256`` and ``settings`` if the stored settings agree with the study; else {}.

    The stored values replace those of the study file, which may name the same systems by another path.
    """
    for row in store.read("studies").to_pylist():
        if (row["study"], row["model"]) == (study.name, study.model.id) and study.agrees_with(row["settings"]):
            return {name: row[name] for name in ("study_sha256", "settings")}
    return {}


def document_rows(store: Store, material: Material) -> list[dict[str, Any]]:
    """Return the rows of a study's documents: stored rows, new rows, and further revisions of changed documents."""
    study, model = material.study.name, material.model_id
    stored = {row["doc"]: row for row in store.documents(study, model).to_pylist()}
    newest = max((row["document_revision"] for row in stored.values()), default=0)
    rows = []
    for split in SPLITS:
        for document in material.of_split(split):
            row = _document_row(study, model, split, document)
            if (there := stored.get(document.doc)) is not None:
                corrected = changed(document, there)
                kept = there if not corrected else {"document_revision": newest + 1}
                row |= {name: kept[name] for name in (*CHANGEABLE, "document_revision") if name in kept}
            rows.append(row)
    return rows


def _document_row(study: str, model: str, split: str, document: Document) -> dict[str, Any]:
    return {
        "study": study,
        "model": model,
        "doc": document.doc,
        "split": split,
        "stratum": document.stratum,
        "cluster": document.cluster,
        "task": document.task,
        "source": document.source,
        "prompt_tokens": document.prompt_tokens,
        "prompt_sha256": document.prompt_sha256,
        "answers": list(document.answers),
        "scoring": document.scoring or None,
        "document_revision": 0,
    }


def record_prompts(store: Store, material: Material) -> int:
    """Write the prompts of documents that the store has rows of, but no prompt yet; return how many are new."""
    study, model = material.study.name, material.model_id
    revisions = store.documents(study, model, ["doc", "document_revision"])
    revision_of = dict(zip(*(revisions[name].to_pylist() for name in ("doc", "document_revision")), strict=True))
    known = store.prompts_of(study, model)
    missing = [
        document for document in material.every_document if (document.doc, revision_of[document.doc]) not in known
    ]
    if not missing:
        return 0
    location = tokenizer_location(material.study.model)
    read = token_reader(location, revision=material.study.model.revision)
    text = None if read is None else functools.cache(read)
    names = {"study": study, "model": model, "action": None, "action_revision": 0, "step": 0}
    rows = []
    for document in missing:
        records = None
        if text is not None:
            places = find_records([text(token) for token in document.tokens], document.answers, document.scoring)
            records = [asdict(place) for place in places]
        rows.append(_row(document, records) | names | {"document_revision": revision_of[document.doc]})
    return store.append_prompts(rows)


def _row(document: Document, records: list[dict[str, int]] | None) -> dict[str, Any]:
    tokens, turns = list(document.tokens), [asdict(turn) for turn in document.turns] or None
    return {
        "doc": document.doc, "tokens": tokens, "records": records, "layers": None, "pairs": None, "kept": None,
        "turns": turns,
    }  # fmt: skip


IN_A_ROW = 3
"""The number of documents in a row after whose failure generation stops, since the cause then lies elsewhere."""

Identities = Mapping[tuple[str, str, int], ActionIdentity]
"""The identity of each study, action and revision, as the store has it."""

Generate = Callable[[Study, Work], Generator[list[Unit], None, None]]
"""Makes the units of a study's work: yields one list for each document, in any order."""

GenerateInto = Callable[[Store, Study, Work, Identities], Generator[tuple[int, int], None, None]]
"""Makes the units of a study's work and stores them: yields of each commit the numbers of documents and of new units.

A document is yielded when its commit is durable. Units with an identity other than the store's are refused.
"""


Identify = Callable[..., Callable[[Action], ActionIdentity]]
"""Returns the function from an action to the identity of its units.

Arguments are the study and ``required``; unless an identity is required, weights that are not known yet are None.
"""


class Trying:
    """The parts of some work that are still to be tried.

    If several documents fail in a row, the documents are not the cause, and no more documents are tried.
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
            self._parts.extendleft([document_work] for document_work in reversed(left))
            return
        self._failed[left[0][0].doc] = error
        self._in_a_row += 1
        rest = [*itertools.chain(*self._parts)] if self._in_a_row < IN_A_ROW else []
        self._parts = deque([rest] if rest else [])

    def check(self) -> None:
        """Check that no document failed.

        Raises:
            KvdriftError: The first error itself if nothing was generated or the work has a single document; else a line
                that names the documents that failed.
        """
        if not self._failed:
            return
        if self._documents == 1 or not self._any:
            raise next(iter(self._failed.values()))
        failures = [
            str(error) if doc in str(error) else f"document '{doc}': {error}" for doc, error in self._failed.items()
        ]
        what = (
            f"{len(failures)} of {self._documents} documents failed; everything else that could be generated is stored"
        )
        of_user = all(isinstance(error, InputError) for error in self._failed.values())
        raise (InputError if of_user else OperationError)(f"{what}: {'; '.join(failures)}")


class _OtherIdentityError(OperationError):
    """The identity of units changed during the run."""


_ENDING = (
    DamagedStoreError,
    NobodyLeftError,
    UnlikeUnitsError,
    _OtherIdentityError,
)  # every other document would fail too


def generate(store: Store, study: Study, work: Work, made_by: GenerateInto, stage: str, progress: Progress) -> int:
    """Generate work by ``made_by``, which also stores the units; return the number of new units.

    Units may be of studies that differ from ``study`` in temperature alone; such units name their study. ``stage``
    names the work for ``progress``. If a document fails, the others are still generated, unless several fail in a row.

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
    keys = {(unit.study(study.name), unit.action.name, unit.revision) for _, pending in work for unit in pending}
    for name, action, revision in sorted(keys - known.keys()):
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
    """Return the names of the studies that have units in ``work``; they may differ from ``study`` in temperature."""
    return list(dict.fromkeys(unit.study(study.name) for _, pending in work for unit in pending))


def not_stored(store: Store, study: Study, work: Work) -> Work:
    """Return the documents of some work for which the store lacks units, each with the units that it lacks."""
    records = [[_span(study, document, unit) for unit in pending] for document, pending in work]
    there = store.stored_units([*itertools.chain(*records)])
    lacking = [
        (document, [unit for unit, record in zip(pending, spans, strict=True) if unit_number(record) not in there])
        for (document, pending), spans in zip(work, records, strict=True)
    ]
    return [(document, pending) for document, pending in lacking if pending]


def _span(study: Study, document: Document, unit: PendingUnit) -> dict[str, Any]:
    """Return the columns ``SPAN`` of a document's pending unit; their values distinguish the unit from all others."""
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
    """Wrap a generator of units so that this process stores the units, those of each document by one commit."""

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
    """Refuse a unit whose identity differs from its action's stored identity, as when files changed during the run."""
    record = unit.record
    for name, value in known[record["study"], record["action"], record["action_revision"]].columns.items():
        if record[name] != value:
            raise _OtherIdentityError(
                f"unit {unit_name(record)}: {name} is {record[name]}, but the store has {value} for the action; "
                "the settings or files behind the action changed during the run: run the command again"
            )
