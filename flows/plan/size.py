"""The allowed size of an evaluation: the bounds of a study file, and the size that is evaluated already."""

from __future__ import annotations

from dataclasses import dataclass

from kvdrift.flows.material import Material
from kvdrift.log.store import Store
from kvdrift.schema.study import Study

Bounds = tuple[int, int]


@dataclass(frozen=True)
class EvaluatedSize:
    """The size of a study's present evaluation, by current units."""

    replicates: int = 0  # the most replicates of one document and measured action
    documents: int = 0  # the most documents of one stratum, up to the last that has units


NOTHING = EvaluatedSize()


def evaluated_size(store: Store, material: Material) -> EvaluatedSize:
    """Read the present size of a study's evaluation from a store."""
    units = store.units(material.study.name, material.model_id)
    strata = material.documents["evaluation"].values()
    places = {document.doc: place for stratum in strata for place, document in enumerate(stratum, 1)}
    replicates, documents = 0, 0
    columns = (units[name].to_pylist() for name in ("doc", "action", "first_replicate", "replicates"))
    for doc, action, first, count in zip(*columns, strict=True):
        if doc in places:
            documents = max(documents, places[doc])
            if action in material.measured_actions:
                replicates = max(replicates, first + count)
    return EvaluatedSize(replicates, documents)


def size_bounds(study: Study, evaluated: EvaluatedSize) -> tuple[Bounds, Bounds]:
    """Return the least and the largest K, and the least and the largest N, that a plan may choose.

    All replicates of a greedy law are equal, so K is 1 whatever the study file asks for.
    A plan covers everything that was evaluated, as the estimates do: if a study file asks for less, the evaluated size
    is the bound.
    """
    planned, available = study.plan, min(section.evaluation for section in study.documents)
    low, high = planned.replicates_between if planned.replicates == "auto" else (planned.replicates,) * 2
    if study.law.greedy:
        low = high = 1
    few, many = (planned.documents_at_least, available) if planned.documents == "auto" else (planned.documents,) * 2
    k, n = evaluated.replicates, evaluated.documents
    return (max(low, k), max(high, k)), (max(min(few, many), n), max(many, n))
