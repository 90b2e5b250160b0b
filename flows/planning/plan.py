"""Making a plan from development documents, and freezing it before the first evaluation event."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from flows.frozen_plan import (
    FrozenPlan,
    check_plan_agrees,
    find_plan,
    plan_section_sha256,
    plan_settings,
    require_plan,
)
from flows.material import Material
from flows.planning.seen import SeenDocuments
from schema.errors import InputError, OperationError, PlanError
from schema.frozen_text import MEASURED, frozen_sha256, frozen_text
from schema.store.store import Store
from schema.study import Study
from schema.tables import PLAIN, PLANS, SWRB
from stats.allocation import Allocation, allocate
from stats.calibration import CANDIDATES, FOLDS, INTERVALS_PER_FAMILY, MARGIN, OBSERVATIONS, PENALTY
from stats.endpoints import Endpoint
from stats.moments import ReplicateMoments
from stats.quantities import QUANTITIES


def make_plan(
    material: Material, development: ReplicateMoments, units: pa.Table, efficiency: Mapping[str, float | None]
) -> dict[str, Any]:
    """Make the plan's content: K and N from development variance and measured seconds, endpoints, levels.

    Args:
        material: the study with its documents and actions.
        development: moments of every replicate of the development documents.
        units: rows of ``units`` of the development documents.
        efficiency: by action, the efficiency in seconds of residual branching on the development documents; None
            where it is undefined.

    Returns:
        The content as JSON holds it, with everything that was measured in seconds under ``measured``. Equal arguments
        give an equal plan, and arguments that differ in seconds alone one of the same hash if they lead to the same
        K and N.

    Raises:
        OperationError: there are no development units.

    """
    study = material.study
    endpoints = primary_endpoints(study)
    document_seconds, replicate_seconds = _costs(units)
    available = min(section.evaluation for section in study.documents)
    planned = study.plan
    fixed_k, fixed_n = planned.replicates, planned.documents
    allocation = allocate(
        development,
        endpoints,
        target=planned.target_half_width,
        document_seconds=document_seconds,
        replicate_seconds=replicate_seconds,
        replicates=planned.replicates_between if fixed_k == "auto" else (fixed_k, fixed_k),
        documents=(min(planned.documents_at_least, available), available) if fixed_n == "auto" else (fixed_n, fixed_n),
        alpha=planned.alpha,
        family_size=planned.family_size or 0,
    )
    return {
        "study": study.name,
        "model": material.model_id,
        "study_sha256": study.sha256,
        "plan_section_sha256": plan_section_sha256(study),
        "settings": plan_settings(study),
        "seed": study.study.seed,
        "horizon": study.study.horizon,
        "windows": study.window_values.without_horizon,
        "actions": material.measured_actions,
        "baseline": planned.baseline,
        "residual_branching": {
            "estimator": planned.estimator,
            "actions": _branched_actions(material, efficiency),
        },
        "replicates": allocation.replicates,
        "documents_per_stratum": allocation.documents_per_stratum,
        "strata": [section.stratum_name for section in study.documents],
        "alpha": planned.alpha,
        "family_size": planned.family_size or len(endpoints),
        "level": allocation.level,
        "draws": planned.draws,
        "exploratory_draws": planned.exploratory_draws,
        "target_half_width": planned.target_half_width,
        "primary_endpoints": _endpoint_rows(allocation),
        "calibration": {
            "observations": list(OBSERVATIONS),
            "candidates": list(CANDIDATES),
            "folds": FOLDS,
            "ridge_penalty": PENALTY,
            "margin": MARGIN,
            "level": 1 - planned.alpha / INTERVALS_PER_FAMILY,
        },
        "reachable": allocation.reachable,
        "reason": allocation.reason,
        "development": {
            "documents": len(development.documents),
            "replicates": int(development.present.sum(axis=2).max()),
        },
        "cost_curve": [
            {
                "replicates": choice.replicates,
                "documents_per_stratum": choice.documents_per_stratum,
                "widest_half_width": _number(max(choice.half_widths)),
                "reachable": choice.reachable,
            }
            for choice in allocation.curve
        ],
        MEASURED: {
            "expected_seconds": allocation.seconds,
            "development": {"seconds_per_document": document_seconds, "seconds_per_replicate": replicate_seconds},
            "residual_branching": {
                "development_efficiency_in_seconds": {name: efficiency.get(name) for name in material.measured_actions}
            },
            "cost_curve": [{"seconds": choice.seconds} for choice in allocation.curve],
        },
    }


def primary_endpoints(study: Study) -> list[Endpoint]:
    """One endpoint per primary quantity and action, contrasts against the baseline."""
    baseline = study.plan.baseline
    names = [action.name for action in study.actions]
    endpoints = []
    for quantity in study.plan.primary:
        if QUANTITIES[quantity].kind == "contrast":
            endpoints += [Endpoint(quantity, name, baseline) for name in names if name != baseline]
        else:
            endpoints += [Endpoint(quantity, name) for name in names]
    return endpoints


def freeze_plan(store: Store, material: Material, content: dict[str, Any], events_version: int) -> FrozenPlan:
    """Write a plan to the store, or adopt the one that another run of the same study froze first.

    Args:
        store: the study's store.
        material: the study with its documents and actions.
        content: what ``make_plan`` returned; the plan says too whether its evaluation documents had been seen.
        events_version: the version of ``events`` that the content was made from.

    Returns:
        The study's one frozen plan.

    Raises:
        PlanError: evaluation events exist though no plan does, or the plan that is there disagrees with the study file.

    """
    study = material.study
    if (frozen := _adopted(store, study)) is not None:
        return frozen
    evaluation = {document.doc for document in material.of_split("evaluation")}
    if not evaluation.isdisjoint(store.units(study.name, material.model_id)["doc"].to_pylist()):
        raise PlanError(f"study '{study.name}' has evaluation events but no plan: no plan can be frozen now")
    documents = material.of_split("evaluation", content["documents_per_stratum"])
    seen = SeenDocuments.in_store(store, without=study.name).among(documents, study.study.seed)
    text = frozen_text(content | {"seen": bool(seen)})
    row = {
        "study": study.name,
        "model": material.model_id,
        "plan_sha256": frozen_sha256(text),
        "frozen_at": datetime.now(UTC),
        "events_version": events_version,
        "plan": text,
    }
    try:
        store.append_rows("plans", pa.Table.from_pylist([row], schema=PLANS.schema))
    except InputError:  # another run's plan came first, unless something else is wrong with the row
        if (frozen := _adopted(store, study)) is not None:
            return frozen
        raise
    return require_plan(store, study)


def _adopted(store: Store, study: Study) -> FrozenPlan | None:
    """The plan that is there already, if the study file agrees with it."""
    plan = find_plan(store, study.name, study.model.id)
    if plan is not None:
        check_plan_agrees(plan, study)
    return plan


def _branched_actions(material: Material, efficiency: Mapping[str, float | None]) -> list[str]:
    """Under "swrb" all measured actions, under "hybrid" those where development found an efficiency above 1."""
    chosen = {
        PLAIN: [],
        SWRB: material.measured_actions,
        "hybrid": [name for name in material.measured_actions if (efficiency.get(name) or 0.0) > 1],
    }
    return chosen[material.study.plan.estimator]


def _endpoint_rows(allocation: Allocation) -> list[dict[str, Any]]:
    rows = []
    for linearized, half_width in zip(allocation.endpoints, allocation.half_widths, strict=True):
        between, within = linearized.components
        rows.append({
            "quantity": linearized.endpoint.quantity,
            "action": linearized.endpoint.action,
            "baseline": linearized.endpoint.baseline,
            "development_value": _number(linearized.value),
            "variance_between_documents": _number(between),
            "variance_between_replicates": _number(within),
            "expected_half_width": _number(half_width),
        })  # fmt: skip
    return rows


def _number(value: float) -> float | None:
    """JSON has no NaN: undefined is null."""
    return None if value != value else float(value)  # noqa: PLR0124 - NaN is what differs from itself


def _costs(units: pa.Table) -> tuple[float, float]:
    """Measured seconds per document (prefill and eviction, all actions) and per replicate (decoding, all actions)."""
    documents = len(set(units["doc"].to_pylist()))
    prefill = sum(units["prefill_seconds"].to_pylist())
    decode = sum(
        seconds / count
        for seconds, count in zip(units["decode_seconds"].to_pylist(), units["replicates"].to_pylist(), strict=True)
    )
    if not documents:
        raise OperationError("no development units: nothing to measure the cost on")
    return prefill / documents, decode / documents
