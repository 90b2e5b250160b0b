"""The looks of a sequential plan: the documents of each look, and its critical constant."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from kvdrift.flows.material import Material
from kvdrift.schema.document import Document
from kvdrift.schema.study import FIXED, PlanSection
from kvdrift.stats.sequential.resolution import EQUIVALENCE, HALF_WIDTH
from kvdrift.stats.sequential.spending import critical_constants

_FEWEST = 2  # clusters of a stratum that a variance needs


def plan_looks(
    material: Material, per_stratum: int, level: float, evaluated: Collection[str] = ()
) -> dict[str, Any] | None:
    """Fix the looks of a study at its evaluation documents; None if the study is not sequential.

    A look at a share of N takes that share of each stratum's documents, rounded up, and all other documents of their
    clusters. A look that adds nothing is left out, and so is a look without two clusters in each stratum, which would
    have no interval, and a look that lacks a document of ``evaluated``, evaluated before the plan.

    The result is the plan's entry ``sequential`` as JSON; ``level`` is that of each primary endpoint, for all looks
    together.
    """
    planned = material.study.plan
    if planned.stopping == FIXED:
        return None
    strata = {stratum: documents[:per_stratum] for stratum, documents in material.documents["evaluation"].items()}
    everything = {document.doc for documents in strata.values() for document in documents}
    taken: list[set[str]] = []
    for share in planned.shares:
        clusters = {
            document.cluster
            for documents in strata.values()
            for document in documents[: math.ceil(share * per_stratum)]
        }
        names = {one.doc for documents in strata.values() for one in documents if one.cluster in clusters}
        whole = names >= everything & set(evaluated)
        if names == everything or (whole and _varies(strata, clusters) and names not in taken):
            taken.append(names)
            if names == everything:
                break
    shares = [len(names) / len(everything) for names in taken]
    return {
        "resolve": planned.resolve,
        "bound": _bound(planned),
        "looks": [
            {
                "share": share,
                "constant": constant,
                "documents": {
                    stratum: sum(one.doc in names for one in documents) for stratum, documents in strata.items()
                },
            }
            for names, share, constant in zip(taken, shares, critical_constants(shares, 1 - level), strict=True)
        ],
        "order": {
            stratum: [
                one.doc for one in sorted(documents, key=lambda one: sum(one.doc not in names for names in taken))
            ]
            for stratum, documents in strata.items()
        },
    }  # fmt: skip


def last_constant(planned: PlanSection, level: float) -> float | None:
    """Return the critical constant of the last look, by the requested shares; None without looks."""
    if planned.stopping == FIXED:
        return None
    return critical_constants([float(share) for share in planned.shares], 1 - level)[-1]


def _varies(strata: dict[str, list[Document]], clusters: Collection[str]) -> bool:
    return all(len({one.cluster for one in documents} & set(clusters)) >= _FEWEST for documents in strata.values())


def _bound(planned: PlanSection) -> float:
    if planned.resolve == HALF_WIDTH:
        return planned.target_half_width
    return planned.margin or 0.0 if planned.resolve == EQUIVALENCE else 0.0
