"""The making of a plan from development documents: sizes, endpoints, levels. Later revisions use the same documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from kvdrift.flows.material import Material
from kvdrift.flows.plan.agreement import plan_section_sha256, plan_settings
from kvdrift.flows.plan.frozen_plan import PRIMARY_FAMILY, FrozenPlan
from kvdrift.flows.plan.planned_looks import last_constant, plan_looks
from kvdrift.flows.plan.size import NOTHING, EvaluatedSize, size_bounds
from kvdrift.flows.plan.stored_documents import frozen_documents
from kvdrift.schema.errors import OperationError
from kvdrift.schema.frozen_text import MEASURED
from kvdrift.schema.study import Study
from kvdrift.schema.tables import PLAIN, SWRB
from kvdrift.stats.allocation import Allocation, allocate
from kvdrift.stats.calibration import CANDIDATES, FOLDS, INTERVALS_PER_FAMILY, MARGIN, OBSERVATIONS, PENALTY
from kvdrift.stats.endpoints import Endpoint, Family
from kvdrift.stats.ends import STUDENTIZED
from kvdrift.stats.moments import ReplicateMoments
from kvdrift.stats.quantities import PAIR_QUANTITIES
from kvdrift.stats.reduction.coefficients import reduced_replicates
from kvdrift.stats.reduction.saving import PLAIN_VARIANCE, REDUCED_VARIANCE


def make_plan(
    material: Material,
    development: ReplicateMoments,
    units: pa.Table,
    efficiency: Mapping[str, float | None],
    answers: ReplicateMoments | None = None,
    *,
    grown: FrozenPlan | None = None,
    evaluated: EvaluatedSize = NOTHING,
    interval: str = STUDENTIZED,
) -> dict[str, Any]:
    """Make the content of a plan: K and N from development variance and measured seconds, endpoints, levels.

    Args:
        material: the study with its documents and actions.
        development: moments of every replicate of the development documents.
        units: rows of ``units`` of the development documents.
        efficiency: by action, the efficiency in seconds of residual branching on the development documents; None
            if it is undefined.
        answers: moments of every scored replicate of the development documents; None without any.
        grown: the result of ``grown_plan`` for the present plan, whose actions and endpoints are kept; None to choose
            anew.
        evaluated: the evaluation's present size, if the plan is chosen anew.
        interval: the method of intervals if the study file names none.

    Returns:
        The content as JSON holds it, with everything that was measured in seconds under ``measured``. Equal arguments
        give an equal plan. Arguments that differ only in seconds give a plan of the same hash if K and N are the same.
    """
    study = material.study
    planned, actions = study.plan, material.measured_actions if grown is None else grown.actions
    endpoints = primary_endpoints(study, actions)
    document_seconds, replicate_seconds = _costs(units, equal=study.law.greedy)
    if grown is None:
        replicates, documents = size_bounds(study, evaluated)
        branched = _branched_actions(material, efficiency)
    else:
        replicates, documents = (grown.replicates,) * 2, (grown.documents_per_stratum,) * 2
        branched = grown.branched_actions
    level = Family(PRIMARY_FAMILY, tuple(endpoints), planned.alpha, planned.family_size or 0).level
    allocations = {
        variance: allocate(
            development,
            endpoints,
            target=planned.target_half_width,
            document_seconds=document_seconds,
            replicate_seconds=replicate_seconds,
            replicates=replicates,
            documents=documents,
            alpha=planned.alpha,
            family_size=planned.family_size or 0,
            constant=last_constant(planned, level),
            answers=answers,
            reduced=reduced,
            alike_within=planned.margin or 0.0,
        )
        for variance, reduced in ((PLAIN_VARIANCE, None), (REDUCED_VARIANCE, reduced_replicates(development)))
    }
    allocation = allocations[planned.variance]
    looks = plan_looks(material, allocation.documents_per_stratum, level)
    return {
        "study": study.name,
        "model": material.model_id,
        "study_sha256": study.sha256,
        "plan_section_sha256": plan_section_sha256(study),
        "settings": plan_settings(study),
        "seed": study.study.seed,
        "horizon": study.study.horizon,
        "windows": study.window_values.without_horizon,
        "actions": actions,
        "baseline": planned.baseline,
        "residual_branching": {
            "estimator": planned.estimator,
            "actions": branched,
        },
        "replicates": allocation.replicates,
        "documents_per_stratum": allocation.documents_per_stratum,
        "strata": [section.stratum_name for section in study.documents],
        "documents": frozen_documents(material),
        "alpha": planned.alpha,
        "family_size": planned.family_size or len(endpoints),
        "level": allocation.level,
        "interval": planned.interval or interval,
        "draws": planned.draws,
        "exploratory_draws": planned.exploratory_draws,
        "target_half_width": planned.target_half_width,
        "variance": planned.variance,
        "primary_endpoints": _endpoint_rows(allocation),
        **({} if looks is None else {"sequential": looks}),
        "calibration": {
            "observations": list(OBSERVATIONS),
            "candidates": list(CANDIDATES),
            "folds": FOLDS,
            "ridge_penalty": PENALTY,
            "margin": MARGIN,
            "level": 1 - planned.alpha / INTERVALS_PER_FAMILY,
        },
        "reduction": _variance_ratios(*allocations.values()),
        "reachable": allocation.reachable,
        "reason": allocation.reason + ("" if grown else _raised(study, evaluated)),
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
            "sizes": {variance: _size(one) for variance, one in allocations.items()},
            "development": {"seconds_per_document": document_seconds, "seconds_per_replicate": replicate_seconds},
            "residual_branching": {
                "development_efficiency_in_seconds": {name: efficiency.get(name) for name in actions}
            },
            "cost_curve": [{"seconds": choice.seconds} for choice in allocation.curve],
        },
    }


def primary_endpoints(study: Study, actions: Sequence[str] | None = None) -> list[Endpoint]:
    """Return an endpoint for each primary quantity and action (default: all), contrasts against the baseline.

    The floor of an engine has no endpoint: nearly all of its documents are alike, and no number of them would settle
    it.
    """
    baseline = study.plan.baseline
    names = study.estimated if actions is None else [name for name in actions if name in study.estimated]
    endpoints = []
    for quantity in study.plan.primary:
        if PAIR_QUANTITIES[quantity].kind == "contrast":
            endpoints += [Endpoint(quantity, name, baseline) for name in names if name != baseline]
        else:
            endpoints += [Endpoint(quantity, name) for name in names]
    return endpoints


def _raised(study: Study, evaluated: EvaluatedSize) -> str:
    """Return an addition to the plan's reason if the evaluation's present size bounds the choice."""
    if size_bounds(study, evaluated) == size_bounds(study, NOTHING):
        return ""
    return f"; evaluation documents have up to K = {evaluated.replicates} and N = {evaluated.documents} already"


def _branched_actions(material: Material, efficiency: Mapping[str, float | None]) -> list[str]:
    """Return all measured actions under "swrb"; under "hybrid" those with efficiency above 1 in development."""
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


def _variance_ratios(plain: Allocation, reduced: Allocation) -> list[dict[str, Any]]:
    """Return, by endpoint, the reduced estimate's variance between replicates as a share of the plain estimate's."""
    rows: list[dict[str, Any]] = []
    for own, other in zip(plain.endpoints, reduced.endpoints, strict=True):
        endpoint, (_, variance), (_, less) = own.endpoint, own.components, other.components
        rows.append({
            "quantity": endpoint.quantity,
            "action": endpoint.action,
            "baseline": endpoint.baseline,
            "variance_ratio": _number(less / variance) if variance > 0 else None,
        })  # fmt: skip
    return rows


def _size(allocation: Allocation) -> dict[str, Any]:
    return {
        "replicates": allocation.replicates,
        "documents_per_stratum": allocation.documents_per_stratum,
        "reachable": allocation.reachable,
        "seconds": allocation.seconds,
    }


def _number(value: float) -> float | None:
    """Replace NaN by None, since JSON has no NaN."""
    return None if value != value else float(value)  # noqa: PLR0124 - NaN is what differs from itself


def _costs(units: pa.Table, *, equal: bool) -> tuple[float, float]:
    """Return measured seconds per document (prefill, eviction) and per replicate (decoding), over all actions.

    Equal replicates are decoded once, so their decoding counts as a cost of the document.
    """
    documents = len(set(units["doc"].to_pylist()))
    prefill = sum(units["prefill_seconds"].to_pylist())
    decode = sum(
        seconds / (1 if equal else count)
        for seconds, count in zip(units["decode_seconds"].to_pylist(), units["replicates"].to_pylist(), strict=True)
    )
    if not documents:
        raise OperationError("no development units: nothing to measure the cost on")
    per_document, per_replicate = prefill / documents, decode / documents
    return (per_document + per_replicate, 0.0) if equal else (per_document, per_replicate)
