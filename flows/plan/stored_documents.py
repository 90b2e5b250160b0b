"""The documents that a study has in its store, which it takes before others, and whose answers changed since.

A plan freezes documents with their prompts' hashes, clusters and answers, in their order. A later run takes these
first, whatever order the source has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flows.plan.frozen_plan import FrozenPlan, find_plan
from generator.documents.answers import task_scoring
from generator.documents.held import NOTHING_HELD, HeldDocument, HeldDocuments
from log.store import Store
from schema.document import SPLITS, Document
from schema.study import Study

if TYPE_CHECKING:
    from flows.material import Material

Row = dict[str, Any]

CHANGEABLE = ("answers", "scoring", "cluster")
"""The properties of a document that its source may correct; the prompt stays, so nothing is generated anew."""


def held_documents(store: Store, study: Study) -> HeldDocuments:
    """Return the documents that a study holds: those of its plan in the plan's order, then others that are stored.

    A study whose settings are not the stored ones holds none: its documents are others.
    """
    model = study.model.id
    rows = [row for row in store.read("studies").to_pylist() if (row["study"], row["model"]) == (study.name, model)]
    if not any(study.agrees_with(row["settings"]) or row["study_sha256"] == study.sha256 for row in rows):
        return NOTHING_HELD
    plan = find_plan(store, study.name, model)
    places = {} if plan is None else _places(store, plan)
    stored = store.documents(study.name, model, ["doc", "split", "stratum", "task"]).to_pylist()
    return HeldDocuments(tuple(HeldDocument(**row, place=places.get(row["doc"])) for row in stored))


def _places(store: Store, plan: FrozenPlan) -> dict[str, int]:
    """The place of each document of a plan in its split and stratum.

    Of a plan that was frozen before plans had documents, those that were evaluated come first.
    """
    if plan.documents is not None:
        return {row["doc"]: at for strata in plan.documents.values() for rows in strata.values()
                for at, row in enumerate(rows)}  # fmt: skip
    if plan.looks is not None:
        return {doc: at for order in plan.looks.order.values() for at, doc in enumerate(order)}
    return dict.fromkeys(store.units(plan.study, plan.model)["doc"].to_pylist(), 0)


def frozen_documents(material: Material) -> dict[str, dict[str, list[Row]]]:
    """Return the documents of a study by split and stratum, in their order, as a plan freezes them in JSON."""
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
    """Return the stored and the present value of each property in ``CHANGEABLE`` that a source's document has changed.

    Rows that were stored before there was a scoring have that of their task.
    """
    present = {"answers": list(document.answers), "scoring": document.scoring or None, "cluster": document.cluster}
    before = {name: stored[name] for name in CHANGEABLE} | {"answers": stored["answers"] or []}
    if before["scoring"] is None and before["answers"]:
        before["scoring"] = task_scoring(stored["source"] or "", stored["task"] or "")
    if not present["answers"] or not before["answers"]:  # nothing is scored on one side
        before["scoring"] = present["scoring"]
    return {name: (before[name], present[name]) for name in CHANGEABLE if before[name] != present[name]}


def changed_answers(store: Store, plan: FrozenPlan) -> bool:
    """Return whether a document that a plan evaluates has answers or a scoring other than the plan froze.

    Of a plan that was frozen before plans had documents, the first revision of the documents counts as frozen.
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
    """Answers and how they are scored."""
    answers = tuple(row["answers"] or ())
    return answers, (row["scoring"] or task_scoring(row["source"] or "", row["task"] or "")) if answers else None
