"""The page's first screen: a sentence of verdict, the frontier, and a row for each action with its badge and reasons.

A badge says what the intervals decide about an action, and its reasons are the differences in R that decide. The same
facts are in view ``verdict`` and in ``kvdrift report --json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

from kvdrift.report.figures.canvas import ACTION_COLOURS
from kvdrift.report.printing.bars import Bar, bars, share_bar
from kvdrift.report.printing.numbers import MISSING, count, fixed, in_text, level, listed, scaled, size
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.sections.choice import Choice, choose, difference, documents_needed, not_distinguished
from kvdrift.report.sections.contrasts import standing_of
from kvdrift.report.sections.frontier import bytes_figure, frontier_values, has_bytes
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.stats.bootstrap import PRESPECIFIED
from kvdrift.stats.quantities import ALL_QUANTITIES, SIMULTANEOUS_GAP
from kvdrift.stats.registry import Scale

MOST_WORDS: Final = 25
"""Most words of the sentence of verdict, if names of actions have no spaces and at most three are listed."""

_MOST = 3  # most actions that a sentence names


class Badge(StrEnum):
    """What the intervals decide about an action; the first screen has the actions in the order of these badges."""

    RECOMMENDED = "recommended"
    UNDECIDED = "undecided"
    OTHER_WEIGHTS = "other weights"
    LOSES_ANSWERS = "loses answers"
    RULED_OUT = "ruled out"
    FLOOR = "noise floor"
    CONTROL = "control"


class Says(StrEnum):
    """What the interval of a reason says of an action."""

    RULED_OUT = "ruled out by"
    RULES_OUT = "rules out"
    UNDECIDED = "undecided against"
    DIFFERS = "differs from"
    LOSES = "loses answers"
    NEAR = "not distinguished from"


@dataclass(frozen=True)
class Reason:
    """An interval behind a badge: that of the action's R less another action's, or that of the lost answers' share."""

    says: Says
    other: str | None
    estimate: Estimate
    bytes_ratio: float | None = None  # bytes of the action's cache over the other's
    documents_needed: int | None = None  # would decide an undecided difference, in about half of such studies

    def as_record(self) -> dict[str, Any]:
        """Return the reason's values by name, as fractions and counts."""
        row = self.estimate
        return {
            "says": str(self.says), "other": self.other, "estimate": row.estimate, "low": row.low, "high": row.high,
            "level": row.level, "status": row.standing, "documents": row.documents, "bytes_ratio": self.bytes_ratio,
            "documents_needed": self.documents_needed,
        }  # fmt: skip

    @property
    def words(self) -> str:
        """The reason as a sentence."""
        row = self.estimate
        if self.says is Says.LOSES:
            return f"Loses {in_text(row, Scale.PERCENT)} of the right answers ({_standing(row)})."
        if row.estimate is None:
            return f"{str(self.says).capitalize()} {self.other}: their difference has no interval."
        held = "" if self.bytes_ratio is None else f", at {fixed(self.bytes_ratio, 2)} times the bytes"
        more = f"; about {count(self.documents_needed)} documents would decide" if self.documents_needed else ""
        gap = in_text(row, Scale.POINTS)
        return f"{str(self.says).capitalize()} {self.other}: R differs by {gap}{held} ({_standing(row)}){more}."


def _standing(row: Estimate) -> str:
    return f"{standing_of(row)}, {count(row.documents)} documents" if row.has_interval else "no interval"


@dataclass(frozen=True)
class ActionVerdict:
    """The verdict on one action."""

    action: str
    badge: Badge
    reasons: tuple[Reason, ...] = ()
    remark: str = ""  # of a floor: what it measures; of the only recommended action: why

    @property
    def by(self) -> str:
        """The action that rules this action out; empty if none does."""
        return next((str(reason.other) for reason in self.reasons if reason.says is Says.RULED_OUT), "")

    def as_record(self) -> dict[str, Any]:
        """Return the verdict's values by name."""
        reasons = [reason.as_record() for reason in self.reasons]
        return {"action": self.action, "badge": str(self.badge), "reasons": reasons}


def action_verdicts(content: PageContent, choice: Choice) -> list[ActionVerdict]:
    """Return the verdict on each action, the best first; noise floors and the control are last."""
    floors = [
        ActionVerdict(name, Badge.FLOOR, remark=_floor_remark(content, name)) for name in content.facts.noise_floors
    ]
    controls = [ActionVerdict(control.action, Badge.CONTROL) for control in content.facts.controls[:1]]
    near = not_distinguished(content)
    verdicts = [
        ActionVerdict(
            action, _badge(content, choice, action), tuple(_reasons(content, choice, action, near)),
            "R differs surely from that of every other action." if choice.recommended == [action] else "",
        )
        for action in choice.candidates
    ]  # fmt: skip
    order = list(Badge)
    return [*sorted(verdicts, key=lambda verdict: order.index(verdict.badge)), *floors, *controls]


