"""Estimates with intervals: SQL moments in, ``results`` rows out.

Only actions and contrasts with changed inputs are estimated; the rows equal those of a complete analysis bit for bit.
The work is cut into parts (``kvdrift.flows.estimate.parts``), whose numbers do not depend on how they are run: in
sequence here, as tasks in the flow.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from kvdrift.flows.estimate.branching_moments import branching_moments
from kvdrift.flows.estimate.document_index import DocumentIndex, measured
from kvdrift.flows.estimate.parts import Analysis, Runner, Subject, in_sequence, inputs_of, parts_of
from kvdrift.flows.estimate.standing import standing_rows
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError
from kvdrift.schema.moments import LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.tables import RESULTS
from kvdrift.schema.windows import Windows
from kvdrift.sql.catalog import Views
from kvdrift.stats.efficiency import BranchingMoments, estimate_branching
from kvdrift.stats.moments import DocumentMoments, Float, ReplicateMoments
from kvdrift.stats.quantities import SIMULTANEOUS_GAP, SIMULTANEOUS_OF
from kvdrift.stats.quantities.answers import ANSWER_QUANTITIES
from kvdrift.stats.quantities.estimator_costs import BRANCHING_QUANTITIES
from kvdrift.stats.reduction.control_variates import NO_COEFFICIENTS
from kvdrift.stats.resampling.intervals import Estimates
from kvdrift.stats.simultaneous import simultaneous_gaps, simultaneous_members

_POSITION_SUMS = {f"position_{name}": name for name in POSITION_MOMENTS}  # moments by column of ``profiles``
_LAG_SUMS = {f"lag_{name}": name for name in LAG_MOMENTS}
_ORDER = ("quantity", "stratum", "action", "baseline", "x")  # the key of a row


@dataclass(frozen=True)
class StudyEstimates:
    """The estimates of an analysis."""

    rows: pa.Table  # rows of ``results``, in the order of their keys
    new: int  # how many rows were made now; the others were stored already
    made: int  # how many actions and contrasts were estimated now
    subjects: int  # how many actions and contrasts there are


def estimate_study(
    store: Store,
    views: Views,
    analysis: Analysis,
    events_version: int,
    moments: DocumentMoments,
    run: Runner = in_sequence,
    coefficients: Mapping[str, Float] = NO_COEFFICIENTS,
    answers: DocumentMoments | None = None,
    *,
    wanted: Callable[[Subject], bool] = lambda _: True,
) -> StudyEstimates:
    """Bootstrap the documents of an analysis, for the actions and contrasts that lack current estimates.

    If the store holds replicates of residual branching, these are estimated too. ``run`` estimates the parts of the
    analysis. An action without ``coefficients`` of control variates, fitted on other documents, has no reduced
    estimates. ``answers`` are moments of the documents with answers, and ``wanted`` says whether a subject's estimates
    are to be made or are kept already.
    """
    analysis.request.check(moments, list(itertools.permutations(moments.actions, 2)))
    branching = branching_moments(views, analysis.study, analysis.model, analysis.split)
    revisions = action_revisions(views, analysis.study)
    inputs = inputs_of(analysis, moments, branching, revisions, coefficients, answers)
    inputs = {subject: sha256 for subject, sha256 in inputs.items() if wanted(subject)}
    cited = {
        "events_version": events_version,
        "documents_revision": documents_revision(views, analysis.study, analysis.model),
    }
    standing = standing_rows(store, "results", inputs.values(), cited)
    there = set(standing["inputs_sha256"].unique().to_pylist())
    lacking = [subject for subject, sha256 in inputs.items() if sha256 not in there]
    parts = parts_of(analysis, moments, lacking, coefficients)
    parts += parts_of(analysis.of_answers, answers, lacking, answers=True) if answers is not None else []
    estimates = [*(run(parts) if parts else ()), *_branching_estimates(branching, analysis, lacking)]
    draws, seed, level = analysis.exploratory_draws, analysis.seed, analysis.request.level
    if any(subject.together and subject.baseline is not None for subject in lacking):
        estimates.append(simultaneous_gaps(moments, draws=draws, seed=seed, level=level))
    for name, measured_by in (("mismatch", moments), ("accuracy", answers)):
        of_answers = name in ANSWER_QUANTITIES
        swept = [one for one in lacking if one.together and one.baseline is None and one.answers == of_answers]
        if measured_by is not None and swept:
            members = [one.action for one in swept]
            bands = simultaneous_members(measured_by, name, members, draws=draws, seed=seed, level=level)
            estimates.append(bands)
    new = _result_rows(Estimates.join(estimates), analysis, cited, revisions, inputs)
    rows = pa.concat_tables([standing, new]).sort_by([(name, "ascending") for name in _ORDER])
    made, subjects = (sum(not one.together for one in part) for part in (lacking, inputs))
    return StudyEstimates(rows, new.num_rows, made, subjects)


def analyzed_splits(views: Views, study: str, model: str) -> list[str]:
    """Return the splits that have complete trajectories of a measured action, sorted."""
    rows = measured(views.rows("moments", study=study, model=model))
    return sorted(set(rows["split"].to_pylist()))


def action_revisions(views: Views, study: str) -> Mapping[str | None, int]:
    """Read the revision of each action that the views show; 0 for actions that the store lacks, and for None."""
    listed = views.rows("actions", study=study)
    shown = zip(listed["action"].to_pylist(), listed["action_revision"].to_pylist(), strict=True)
    return defaultdict(int, shown)


def documents_revision(views: Views, study: str, model: str) -> int:
    """Read the newest revision of a study's documents that the views show; 0 without documents."""
    rows = views.rows("documents", ["document_revision"], study=study, model=model)
    return max(rows["document_revision"].to_pylist(), default=0)


