"""The question and the answer of a gate."""

from __future__ import annotations

from dataclasses import dataclass

from flows.estimate.parts import EXPLORATORY_LEVEL
from schema.study import POOLED
from stats.endpoints import Decision
from stats.registry import Quantity


@dataclass(frozen=True)
class GateQuestion:
    """A question to a store.

    Attributes:
        quantity: a quantity of actions, or a contrast.
        action: the action b.
        baseline: the action a that b is compared with.
        margin: how much worse b may be, in the quantity's own unit: fractions, or tokens.
        level: 1 - alpha of each answer.
        study: the study's name; None if the store has one.
        model: the model's id; None if the study has one.
        stratum: a stratum, or ``pooled``.
    """

    quantity: str
    action: str
    baseline: str
    margin: float
    level: float = EXPLORATORY_LEVEL
    study: str | None = None
    model: str | None = None
    stratum: str = POOLED

    @property
    def interval_level(self) -> float:
        """The coverage of the interval, 1 - 2 alpha."""
        return 1 - 2 * (1 - self.level)


@dataclass(frozen=True)
class Verdict:
    """The answer, and the numbers behind it.

    Attributes:
        decision: the answer.
        question: the question, completed with the study and the model.
        contrast: the difference that was estimated.
        estimate: theta_b - theta_a; None if it is undefined.
        low: the lower end of the two-sided interval at level 1 - 2 alpha; None without an interval.
        high: the upper end.
        interval: how the interval was made.
        draws: bootstrap draws.
        documents: evaluation documents that both actions have.
        clusters: clusters of these documents.
        status: whether a plan named the difference before its documents were seen.
        events_version: the version of ``events`` that was read.
        plan_sha256: the plan's hash; None without a plan.
        alike: whether the estimate is below the margin, but the interval is not, because all or nearly all documents
            are alike and failing documents may be missing.
        more: how many more documents, with the same share of unlike ones, would then settle the question; None if no
            number would, or if the documents are not alike.
        unseen: how many documents in all would exclude failures that no document shows, if the answer is
            ``equivalent or better`` and does not reckon with such failures; None otherwise.
        from_floor: the interval of the difference in R from the engine's floor, which holds for all pairs of actions
            together; None if the baseline is no floor.
    """

    decision: Decision
    question: GateQuestion
    contrast: Quantity
    estimate: float | None
    low: float | None
    high: float | None
    interval: str
    draws: int
    documents: int
    clusters: int
    status: str
    events_version: int
    plan_sha256: str | None
    alike: bool
    more: int | None
    unseen: int | None = None
    from_floor: tuple[float, float] | None = None

    @property
    def told_from_floor(self) -> bool | None:
        """Whether the interval from the floor excludes 0; None without that interval."""
        return None if self.from_floor is None else self.from_floor[0] > 0 or self.from_floor[1] < 0

    @property
    def interval_level(self) -> float:
        """The coverage of the interval, 1 - 2 alpha."""
        return self.question.interval_level
