"""The gate: whether an action of a stored study is at most a margin worse than another action (``docs/gate.md``).

Everything is computed from the store's moments at the question's level; nothing is written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc

from kvdrift.flows.estimate.estimation import EXPLORATORY_DRAWS, EXPLORATORY_LEVEL
from kvdrift.flows.estimate.moments import answer_moments, document_moments
from kvdrift.flows.estimate.scores import known_answers
from kvdrift.flows.plan.frozen_plan import FrozenPlan, find_plan
from kvdrift.flows.plan.stored_documents import EVALUATION, changed_answers, seen_actions
from kvdrift.log.checked_files import WEEK
from kvdrift.log.store import Store
from kvdrift.log.studies import chosen_study
from kvdrift.log.units.revisions import current_actions
from kvdrift.schema.errors import ControlError, InputError, nearest
from kvdrift.schema.frozen_text import wanted_documents
from kvdrift.schema.study import CONTROL_ACTION, NUMERICS, POOLED
from kvdrift.schema.windows import Windows
from kvdrift.sql.catalog import Views, open_views
from kvdrift.stats.alike import alike_documents
from kvdrift.stats.bootstrap import EXPLORATORY, SEEN, Request, estimate, planned_status
from kvdrift.stats.endpoints import Decision, Endpoint, decidable_quantity, decide
from kvdrift.stats.ends import ALIKE, MOST_UNLIKE, STUDENTIZED, Likeness, settling_factor
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.pooling import Pooling
from kvdrift.stats.quantities import ANSWER_QUANTITIES, SIMULTANEOUS_GAP
from kvdrift.stats.registry import Between, Higher, Quantity
from kvdrift.stats.simultaneous import simultaneous_gaps

LARGER_FLOOR: Final = ""
"""The name of a baseline that stands for the study's floor with the larger R."""

_DRAWS = 10_000  # for a study without a plan


@dataclass(frozen=True)
class GateQuestion:
    """The question whether ``action`` (b) is at most ``margin`` worse than ``baseline`` (a), answered from a store."""

    quantity: str  # a quantity of actions, or a contrast
    action: str  # the action b
    baseline: str  # the action a that b is compared with, or ``LARGER_FLOOR``
    margin: float  # how much worse b may be, in the quantity's own unit: fractions, or tokens
    level: float = EXPLORATORY_LEVEL  # 1 - alpha of each answer
    study: str | None = None  # the study's name; None if the store has one
    model: str | None = None  # the model's id; None if the study has one
    stratum: str = POOLED  # a stratum, or ``pooled``

    @property
    def interval_level(self) -> float:
        """The coverage of the two-sided interval, 1 - 2 alpha, where ``level`` is 1 - alpha."""
        return 1 - 2 * (1 - self.level)


@dataclass(frozen=True)
class Verdict:
    """The answer to a question, and the numbers behind the answer."""

    decision: Decision  # the answer
    question: GateQuestion  # the question, completed with the study and the model
    contrast: Quantity  # the difference that was estimated
    estimate: float | None  # theta_b - theta_a; None if it is undefined
    low: float | None  # the lower end of the two-sided interval at level 1 - 2 alpha; None without an interval
    high: float | None  # the upper end
    interval: str  # how the interval was made
    draws: int  # bootstrap draws
    documents: int  # evaluation documents that both actions have
    clusters: int  # clusters of these documents
    status: str  # whether a plan named the difference before its documents were seen
    events_version: int  # the version of ``events`` that was read
    plan_sha256: str | None  # the plan's hash; None without a plan
    # whether the estimate is below the margin, but the interval is not, because all or nearly all documents agree
    # and failing documents may be missing
    alike: bool
    # how many more documents, with the same share of unlike ones, would then settle the question; None if no number
    # would, or if the documents differ
    more: int | None
    # how many documents in all would exclude failures that no document shows, if the answer is ``equivalent or better``
    # and does not reckon with such failures; None otherwise
    unseen: int | None = None
    # for each floor of the study the interval of the difference in R from it, which holds for all pairs of actions
    # together; empty if the baseline is no floor
    from_floors: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def distinguished(self) -> bool | None:
        """Whether the action's R is surely above that of every floor: all lower ends in ``from_floors`` are above 0.

        It is None if ``from_floors`` is empty.
        """
        return all(low > 0 for low, _ in self.from_floors.values()) if self.from_floors else None

    @property
    def interval_level(self) -> float:
        """The coverage of the interval from ``low`` to ``high``: 1 - 2 alpha, for a question of level 1 - alpha."""
        return self.question.interval_level


