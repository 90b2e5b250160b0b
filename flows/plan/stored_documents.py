"""A study's stored documents: which a run takes first, whose answers changed, and whose outcomes could be seen.

A plan freezes documents with their prompts' hashes, clusters and answers, in their order. A later run takes these
documents first, whatever the source's order.

A document was seen before a plan was frozen if this study or another study had units of the same text. An action was
seen if its units were redone. A plan may rest on outcomes seen before, so these outcomes cannot confirm the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdrift.flows.plan.frozen_plan import FrozenPlan, find_plan
from kvdrift.generator.documents.registry import SOURCES
from kvdrift.generator.documents.source import HeldDocument, HeldDocuments
from kvdrift.log.forgotten import forgotten_documents
from kvdrift.log.store import Store
from kvdrift.log.units.revisions import newest_revisions
from kvdrift.schema.document import SPLITS, Document
from kvdrift.schema.study import FINITE_STATE, Study

if TYPE_CHECKING:
    from kvdrift.flows.material import Material

Row = dict[str, Any]

CHANGEABLE = ("answers", "scoring", "cluster")
"""The properties of a document that its source may correct; the prompt stays, so nothing is generated anew."""


def held_documents(store: Store, study: Study) -> HeldDocuments:
    """Return a study's stored documents: those of its plan in the plan's order, then all others.

    If the study's settings differ from the stored settings, no stored document is returned, since the documents then
    differ too. The documents that were removed for good are returned in any case.
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
        split: {
            stratum: [_frozen(document) for document in documents]
            for stratum, documents in material.documents[split].items()
        }
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
    """Return whether answers or scoring of an evaluated document differ from those that the plan froze."""
    present = {row["doc"]: row for row in store.documents(plan.study, plan.model).to_pylist()}
    return any(_scored_by(present[doc]) != _scored_by(row) for doc, row in plan.evaluated_documents.items())


def _scored_by(row: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    answers = tuple(row["answers"] or ())
    return answers, row["scoring"] if answers else None


EVALUATION = "evaluation"

Trait = tuple[Any, ...]
"""A property that identifies a document's content across studies: the prompt's digest, or the cluster."""


@dataclass(frozen=True)
class SeenDocuments:
    """The documents of a store's studies that have units, superseded units included.

    A development document of a study can be an evaluation document of another study.
    """

    traits: frozenset[Trait]
    evaluated: frozenset[Trait]  # of evaluation documents alone

    @classmethod
    def in_store(cls, store: Store, without: str | None = None) -> SeenDocuments:
        """Read the seen documents from a store, except those of the study named ``without``."""
        units = store.read("units", columns=["study", "model", "doc"])
        generated = set(zip(*(units[name].to_pylist() for name in units.column_names), strict=True))
        seeds = {(row["study"], row["model"]): row["seed"] for row in store.read("studies").to_pylist()}
        columns = ["study", "model", "doc", "split", "cluster", "source", "prompt_tokens", "prompt_sha256"]
        rows = [
            row for row in store.read("documents", columns=columns).to_pylist()
            if row["study"] != without and (row["study"], row["model"], row["doc"]) in generated
        ]  # fmt: skip
        traits = [(row["split"], _traits(row, seeds.get((row["study"], row["model"])))) for row in rows]
        return cls(
            frozenset(trait for _, held in traits for trait in held),
            frozenset(trait for split, held in traits if split == EVALUATION for trait in held),
        )

    @property
    def clusters(self) -> set[str]:
        """Return the clusters of the seen evaluation documents that came from files or from another generator."""
        return {str(trait[1]) for trait in self.evaluated if trait[0] == "cluster"}

    def among(self, documents: Iterable[Document], seed: int) -> list[Document]:
        """Return the documents of a study that were seen; ``seed`` is the study's seed."""
        return [document for document in documents if not self.traits.isdisjoint(_traits(_row(document), seed))]


def generated_documents(store: Store, study: str, model: str) -> set[str]:
    """Return the documents of a study and model that have units, superseded units included."""
    units = store.read("units", columns=["study", "model", "doc"]).to_pylist()
    units += store.units(study, model).select(["study", "model", "doc"]).to_pylist()  # rows not written yet included
    return {row["doc"] for row in units if (row["study"], row["model"]) == (study, model)}


def seen_actions(store: Store, plan: FrozenPlan) -> tuple[str, ...]:
    """Return the actions of a plan whose outcomes were known before: all if ``plan.seen``, else those that were redone.

    An action counts as redone if its units of evaluation documents were superseded.
    """
    if plan.seen:
        return tuple(plan.actions)
    newest = newest_revisions(store.read("actions"))
    documents = store.read("documents", columns=["study", "model", "doc", "split"]).to_pylist()
    evaluation = {
        row["doc"]
        for row in documents
        if (row["study"], row["model"], row["split"]) == (plan.study, plan.model, EVALUATION)
    }
    units = store.read("units", columns=["study", "model", "doc", "action", "action_revision"]).to_pylist()
    redone = {
        row["action"] for row in units
        if (row["study"], row["model"]) == (plan.study, plan.model) and row["doc"] in evaluation
        and row["action_revision"] < newest.get((plan.study, row["action"]), 0)
    }  # fmt: skip
    return tuple(name for name in plan.actions if name in redone)


def _row(document: Document) -> dict[str, Any]:
    names = ("doc", "cluster", "source", "prompt_tokens", "prompt_sha256")
    return {name: getattr(document, name) for name in names}


def _traits(row: dict[str, Any], seed: int | None) -> set[Trait]:
    """Return the traits of a document; two documents that share a trait have the same content.

    The trait of a drawn document includes the seed: its cluster is a number within its task, and the same number under
    another seed is another document.
    """
    row_traits: set[Trait] = (
        {("prompt", row["prompt_sha256"])} if row["prompt_sha256"] and row["prompt_tokens"] else set()
    )
    drawn = row["source"] == FINITE_STATE or (
        row["source"] in SOURCES and bool(SOURCES[row["source"]].generated) and row["cluster"] == row["doc"]
    )
    row_traits.add(("drawn", row["source"], row["cluster"], seed) if drawn else ("cluster", row["cluster"]))
    return row_traits
