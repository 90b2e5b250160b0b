"""One sentence on each action, made from the numbers: what differs, by how much, and which term explains it.

A direction is claimed only where an interval supports it: "longer" if the interval of the exposure term excludes zero,
"earlier" if the interval of the paired difference in mean entry excludes zero, or, if that difference is missing, if
the intervals of the two means do not overlap. Without intervals no direction is claimed. After each interval stand its
level and the status of its estimate; a sentence that rests on few clusters says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvdrift.report.printing.numbers import capital, fixed, in_text, level
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate, ReportedEstimates
from kvdrift.report.reading.facts import Facts
from kvdrift.report.sections.choice import by_divergence
from kvdrift.report.sections.section import Section
from kvdrift.stats.quantities import SIMULTANEOUS_GAP
from kvdrift.stats.registry import DIFFERENCE, Scale
from kvdrift.stats.resampling.intervals import EXPLORATORY, PRESPECIFIED, SEEN

_TERMS = {
    "exposure_share": "exposure, the time after the first mismatch",
    "rate_share": "rate, the mismatch rate in that time",
    "occurrence_share": "occurrence, the first mismatch itself",
}


_ALL_PAIRS = " over all pairs"  # follows the level of intervals that hold together
_GROUNDS = re.compile(rf" \((both )?([\d.]+%(?:{_ALL_PAIRS})?, (?:{PRESPECIFIED}|{SEEN}|{EXPLORATORY}))\)")
_FEW = 10  # clusters of a stratum: fewer make intervals unsure


@dataclass(frozen=True)
class Sentence:
    """One finding: a sentence in large print, the numbers behind the sentence, and the documents behind both."""

    lead: str
    detail: str
    sample: str
    # whether the action was added after the plan, so that nothing about the action was prespecified
    added: bool = False


def section(content: PageContent) -> Section:
    """Make the section with a sentence on each action; documents shared by all sentences are named once."""
    said = sentences(content)
    samples = {sentence.sample for sentence in said}
    values = {"sentences": said, "sample": said[0].sample if len(samples) == 1 else ""}
    return Section("actions-in-words", "In words", values=values)


def sentences(content: PageContent) -> list[Sentence]:
    """Write a sentence for each contrast with the baseline, by R, added actions last; for a single action, on its R.

    An engine's floor has its sentence in the verdict.
    """
    floors = content.facts.noise_floors if content.facts.engine else []
    others = by_divergence(content, [action for action in content.others if action not in floors])
    made = [_contrast(content, action, first=action == others[0]) for action in others] or [_alone(content)]
    return sorted(made, key=lambda sentence: sentence.added)


def _alone(content: PageContent) -> Sentence:
    name = content.baseline
    mismatch = shown(content.estimates.get("mismatch", name), Scale.PERCENT)
    sample = Sample.of(content, [name])
    lead = f"{name} disagrees with {content.facts.whole} on {mismatch} of positions{sample.caution}."
    detail = said_once(f"{capital(_entry(content, name))}.")
    return Sentence(lead, detail, sample.sentence, _added(content, name))


def _contrast(content: PageContent, action: str, *, first: bool) -> Sentence:
    estimates, baseline, whole = content.estimates, content.baseline, content.facts.whole
    gap, added = estimates.get("gap", action, baseline), _added(content, action, baseline)
    mine, other = _two_rates(estimates.get("mismatch", action), estimates.get("mismatch", baseline))
    same, times = _bytes(content.facts, action, baseline)
    sample = Sample.of(content, [action, baseline])
    rates = f"it disagrees with {whole} on {mine} of positions against {other}"
    if gap.estimate is None:
        return Sentence(f"The gap between {action} and {baseline} is not estimated.", "", sample.sentence, added)
    in_points = shown(gap, Scale.POINTS)
    if not gap.has_interval:
        lead = f"{action}{times} disagrees with {whole} on {mine} of positions, {baseline} on {other}{same}."
        chance = f"The gap is {in_points}; without an interval it may be due to chance."
        return Sentence(lead, chance, sample.sentence, added)
    if not gap.excludes_zero():
        lead = f"{action}{times} is not distinguishable from {baseline}{same}{sample.caution}: {rates}."
        return Sentence(lead, f"The gap is {in_points}.", sample.sentence, added)
    verbs = (_entry_verb(estimates, action, baseline), _exposure_verb(estimates, action, baseline))
    more = f"disagrees {'more' if gap.estimate > 0 else 'less'}{grounds(gap)}"
    does = " and ".join(verb for verb in verbs if verb) or more
    share = _largest_share(estimates, action, baseline)
    lead = f"{action}{times} {does} than {baseline}{same}{sample.caution}: {rates}{f'; {share}' if share else ''}."
    # The first sentence also says when the baseline diverges.
    entries = [capital(_entry(content, action)), *([_entry(content, baseline)] if first else [])]
    detail = said_once(f"The gap is {in_points}. {'; '.join(entries)}.")
    return Sentence(said_once(lead), detail, sample.sentence, added)


@dataclass(frozen=True)
class Sample:
    """The documents that a sentence rests on: those of the page's split that all of its actions have."""

    words: str  # the number of documents, and their strata
    few: bool  # whether a stratum has so few clusters that an interval may be too narrow

    @classmethod
    def of(cls, content: PageContent, actions: list[str]) -> Sample:
        """Return the documents of these actions."""
        facts = content.facts
        measured = [facts.storage[name].resident.keys() for name in actions if name in facts.storage]
        noun = "system" if facts.finite else "document"
        clusters: dict[str, list[str]] = {}
        for row in facts.documents:
            if row["split"] == content.split and all(row["doc"] in docs for docs in measured):
                clusters.setdefault(row["stratum"], []).append(row["cluster"] or row["doc"])
        counts = {stratum: _counted(noun, own) for stratum, own in clusters.items()}
        each = [f"{text} in {stratum}" for stratum, text in counts.items()]
        if len(counts) > 1 and len(set(counts.values())) == 1:
            each = [f"{next(iter(counts.values()))} in each of {len(counts)} strata"]
        few = any(len(set(own)) < _FEW for own in clusters.values())
        return cls(", ".join(each) or f"no {noun}", few or not clusters)

    @property
    def caution(self) -> str:
        """Return the addition to a sentence that rests on few clusters."""
        return f", on only {self.words}" if self.few else ""

    @property
    def sentence(self) -> str:
        """Return a sentence on how many documents were measured."""
        narrow = f" An interval from fewer than {_FEW} clusters in a stratum may be too narrow." if self.few else ""
        return f"Measured on {self.words}.{narrow}"