def _floor_remark(content: PageContent, floor: str) -> str:
    """Say what a floor measures, and how far apart its distributions are."""
    facts, distance = content.facts, content.estimates.get("rollout_tv", floor).estimate
    what = "rounding alone" if floor in facts.kernel_floors else "repetition alone"
    if distance is None:
        return f"Shows the effect of {what}."
    apart = f"the mean of δ is {distance:.1e}" if distance else "δ is exactly 0, which says nothing about rounding"
    return f"Shows the effect of {what}: {apart}."


def _badge(content: PageContent, choice: Choice, action: str) -> Badge:
    if content.facts.weights(action) is not None and content.facts.weight_bytes(action) is None:
        return Badge.OTHER_WEIGHTS
    if action in choice.recommended:
        return Badge.RECOMMENDED
    if action in choice.unfit:
        return Badge.LOSES_ANSWERS
    return Badge.RULED_OUT if action in choice.ruled_out else Badge.UNDECIDED


def _reasons(content: PageContent, choice: Choice, action: str, near: dict[str, list[str]]) -> Iterator[Reason]:
    def against(says: Says, other: str) -> Reason:
        row, ratio = difference(content.estimates, action, other), content.facts.times_bytes(action, other)
        needed = documents_needed(row) if says is Says.UNDECIDED else None
        return Reason(says, other, row, ratio, needed)

    if action in choice.unfit:
        yield Reason(Says.LOSES, None, content.estimates.get("lost_share", action))
    if (better := choice.ruled_out.get(action)) is not None:
        yield against(Says.RULED_OUT, better)
    yield from (against(Says.RULES_OUT, other) for other, by in choice.ruled_out.items() if by == action)
    for pair in choice.unsettled:
        if action in pair:
            yield against(Says.UNDECIDED, pair[1] if pair[0] == action else pair[0])
    settled = [*choice.recommended, *choice.unfit]
    if action in settled:
        yield from (against(Says.DIFFERS, other) for other in settled if other != action)
    for floor in near.get(action, ()):
        yield Reason(Says.NEAR, floor, content.estimates.get(SIMULTANEOUS_GAP, action, floor))


def headline(content: PageContent, choice: Choice) -> str:
    """Return the verdict as one sentence of at most ``MOST_WORDS`` words."""
    recommended = choice.recommended
    if choice.obstacle:
        return f"No action can be recommended: {choice.obstacle}."
    undecided = _undecided(choice)
    if recommended and undecided:
        names = (
            f"{recommended[0]}, with {_held(content, recommended[0])}" if not recommended[1:] else _some(recommended)
        )
        return f"Recommended: {names}; {undecided} between other actions are undecided."
    if len(recommended) > 1:
        return f"Recommended: {_some(recommended)}; each holds fewer bytes than the one before, and diverges more."
    if recommended:
        costs = [f"R {scaled(_number(content, 'mismatch', recommended[0]), Scale.PERCENT, 1)}%"]
        if (after := _number(content, "accuracy", recommended[0])) is not None:
            before = scaled(_number(content, "accuracy_reference", recommended[0]), Scale.PERCENT, 1)
            costs.insert(0, f"accuracy {before}% → {scaled(after, Scale.PERCENT, 1)}%")
        return f"Recommended: {recommended[0]}, with {_held(content, recommended[0])}, {', '.join(costs)}."
    if undecided:
        return f"No action is recommended yet: {undecided} are undecided."
    return f"No action is recommended: {_some(choice.unfit)} would be, but loses most right answers."


def _undecided(choice: Choice) -> str:
    """Count the undecided differences in words; empty without any."""
    pairs = len(choice.candidates) * (len(choice.candidates) - 1) // 2
    return f"{count(len(choice.unsettled))} of {count(pairs)} differences in R" if choice.unsettled else ""


def _number(content: PageContent, quantity: str, action: str) -> float | None:
    return content.estimates.get(quantity, action).estimate


def remarks(content: PageContent, choice: Choice) -> list[str]:
    """Return at most two sentences: what would settle or confirm the verdict, and a note on an absent kernel floor.

    A kernel floor is the noise floor of rounding alone, which a study with an engine may have.
    """
    rows = [difference(content.estimates, *pair) for pairs in choice.deciding.values() for pair in pairs]
    sentences = [choice.remedy] if choice.remedy else []
    if choice.unsettled:
        names = _some([name for name in choice.candidates if any(name in pair for pair in choice.unsettled)])
        sentences.append(
            f"Not ruled out: {names}. If a small difference does not matter, kvdrift gate says whether an action is at "
            "most a margin worse."
        )
    elif choice.recommended and any(row.standing != PRESPECIFIED for row in rows):
        sentences.append("kvdrift confirm writes a study of unseen documents whose plan names these actions.")
    if content.facts.engine and not content.facts.kernel_floors:
        sentences.append("No kernel floor was measured: the effect of rounding alone is not known.")
    return sentences[:2]


