"""Estimates with intervals: SQL moments in, ``results`` rows out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flows.plan import FrozenPlan
from schema.errors import InputError
from schema.moments import LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from schema.store import Store
from schema.study import CONTROL_ACTION
from schema.tables import RESULTS
from sql.catalog import Views
from stats.bootstrap import estimate
from stats.intervals import Estimates, Request
from stats.moments import DocumentMoments, ReplicateMoments, Windows
from stats.quantities import QUANTITIES


def study_windows(views: Views, study: str, model: str) -> Windows:
    """The study's windows from the ``windows`` view."""
    rows = views.rows("windows", study=study, model=model).to_pylist()
    if not rows:
        raise InputError(f"study '{study}', model '{model}': nothing of it is derived in this store")
    (row,) = rows
    return Windows(row["horizon"], row["cohort_bound"], row["early_last"], row["late_first"])


def document_moments(views: Views, study: str, model: str, split: str) -> DocumentMoments:
    """Moments of every document and action of a split, controls left out; InputError where there are none."""
    windows = study_windows(views, study, model)
    table = _measured(views.rows("moments", study=study, model=model, split=split))
    if not table.num_rows:
        raise InputError(f"study '{study}', model '{model}': no complete {split} trajectories in this store")
    index = _Index(table)
    scalars = {name: index.spread(table, name) for name in SCALAR_MOMENTS}
    profiles = {}
    for view, names, axis, length in (
        ("position_moments", POSITION_MOMENTS, "t", windows.horizon),
        ("lag_moments", LAG_MOMENTS, "lag", windows.cohort_bound),
    ):
        rows = _measured(views.rows(view, study=study, model=model, split=split))
        profiles[view] = {name: index.spread(rows, name, axis, length) for name in names}
    return DocumentMoments(
        index.documents, index.strata, index.clusters, index.actions, windows, scalars,
        profiles["position_moments"], profiles["lag_moments"],
    )  # fmt: skip


def replicate_moments(views: Views, study: str, model: str, split: str) -> ReplicateMoments:
    """Scalar moments of every replicate of a split, controls left out; InputError where there are none."""
    table = _measured(views.rows("trajectory_moments", study=study, model=model, split=split))
    if not table.num_rows:
        raise InputError(f"study '{study}', model '{model}': no complete {split} trajectories in this store")
    index = _Index(table)
    count = int(table["replicate"].to_numpy().max()) + 1
    scalars = {name: index.spread(table, name, "replicate", count, first=0) for name in SCALAR_MOMENTS}
    windows = study_windows(views, study, model)
    return ReplicateMoments(index.documents, index.strata, index.clusters, index.actions, windows, scalars)


def estimate_study(store: Store, views: Views, plan: FrozenPlan, events_version: int) -> int:
    """Bootstrap the evaluation documents and append the estimates to ``results``; returns how many there are.

    Primary quantities get the plan's draws, all others its exploratory draws; members of the primary family the level
    1 - alpha/m, all other rows 95% pointwise (definitions, "Bootstrap").
    """
    moments = document_moments(views, plan.study, plan.model, "evaluation")
    request = Request(families=(plan.family,), prespecified=tuple(plan.actions))
    primary = list(plan.primary)
    exploratory = [name for name in QUANTITIES if name not in primary]
    parts = [
        estimate(moments, draws=draws, seed=plan.seed, request=_only(request, names), quantities=names)
        for names, draws in ((primary, plan.draws), (exploratory, plan.exploratory_draws))
    ]
    rows = _result_rows(Estimates.join(parts), plan, events_version)
    store.append_rows("results", rows)
    return int(rows.num_rows)


def _only(request: Request, names: Sequence[str]) -> Request:
    """The request with its families only where their quantities are estimated."""
    families = tuple(f for f in request.families if all(member.quantity in names for member in f.endpoints))
    return Request(request.level, families, request.prespecified)


def _result_rows(estimates: Estimates, plan: FrozenPlan, events_version: int) -> pa.Table:
    count = len(estimates)
    constant: dict[str, Any] = {
        "study": plan.study,
        "model": plan.model,
        "split": "evaluation",
        "events_version": events_version,
        "plan_sha256": plan.sha256,
    }
    columns = {**{name: [value] * count for name, value in constant.items()}, **estimates.columns}
    return pa.table({name: columns[name] for name in RESULTS.columns}, schema=RESULTS.schema)


def _measured(table: pa.Table) -> pa.Table:
    keep = np.asarray(table["action"].to_pylist(), dtype=object) != CONTROL_ACTION
    return table.filter(pa.array(keep, type=pa.bool_()))


class _Index:
    """Documents and actions of a view's rows, in sorted order, and where each row lies among them."""

    def __init__(self, table: pa.Table) -> None:
        keys = {
            doc: (stratum, cluster)
            for doc, stratum, cluster in zip(
                *(table[name].to_pylist() for name in ("doc", "stratum", "cluster")), strict=True
            )
        }
        self.documents = np.array(sorted(keys), dtype=np.str_)
        self.strata = np.array([keys[doc][0] for doc in self.documents.tolist()], dtype=np.str_)
        self.clusters = np.array([keys[doc][1] for doc in self.documents.tolist()], dtype=np.str_)
        self.actions = tuple(sorted(set(table["action"].to_pylist())))

    def spread(
        self, table: pa.Table, name: str, axis: str | None = None, length: int = 0, first: int = 1
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """A column as [documents, actions] or, along ``axis``, [documents, actions, length]; NaN where no row is."""
        shape: tuple[int, ...] = (len(self.documents), len(self.actions))
        where: list[Any] = [
            np.searchsorted(self.documents, np.asarray(table["doc"].to_pylist(), dtype=np.str_)),
            np.searchsorted(np.array(self.actions), np.asarray(table["action"].to_pylist(), dtype=np.str_)),
        ]
        if axis is not None:
            shape = (*shape, length)
            where.append(table[axis].to_numpy() - first)
        values = np.full(shape, np.nan)
        values[tuple(where)] = table[name].cast(pa.float64()).to_numpy()
        return values
