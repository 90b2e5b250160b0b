"""A study's parameters, documents, actions, identities and prompts as rows of its store."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from kvdrift.flows.material import Material
from kvdrift.flows.plan.stored_documents import CHANGEABLE, changed
from kvdrift.generator.actions import Action
from kvdrift.generator.documents.answers import find_records
from kvdrift.generator.engines.registry import tokenizer_location
from kvdrift.generator.finite.model import finite_model
from kvdrift.generator.finite.study_systems import exact_value_rows
from kvdrift.generator.identity import IDENTITY_COLUMNS, ActionIdentity
from kvdrift.generator.transformer.files.tokenizer import token_reader
from kvdrift.log.forgotten import forgotten_documents
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import current_actions, newest_revisions
from kvdrift.schema.document import SPLITS, Document
from kvdrift.schema.estimate_tables import EXACT_VALUES
from kvdrift.schema.study import FINITE_STATE, Study
from kvdrift.schema.tables import ACTIONS, DOCUMENTS, IDENTITIES, STUDIES


def record_material(store: Store, material: Material, planned_actions: list[str] | None) -> None:
    """Write study parameters, documents and actions; existing rows stay.

    A document whose answers, scoring or cluster have changed gets a further revision. A new action outside the plan's
    ``planned_actions`` counts as added after it; None if there is no plan yet.
    """
    study, model = material.study, material.model_id
    parameters = {
        "study": study.name,
        "model": model,
        "seed": study.study.seed,
        "study_sha256": study.sha256,
        "revision": study.model.revision,
        "settings": study.settings,
        **asdict(study.law),
        **asdict(study.window_values),
    } | _moved_settings(store, study)
    store.append_rows("studies", pa.Table.from_pylist([parameters], schema=STUDIES.schema))
    store.append_rows("documents", pa.Table.from_pylist(document_rows(store, material), schema=DOCUMENTS.schema))
    stored = store.read("actions")
    there, revisions = current_actions(stored, study.name), newest_revisions(stored)
    actions = []
    for action in material.actions:
        prespecified = planned_actions is None or action.control or action.name in planned_actions
        if action.name in there:  # of the newest plan at that time
            prespecified = there[action.name]["prespecified"]
        revision = revisions.get((study.name, action.name), -1) + (action.name not in there)
        actions.append(action.row(study.name, prespecified=prespecified, revision=revision))
    store.append_rows("actions", pa.Table.from_pylist(actions, schema=ACTIONS.schema))
    if material.study.model.kind == FINITE_STATE:
        forgotten = forgotten_documents(store.location).of(study.name, model)
        systems = [one for one in finite_model(material.study).systems.values() if not forgotten.has(one.name)]
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
    """Return the recorded identity of each action and revision of a study and model."""
    return {
        (row["action"], row["action_revision"]): ActionIdentity(**{name: row[name] for name in IDENTITY_COLUMNS})
        for row in store.read("identities").to_pylist()
        if (row["study"], row["model"]) == (study, model)
    }


def _moved_settings(store: Store, study: Study) -> dict[str, Any]:
    """Return the stored hash and settings, which stay if the study file names the same systems by another path."""
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