def _some(names: Sequence[str]) -> str:
    return listed([*names[:_MOST], *([f"{len(names) - _MOST} more"] if names[_MOST:] else [])])


def _held(content: PageContent, action: str) -> str:
    facts, share = content.facts, content.facts.share_of_whole(action)
    held = facts.cache_bytes(action)
    cache = f"{size(held)} of {facts.cache}" if share is None else f"{fixed(100 * share, 0)}% of {facts.whole}’s bytes"
    weights, whole = facts.weight_bytes(action), facts.whole_cache and facts.weight_bytes(facts.whole_cache)
    if not facts.own_weights or not weights or not whole:
        return cache
    return f"{cache} and {fixed(100 * weights / whole, 0)}% of {facts.whole}’s weights"


def verdict_record(content: PageContent) -> dict[str, Any]:
    """Return a page's verdict by name: study, model, a sentence, remarks, and actions with badges and reasons."""
    choice = choose(content)
    verdicts = [verdict.as_record() for verdict in action_verdicts(content, choice)]
    facts = content.facts
    return {
        "study": facts.study,
        "model": facts.model,
        "sentence": headline(content, choice),
        "remarks": remarks(content, choice),
        "actions": verdicts,
    }


@dataclass(frozen=True)
class GlanceRow:
    """A row of the first screen."""

    verdict: ActionVerdict
    index: (
        int | None
    )  # of the action among those of the page, by which figures have its colour and ids; None: a control
    described: str
    held: Bar
    weights: Bar
    risk: Bar
    accuracy: Bar
    entry: Bar

    @property
    def colour(self) -> int:
        """The number of the action's colour in figures, from 1; 0 for a control."""
        return 0 if self.index is None else self.index % len(ACTION_COLOURS) + 1


def glance_rows(content: PageContent, verdicts: Sequence[ActionVerdict]) -> list[GlanceRow]:
    """Make the rows of the first screen, in the order of the verdicts."""
    columns = {
        name: bars([content.estimates.get(name, verdict.action) for verdict in verdicts], ALL_QUANTITIES[name].scale)
        for name in ("mismatch", "score_gap", "mean_entry")
    }
    facts = content.facts
    largest = max(filter(None, (facts.cache_bytes(verdict.action) for verdict in verdicts)), default=None)
    whole = facts.whole_cache and facts.weight_bytes(facts.whole_cache)
    rows = []
    for place, verdict in enumerate(verdicts):
        action = verdict.action
        index = content.actions.index(action) if action in content.actions else None
        risk, accuracy, entry = (column[place] for column in columns.values())
        if verdict.badge is Badge.CONTROL:
            reference = _number(content, "accuracy_reference", content.baseline)
            risk, accuracy = Bar("0"), Bar(MISSING if reference is None else f"{scaled(reference, Scale.PERCENT, 1)}%")
        cache, own = facts.cache_bytes(action), facts.weight_bytes(action)
        held = share_bar(facts.share_of_whole(action), cache, 100 * cache / largest if cache and largest else None)
        share = own / whole if own is not None and whole else None
        weights = share_bar(share, own, None if share is None else min(100.0, 100 * share))
        described = "" if facts.finite else facts.described(action)
        rows.append(GlanceRow(verdict, index, described, held, weights, risk, accuracy, entry))
    return rows


def section(content: PageContent) -> Section:
    """Make the first screen: the verdict, the frontier figure, and the rows of actions."""
    choice = choose(content)
    verdicts = action_verdicts(content, choice)
    rows = glance_rows(content, verdicts)
    words = "R of each action against the bytes of its cache"
    drawn = not content.facts.finite and has_bytes(content)
    drawings = (Drawing("bytes", words, partial(bytes_figure, content, choice)),) if drawn else ()
    risks = [content.estimates.get("mismatch", verdict.action) for verdict in verdicts]
    values = frontier_values(content, choice) | {
        "headline": headline(content, choice),
        "remarks": remarks(content, choice),
        "rows": rows,
        "scored": content.estimates.known("score_gap"),
        "marked": any(bar.mark for row in rows for bar in (row.risk, row.accuracy, row.entry)),
        "level": next((level(row.level) for row in risks if row.has_interval), ""),
        "before": scaled(_number(content, "accuracy_reference", content.baseline), Scale.PERCENT, 1),
        # whether a chat template was applied although no text ended
        "endless": content.ended[1] if content.facts.has_chats and not content.ended[0] else 0,
    }
    return Section("verdict", "Verdict", drawings=drawings, values=values)
