"""A plan made from development documents, and frozen before the first evaluation event.

Later revisions use the same development documents, and say whether evaluation documents had been seen by then.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from kvdrift.flows.material import Material
from kvdrift.flows.plan.frozen_plan import (
    PRIMARY_FAMILY,
    FrozenPlan,
    check_plan_agrees,
    find_plan,
    number,
    plan_section_sha256,
    plan_settings,
    require_plan,
)
from kvdrift.flows.plan.stored_documents import SeenDocuments, frozen_documents, generated_documents
from kvdrift.log.store import Store
from kvdrift.schema.document import Document
from kvdrift.schema.errors import InputError, OperationError, PlanError
from kvdrift.schema.estimate_tables import PLANS
from kvdrift.schema.frozen_text import MEASURED, frozen_sha256, frozen_text
from kvdrift.schema.study import FIXED, PlanSection, Study
from kvdrift.schema.tables import PLAIN, SWRB
from kvdrift.stats.allocation import Allocation, allocate
from kvdrift.stats.calibration import CANDIDATES, FOLDS, INTERVALS_PER_FAMILY, MARGIN, OBSERVATIONS, PENALTY
from kvdrift.stats.endpoints import Endpoint, Family
from kvdrift.stats.ends import STUDENTIZED
from kvdrift.stats.moments import ReplicateMoments
from kvdrift.stats.quantities import PAIR_QUANTITIES
from kvdrift.stats.reduction import PLAIN_VARIANCE, REDUCED_VARIANCE, reduced_replicates
from kvdrift.stats.sequential import EQUIVALENCE, HALF_WIDTH, critical_constants

Bounds = tuple[int, int]

_FEWEST = 2  # clusters of a stratum that a variance needs
# Keys that record how a plan came about; two plans that differ only here decide the same.
_CIRCUMSTANCES = (
    MEASURED, "seen", "revision", "evaluated_documents", "reachable", "reason", "cost_curve", "sequential", "reduction",
    "study_sha256", "forgotten",
)  # fmt: skip


@dataclass(frozen=True)
class EvaluatedSize:
    """The size of a study's present evaluation; superseded units do not count."""

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

    At temperature 0 all replicates are equal, so K is 1 whatever the study file requests. A plan covers everything that
    was evaluated, as the estimates do: if a study file requests less, the evaluated size is the bound.
    """
    planned, available = study.plan, min(section.evaluation for section in study.documents)
    low, high = planned.replicates_between if planned.replicates == "auto" else (planned.replicates,) * 2
    if study.sampling.greedy:
        low = high = 1
    fewest, many = (planned.documents_at_least, available) if planned.documents == "auto" else (planned.documents,) * 2
    k, n = evaluated.replicates, evaluated.documents
    return (max(low, k), max(high, k)), (max(fewest, n), max(many, n))


def plan_interim_looks(
    material: Material, per_stratum: int, level: float, evaluated: Collection[str] = ()
) -> dict[str, Any] | None:
    """Plan the interim looks at a study's evaluation documents; None if the study is not sequential.

    An interim look at a share of N takes that share of each stratum's documents, rounded up, and all other documents of
    their clusters. An interim look is left out if it adds no document, if a stratum has fewer than two clusters and so
    no interval, or if it lacks a document of ``evaluated``: these were evaluated before the plan.

    The result is the plan's entry ``sequential`` as JSON; ``level`` is that of each primary endpoint, for all interim
    looks together.
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
        names = {
            document.doc for documents in strata.values() for document in documents if document.cluster in clusters
        }
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
                    stratum: sum(document.doc in names for document in documents)
                    for stratum, documents in strata.items()
                },
            }
            for names, share, constant in zip(taken, shares, critical_constants(shares, 1 - level), strict=True)
        ],
        "order": {
            stratum: [
                document.doc
                for document in sorted(
                    documents, key=lambda document: sum(document.doc not in names for names in taken)
                )
            ]
            for stratum, documents in strata.items()
        },
    }  # fmt: skip


def last_constant(planned: PlanSection, level: float) -> float | None:
    """Return the last interim look's critical constant for the study file's shares of N; None without interim looks."""
    if planned.stopping == FIXED:
        return None
    return critical_constants([float(share) for share in planned.shares], 1 - level)[-1]


def _varies(strata: dict[str, list[Document]], clusters: Collection[str]) -> bool:
    return all(
        len({document.cluster for document in documents} & set(clusters)) >= _FEWEST for documents in strata.values()
    )


