"""The question and the answer of a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvdrift.flows.estimate.parts import EXPLORATORY_LEVEL
from kvdrift.schema.study import POOLED
from kvdrift.stats.endpoints import Decision
from kvdrift.stats.registry import Quantity

LARGER_FLOOR: Final = ""
"""As a baseline: that of the study's floors which has the larger R."""


@dataclass(frozen=True)
class GateQuestion:
    """A question to a store."""

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
        """The coverage of the interval, 1 - 2 alpha."""
        return 1 - 2 * (1 - self.level)


@dataclass(frozen=True)
class Verdict:
    """The answer, and the numbers behind it."""

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
    # whether the estimate is below the margin, but the interval is not, because all or nearly all documents are alike
    # and failing documents may be missing
    alike: bool
    # how many more documents, with the same share of unlike ones, would then settle the question; None if no number
    # would, or if the documents are not alike
    more: int | None
    # how many documents in all would exclude failures that no document shows, if the answer is ``equivalent or better``
    # and does not reckon with such failures; None otherwise
    unseen: int | None = None
    # for each floor of the study the interval of the difference in R from it, which holds for all pairs of actions
    # together; empty if the baseline is no floor
    from_floors: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def distinguished(self) -> bool | None:
        """Whether the action is surely above all floors, by the lower ends; None without such intervals."""
        return all(low > 0 for low, _ in self.from_floors.values()) if self.from_floors else None

    @property
    def interval_level(self) -> float:
        """The coverage of the interval, 1 - 2 alpha."""
        return self.question.interval_level