def _counted(noun: str, clusters: list[str]) -> str:
    distinct = len(set(clusters))
    extra = "" if distinct == len(clusters) else f" ({distinct} cluster{'s' if distinct > 1 else ''})"
    return f"{len(clusters)} {noun}{'s' if len(clusters) > 1 else ''}{extra}"


def _added(content: PageContent, *actions: str) -> bool:
    """Tell whether one of the actions was added after the plan."""
    return not set(content.facts.added).isdisjoint(actions)


def grounds(estimate: Estimate) -> str:
    """Return the level of an estimate's interval and its status, in parentheses; empty without an interval."""
    return f" ({standing_of(estimate)})" if estimate.has_interval else ""


def standing_of(estimate: Estimate) -> str:
    """Return the level of an estimate's interval and its status; empty without an interval."""
    if not estimate.has_interval:
        return ""
    together = _ALL_PAIRS if estimate.quantity == SIMULTANEOUS_GAP else ""
    return f"{level(estimate.level)}{together}, {estimate.standing}"


def grounds_of(estimates: Iterable[Estimate]) -> str:
    """Return the levels and statuses of several intervals, each once, in parentheses; empty without an interval."""
    found: dict[str, set[str]] = {}
    for one in estimates:
        if one.has_interval:
            level_of, _, status = standing_of(one).rpartition(", ")
            found.setdefault(level_of, set()).add(status)
    told = [f"{level_of}, {' and '.join(sorted(found[level_of]))}" for level_of in sorted(found)]
    return f" ({'; '.join(told)})" if told else ""


