"""Estimates with intervals, computed from moments as rows of ``results``.

Each action and each contrast is estimated independently of all others. All parts of an analysis resample the same
documents. The estimates of a part do not depend, in any bit, on other parts or on the order in which parts are
estimated. Quantities are grouped so that the draws of a part fit into memory together.

Only actions and contrasts with changed inputs are estimated. Events of another study, model, split or action change the
log's version, but not these inputs. The other estimates are copied to the new version, bit for bit, without a new
bootstrap. If answers are corrected, estimates that do not depend on answers are likewise copied to the new revision of
the documents.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.flows.estimate.moments import action_revisions, branching_moments, documents_revision
from kvdrift.flows.plan.frozen_plan import FrozenPlan
from kvdrift.log.store import Store
from kvdrift.schema.estimate_tables import RESULTS
from kvdrift.schema.progress import SILENT, Progress
from kvdrift.schema.python_source import syntax_sha256
from kvdrift.schema.study.reading import families
from kvdrift.sql.catalog import Views
from kvdrift.stats.bootstrap import Estimates, Request, estimate, groups
from kvdrift.stats.efficiency import BranchingMoments, estimate_branching
from kvdrift.stats.ends import STUDENTIZED
from kvdrift.stats.moments import DocumentMoments, Float
from kvdrift.stats.quantities import (
    ANSWER_QUANTITIES,
    BRANCHING_QUANTITIES,
    PAIR_QUANTITIES,
    SIMULTANEOUS_GAP,
    SIMULTANEOUS_OF,
)
from kvdrift.stats.reduction import NO_COEFFICIENTS, is_reduced, reduced_documents
from kvdrift.stats.simultaneous import simultaneous_gaps, simultaneous_members

EXPLORATORY_DRAWS = 2_000
EXPLORATORY_LEVEL = 0.95
_ABREAST = max(2, min(os.cpu_count() or 2, 4))  # at most 4, since a part's draws take up to 400 MB
_ORDER = ("quantity", "stratum", "action", "baseline", "x")  # the key of a row


def inputs_sha256(*inputs: Any) -> str:
    """Compute the SHA-256 of all inputs of estimates: data, code of ``stats``, versions of numpy and scipy.

    The code counts without comments, docstrings and formatting.
    Inputs are dataclasses, mappings, sequences, arrays and plain values; arrays count with every bit.
    """
    digest = hashlib.sha256(_code_sha256().encode())
    for part in inputs:
        _add(digest, part)
    return digest.hexdigest()


def standing_rows(store: Store, table: str, wanted: Iterable[str], cited: Mapping[str, int]) -> pa.Table:
    """Return the newest rows of ``results`` or ``calibration`` for each wanted SHA-256 of inputs.

    The rows may have been stored for another version of the events or revision of the documents. In the result, the
    columns named in ``cited`` have the values given there. Inputs without stored rows are left out.
    """
    stored = store.read(table)
    rows = stored.filter(pc.is_in(stored["inputs_sha256"], value_set=pa.array(list(wanted), pa.string())))
    for name, present in cited.items():
        newest = rows.group_by("inputs_sha256").aggregate([(name, "max")])
        newest_rows = pc.index_in(rows["inputs_sha256"], value_set=newest["inputs_sha256"])
        rows = rows.filter(pc.equal(rows[name], newest[f"{name}_max"].take(newest_rows)))
        at, field = stored.schema.get_field_index(name), stored.schema.field(name)
        rows = rows.set_column(at, field, pa.repeat(pa.scalar(present, field.type), rows.num_rows))
    return rows


def _add(digest: Any, value: Any) -> None:
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        value = [part for name in sorted(value, key=repr) for part in (name, value[name])]
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} values".encode())
        for part in value:
            _add(digest, part)
    else:
        digest.update(f"{value!r};".encode())


@cache
def _code_sha256() -> str:
    stats = resources.files("kvdrift.stats")
    folders = [stats, *(entry for entry in stats.iterdir() if entry.is_dir())]
    files = [(f"{folder.name}/{file.name}", file) for folder in folders for file in folder.iterdir()]
    texts = {name: file.read_bytes() for name, file in files if name.endswith(".py")}
    versions = " ".join(f"{name} {version(name)}" for name in ("numpy", "scipy"))
    digest = hashlib.sha256(versions.encode())
    for name in sorted(texts):
        digest.update(f"{name} {syntax_sha256(texts[name])}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Analysis:
    """The estimates to make for one study, model and split, and how to make them."""

    study: str  # the study's name
    model: str  # the model's id
    split: str  # the split whose documents are resampled
    seed: int  # the seed of resampling
    # pairs of quantities and bootstrap draws; every quantity once, the exploratory ones last
    draws: tuple[tuple[tuple[str, ...], int], ...]
    request: Request  # the levels and families of the intervals
    plan_sha256: str | None  # the plan's hash; None if no plan was frozen
    answers_changed: bool = False  # whether answers of its documents have changed since the plan froze them

    @property
    def of_answers(self) -> Analysis:
        """The analysis of answers; if answers changed after the plan, all its endpoints have the status ``seen``."""
        seen = tuple(self.request.prespecified or ()) if self.answers_changed else self.request.seen
        return replace(self, request=replace(self.request, seen=seen))

    @property
    def exploratory_draws(self) -> int:
        """The number of bootstrap draws for quantities that no plan names."""
        return self.draws[-1][1]

    @classmethod
    def planned(cls, plan: FrozenPlan, seen: tuple[str, ...] = (), *, answers_changed: bool = False) -> Self:
        """Return the frozen plan's analysis of the evaluation documents.

        Primary quantities get the plan's draws, all others its exploratory draws. Each primary endpoint gets the
        level 1 - alpha/m, m being the size of their family; all other intervals have the pointwise level 95%. Planned
        endpoints of actions in ``seen`` have the status ``seen``, and so have those of answers if ``answers_changed``
        after the plan was frozen.
        """
        primary = tuple(plan.primary)
        others = tuple(name for name in PAIR_QUANTITIES if name not in primary)
        draws = ((primary, plan.draws), (others, plan.exploratory_draws))
        request = Request(EXPLORATORY_LEVEL, (plan.family,), tuple(plan.actions), seen, plan.interval)
        return cls(plan.study, plan.model, "evaluation", plan.seed, draws, request, plan.sha256, answers_changed)

    @classmethod
    def exploratory(cls, views: Views, study: str, model: str, split: str) -> Self:
        """Return the exploratory analysis of a split, which follows no plan.

        The seed is the study's; 0 if the store has no row of the study.
        """
        stored = views.rows("studies", study=study, model=model).to_pylist()
        seed = int(stored[0]["seed"]) if stored else 0
        draws = ((tuple(PAIR_QUANTITIES), EXPLORATORY_DRAWS),)
        return cls(study, model, split, seed, draws, Request(EXPLORATORY_LEVEL), None)


class Subject(NamedTuple):
    """The subject of estimates: an action, its contrast with a baseline, or its residual branching.

    With ``answers`` the estimates are over the documents with answers. With ``together`` the intervals hold
    simultaneously, for all pairs of actions or for all members of a sweep.
    """

    action: str
    baseline: str | None = None
    branched: bool = False
    answers: bool = False
    together: bool = False


@dataclass(frozen=True, eq=False)
class AnalysisPart:
    """Some quantities of some actions, or of some contrasts (baseline, action), to be estimated at once.

    ``reduced`` are the moments minus control variates, of the actions for which coefficients were fitted.
    """

    moments: DocumentMoments
    quantities: tuple[str, ...]
    draws: int
    seed: int
    request: Request
    contrasts: tuple[tuple[str, str], ...] = ()
    reduced: DocumentMoments | None = None


def estimate_parts(parts: Sequence[AnalysisPart], progress: Progress = SILENT) -> list[Estimates]:
    """Estimate parts in threads, ``_ABREAST`` at once; return the result of each, in their order.

    Numpy releases the interpreter's lock while it multiplies and sorts; each process would need a copy of the moments.
    """
    estimates = []
    progress.begin("bootstrap", len(parts), "parts")
    with ThreadPoolExecutor(_ABREAST) as threads:
        for made in threads.map(estimate_part, parts):
            estimates.append(made)
            progress.advance(1)
    return estimates


def estimate_part(part: AnalysisPart) -> Estimates:
    """Estimate the quantities of one part.

    Quantities that are functions of reduced moments alone are estimated from these moments too.
    """
    estimates = estimate(
        part.moments, draws=part.draws, seed=part.seed, request=part.request, quantities=part.quantities,
        pairs=part.contrasts,
    )  # fmt: skip
    reduced = part.reduced
    if reduced is None:
        return estimates
    names = [name for name in part.quantities if is_reduced(PAIR_QUANTITIES[name], reduced)]
    pairs = tuple(pair for pair in part.contrasts if set(pair) <= set(reduced.actions))
    if part.contrasts and not pairs:
        return estimates  # no two actions have coefficients, for example if one action was ingested
    request = part.request.of(reduced.actions, pairs)
    return estimates.with_reduced(
        estimate(reduced, draws=part.draws, seed=part.seed, request=request, quantities=names, pairs=pairs)
    )


def subjects_of(moments: DocumentMoments, *, answers: bool = False) -> list[Subject]:
    """Return the subjects to estimate: every action, and every contrast of two actions that share a document.

    With ``answers``, ``moments`` are of the documents with answers, and the subjects have ``answers`` set.
    """
    actions = moments.actions
    has = dict(zip(actions, moments.present.T, strict=True))
    pairs = [(a, b) for a in actions for b in actions if a != b and (has[a] & has[b]).any()]
    return [
        *(Subject(action, answers=answers) for action in actions),
        *(Subject(b, a, answers=answers) for a, b in pairs),
    ]


def parts_of(
    analysis: Analysis,
    moments: DocumentMoments,
    subjects: Collection[Subject],
    coefficients: Mapping[str, Float] = NO_COEFFICIENTS,
    *,
    answers: bool = False,
) -> list[AnalysisPart]:
    """Cut the estimates of some subjects into parts, residual branching excluded.

    With ``answers``, ``moments`` are of the documents with answers, and answers are estimated instead of events.
    """
    subjects = [
        subject for subject in subjects if subject.answers == answers and not (subject.branched or subject.together)
    ]
    actions = [subject.action for subject in subjects if subject.baseline is None]
    contrasts = tuple((subject.baseline, subject.action) for subject in subjects if subject.baseline is not None)
    compared = {action for pair in contrasts for action in pair}
    moments, parts = moments.in_canonical_order(), []  # once for all parts, since profiles may be large
    for kind, actions_of_kind, pairs in (("action", actions, ()), ("contrast", compared, contrasts)):
        if not actions_of_kind:
            continue
        some, request = moments.of_actions(actions_of_kind), analysis.request.of(actions_of_kind, pairs)
        reduced = reduced_documents(some, coefficients)
        for quantities, draws in analysis.draws:
            suited_names = [name for name in quantities if (name in ANSWER_QUANTITIES) == answers]
            names = [name for name in suited_names if PAIR_QUANTITIES[name].kind == kind]
            parts += [
                AnalysisPart(some, group, draws, analysis.seed, request, pairs, reduced)
                for group in groups(some, draws, names, pairs, studentized=request.interval == STUDENTIZED)
            ]
    return parts


def inputs_of(
    analysis: Analysis,
    moments: DocumentMoments,
    branching: BranchingMoments | None,
    revisions: Mapping[str | None, int],
    coefficients: Mapping[str, Float] = NO_COEFFICIENTS,
    answers: DocumentMoments | None = None,
) -> dict[Subject, str]:
    """Return, for every subject of an analysis, the SHA-256 of all inputs of the subject's estimates."""
    settings = replace(analysis, request=replace(analysis.request, seen=()), answers_changed=False)
    hashes = {}
    kinds: list[tuple[DocumentMoments | BranchingMoments, list[Subject]]] = [(moments, subjects_of(moments))]
    if answers is not None:
        kinds.append((answers, subjects_of(answers, answers=True)))
    if branching is not None:
        kinds.append((branching, [Subject(action, branched=True) for action in branching.actions]))
    for measured, subjects in kinds:
        of_action = {action: inputs_sha256(settings, measured.of_actions([action])) for action in measured.actions}
        for subject in subjects:
            seen = (analysis.of_answers if subject.answers else analysis).request.seen
            names = [name for name in (subject.baseline, subject.action) if name is not None]
            traits = [(of_action[name], revisions[name], name in seen, coefficients.get(name)) for name in names]
            hashes[subject] = inputs_sha256(subject.branched, subject.answers, traits)
    # An interval that holds for all pairs depends on all actions.
    whole = inputs_sha256("together", [hashes[subject] for subject in subjects_of(moments)])
    pairs = [subject for subject in subjects_of(moments) if subject.baseline is not None]
    hashes |= {pair._replace(together=True): inputs_sha256(whole, *pair) for pair in pairs}
    # An interval that holds for all members of sweeps depends on all members.
    swept = [Subject(action) for action in swept_actions(moments.actions)]
    swept += [] if answers is None else [Subject(action, answers=True) for action in swept_actions(answers.actions)]
    of_all = inputs_sha256("members", [hashes[subject] for subject in swept])
    return hashes | {subject._replace(together=True): inputs_sha256(of_all, *subject) for subject in swept}


