"""The actions of a study that can be recommended, decided by intervals of differences in R and by bytes.

An action is ruled out if another action holds no more bytes and has surely less R: the interval of the difference lies
below 0. Of more than two actions these intervals hold for all pairs together. A remaining action is recommended if
its R differs surely from the R of every other remaining action. Of two recommended actions the one with more bytes
diverges less, so that bytes decide between them. An action that surely loses more than half of the right answers is
not recommended at any bytes. Points without intervals decide nothing. Bytes are those of the cache; if weights differ,
an action counts as holding no more bytes only if its weights have no more bytes either. An action whose weights have an
unknown number of bytes is not recommended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate, ReportedEstimates
from kvdrift.report.reading.facts import EVALUATION
from kvdrift.report.sections.plan import progress
from kvdrift.schema.frozen_text import wanted_documents
from kvdrift.stats.bootstrap import PRESPECIFIED, SEEN
from kvdrift.stats.quantities import SIMULTANEOUS_GAP

_FURTHER = 25.0  # never suggest more than 25 times the documents
_TOO_MANY = 0.5  # of the right answers are lost
_BEST_FIRST = {PRESPECIFIED: 0, SEEN: 1}  # a planned interval decides before an exploratory one of the same difference
_RUN = "kvdrift run goes on to the end of the study."
_ANALYZE = "kvdrift analyze makes the intervals."


@dataclass(frozen=True)
class Choice:
    """The recommended actions of a study, and why others are not recommended."""

    candidates: list[str]  # the actions to choose from, by R: all but controls and noise floors
    places: dict[str, tuple[int, int]]  # for each candidate the first and the last place by R that the intervals allow
    # for each action that is ruled out, the action with the least R that rules it out
    ruled_out: dict[str, str] = field(default_factory=dict)
    recommended: list[str] = field(default_factory=list)  # actions that can be recommended, those with more bytes first
    # actions that would be recommended if they did not surely lose more than half of the right answers
    unfit: list[str] = field(default_factory=list)
    # pairs of other actions whose difference in R may be 0
    unsettled: list[tuple[str, str]] = field(default_factory=list)
    # why nothing can be recommended whatever the intervals say, and how to remove this; empty without an obstacle
    obstacle: str = ""
    remedy: str = ""

    @property
    def deciding(self) -> dict[str, list[tuple[str, str]]]:
        """The pairs of actions whose differences in R decide, grouped by what the interval of a difference says."""
        left = combinations([*self.recommended, *self.unfit], 2)
        return {"not settled": self.unsettled, "ruled out": list(self.ruled_out.items()), "smaller R": list(left)}


def choose(content: PageContent) -> Choice:
    """Choose the actions of a study that can be recommended."""
    facts, estimates = content.facts, content.estimates
    candidates = by_divergence(content, [action for action in content.actions if action not in facts.noise_floors])
    less = {
        (action, other)
        for action in candidates for other in candidates if action != other and surely_less(estimates, action, other)
    }  # fmt: skip
    places = {
        action: (
            1 + sum((other, action) in less for other in candidates),
            len(candidates) - sum((action, other) in less for other in candidates),
        )
        for action in candidates
    }
    if obstacle := _obstacle(content, candidates):
        return Choice(candidates, places, obstacle=obstacle[0], remedy=obstacle[1])
    ruled_out = {
        action: better[0]
        for action in candidates
        if (
            better := [
                other for other in candidates if (other, action) in less and _no_more_bytes(content, other, action)
            ]
        )
    }
    left = [action for action in candidates if action not in ruled_out]
    unsettled = [(a, b) for a, b in combinations(left, 2) if (a, b) not in less and (b, a) not in less]
    settled = [
        action
        for action in left
        if not any(action in pair for pair in unsettled)
        and (facts.weights(action) is None or facts.weight_bytes(action) is not None)
    ]
    settled.sort(key=lambda action: (-(facts.cache_bytes(action) or 0.0), -(facts.weight_bytes(action) or 0)))
    unfit = [action for action in settled if (estimates.get("lost_share", action).low or 0.0) > _TOO_MANY]
    recommended = [action for action in settled if action not in unfit]
    return Choice(candidates, places, ruled_out, recommended, unfit, unsettled)


def not_distinguished(content: PageContent) -> dict[str, list[str]]:
    """Return the noise floors that each action is not distinguished from; actions without any are left out.

    An action is distinguished from a floor if the interval of its R less that of the floor lies above 0: an action
    below a floor does no more than the floor. These intervals hold for all pairs of actions together.
    """
    estimates, floors = content.estimates, content.facts.noise_floors
    others = [action for action in content.actions if action not in floors] if estimates.pairs else []
    near = {
        action: [floor for floor in floors if (estimates.get(SIMULTANEOUS_GAP, action, floor).low or 0.0) <= 0]
        for action in others
    }
    return {action: names for action, names in near.items() if names}


def by_divergence(content: PageContent, actions: Sequence[str]) -> list[str]:
    """Sort actions by their R; actions without R come last."""
    known = {action: content.estimates.get("mismatch", action).estimate for action in actions}
    return sorted(actions, key=lambda action: (known[action] is None, known[action] or 0.0))


def difference(estimates: ReportedEstimates, action: str, other: str) -> Estimate:
    """Return R of one action less R of another, with the interval that the verdict rests on.

    If the study has two actions, that is the interval of their difference: the planned interval if the plan named the
    difference or its mirror image. If there are more actions, it is the interval that holds for all pairs together; if
    the plan named the difference, both intervals must exclude 0.
    """
    single = _single_difference(estimates, action, other)
    together = estimates.get(SIMULTANEOUS_GAP, action, other)
    if estimates.pairs < 2 or not together.has_interval:
        return single
    if single.standing not in _BEST_FIRST:
        return together
    if together.excludes_zero() and not single.excludes_zero():
        return single
    return replace(together, family=single.family, status=single.status)


def documents_needed(gap: Estimate) -> int | None:
    """Estimate how many documents would distinguish two actions if the true difference equals the estimate.

    With that many documents half the interval is about as wide as the difference, so that it excludes 0 if the new
    estimate is larger than this one. None without an interval, or if more than 25 times as many documents are needed.
    """
    if not gap.estimate or gap.low is None or gap.high is None or gap.documents is None:
        return None
    times = ((gap.high - gap.low) / 2 / abs(gap.estimate)) ** 2
    return None if times > _FURTHER else math.ceil(max(times, 1.1) * gap.documents)


def _single_difference(estimates: ReportedEstimates, action: str, other: str) -> Estimate:
    """Return R of one action less R of another, with the interval for this pair alone.

    If the plan named only the reverse difference, it is that with the opposite sign.
    """
    plain, mirrored = estimates.get("gap", action, other), estimates.get("gap", other, action)
    turned = replace(
        mirrored, action=action, baseline=other, estimate=_negative(mirrored.estimate), low=_negative(mirrored.high),
        high=_negative(mirrored.low),
    )  # fmt: skip
    return min(plain, turned, key=lambda row: (not row.has_interval, _BEST_FIRST.get(row.standing, 2)))


def _unfinished(content: PageContent) -> bool:
    """Tell whether an evaluation lacks planned documents, or a sequential study has not stopped at an interim look.

    Intervals over a number of documents that the plan did not fix would be unplanned interim looks.
    """
    plan = content.facts.plan
    if plan is None or content.split != EVALUATION:
        return False
    if sequence := progress(content):
        return not sequence.stopped
    stratum_of = {row["doc"]: row["stratum"] for row in content.facts.documents if row["split"] == EVALUATION}
    planned = [action for action in plan.content.get("actions", ()) if action in content.facts.storage]
    measured = [
        Counter(stratum_of[doc] for doc in content.facts.storage[action].prompt_cache if doc in stratum_of)
        for action in planned
    ]
    wanted = wanted_documents(plan.content)
    return any(count[stratum] < least for count in measured for stratum, least in wanted.items())


def surely_less(estimates: ReportedEstimates, action: str, other: str) -> bool:
    """Tell whether the interval of the difference says that an action has less R than another action."""
    high = difference(estimates, action, other).high
    return high is not None and high < 0


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


def _no_more_bytes(content: PageContent, action: str, other: str) -> bool:
    ratio = content.facts.times_bytes(action, other) if content.facts.no_more_weights(action, other) else None
    return ratio is not None and ratio <= 1


def _obstacle(content: PageContent, candidates: list[str]) -> tuple[str, str] | None:
    """Say why nothing can be recommended, whatever the intervals say, and what to do; None without an obstacle."""
    facts, estimates = content.facts, content.estimates
    moved = [control.action for control in facts.controls if not control.zero]
    unknown = any(
        facts.same_weights(action, other) and facts.times_bytes(action, other) is None
        for action, other in combinations(candidates, 2)
    )
    lacks_pairs = len(content.actions) > 2 and not estimates.pairs
    obstacles = (
        (facts.finite, "these are systems of known next-token distributions, and no action holds any bytes", ""),
        (not candidates, "no entries are left out or coded, so there is nothing to choose", ""),
        (bool(content.preliminary), "the study is not finished", _RUN),
        (content.split != EVALUATION, "no evaluation document has been measured yet", _RUN),
        (bool(moved), f"the control {''.join(moved[:1])} is not exactly 0, so numerics are part of every number",
         "First the control must be exactly 0; a noise floor beside the control shows the effect of numerics."),
        (_unfinished(content), "the evaluation is not finished, and an earlier interim look was not planned", _RUN),
        (not estimates.have_intervals, "there are no intervals yet", _ANALYZE),
        (lacks_pairs, "there are no intervals yet that hold for all pairs of actions together", _ANALYZE),
        (bool(estimates.stale), "the estimates do not cover all events", _ANALYZE),
        (len(candidates) == 1, f"{''.join(candidates[:1])} is the only action, and nothing can be compared with it",
         "Add a second action at the same bytes to the study file; kvdrift run then generates only that action."),
        (unknown, "the bytes that the actions hold are not recorded, or they have no document in common",
         "The comparison needs units that record payload_bytes, on documents that the actions share."),
    )  # fmt: skip
    return next(((words, remedy) for is_there, words, remedy in obstacles if is_there), None)
