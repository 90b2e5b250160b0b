"""What a study consists of before anything is generated: documents, actions and parameters, written to the store."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from generator.actions import Action, build_actions
from generator.eviction import kept_entries
from generator.sources import stratum_documents
from schema.document import SPLITS, Document
from schema.errors import InputError, PlanError, nearest
from schema.store import Store
from schema.study import CONTROL_REPLICATES, Study
from schema.tables import ACTIONS, DOCUMENTS, STUDIES
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
    documents: dict[str, dict[str, list[Document]]] = {split: {} for split in SPLITS}
    for section in study.documents:
        for split, made in stratum_documents(section, study.study.seed).items():
            documents[split][section.stratum_name] = made
    material = Material(study, documents, actions)
    _check_distinct(material)
    for split in SPLITS:
        for document in material.of_split(split):
            for action in actions:
                where = f"action '{action.name}', document '{document.doc}'"
                kept_entries(action.selector, action.retention, document.prompt_tokens, where)
    return material


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
        "horizon": study.study.horizon,
        "seed": study.study.seed,
        "study_sha256": study.sha256,
        **study.window_values,
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


def _check_distinct(material: Material) -> None:
    strata: dict[str, str] = {}
    for split in SPLITS:
        for document in material.of_split(split):
            other = strata.setdefault(document.doc, document.stratum)
            if other != document.stratum:
                raise InputError(f"document '{document.doc}' is in two strata, '{other}' and '{document.stratum}'")


def _check_endpoints(study: Study) -> None:
    for name in study.plan.primary:
        if name not in QUANTITIES:
            raise InputError(f"plan.primary: unknown quantity '{name}'; {nearest(name, QUANTITIES)}")
        if QUANTITIES[name].profile:
            raise InputError(f"plan.primary: '{name}' is a profile over positions or lags; name a single quantity")
    if len(study.actions) == 1 and any(QUANTITIES[name].kind == "contrast" for name in study.plan.primary):
        raise InputError("plan.primary names a contrast, but the study has one action: add another action")


def _refuse_other_study(store: Store, study: Study) -> None:
    for row in store.read("studies").to_pylist():
        if row["study"] != study.name or row["study_sha256"] == study.sha256:
            continue
        given = {"model.id": study.model.id, "horizon": study.study.horizon, "seed": study.study.seed}
        stored = {"model.id": row["model"], "horizon": row["horizon"], "seed": row["seed"]}
        changed = [f"{name} {stored[name]} -> {given[name]}" for name in given if given[name] != stored[name]]
        what = ", ".join(changed) or "documents, device, dtype or revision"
        raise PlanError(
            f"study '{study.name}' is in this store with other settings ({what}); "
            "give the changed study a new name, or use another --store"
        )
