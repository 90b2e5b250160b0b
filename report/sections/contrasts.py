"""A sentence on each action, made from the numbers: what differs, by how much, and which term explains it.

A direction is claimed only where an interval supports it: "longer" if the interval of the exposure term excludes zero,
"earlier" if the interval of the paired difference in mean entry does. After the intervals stand their level and the
status of their estimates; a sentence that rests on few clusters says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvdrift.report.printing.numbers import fixed, in_text, level
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate, ReportedEstimates
from kvdrift.report.reading.facts import Facts
from kvdrift.report.sections.choice import by_divergence
from kvdrift.report.sections.section import Section
from kvdrift.stats.quantities import ALL_QUANTITIES, SIMULTANEOUS_GAP
from kvdrift.stats.registry import DIFFERENCE

_TERMS = {
    "exposure_share": "exposure, the time after the first mismatch",
    "rate_share": "rate, the mismatch rate in that time",
    "occurrence_share": "occurrence, the first mismatch itself",
}
_FEW = 10  # clusters of a stratum: fewer make intervals unsure

Claim = str | Estimate | tuple[str, Estimate]
"""A part of a sentence: words, an estimate to print, or words that rest on an estimate's interval."""


@dataclass(frozen=True)
class Sentence:
    """What is said of an action, and the documents behind it."""

    text: str
    sample: str
    # whether the action was added after the plan, so that nothing about the action was prespecified
    added: bool = False


def section(content: PageContent) -> Section:
    """Make the section with a sentence on each action; documents shared by all sentences are named once."""
    made = sentences(content)
    samples = {sentence.sample for sentence in made}
    values = {"sentences": made, "sample": made[0].sample if len(samples) == 1 else ""}
    return Section("actions-in-words", "In words", values=values)


def sentences(content: PageContent) -> list[Sentence]:
    """Write a sentence for each contrast with the baseline, by R, added actions last; for a single action, on its R.

    An engine's floor has its sentence in the verdict.
    """
    floors = content.facts.noise_floors if content.facts.engine else []
    others = by_divergence(content, [action for action in content.others if action not in floors])
    made = [_contrast(content, action) for action in others] or [_alone(content)]
    return sorted(made, key=lambda sentence: sentence.added)


def _alone(content: PageContent) -> Sentence:
    name, sample = content.baseline, Sample.of(content, [content.baseline])
    risk = content.estimates.get("mismatch", name)
    text = with_grounds(f"{name} disagrees with {content.facts.whole} on ", risk, f" of positions{sample.caution}")
    return Sentence(text, sample.sentence, name in content.facts.added)


def _contrast(content: PageContent, action: str) -> Sentence:
    estimates, baseline, whole = content.estimates, content.baseline, content.facts.whole
    gap, sample = estimates.get("gap", action, baseline), Sample.of(content, [action, baseline])
    mine, other = (estimates.get("mismatch", name) for name in (action, baseline))
    than = f"{baseline}{_bytes(content.facts, action, baseline)}{sample.caution}"
    rates: list[Claim] = [
        f": it disagrees with {whole} on ", mine, " of positions against ", other, "; the gap is ", gap,
    ]  # fmt: skip
    if gap.estimate is None:
        text = f"The gap between {action} and {baseline} is not estimated."
    elif not gap.has_interval:
        text = with_grounds(f"{action} is not yet compared with {than}", *rates, ", and may be due to chance")
    elif not gap.excludes_zero():
        text = with_grounds(f"{action} is not distinguishable from {than}", *rates)
    else:
        text = with_grounds(f"{action} ", *_verbs(estimates, gap), f" than {than}", *rates, *_share(estimates, gap))
    return Sentence(text, sample.sentence, not {action, baseline}.isdisjoint(content.facts.added))


def _verbs(estimates: ReportedEstimates, gap: Estimate) -> list[Claim]:
    """Say what an action does more or less than the baseline, as far as intervals support it."""
    entry = estimates.get(f"mean_entry{DIFFERENCE}", gap.action, gap.baseline)
    exposure = estimates.get("exposure_term", gap.action, gap.baseline)
    verbs: list[tuple[str, Estimate]] = []
    if entry.excludes_zero():
        verbs.append((f"diverges {'earlier' if (entry.estimate or 0.0) < 0 else 'later'}", entry))
    if exposure.excludes_zero():
        verbs.append((f"stays apart {'longer' if (exposure.estimate or 0.0) > 0 else 'for less time'}", exposure))
    first, *rest = verbs or [(f"disagrees {'more' if (gap.estimate or 0.0) > 0 else 'less'}", gap)]
    return [first, *(part for verb in rest for part in (" and ", verb))]


def _share(estimates: ReportedEstimates, gap: Estimate) -> list[Claim]:
    shares = [estimates.get(name, gap.action, gap.baseline) for name in _TERMS]
    largest = max(
        (row for row in shares if row.estimate is not None), key=lambda row: row.estimate or 0.0, default=None
    )
    return [] if largest is None else ["; ", largest, f" of it is {_TERMS[largest.quantity]}"]


def _bytes(facts: Facts, action: str, baseline: str) -> str:
    """Compare the bytes of two actions, as a phrase after the second; empty if they are unknown."""
    times, compared = facts.times_bytes(action, baseline), facts.bytes_of(action, baseline)
    if times is None:
        return ""
    about = "" if facts.same_bytes(action, baseline) else "about "
    return f" at {about}the same {compared}" if times == 1 else f", with {fixed(times, 2)} times its {compared}"


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


def standing_of(estimate: Estimate) -> str:
    """Return the level of an estimate's interval and its status; empty without an interval."""
    if not estimate.has_interval:
        return ""
    together = " over all pairs" if estimate.quantity == SIMULTANEOUS_GAP else ""
    return f"{level(estimate.level)}{together}, {estimate.standing}"


def grounds_of(estimates: Iterable[Estimate]) -> str:
    """Return the levels and statuses of several intervals, each once, in parentheses; empty without an interval."""
    known = dict.fromkeys(standing_of(row) for row in estimates if row.has_interval)
    return f" ({'; '.join(known)})" if known else ""


def with_grounds(*parts: Claim) -> str:
    """Write a sentence whose intervals have level and status behind them: once at its end if all have the same."""
    rows = [part if isinstance(part, Estimate) else part[1] for part in parts if not isinstance(part, str)]
    shared = len({standing_of(row) for row in rows if row.has_interval}) < 2
    words = []
    for part in parts:
        if isinstance(part, str):
            words.append(part)
            continue
        row = part if isinstance(part, Estimate) else part[1]
        text = in_text(row, ALL_QUANTITIES[row.quantity].scale) if isinstance(part, Estimate) else part[0]
        words.append(text if shared else f"{text}{grounds_of([row])}")
    return f"{''.join(words)}{grounds_of(rows) if shared else ''}."
