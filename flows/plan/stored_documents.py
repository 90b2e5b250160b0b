"""A study's stored documents, which a run takes before others, and changes of their answers.

A plan freezes documents with their prompts' hashes, clusters and answers, in their order. A later run takes these
documents first, whatever the source's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvdrift.flows.plan.frozen_plan import FrozenPlan, find_plan
from kvdrift.generator.documents.answers import task_scoring
from kvdrift.generator.documents.source import HeldDocument, HeldDocuments
from kvdrift.log.forgotten import forgotten_documents
from kvdrift.log.store import Store
from kvdrift.schema.document import SPLITS, Document
from kvdrift.schema.study import Study

if TYPE_CHECKING:
    from kvdrift.flows.material import Material

Row = dict[str, Any]

CHANGEABLE = ("answers", "scoring", "cluster")
"""The properties of a document that its source may correct; the prompt stays, so nothing is generated anew."""


def held_documents(store: Store, study: Study) -> HeldDocuments:
    """Return a study's stored documents: those of its plan in the plan's order, then all others.

    If the study's settings differ from the stored settings, there are none, since its documents differ. With them come
    the documents that were removed for good.
    """
    model = study.model.id
    forgotten = forgotten_documents(store.location).of(study.name, model)
    rows = [row for row in store.read("studies").to_pylist() if (row["study"], row["model"]) == (study.name, model)]
    if not any(study.agrees_with(row["settings"]) or row["study_sha256"] == study.sha256 for row in rows):
        return HeldDocuments(forgotten=forgotten)
    plan = find_plan(store, study.name, model)
    places = {} if plan is None else _places(store, plan)
    stored = store.documents(study.name, model, ["doc", "split", "stratum", "task", "cluster"]).to_pylist()
    held = tuple(HeldDocument(**row, place=places.get(row["doc"])) for row in stored)
    return HeldDocuments(held, forgotten)


def _places(store: Store, plan: FrozenPlan) -> dict[str, int]:
    """Return the index of each document of a plan in its split and stratum.

    If a plan is from before plans listed documents, the evaluated documents come first.
    """
    if plan.documents is not None:
        return {row["doc"]: at for strata in plan.documents.values() for rows in strata.values()
                for at, row in enumerate(rows)}  # fmt: skip
    if plan.looks is not None:
        return {doc: at for order in plan.looks.order.values() for at, doc in enumerate(order)}
    return dict.fromkeys(store.units(plan.study, plan.model)["doc"].to_pylist(), 0)


def frozen_documents(material: Material) -> dict[str, dict[str, list[Row]]]:
    """Return the documents of a study by split and stratum, in order, in the form that a plan freezes as JSON."""
    return {
        split: {stratum: [_frozen(one) for one in own] for stratum, own in material.documents[split].items()}
        for split in SPLITS
    }


def _frozen(document: Document) -> Row:
    return {
        "doc": document.doc,
        "prompt_sha256": document.prompt_sha256,
        "cluster": document.cluster,
        "answers": list(document.answers),
        "scoring": document.scoring or None,
    }


def changed(document: Document, stored: Row) -> dict[str, tuple[Any, Any]]:
    """Return the stored and the present value of each property in ``CHANGEABLE`` that changed in the source.

    Rows from before scorings were stored have the scoring of their task.
    """
    present = {"answers": list(document.answers), "scoring": document.scoring or None, "cluster": document.cluster}
    before = {name: stored[name] for name in CHANGEABLE} | {"answers": stored["answers"] or []}
    if before["scoring"] is None and before["answers"]:
        before["scoring"] = task_scoring(stored["source"] or "", stored["task"] or "")
    if not present["answers"] or not before["answers"]:  # one side has no answers, so no score changes
        before["scoring"] = present["scoring"]
    return {name: (before[name], present[name]) for name in CHANGEABLE if before[name] != present[name]}


def changed_answers(store: Store, plan: FrozenPlan) -> bool:
    """Tell whether answers or scoring of an evaluated document differ from those that the plan froze.

    If a plan is from before plans listed documents, the first revision of the documents counts as frozen.
    """
    present = {row["doc"]: row for row in store.documents(plan.study, plan.model).to_pylist()}
    frozen = plan.evaluated_documents or {
        row["doc"]: row
        for row in store.read("documents").to_pylist()
        if (row["study"], row["model"]) == (plan.study, plan.model)
        and row["split"] == "evaluation" and not row["document_revision"]
    }  # fmt: skip
    return any(_scored_by(present[doc]) != _scored_by(row | _origin(present[doc])) for doc, row in frozen.items())


def _origin(row: Row) -> Row:
    return {name: row[name] for name in ("source", "task")}


def _scored_by(row: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """Return a document's answers and the rule that scores them."""
    answers = tuple(row["answers"] or ())
    return answers, (row["scoring"] or task_scoring(row["source"] or "", row["task"] or "")) if answers else None
