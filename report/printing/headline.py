"""The page's first sentences, made from the numbers: what differs, by how much, and which term explains it.

A direction is claimed only where an interval supports it: "longer" where the interval of the exposure term excludes
zero, "earlier" where that of the paired difference in mean entry does, or, where there is none, where the intervals of
the two means do not overlap. Without intervals no direction is claimed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from report.printing.numbers import MISSING, fixed, in_text
from report.reading.content import PageContent
from report.reading.estimates import Estimate, ReportedEstimates
from report.reading.facts import Facts
from stats.registry import DIFFERENCE, Scale

_TERMS = {
    "exposure_share": "exposure, the time after the first mismatch",
    "rate_share": "rate, the mismatch rate in that time",
    "occurrence_share": "occurrence, the first mismatch itself",
}


@dataclass(frozen=True)
class Sentence:
    """One finding: the sentence in large print, and the numbers behind it."""

    lead: str
    detail: str


def sentences(content: PageContent) -> list[Sentence]:
    """One sentence per contrast with the baseline; for a single action, what it does."""
    return [_contrast(content, action) for action in content.others] or [_alone(content)]


def _alone(content: PageContent) -> Sentence:
    mismatch = in_text(content.estimates.get("mismatch", content.baseline), Scale.PERCENT)
    lead = f"{content.baseline} disagrees with {_whole(content)} on {mismatch} of positions."
    return Sentence(lead, _capital(_entry(content, content.baseline)) + ".")


def _contrast(content: PageContent, action: str) -> Sentence:
    estimates, baseline, whole = content.estimates, content.baseline, _whole(content)
    gap = estimates.get("gap", action, baseline)
    mine, other = (in_text(estimates.get("mismatch", name), Scale.PERCENT) for name in (action, baseline))
    bytes_ = _bytes(content.facts, action, baseline)
    rates = f"it disagrees with {whole} on {mine} of positions against {other}"
    if gap.estimate is None:
        return Sentence(f"The gap between {action} and {baseline} is not estimated.", "")
    if not gap.has_interval:
        lead = f"{action} disagrees with {whole} on {mine} of positions, {baseline} on {other}{bytes_}."
        return Sentence(lead, f"The gap is {in_text(gap, Scale.POINTS)}; without an interval it may be due to chance.")
    if not gap.excludes_zero():
        lead = f"{action} and {baseline} are not distinguishable{bytes_}: {rates}."
        return Sentence(lead, f"The gap is {in_text(gap, Scale.POINTS)}.")
    verbs = (_entry_verb(estimates, action, baseline), _exposure_verb(estimates, action, baseline))
    does = " and ".join(verb for verb in verbs if verb) or f"disagrees {'more' if gap.estimate > 0 else 'less'}"
    share = _largest_share(estimates, action, baseline)
    lead = f"{action} {does} than {baseline}{bytes_}: {rates}{f'; {share}' if share else ''}."
    # The first sentence says of the baseline, too, when it diverges.
    entries = [_capital(_entry(content, action)), *([_entry(content, baseline)] if action == content.others[0] else [])]
    return Sentence(lead, f"The gap is {in_text(gap, Scale.POINTS)}. {'; '.join(entries)}.")


def _whole(content: PageContent) -> str:
    return "the reference" if content.facts.finite else "the full cache"


def _entry(content: PageContent, action: str) -> str:
    parted = in_text(content.estimates.get("divergence_probability", action), Scale.PERCENT)
    entry = content.estimates.get("mean_entry", action)
    when = ""
    if entry.estimate is not None:
        when = f", on average at position {in_text(entry, Scale.TOKENS).replace(' tokens', '')}"
    return f"under {action}, {parted} of continuations diverge within {content.windows.horizon} tokens{when}"


def _entry_verb(estimates: ReportedEstimates, action: str, baseline: str) -> str:
    mine, other = estimates.get("mean_entry", action), estimates.get("mean_entry", baseline)
    if mine.estimate is None or other.estimate is None or mine.estimate == other.estimate:
        return ""
    difference = estimates.get(f"mean_entry{DIFFERENCE}", action, baseline)
    if not difference.excludes_zero() if difference.has_interval else _overlap(mine, other):
        return ""
    return "diverges earlier" if mine.estimate < other.estimate else "diverges later"


def _exposure_verb(estimates: ReportedEstimates, action: str, baseline: str) -> str:
    term = estimates.get("exposure_term", action, baseline)
    if term.estimate is None or not term.excludes_zero():
        return ""
    return "stays apart longer" if term.estimate > 0 else "stays apart for less time"


def _overlap(first: Estimate, second: Estimate) -> bool:
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return True
    return first.low <= second.high and second.low <= first.high


def _largest_share(estimates: ReportedEstimates, action: str, baseline: str) -> str:
    shares = [estimates.get(name, action, baseline) for name in _TERMS]
    largest = max(shares, key=lambda share: -math.inf if share.estimate is None else share.estimate)
    if largest.estimate is None:
        return ""
    return f"{fixed(100 * largest.estimate, 0)}% of the gap is {_TERMS[largest.quantity]}"


def _bytes(facts: Facts, action: str, baseline: str) -> str:
    if facts.same_bytes(action, baseline):
        return " at the same bytes"
    mine, other = (facts.storage[name].mean_bytes(0) if name in facts.storage else None for name in (action, baseline))
    return f" with {fixed(mine / other, 2)} times its prompt-cache bytes" if mine and other and mine != other else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text else MISSING
