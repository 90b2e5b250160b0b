"""What a study consists of before anything is generated: documents, actions and parameters, written to the store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from generator.actions import Action, build_actions
from generator.documents.registry import SOURCES, check_source, choose_candidates, stratum_documents
from generator.finite.model import finite_model
from generator.finite.study_systems import exact_value_rows, study_systems, system_document
from generator.transformer.decoder import check_positions
from generator.transformer.local_folders import local_configuration
from generator.transformer.tokenizer import load_tokenizer
from schema.document import SPLITS, Document
from schema.errors import InputError, PlanError, nearest
from schema.store.store import Store
from schema.study import CONTROL_REPLICATES, FINITE_STATE, Study
from schema.tables import ACTIONS, DOCUMENTS, EXACT_VALUES, STUDIES
from stats.quantities import QUANTITIES


@dataclass(frozen=True)
class Material:
    """A study with its documents and actions made: everything that generation needs but the model."""

    study: Study
    documents: dict[str, dict[str, list[Document]]]  # split -> stratum -> documents in the source's order
    actions: list[Action]

    @property
    def model_id(self) -> str:
        """The model id as the study file gives it."""
        return self.study.model.id

    def of_split(self, split: str) -> list[Document]:
        """All documents of a split, stratum by stratum."""
        return [document for documents in self.documents[split].values() for document in documents]

    @cached_property
    def measured_actions(self) -> list[str]:
        """Names of the actions that are compared: all but the control."""
        return [action.name for action in self.actions if not action.control]


def replicates_of(action: Action, replicates: int) -> int:
    """How many replicates an action gets: controls need no more than ``CONTROL_REPLICATES``."""
    return min(replicates, CONTROL_REPLICATES) if action.control else replicates


def gather_material(study: Study) -> Material:
    """Make documents and actions; InputError for anything in the study file that cannot be done."""
    actions = build_actions(study)
    _check_endpoints(study)
    if study.model.kind == FINITE_STATE:
        return _finite_material(study, actions)

    @cache
    def tokenizer() -> Any:
        return load_tokenizer(study.model.id, revision=study.model.revision)

    documents: dict[str, dict[str, list[Document]]] = {split: {} for split in SPLITS}
    for section in study.documents:
        for split, made in stratum_documents(section, study.study.seed, tokenizer).items():
            documents[split][section.stratum_name] = made
    material = Material(study, documents, actions)
    everything = [document for split in SPLITS for document in material.of_split(split)]
    _check_distinct((document.doc, document.stratum) for document in everything)
    for document in everything:
        for action in actions:
            action.kept_entries(document.prompt_tokens, f"document '{document.doc}'")
    return material


def _finite_material(study: Study, actions: list[Action]) -> Material:
    """Systems as documents, with their quantities by enumeration."""
    systems = study_systems(study)
    documents = {
        split: {stratum: [system_document(system, stratum) for system in made] for stratum, made in strata.items()}
        for split, strata in systems.items()
    }
    material = Material(study, documents, actions)
    _check_distinct((document.doc, document.stratum) for split in SPLITS for document in material.of_split(split))
    return material


@dataclass(frozen=True)
class Outline:
    """What can be said of a study before its texts are read and tokenized.

    ``lengths`` are prompt tokens, split by split and stratum by stratum: exact where the source needs no tokenizer,
    and the section's nominal length in ``nominal`` strata. ``absent`` tells which strata's files are not here.
    ``positions`` are the model's, None where its configuration is not here.
    """

    study: Study
    actions: list[Action]
    lengths: dict[str, dict[str, list[int]]]
    nominal: list[str]
    absent: dict[str, Path]
    positions: int | None


def outline_study(study: Study) -> Outline:
    """The outline of a study; nothing is tokenized or downloaded. InputError as far as it shows without that."""
    actions = build_actions(study)
    _check_endpoints(study)
    positions = (local_configuration(study.model.id, study.model.revision) or {}).get("max_position_embeddings")
    outline = Outline(study, actions, {split: {} for split in SPLITS}, [], {}, positions)
    names: list[tuple[str, str]] = []
    if study.model.kind == FINITE_STATE:
        for split, strata in study_systems(study).items():
            outline.lengths[split] = {stratum: [0] * len(systems) for stratum, systems in strata.items()}
        return outline
    for section in study.documents:
        stratum = section.stratum_name
        check_source(section)
        here = section.path is None or Path(section.path).expanduser().exists()
        if not SOURCES[section.source].reads_text:
            made = stratum_documents(section, study.study.seed)
            names += [(document.doc, stratum) for documents in made.values() for document in documents]
            lengths = {split: [document.prompt_tokens for document in made[split]] for split in SPLITS}
            for document in (document for documents in made.values() for document in documents):
                check_positions(document.doc, document.prompt_tokens, study.study.horizon, positions)
        else:
            if here:
                chosen = choose_candidates(section, study.study.seed)
                names += [(item.doc, stratum) for items in chosen.values() for item in items]
            else:
                outline.absent[stratum] = Path(str(section.path))
            outline.nominal.append(stratum)
            wanted = {"development": section.development, "evaluation": section.evaluation}
            lengths = {split: [section.length] * count for split, count in wanted.items()}
        for split, tokens in lengths.items():
            outline.lengths[split][stratum] = tokens
            for action in actions:
                for entries in set(tokens):
                    action.kept_entries(entries, f"stratum '{stratum}'")
    _check_distinct(names)
    return outline


def record_material(store: Store, material: Material, planned_actions: list[str] | None) -> None:
    """Write study parameters, documents and actions; rows already there stay.

    ``planned_actions`` are those of the frozen plan, None before it: an action that is not among them is exploratory.
    InputError where the store holds a study of this name with other parameters.
    """
    study, model = material.study, material.model_id
    _refuse_other_study(store, study)
    parameters = {
        "study": study.name,
        "model": model,
        "seed": study.study.seed,
        "study_sha256": study.sha256,
        "revision": _recorded_revision(store, study),
        **asdict(study.window_values),
    }
    store.append_rows("studies", pa.Table.from_pylist([parameters], schema=STUDIES.schema))
    rows = [
        _document_row(study.name, model, split, document) for split in SPLITS for document in material.of_split(split)
    ]
    store.append_rows("documents", pa.Table.from_pylist(rows, schema=DOCUMENTS.schema))
    actions = []
    for action in material.actions:
        prespecified = planned_actions is None or action.control or action.name in planned_actions
        actions.append(action.row(study.name, prespecified=prespecified))
    store.append_rows("actions", pa.Table.from_pylist(actions, schema=ACTIONS.schema))
    if material.study.model.kind == FINITE_STATE:
        systems = finite_model(material.study).systems.values()
        exact = [row for system in systems for row in exact_value_rows(study.name, model, system)]
        store.append_rows("exact_values", pa.Table.from_pylist(exact, schema=EXACT_VALUES.schema))


def _recorded_revision(store: Store, study: Study) -> str | None:
    """The model's revision; null where the store has the study's row from before there was a column for it.

    The row's ``study_sha256`` covers the revision, so a stored row cannot be of another one.
    """
    for row in store.read("studies").to_pylist():
        if (row["study"], row["model"]) == (study.name, study.model.id):
            return None if row["revision"] is None else str(row["revision"])
    return study.model.revision


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
    }


def _check_distinct(names: Iterable[tuple[str, str]]) -> None:
    strata: dict[str, str] = {}
    for name, stratum in names:
        if (other := strata.setdefault(name, stratum)) != stratum:
            raise InputError(f"document '{name}' is in two strata, '{other}' and '{stratum}'")


def _check_endpoints(study: Study) -> None:
    for name in study.plan.primary:
        if name not in QUANTITIES:
            raise InputError(f"plan.primary: unknown quantity '{name}'; {nearest(name, QUANTITIES)}")
        if QUANTITIES[name].profile:
            raise InputError(f"plan.primary: '{name}' is a profile over positions or lags; name a single quantity")
    if len(study.actions) == 1 and any(QUANTITIES[name].kind == "contrast" for name in study.plan.primary):
        raise InputError("plan.primary names a contrast, but the study has one action: add another action")
    contrasts = sum(QUANTITIES[name].kind == "contrast" for name in study.plan.primary)
    endpoints = len(study.plan.primary) * len(study.actions) - contrasts
    if study.plan.family_size is not None and study.plan.family_size < endpoints:
        raise InputError(f"plan.family_size = {study.plan.family_size}: this model alone has {endpoints} endpoints")


def _refuse_other_study(store: Store, study: Study) -> None:
    for row in store.read("studies").to_pylist():
        if row["study"] != study.name or row["study_sha256"] == study.sha256:
            continue
        given = {"model.id": study.model.id, "horizon": study.study.horizon, "seed": study.study.seed}
        stored = {"model.id": row["model"], "horizon": row["horizon"], "seed": row["seed"]}
        changed = [f"{name} {stored[name]} -> {given[name]}" for name in given if given[name] != stored[name]]
        if study.several_models and changed == [f"model.id {row['model']} -> {study.model.id}"]:
            continue  # another model of the same file
        what = ", ".join(changed) or "documents, device, dtype or revision"
        raise PlanError(
            f"study '{study.name}' is in this store with other settings ({what}); "
            "give the changed study a new name, or use another --store"
        )
