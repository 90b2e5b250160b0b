"""Estimates with intervals: SQL moments in, ``results`` rows out.

An analysis is cut into parts whose draws fit into memory together, a handful at the paper's size. Parts do not depend
on each other and their numbers do not depend on how they are run: one after the other here, as tasks in the flow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa

from flows.analysis.branching import branching_moments
from flows.analysis.document_index import DocumentIndex, measured
from flows.analysis.standing import inputs_sha256, standing_rows
from flows.frozen_plan import FrozenPlan
from schema.errors import InputError
from schema.moments import LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from schema.store.store import Store
from schema.tables import RESULTS
from schema.windows import Windows
from sql.catalog import Views
from stats.bootstrap import estimate, groups
from stats.efficiency import BranchingMoments, estimate_branching
from stats.intervals import Estimates, Request
from stats.moments import DocumentMoments, ReplicateMoments
from stats.quantities import QUANTITIES

EXPLORATORY_DRAWS = 2_000  # definitions, "Bootstrap"
EXPLORATORY_LEVEL = 0.95


@dataclass(frozen=True)
class Analysis:
    """What is estimated of one study, model and split, and how.

    Attributes:
        study: the study's name.
        model: the model's id.
        split: the split whose documents are resampled.
        seed: the seed of resampling.
        draws: pairs of quantities and bootstrap draws; every quantity once, the exploratory ones last.
        request: the levels and families of the intervals.
        plan_sha256: the plan's hash, None where no plan was frozen.

    """

    study: str
    model: str
    split: str
    seed: int
    draws: tuple[tuple[tuple[str, ...], int], ...]
    request: Request
    plan_sha256: str | None

    @property
    def exploratory_draws(self) -> int:
        """Draws of what no plan names."""
        return self.draws[-1][1]

    @classmethod
    def planned(cls, plan: FrozenPlan, seen: tuple[str, ...] = ()) -> Self:
        """Return the analysis of the evaluation documents that the frozen plan asks for.

        Primary quantities get the plan's draws, all others its exploratory draws; members of the primary family the
        level 1 - alpha/m, all other rows 95% pointwise (definitions, "Bootstrap"). What was planned of the actions
        ``seen`` has that status.
        """
        primary = tuple(plan.primary)
        others = tuple(name for name in QUANTITIES if name not in primary)
        draws = ((primary, plan.draws), (others, plan.exploratory_draws))
        request = Request(EXPLORATORY_LEVEL, (plan.family,), tuple(plan.actions), seen)
        return cls(plan.study, plan.model, "evaluation", plan.seed, draws, request, plan.sha256)

    @classmethod
    def exploratory(cls, views: Views, study: str, model: str, split: str) -> Self:
        """Return the analysis of a split for which nothing was fixed beforehand.

        The seed is the study's, 0 where the store has no row of the study.
        """
        stored = views.rows("studies", study=study, model=model).to_pylist()
        seed = int(stored[0]["seed"]) if stored else 0
        draws = ((tuple(QUANTITIES), EXPLORATORY_DRAWS),)
        return cls(study, model, split, seed, draws, Request(EXPLORATORY_LEVEL), None)


@dataclass(frozen=True, eq=False)
class AnalysisPart:
    """Some quantities of an analysis: what one task estimates."""

    moments: DocumentMoments
    quantities: tuple[str, ...]
    draws: int
    seed: int
    request: Request


Runner = Callable[[Sequence[AnalysisPart]], Sequence[Estimates]]


def in_sequence(parts: Sequence[AnalysisPart]) -> list[Estimates]:
    """Estimate parts one after the other, in this thread."""
    return [estimate_part(part) for part in parts]


def estimate_part(part: AnalysisPart) -> Estimates:
    """Estimate the quantities of one part."""
    return estimate(
        part.moments, draws=part.draws, seed=part.seed, request=part.request, quantities=part.quantities
    )  # fmt: skip


def parts_of(analysis: Analysis, moments: DocumentMoments) -> list[AnalysisPart]:
    """Cut an analysis into parts, in the order of its results."""
    return [
        AnalysisPart(moments, names, draws, analysis.seed, analysis.request)
        for quantities, draws in analysis.draws
        for names in groups(moments, draws, quantities)
    ]


def estimate_study(
    store: Store, views: Views, analysis: Analysis, events_version: int, run: Runner = in_sequence
) -> tuple[pa.Table, bool]:
    """Bootstrap the documents of an analysis.

    Where the store holds replicates of residual branching, their estimates are there too.

    Args:
        store: the study's store.
        views: its views.
        analysis: what is estimated, and how.
        events_version: the version of ``events`` that the views show.
        run: estimates the parts of an analysis.

    Returns:
        Rows of ``results``, and whether they are new: those of an earlier events version may stand.

    """
    moments = document_moments(views, analysis.study, analysis.model, analysis.split)
    branching = branching_moments(views, analysis.study, analysis.model, analysis.split)
    revisions = action_revisions(views, analysis.study)
    sha256 = inputs_sha256(analysis, moments, branching, revisions)
    rows = standing_rows(store, sha256, events_version)
    if rows is not None:
        return rows, False
    estimates = [*run(parts_of(analysis, moments)), *_branching_estimates(branching, analysis)]
    return _result_rows(Estimates.join(estimates), analysis, events_version, revisions, sha256), True


def analyzed_splits(views: Views, study: str, model: str) -> list[str]:
    """Return the splits that have complete trajectories of a measured action, sorted."""
    rows = measured(views.rows("decomposition", study=study, model=model))
    return sorted(set(rows["split"].to_pylist()))


def action_revisions(views: Views, study: str) -> Mapping[str | None, int]:
    """Read which revision of each action the views show; 0 of one that the store does not list, and of none."""
    listed = views.rows("actions", study=study)
    shown = zip(listed["action"].to_pylist(), listed["action_revision"].to_pylist(), strict=True)
    return defaultdict(int, shown)


def study_windows(views: Views, study: str, model: str) -> Windows:
    """Read the study's windows from the ``windows`` view.

    Raises:
        InputError: nothing of the study is derived.

    """
    rows = views.rows("windows", study=study, model=model).to_pylist()
    if not rows:
        raise InputError(f"study '{study}', model '{model}': nothing of it is derived in this store")
    (row,) = rows
    return Windows.from_row(row)


def document_moments(views: Views, study: str, model: str, split: str) -> DocumentMoments:
    """Read the moments of every document and action of a split, controls left out.

    Raises:
        InputError: there are no complete trajectories.

    """
    windows = study_windows(views, study, model)
    table = measured(views.rows("moments", study=study, model=model, split=split))
    if not table.num_rows:
        raise InputError(f"study '{study}', model '{model}': no complete {split} trajectories in this store")
    index = DocumentIndex(table)
    scalars = index.spread(table, SCALAR_MOMENTS)
    profiles = {}
    for view, names, axis, length in (
        ("position_moments", POSITION_MOMENTS, "t", windows.horizon),
        ("lag_moments", LAG_MOMENTS, "lag", windows.cohort_bound),
    ):
        rows = measured(views.rows(view, study=study, model=model, split=split))
        profiles[view] = index.spread(rows, names, axis, length)
    return DocumentMoments(
        index.documents, index.strata, index.clusters, index.actions, windows, scalars,
        profiles["position_moments"], profiles["lag_moments"],
    )  # fmt: skip


def replicate_moments(views: Views, study: str, model: str, split: str) -> ReplicateMoments:
    """Read the scalar moments of every replicate of a split, controls left out.

    Raises:
        InputError: there are no complete trajectories.

    """
    table = measured(views.rows("trajectory_moments", study=study, model=model, split=split))
    if not table.num_rows:
        raise InputError(f"study '{study}', model '{model}': no complete {split} trajectories in this store")
    index = DocumentIndex(table)
    count = int(table["replicate"].to_numpy().max()) + 1
    scalars = index.spread(table, SCALAR_MOMENTS, "replicate", count, first=0)
    windows = study_windows(views, study, model)
    return ReplicateMoments(index.documents, index.strata, index.clusters, index.actions, windows, scalars)


def _branching_estimates(moments: BranchingMoments | None, analysis: Analysis) -> list[Estimates]:
    if moments is None:
        return []
    draws, level = analysis.exploratory_draws, analysis.request.level
    return [estimate_branching(moments, draws=draws, seed=analysis.seed, level=level)]


def _result_rows(
    estimates: Estimates, analysis: Analysis, events_version: int, revisions: Mapping[str | None, int], sha256: str
) -> pa.Table:
    count = len(estimates)
    constant: dict[str, Any] = {
        "study": analysis.study,
        "model": analysis.model,
        "split": analysis.split,
        "events_version": events_version,
        "plan_sha256": analysis.plan_sha256,
        "inputs_sha256": sha256,
    }
    columns = {**{name: [value] * count for name, value in constant.items()}, **estimates.columns}
    for name in ("action", "baseline"):
        columns[f"{name}_revision"] = [revisions[one] for one in columns[name]]
    return pa.table({name: columns[name] for name in RESULTS.columns}, schema=RESULTS.schema)