def swept_actions(actions: Sequence[str]) -> list[str]:
    """Return the actions that are members of sweeps."""
    return sorted({member for members in families([*actions]).values() for member in members})


@dataclass(frozen=True)
class StudyEstimates:
    """The estimates of an analysis, and how many of them were made now."""

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
    progress: Progress = SILENT,
    coefficients: Mapping[str, Float] = NO_COEFFICIENTS,
    answers: DocumentMoments | None = None,
    *,
    wanted: Callable[[Subject], bool] = lambda _: True,
) -> StudyEstimates:
    """Bootstrap the documents of an analysis, for the actions and contrasts that lack current estimates.

    If the store holds replicates of residual branching, these are estimated too. An action without ``coefficients`` of
    control variates, fitted on other documents, has no reduced estimates. ``answers`` are moments of the documents with
    answers. Subjects for which ``wanted`` is false are left out: their estimates are neither made nor returned.
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
    estimates = estimate_parts(parts, progress) if parts else []
    draws, seed, level = analysis.exploratory_draws, analysis.seed, analysis.request.level
    if branching is not None and (branched := [subject.action for subject in lacking if subject.branched]):
        estimates.append(estimate_branching(branching.of_actions(branched), draws=draws, seed=seed, level=level))
    if any(subject.together and subject.baseline is not None for subject in lacking):
        estimates.append(simultaneous_gaps(moments, draws=draws, seed=seed, level=level))
    for name, measured_by in (("mismatch", moments), ("accuracy", answers)):
        of_answers = name in ANSWER_QUANTITIES
        swept = [
            subject
            for subject in lacking
            if subject.together and subject.baseline is None and subject.answers == of_answers
        ]
        if measured_by is not None and swept:
            members = [subject.action for subject in swept]
            bands = simultaneous_members(measured_by, name, members, draws=draws, seed=seed, level=level)
            estimates.append(bands)
    new = _result_rows(Estimates.join(estimates), analysis, cited, revisions, inputs)
    rows = pa.concat_tables([standing, new]).sort_by([(name, "ascending") for name in _ORDER])
    made, subjects = (sum(not subject.together for subject in part) for part in (lacking, inputs))
    return StudyEstimates(rows, new.num_rows, made, subjects)


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
        columns[f"{name}_revision"] = [revisions[action] for action in columns[name]]
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
