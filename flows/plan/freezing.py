"""The freezing of a plan before the first evaluation event, or of a later revision, also beside another run.

A later revision says whether evaluation documents had been seen by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from kvdrift.flows.material import Material
from kvdrift.flows.plan.agreement import check_plan_agrees, require_plan
from kvdrift.flows.plan.frozen_plan import FrozenPlan, find_plan
from kvdrift.flows.plan.planned_looks import plan_looks
from kvdrift.flows.plan.seen import SeenDocuments, generated_documents
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, PlanError
from kvdrift.schema.frozen_text import MEASURED, frozen_sha256, frozen_text
from kvdrift.schema.study import Study
from kvdrift.schema.tables import PLANS
from kvdrift.stats.ends import PERCENTILE
from kvdrift.stats.reduction.saving import PLAIN_VARIANCE

# Keys that record how a plan came about; two plans that differ only here decide the same.
_CIRCUMSTANCES = (
    MEASURED, "seen", "revision", "evaluated_documents", "reachable", "reason", "cost_curve", "sequential", "reduction",
    "study_sha256", "forgotten",
)  # fmt: skip


def decides_the_same(content: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether two plans have equal settings and lead to the same evaluation and estimates.

    Only evaluated documents and those behind the plan are compared; older plans do not name documents.
    """
    first, second = (
        {"interval": PERCENTILE, "variance": PLAIN_VARIANCE}
        | {name: value for name, value in one.items() if name not in _CIRCUMSTANCES}
        | {"strata": sorted(one["strata"])}
        for one in (content, other)
    )
    taken = [one.pop("documents", None) for one in (first, second)]
    count = content["documents_per_stratum"]
    return first == second and (None in taken or _taken(taken[0], count) == _taken(taken[1], count))


def _taken(documents: Mapping[str, Any], count: int) -> dict[str, Any]:
    evaluation = {stratum: rows[:count] for stratum, rows in documents["evaluation"].items()}
    return {"development": documents["development"], "evaluation": evaluation}


def freeze_plan(
    store: Store,
    material: Material,
    content: dict[str, Any],
    events_version: int,
    superseded: FrozenPlan | None = None,
) -> FrozenPlan:
    """Write a plan to the store, or adopt the plan that another run of the same study froze first.

    ``content`` is the result of ``make_plan``, made from ``events_version``. The plan also says whether evaluation
    documents had been seen by then. ``superseded`` is the previous revision of the plan; None for the study's first
    plan.
    """
    study, revision = material.study, 0 if superseded is None else superseded.revision + 1
    if (frozen := _adopted(store, study, revision)) is not None:
        return frozen
    evaluation = {document.doc for document in material.of_split("evaluation")}
    evaluated = evaluation & generated_documents(store, study.name, material.model_id)
    if evaluated and not revision:
        if (frozen := _adopted(store, study, revision)) is not None:  # another run has just frozen it
            return frozen
        raise PlanError(f"study '{study.name}' has evaluation events but no plan: no plan can be frozen now")
    documents = material.of_split("evaluation", content["documents_per_stratum"])
    seen = SeenDocuments.in_store(store, without=study.name).among(documents, study.study.seed)
    content = content | {"seen": bool(seen or evaluated)}
    if revision:
        content |= {"revision": revision, "evaluated_documents": len(evaluated)}
        looks = plan_looks(material, content["documents_per_stratum"], content["level"], evaluated)
        content |= {} if looks is None else {"sequential": looks}
    text = frozen_text(content)
    row = {
        "study": study.name,
        "model": material.model_id,
        "plan_sha256": frozen_sha256(text),
        "frozen_at": datetime.now(UTC),
        "events_version": events_version,
        "plan": text,
        "plan_revision": revision,
    }
    try:
        store.append_rows("plans", pa.Table.from_pylist([row], schema=PLANS.schema))
    except InputError:  # another run's plan came first, unless something else is wrong with the row
        if (frozen := _adopted(store, study, revision)) is not None:
            return frozen
        raise
    return require_plan(store, study)


def _adopted(store: Store, study: Study, revision: int) -> FrozenPlan | None:
    """Return the stored plan of this revision or a later one, if the study file agrees with it."""
    plan = find_plan(store, study.name, study.model.id)
    if plan is None or plan.revision < revision:
        return None
    check_plan_agrees(plan, study)
    return plan