def study_windows(views: Views, study: str, model: str) -> Windows:
    """Read the study's windows from the ``windows`` view."""
    rows = views.rows("windows", study=study, model=model).to_pylist()
    if not rows:
        raise InputError(f"study '{study}', model '{model}': nothing of it is derived in this store")
    (row,) = rows
    return Windows.from_row(row)


def document_moments(
    views: Views, study: str, model: str, split: str, windows: Windows | None = None, *, profiles: bool = True
) -> DocumentMoments:
    """Read the moments of every document and action of a split, controls left out.

    The windows are read if None; without ``profiles``, moments over positions and lags are not read.
    """
    windows = windows or study_windows(views, study, model)
    table = measured(views.rows("moments", study=study, model=model, split=split))
    if not table.num_rows:
        raise InputError(f"study '{study}', model '{model}': no complete {split} trajectories in this store")
    index = DocumentIndex(table)
    scalars = index.spread(table, SCALAR_MOMENTS)
    positions, lags = dict[str, Float](), dict[str, Float]()
    if profiles:
        columns = ("doc", "action", "replicates", *_POSITION_SUMS, *_LAG_SUMS)
        rows = measured(views.rows("profiles", columns, study=study, model=model, split=split))
        replicates = index.spread(rows, ["replicates"])["replicates"][:, :, None]
        positions, lags = (
            {name: index.spread(rows, [column])[column] / replicates for column, name in sums.items()}
            for sums in (_POSITION_SUMS, _LAG_SUMS)
        )
    return DocumentMoments(
        index.documents, index.strata, index.clusters, index.actions, windows, scalars, positions, lags
    )


def replicate_moments(views: Views, study: str, model: str, split: str) -> ReplicateMoments:
    """Read the scalar moments of every replicate of a split, controls left out."""
    table = measured(views.rows("trajectory_moments", study=study, model=model, split=split))
    if not table.num_rows:
        raise InputError(f"study '{study}', model '{model}': no complete {split} trajectories in this store")
    index = DocumentIndex(table)
    count = int(table["replicate"].to_numpy().max()) + 1
    scalars = index.spread(table, SCALAR_MOMENTS, "replicate", count)
    windows = study_windows(views, study, model)
    return ReplicateMoments(index.documents, index.strata, index.clusters, index.actions, windows, scalars)


def _branching_estimates(
    moments: BranchingMoments | None, analysis: Analysis, subjects: Collection[Subject]
) -> list[Estimates]:
    actions = [subject.action for subject in subjects if subject.branched]
    if moments is None or not actions:
        return []
    draws, level = analysis.exploratory_draws, analysis.request.level
    return [estimate_branching(moments.of_actions(actions), draws=draws, seed=analysis.seed, level=level)]


def _result_rows(
    estimates: Estimates, analysis: Analysis, cited: Mapping[str, int], revisions: Mapping[str | None, int],
    inputs: Mapping[Subject, str],
) -> pa.Table:  # fmt: skip
    count = len(estimates)
    constant: dict[str, Any] = {
        "study": analysis.study,
        "model": analysis.model,
        "split": analysis.split,
        "plan_sha256": analysis.plan_sha256,
        **cited,
    }
    columns = {**{name: [value] * count for name, value in constant.items()}, **estimates.columns}
    for name in ("action", "baseline"):
        columns[f"{name}_revision"] = [revisions[one] for one in columns[name]]
    subjects = zip(*(columns[name] for name in ("action", "baseline", "quantity")), strict=True)
    columns["inputs_sha256"] = [
        inputs[
            Subject(
                action,
                baseline,
                quantity in BRANCHING_QUANTITIES,
                quantity in ANSWER_QUANTITIES or quantity == SIMULTANEOUS_OF["accuracy"],
                quantity == SIMULTANEOUS_GAP or quantity in SIMULTANEOUS_OF.values(),
            )
        ]
        for action, baseline, quantity in subjects
    ]
    return pa.table({name: columns[name] for name in RESULTS.columns}, schema=RESULTS.schema)
