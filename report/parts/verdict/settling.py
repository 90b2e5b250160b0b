"""Sentences on what would settle the page's open questions, or confirm its recommendation."""

from __future__ import annotations

import math
from itertools import combinations

from kvdrift.report.parts.verdict.choice import Choice, difference, lacks_pairs, unfinished
from kvdrift.report.printing.numbers import count, in_text
from kvdrift.report.printing.wording import listed
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.reading.facts import EVALUATION
from kvdrift.stats.registry import Scale
from kvdrift.stats.resampling.intervals import EXPLORATORY, PRESPECIFIED, SEEN

_FURTHER = 25.0  # beyond so many times the documents, more of them are no way to settle a difference


def unsettled(content: PageContent, choice: Choice) -> list[str]:
    """Say what would settle the open pair; if there are several pairs, only what applies to all."""
    if not choice.unsettled:
        return []
    of_pair = [settled_by(content, *pair) for pair in choice.unsettled] if len(choice.unsettled) == 1 else []
    margin = (
        "Where a small difference does not matter, kvdrift gate says whether one action is at most a margin worse than "
        "another."
    )
    return [*of_pair, margin]


def settled_by(content: PageContent, one: str, other: str) -> str:
    """Say what would tell two actions apart."""
    gap = difference(content.estimates, one, other)
    if gap.estimate is None or not gap.has_interval:
        return f"{one} and {other} need documents that both actions have; then run kvdrift analyze."
    return _documents(gap, one, other)


def _documents(gap: Estimate, one: str, other: str) -> str:
    """Estimate how many documents would tell two actions apart if the true difference is the estimate.

    With that many documents the interval is about as wide as the difference to each side, and excludes 0 if the
    estimate is larger.
    """
    half = ((gap.high or 0.0) - (gap.low or 0.0)) / 2
    times = math.inf if not gap.estimate else (half / abs(gap.estimate)) ** 2
    if times > _FURTHER or gap.documents is None:
        return f"{one} and {other} differ by so little that more documents will hardly tell them apart."
    seems = in_text(Estimate(gap.stratum, one, other, "gap", estimate=abs(gap.estimate or 0.0)), Scale.POINTS)
    wanted = count(math.ceil(max(times, 1.1) * gap.documents))
    return (
        f"If {one} and {other} differ by the {seems} that they seem to, about {wanted} evaluation documents would tell "
        f"them apart in about half of such studies; this study has {count(gap.documents)}."
    )


def _resting(content: PageContent, choice: Choice) -> list[Estimate]:
    """Return the intervals that a recommendation rests on, of lost answers too; none without a recommendation."""
    if not choice.recommended:
        return []
    left = [*choice.recommended, *choice.unfit]
    pairs = [*choice.ruled_out.items(), *combinations(left, 2)]
    rows = [difference(content.estimates, *pair) for pair in pairs]
    return rows + [content.estimates.get("lost_share", action) for action in choice.unfit]


def planned(content: PageContent, choice: Choice) -> list[str]:
    """Say that a recommendation rests only on planned differences; empty if it does not."""
    if {row.standing for row in _resting(content, choice)} != {PRESPECIFIED}:
        return []
    return ["The plan named these differences before their outcomes were known, and their intervals hold together."]


def fresh(content: PageContent, choice: Choice) -> list[str]:
    """Say how to confirm a recommendation that rests on unplanned differences."""
    rows = _resting(content, choice)
    standings = [row.standing for row in rows]
    if set(standings) <= {PRESPECIFIED}:
        return []
    anew = "kvdrift confirm writes a study of documents that nobody has seen; the plan of that study names the actions."
    if set(standings) == {SEEN}:
        return [f"The plan named these differences when outcomes were known. {anew}"]
    answers = " Intervals of lost answers hold for one action at a time." if choice.unfit else ""
    together = content.estimates.pairs > 1
    if set(standings) == {EXPLORATORY} and not answers:
        alone = "Exploratory intervals hold for one difference at a time."
        named = "Intervals over all pairs hold together; the plan named none of these differences in R."
        return [f"{named if together else alone} {anew}"]
    known = [one for one in (PRESPECIFIED, SEEN, EXPLORATORY) if one in standings]
    counts = listed([f"{standings.count(one)} {one}" for one in known]) if known[1:] else f"all {known[0]}"
    over = " Intervals over all pairs of actions hold together." if together else ""
    return [f"This rests on {count(len(rows))} intervals, {counts}.{over}{answers} {anew}"]


def obstacle_settles(content: PageContent, choice: Choice) -> list[str]:
    """Say what would remove an obstacle."""
    facts = content.facts
    if facts.finite or not choice.candidates:
        return []
    if content.preliminary or content.split != EVALUATION or unfinished(content):
        return ["kvdrift run goes on to the end of the study."]
    if any(not control.zero for control in facts.controls):
        return ["First the control must be exactly 0; a noise floor beside the control shows the effect of numerics."]
    if not content.estimates.have_intervals or content.estimates.stale or lacks_pairs(content):
        return ["kvdrift analyze makes the intervals."]
    if len(choice.candidates) == 1:
        return ["Add a second action at the same bytes to the study file; kvdrift run then generates only that action."]
    return ["The comparison needs units that record payload_bytes, on documents that the actions share."]
