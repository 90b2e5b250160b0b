"""The plan: made from development documents, frozen before the first evaluation event, required by every evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from flows.material import Material
from schema.document import Document
from schema.errors import OperationError, PlanError
from schema.store.store import Store
from schema.study import Study, values_of
from schema.tables import PLAIN, PLANS, SWRB
from stats.allocation import Allocation, allocate
from stats.calibration import CANDIDATES, FOLDS, INTERVALS_PER_FAMILY, MARGIN, OBSERVATIONS, PENALTY
from stats.endpoints import Endpoint, Family
from stats.moments import ReplicateMoments
from stats.quantities import QUANTITIES

PRIMARY_FAMILY = "primary"


@dataclass(frozen=True)
class FrozenPlan:
    """A plan as it stands in the store; ``content`` is its JSON."""

    study: str
    model: str
    sha256: str
    frozen_at: datetime
    content: dict[str, Any]

    @property
    def replicates(self) -> int:
        """K of the evaluation."""
        return int(self.content["replicates"])

    @property
    def seed(self) -> int:
        """The study's seed, also that of resampling."""
        return int(self.content["seed"])

    @property
    def draws(self) -> int:
        """Bootstrap draws for primary quantities."""
        return int(self.content["draws"])

    @property
    def exploratory_draws(self) -> int:
        """Bootstrap draws for everything else."""
        return int(self.content["exploratory_draws"])

    @property
    def actions(self) -> list[str]:
        """Actions that were fixed with the plan, controls left out."""
        return list(self.content["actions"])

    @property
    def primary(self) -> list[str]:
        """Quantities of the primary endpoints."""
        return list(dict.fromkeys(endpoint["quantity"] for endpoint in self.content["primary_endpoints"]))

    @property
    def family(self) -> Family:
        """The primary endpoints, whose intervals are adjusted together."""
        endpoints = tuple(
            Endpoint(entry["quantity"], entry["action"], entry["baseline"])
            for entry in self.content["primary_endpoints"]
        )
        return Family(PRIMARY_FAMILY, endpoints, self.content["alpha"], self.content.get("family_size") or 0)

    def branched_actions(self, material: Material) -> list[str]:
        """Actions that get replicates of residual branching too; those added after the plan do under "swrb" alone."""
        if material.study.plan.estimator == SWRB:
            return material.measured_actions
        return list(self.content.get("residual_branching", {}).get("actions", []))

    def documents(self, material: Material) -> list[Document]:
        """The evaluation documents that the plan takes: the first N of each stratum."""
        count = int(self.content["documents_per_stratum"])
        return [document for documents in material.documents["evaluation"].values() for document in documents[:count]]


def make_plan(
    material: Material, development: ReplicateMoments, units: pa.Table, efficiency: Mapping[str, float | None]
) -> dict[str, Any]:
    """The plan's content: K and N from development variance and measured seconds, endpoints, levels.

    ``units`` are the stored units of the development documents, ``efficiency`` that of residual branching on them in
    seconds, by action. Canonical and complete: equal input, equal plan.
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
        "seed": study.study.seed,
        "horizon": study.study.horizon,
        "windows": study.window_values.without_horizon,
        "actions": material.measured_actions,
        "baseline": planned.baseline,
        "residual_branching": {
            "estimator": planned.estimator,
            "actions": _branched_actions(material, efficiency),
            "development_efficiency_in_seconds": {name: efficiency.get(name) for name in material.measured_actions},
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
        "expected_seconds": allocation.seconds,
        "development": {
            "documents": len(development.documents),
            "replicates": int(development.present.sum(axis=2).max()),
            "seconds_per_document": document_seconds,
            "seconds_per_replicate": replicate_seconds,
        },
        "cost_curve": [
            {
                "replicates": choice.replicates,
                "documents_per_stratum": choice.documents_per_stratum,
                "widest_half_width": _number(max(choice.half_widths)),
                "seconds": choice.seconds,
                "reachable": choice.reachable,
            }
            for choice in allocation.curve
        ],
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


def plan_section_sha256(study: Study) -> str:
    """Hash of what in the study file decides the plan: ``[plan]`` and ``[windows]``."""
    deciding = {"plan": values_of(study.plan, ("estimator",)), "windows": study.window_values.without_horizon}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def freeze_plan(store: Store, material: Material, content: dict[str, Any], events_version: int) -> FrozenPlan:
    """Write the plan to the store; PlanError if evaluation events exist already."""
    evaluation = {document.doc for document in material.of_split("evaluation")}
    generated = store.units(material.study.name, material.model_id)["doc"].to_pylist()
    if not evaluation.isdisjoint(generated):
        raise PlanError(f"study '{material.study.name}' has evaluation events but no plan: no plan can be frozen now")
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    row = {
        "study": material.study.name,
        "model": material.model_id,
        "plan_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "frozen_at": datetime.now(UTC),
        "events_version": events_version,
        "plan": text,
    }
    store.append_rows("plans", pa.Table.from_pylist([row], schema=PLANS.schema))
    plan = find_plan(store, material.study.name, material.model_id)
    if plan is None:
        raise OperationError(f"the plan of study '{material.study.name}' was written but cannot be read back")
    return plan


def find_plan(store: Store, study: str, model: str) -> FrozenPlan | None:
    """The frozen plan, None before there is one; PlanError if it no longer has its hash."""
    for row in store.read("plans").to_pylist():
        if (row["study"], row["model"]) == (study, model):
            if hashlib.sha256(row["plan"].encode()).hexdigest() != row["plan_sha256"]:
                raise PlanError(f"the plan of study '{study}' does not have its hash {row['plan_sha256'][:12]}…")
            return FrozenPlan(study, model, row["plan_sha256"], row["frozen_at"], json.loads(row["plan"]))
    return None


def require_plan(store: Store, material: Material) -> FrozenPlan:
    """The frozen plan, which the study file must still agree with; PlanError where there is none or it does not."""
    study = material.study
    plan = find_plan(store, study.name, material.model_id)
    if plan is None:
        raise PlanError(f"study '{study.name}' has no frozen plan: evaluation starts after the plan, not before")
    check_plan_agrees(plan, study)
    return plan


def check_plan_agrees(plan: FrozenPlan, study: Study) -> None:
    """PlanError where the study file's plan or windows differ from the frozen ones, or lack a planned action."""
    if plan.content["plan_section_sha256"] != plan_section_sha256(study):
        raise PlanError(
            f"study '{study.name}': [plan] or [windows] differ from the plan frozen on "
            f"{plan.frozen_at:%Y-%m-%d %H:%M} UTC ({plan.sha256[:12]}…); restore them, "
            "or give the changed study a new name"
        )
    names = [action.name for action in study.actions]
    for name in plan.actions:
        if name not in names:
            raise PlanError(f"study '{study.name}': action '{name}' is in the frozen plan but not in the study file")


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