def gate_stored(store: Store, question: GateQuestion) -> Verdict:
    """Answer a question from the evaluation documents that both actions have.

    Raises:
        InputError: a name does not exist, the quantity cannot be decided on, or the study is not finished.
        ControlError: the study's full-retention control is not exactly 0.
        DamagedStoreError: the store is damaged.
    """
    contrast = decidable_quantity(question.quantity)
    _check_numbers(question, contrast)
    study, model = chosen_study(store, question.study, question.model)
    plan = find_plan(store, study, model)
    _check_tails(question, _DRAWS if plan is None else plan.draws)
    with open_views(store, kept=("moments",), checked_within=WEEK) as views:
        version = store.data_version("events", views.versions["events"])
        if pending := store.all_underived(views.versions).size:
            raise InputError(f"{pending} units are not derived: kvdrift derive {store.location}")
        _check_control(views, study, model)
        floors = _floors(store, study)
        moments = of_all = document_moments(views, study, model, EVALUATION, profiles=False)
        if question.baseline == LARGER_FLOOR:
            question = replace(question, baseline=_larger_floor(moments, floors, study))
        _check_actions(store, views, question, study)
        _check_finished(store, views, question, study, model, plan)
        if contrast.name in ANSWER_QUANTITIES or contrast.difference_of in ANSWER_QUANTITIES:
            moments = _answers(store, views, study, model, moments.windows)
    _check_pair(moments, question)
    row = _estimated(moments, contrast, question, plan)
    decision = decide(row["low"], row["high"], question.margin, contrast.higher)
    seems = row["estimate"] is not None and _worse_sign(contrast) * row["estimate"] < question.margin
    rare = decision is Decision.UNRESOLVED and row["interval"] == ALIKE and seems
    unseen = _unseen(moments, contrast, question, row) if decision is Decision.EQUIVALENT else None
    return Verdict(
        decision,
        replace(question, study=study, model=model),
        contrast, row["estimate"], row["low"], row["high"], row["interval"], row["draws"], row["documents"],
        row["clusters"],
        _status(store, plan, contrast, question),
        version, None if plan is None else plan.sha256, rare,
        _more_documents(moments, contrast, question, row["documents"]) if rare else None,
        unseen,
        _from_floors(of_all, question, plan, floors) if question.baseline in floors else {},
    )  # fmt: skip


def _answers(store: Store, views: Views, study: str, model: str, windows: Windows) -> DocumentMoments:
    known = known_answers(store, study, model)
    moments = answer_moments(views, study, model, EVALUATION, windows, known)
    if moments is None:
        lacking = (
            f"are not all scored: kvdrift analyze {store.location}"
            if known
            else "are not known; choose another --quantity"
        )
        raise InputError(f"study '{study}': the quantity needs answers, and those of evaluation documents {lacking}")
    return moments


def _estimated(
    moments: DocumentMoments, contrast: Quantity, question: GateQuestion, plan: FrozenPlan | None
) -> dict[str, Any]:
    """Estimate the contrast, with the same draws as the study's stored estimates of primary quantities.

    Documents whose values are within the margin of their stratum's median count as equal: they carry no information
    about failing documents.
    """
    request = Request(
        question.interval_level, interval=STUDENTIZED if plan is None else plan.interval,
        alike_within=question.margin,
    )  # fmt: skip
    pair = (question.baseline, question.action)
    estimates = estimate(
        moments.of_actions(pair), draws=_DRAWS if plan is None else plan.draws, seed=0 if plan is None else plan.seed,
        request=request, quantities=[contrast.name], pairs=[pair],
    )  # fmt: skip
    return estimates.row(Endpoint(contrast.name, question.action, question.baseline, question.stratum))


def _floors(store: Store, study: str) -> list[str]:
    """Return the names of a study's floors, sorted: actions that compute the whole cache again or in another way."""
    actions = current_actions(store.read("actions"), study)
    return sorted(name for name, row in actions.items() if row["selector"] == NUMERICS)