def shown(estimate: Estimate, scale: Scale) -> str:
    """Write an estimate for a sentence, with its interval, its level and its status."""
    return in_text(estimate, scale) + grounds(estimate)


def said_once(text: str) -> str:
    """Move a level and status that all intervals of a text share behind the last interval."""
    found = list(_GROUNDS.finditer(text))
    if len(found) < 2 or len({one[2] for one in found}) > 1:
        return text
    many = len(found) + sum(bool(one[1]) for one in found) > 2
    last = found[-1]
    before = _GROUNDS.sub("", text[: last.start()])
    return f"{before} ({'all' if many else 'both'} {last[2]}){text[last.end() :]}"


def _two_rates(first: Estimate, second: Estimate) -> tuple[str, str]:
    """Write two rates of mismatch for a sentence; level and status are given once if both rates share them."""
    if grounds(first) == grounds(second):
        return in_text(first, Scale.PERCENT), shown(second, Scale.PERCENT).replace(" (", " (both ", 1)
    return shown(first, Scale.PERCENT), shown(second, Scale.PERCENT)


def _entry(content: PageContent, action: str) -> str:
    parted = shown(content.estimates.get("divergence_probability", action), Scale.PERCENT)
    entry = content.estimates.get("mean_entry", action)
    when = ""
    if entry.estimate is not None:
        when = f", on average at position {shown(entry, Scale.TOKENS).replace(' tokens', '')}"
    return said_once(f"under {action}, {parted} of continuations diverge within {content.windows.horizon} tokens{when}")


def _entry_verb(estimates: ReportedEstimates, action: str, baseline: str) -> str:
    mine, other = estimates.get("mean_entry", action), estimates.get("mean_entry", baseline)
    if mine.estimate is None or other.estimate is None or mine.estimate == other.estimate:
        return ""
    difference = estimates.get(f"mean_entry{DIFFERENCE}", action, baseline)
    if not difference.excludes_zero() if difference.has_interval else _overlap(mine, other):
        return ""
    rests_on = grounds(difference if difference.has_interval else mine)
    return f"diverges {'earlier' if mine.estimate < other.estimate else 'later'}{rests_on}"


def _exposure_verb(estimates: ReportedEstimates, action: str, baseline: str) -> str:
    term = estimates.get("exposure_term", action, baseline)
    if term.estimate is None or not term.excludes_zero():
        return ""
    return f"stays apart {'longer' if term.estimate > 0 else 'for less time'}{grounds(term)}"


def _overlap(first: Estimate, second: Estimate) -> bool:
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return True
    return first.low <= second.high and second.low <= first.high


def _largest_share(estimates: ReportedEstimates, action: str, baseline: str) -> str:
    shares = [estimates.get(name, action, baseline) for name in _TERMS]
    largest = max(shares, key=lambda share: -math.inf if share.estimate is None else share.estimate)
    if largest.estimate is None:
        return ""
    return f"{shown(largest, Scale.PERCENT)} of the gap is {_TERMS[largest.quantity]}"


def _bytes(facts: Facts, action: str, baseline: str) -> tuple[str, str]:
    """Return a phrase after both actions if they hold the same bytes, else one after the first action."""
    if facts.same_bytes(action, baseline):
        return f" at the same {facts.bytes_of(action, baseline)}", ""
    times = facts.times_bytes(action, baseline)
    if times is None:
        return "", ""
    if times == 1:
        return f" at about the same {facts.bytes_of(action, baseline)}", ""
    return "", f", with {fixed(times, 2)} times the {facts.cache.replace(' ', '-')} bytes of {baseline},"
