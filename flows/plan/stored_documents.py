"""A study's stored documents, which a run takes before others, and changes of their answers.

A plan freezes documents with their prompts' hashes, clusters and answers, in their order. A later run takes these
documents first, whatever the source's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvdrift.flows.plan.frozen_plan import FrozenPlan, find_plan
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
    frozen = {} if plan is None else plan.documents
    places = {row["doc"]: at for strata in frozen.values() for rows in strata.values() for at, row in enumerate(rows)}
    stored = store.documents(study.name, model, ["doc", "split", "stratum", "task", "cluster"]).to_pylist()
    held = tuple(HeldDocument(**row, place=places.get(row["doc"])) for row in stored)
    return HeldDocuments(held, forgotten)


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
    """Return the stored and the present value of each property in ``CHANGEABLE`` that changed in the source."""
    present = {"answers": list(document.answers), "scoring": document.scoring or None, "cluster": document.cluster}
    before = {name: stored[name] for name in CHANGEABLE} | {"answers": stored["answers"] or []}
    if not present["answers"] or not before["answers"]:  # one side has no answers, so no score changes
        before["scoring"] = present["scoring"]
    return {name: (before[name], present[name]) for name in CHANGEABLE if before[name] != present[name]}


def changed_answers(store: Store, plan: FrozenPlan) -> bool:
    """Tell whether answers or scoring of an evaluated document differ from those that the plan froze."""
    present = {row["doc"]: row for row in store.documents(plan.study, plan.model).to_pylist()}
    return any(_scored_by(present[doc]) != _scored_by(row) for doc, row in plan.evaluated_documents.items())


def _scored_by(row: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """Return a document's answers and the rule that scores them."""
    answers = tuple(row["answers"] or ())
    return answers, row["scoring"] if answers else None