def _larger_floor(moments: DocumentMoments, floors: Sequence[str], study: str) -> str:
    """Return the floor with the larger R; the kernel floor if both are equal."""
    measured = [name for name in floors if name in moments.actions]
    if not measured:
        raise InputError(f"--over-floor: study '{study}' has no floor; --baseline NAME names an action to compare with")
    risks = estimate(
        moments.of_actions(measured), draws=2, seed=0, request=Request(EXPLORATORY_LEVEL), quantities=["mismatch"],
        pairs=[],
    )  # fmt: skip
    return max(measured, key=lambda name: (risks.row(Endpoint("mismatch", name))["estimate"] or 0.0, name))


def _from_floors(
    moments: DocumentMoments, question: GateQuestion, plan: FrozenPlan | None, floors: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Return for each floor the interval (low, high) of the action's R minus the floor's R, as on the study's page."""
    draws, seed = (EXPLORATORY_DRAWS, 0) if plan is None else (plan.exploratory_draws, plan.seed)
    pairs = simultaneous_gaps(moments, draws=draws, seed=seed, level=EXPLORATORY_LEVEL)
    rows = {
        name: pairs.row(Endpoint(SIMULTANEOUS_GAP, question.action, name)) for name in floors if name != question.action
    }
    return {name: (row["low"], row["high"]) for name, row in rows.items() if row["low"] is not None}


def _more_documents(moments: DocumentMoments, contrast: Quantity, question: GateQuestion, documents: int) -> int | None:
    """Return how many more documents would settle a question that is open because documents are nearly identical.

    The result is None if no number of documents would settle it.
    """
    similarity, between = _similarity(moments, contrast, question)
    factor = settling_factor(similarity, question.interval_level, between, question.margin)
    return None if factor is None else math.ceil(documents * (factor - 1))


def _unseen(moments: DocumentMoments, contrast: Quantity, question: GateQuestion, row: Mapping[str, Any]) -> int | None:
    """Return how many documents in all would exclude failures worse than any that the present documents show.

    The result is None if the present documents exclude such failures already, or if no number of documents would. It
    is also None if at most ``MOST_UNLIKE`` clusters differ from the others by more than the margin, since the interval
    then allows for such failures.

    With n present documents, up to a share of 1 - alpha^(1/n) may fail unseen, and lose all that can be lost.
    """
    similarity, between = _similarity(moments, contrast, question)
    if similarity.unlike[0] <= MOST_UNLIKE or not between.bounded:
        return None
    worse = np.array([_worse_sign(contrast) * row["estimate"]])
    seen = replace(similarity, value=worse, spread=np.zeros(1), unlike=np.zeros(1), farthest=np.zeros(1))
    if seen.ends(np.array([question.interval_level]), between)[1][0] < question.margin:
        return None
    factor = settling_factor(seen, question.interval_level, between, question.margin)
    return None if factor is None else math.ceil(row["documents"] * factor)


def _similarity(moments: DocumentMoments, contrast: Quantity, question: GateQuestion) -> tuple[Likeness, Between]:
    """Return how alike the contrast's values are, and their range; values are negated first if lower ones are worse."""
    pair = (question.baseline, question.action)
    pooling = Pooling.of(moments.of_actions(pair).in_canonical_order(), [pair])
    row = pooling.rows.index(question.stratum)
    similarity = alike_documents(pooling, contrast, question.margin).of((slice(row, row + 1), 0, 0))
    between = contrast.range.between(moments.windows.horizon)
    return (
        (similarity, between)
        if _worse_sign(contrast) > 0
        else (similarity.turned, Between(-between.high, -between.low))
    )


def _worse_sign(contrast: Quantity) -> int:
    """Return 1 if higher values of a quantity are worse, and -1 if they are better."""
    return -1 if contrast.higher is Higher.BETTER else 1


def _status(store: Store, plan: FrozenPlan | None, contrast: Quantity, question: GateQuestion) -> str:
    """Return the status of the contrast; the plan may have named it with action and baseline exchanged."""
    named = () if plan is None else plan.family.endpoints
    endpoint = Endpoint(contrast.name, question.action, question.baseline, question.stratum)
    mirrored = Endpoint(contrast.name, question.baseline, question.action, question.stratum)
    if plan is None or not (endpoint in named or (contrast.difference_of is not None and mirrored in named)):
        return EXPLORATORY
    if contrast.name in ANSWER_QUANTITIES and changed_answers(store, plan):
        return SEEN
    return planned_status(seen_actions(store, plan), question.action, question.baseline)


def _check_numbers(question: GateQuestion, contrast: Quantity) -> None:
    if not 0.5 < question.level < 1:
        raise InputError(f"--level {question.level:g}: must be above 0.5 and below 1, such as 0.95")
    if not 0 <= question.margin < float("inf"):
        raise InputError(
            f"--margin {question.margin:g}: must be at least 0; it is the largest difference that counts as no worse"
        )
    # The difference of two fractions is at most 1, and O is a fraction.
    if contrast.scale.factor != 1 and question.margin >= 1:
        percent = contrast.scale.factor
        raise InputError(
            f"--margin {question.margin:g}: must be below 1, since '{question.quantity}' is a fraction; "
            f"{question.margin / percent:g} is {question.margin:g} percentage points"
        )


def _check_tails(question: GateQuestion, draws: int) -> None:
    """Refuse a level at which no draw lies beyond the interval's ends: such ends would be arbitrary."""
    if draws * (1 - question.level) < 1:
        raise InputError(
            f"--level {question.level:.12g}: the study's {draws:,} bootstrap draws suffice for levels up to "
            f"{1 - 1 / draws:.6g}; plan.draws in the study file sets their number"
        )


def _check_actions(store: Store, views: Views, question: GateQuestion, study: str) -> None:
    """Check that the question names two different known actions, neither of them the control.

    An action is known if table ``actions`` or view ``moments`` has it; one of another generator may be in ``moments``
    alone.
    """
    listed = {name for name, row in current_actions(store.read("actions"), study).items() if not row["control"]}
    known = listed | set(pc.unique(views.rows("moments", study=study)["action"]).to_pylist()) - {CONTROL_ACTION}
    for option, name in (("action", question.action), ("baseline", question.baseline)):
        if name == CONTROL_ACTION:
            raise InputError(
                f"--{option} {name}: is the full-retention control, which never diverges; name one of "
                f"{', '.join(sorted(known))}"
            )
        if name not in known:
            raise InputError(f"--{option} {name}: no such action; {nearest(name, known)}")
    if question.action == question.baseline:
        raise InputError(f"--action and --baseline are both {question.action}: name two different actions")


def _check_control(views: Views, study: str, model: str) -> None:
    moved = [row for row in views.rows("controls", study=study, model=model).to_pylist() if row["moved_pairs"]]
    if moved:
        raise ControlError(
            f"study '{study}': {moved[0]['moved_pairs']} pairs of the full-retention control differ, but must have "
            "delta and f of exactly 0; nothing can be decided on this store"
        )


def _check_finished(
    store: Store, views: Views, question: GateQuestion, study: str, model: str, plan: FrozenPlan | None
) -> None:
    """Check that both actions have all evaluation documents and replicates of the plan.

    A study of another generator has no plan, and is taken as finished.
    """
    if plan is None:
        if any((row["study"], row["model"]) == (study, model) for row in store.read("studies").to_pylist()):
            raise InputError(f"study '{study}' has no evaluation yet: kvdrift run STUDY.toml --store {store.location}")
        return
    if plan.looks is not None:
        raise InputError(
            f"study '{study}' is sequential: its outcomes decided how many documents it has, and a gate needs a number "
            'that is fixed beforehand, as in a study with stopping = "fixed"'
        )
    rows = views.rows("moments", study=study, model=model, split=EVALUATION).select(["stratum", "action", "replicates"])
    wanted = wanted_documents(plan.content)
    whole = Counter((row["action"], row["stratum"]) for row in rows.to_pylist() if row["replicates"] >= plan.replicates)
    for name in (question.action, question.baseline):
        there = sum(min(whole[name, stratum], count) for stratum, count in wanted.items())
        if there < sum(wanted.values()):
            raise InputError(
                f"action '{name}' has {there} of the {sum(wanted.values())} evaluation documents of the plan with "
                f"{plan.replicates} replicates; kvdrift run STUDY.toml --store {store.location} generates the others"
            )


def _check_pair(moments: DocumentMoments, question: GateQuestion) -> None:
    if question.stratum != POOLED and question.stratum not in moments.stratum_names:
        raise InputError(
            f"--stratum {question.stratum}: no such stratum; {nearest(question.stratum, moments.stratum_names)}"
        )
    present = dict(zip(moments.actions, moments.present.T, strict=True))
    both = [present.get(name, False) for name in (question.action, question.baseline)]
    of_stratum = (moments.strata == question.stratum) | (question.stratum == POOLED)
    if not (both[0] & both[1] & of_stratum).any():
        raise InputError(f"{question.action} and {question.baseline} have no evaluation document in common")