def _bound(planned: PlanSection) -> float:
    if planned.resolve == HALF_WIDTH:
        return planned.target_half_width
    return planned.margin or 0.0 if planned.resolve == EQUIVALENCE else 0.0


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
    """Make the content of a plan: endpoints, levels, and K and N from development variance and measured seconds.

    Args:
        material: the study with its documents and actions.
        development: moments of every replicate of the development documents.
        units: rows of ``units`` of the development documents.
        efficiency: for each action, the efficiency of residual branching relative to coupled pairs on the development
            documents, with seconds as the cost; None if it is undefined.
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
    document_seconds, replicate_seconds = _costs(units, equal=study.sampling.greedy)
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
    interim_looks = plan_interim_looks(material, allocation.documents_per_stratum, level)
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
        **({} if interim_looks is None else {"sequential": interim_looks}),
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
                "widest_half_width": number(max(choice.half_widths)),
                "reachable": choice.reachable,
            }
            for choice in allocation.curve
        ],
        MEASURED: {
            "expected_seconds": allocation.seconds,
            "sizes": {variance: _size(allocated) for variance, allocated in allocations.items()},
            "development": {"seconds_per_document": document_seconds, "seconds_per_replicate": replicate_seconds},
            "residual_branching": {
                "development_efficiency_in_seconds": {name: efficiency.get(name) for name in actions}
            },
            "cost_curve": [{"seconds": choice.seconds} for choice in allocation.curve],
        },
    }


def primary_endpoints(study: Study, actions: Sequence[str] | None = None) -> list[Endpoint]:
    """Return an endpoint for each primary quantity and each of ``actions``, by default all actions.

    If the quantity is a contrast, the endpoint compares the action with the baseline. The action that measures an
    engine's floor has no endpoint: nearly all of its documents agree, so no number of documents would settle one.
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
    """Return text for the plan's reason if the evaluated documents raise a bound of K or N; else an empty text."""
    if size_bounds(study, evaluated) == size_bounds(study, NOTHING):
        return ""
    return f"; evaluation documents have up to K = {evaluated.replicates} and N = {evaluated.documents} already"


def _branched_actions(material: Material, efficiency: Mapping[str, float | None]) -> list[str]:
    """Return the actions that get replicates of residual branching.

    Under the estimator "swrb" these are all actions, under "hybrid" those of efficiency above 1, under "plain" none.
    """
    estimator, actions = material.study.plan.estimator, material.measured_actions
    if estimator == PLAIN:
        return []
    return actions if estimator == SWRB else [name for name in actions if (efficiency.get(name) or 0.0) > 1]


def _named(endpoint: Endpoint) -> dict[str, Any]:
    return {name: getattr(endpoint, name) for name in ("quantity", "action", "baseline")}


def _endpoint_rows(allocation: Allocation) -> list[dict[str, Any]]:
    rows = []
    for linearized, half_width in zip(allocation.endpoints, allocation.half_widths, strict=True):
        between, within = linearized.components
        rows.append(_named(linearized.endpoint) | {
            "development_value": number(linearized.value),
            "variance_between_documents": number(between),
            "variance_between_replicates": number(within),
            "expected_half_width": number(half_width),
        })  # fmt: skip
    return rows


def _variance_ratios(plain: Allocation, reduced: Allocation) -> list[dict[str, Any]]:
    """Return for each endpoint the reduced estimate's variance between replicates, divided by the plain one's."""
    rows: list[dict[str, Any]] = []
    for plain_endpoint, other in zip(plain.endpoints, reduced.endpoints, strict=True):
        (_, variance), (_, less) = plain_endpoint.components, other.components
        rows.append(
            _named(plain_endpoint.endpoint) | {"variance_ratio": number(less / variance) if variance > 0 else None}
        )
    return rows


def _size(allocation: Allocation) -> dict[str, Any]:
    return {
        "replicates": allocation.replicates,
        "documents_per_stratum": allocation.documents_per_stratum,
        "reachable": allocation.reachable,
        "seconds": allocation.seconds,
    }


def _costs(units: pa.Table, *, equal: bool) -> tuple[float, float]:
    """Return measured seconds per document (prefill, eviction) and per replicate (decoding), summed over actions.

    If all replicates of a document are ``equal``, they are decoded once, and decoding counts as a cost of the document.
    """
    documents = len(set(units["doc"].to_pylist()))
    prefill = sum(units["prefill_seconds"].to_pylist())
    decode = sum(
        seconds / (1 if equal else count)
        for seconds, count in zip(units["decode_seconds"].to_pylist(), units["replicates"].to_pylist(), strict=True)
    )
    if not documents:
        raise OperationError("no development document has units, so the cost of a plan cannot be measured")
    per_document, per_replicate = prefill / documents, decode / documents
    return (per_document + per_replicate, 0.0) if equal else (per_document, per_replicate)


def decides_the_same(content: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two plans have equal settings and lead to the same evaluation and estimates.

    Development documents are compared, and of the evaluation documents only those that a plan takes.
    """

    def deciding(plan: Mapping[str, Any]) -> dict[str, Any]:
        documents, count = plan["documents"], plan["documents_per_stratum"]
        evaluated = {stratum: rows[:count] for stratum, rows in documents["evaluation"].items()}
        return {
            **{name: value for name, value in plan.items() if name not in _CIRCUMSTANCES},
            "strata": sorted(plan["strata"]),
            "documents": {"development": documents["development"], "evaluation": evaluated},
        }

    return deciding(content) == deciding(other)


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
        raise PlanError(
            f"study '{study.name}' has evaluation events but no plan, and a plan can be frozen only before evaluation; "
            "give the study a new name, or use another --store"
        )
    documents = material.of_split("evaluation", content["documents_per_stratum"])
    seen = SeenDocuments.in_store(store, without=study.name).among(documents, study.study.seed)
    content = content | {"seen": bool(seen or evaluated)}
    if revision:
        content |= {"revision": revision, "evaluated_documents": len(evaluated)}
        interim_looks = plan_interim_looks(material, content["documents_per_stratum"], content["level"], evaluated)
        content |= {} if interim_looks is None else {"sequential": interim_looks}
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
    """Return the stored plan if its revision is ``revision`` or later, else None; the study file must agree with it."""
    plan = find_plan(store, study.name, study.model.id)
    if plan is None or plan.revision < revision:
        return None
    check_plan_agrees(plan, study)
    return plan
