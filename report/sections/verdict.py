"""The first section: each action at a glance, the recommendation in words, the ranked table, and bytes against R."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

from kvdrift.report.printing.numbers import capital, count, counted, fixed, in_text, listed, size
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.reading.facts import EVALUATION
from kvdrift.report.sections.choice import Choice, choose, difference, lacks_pairs, not_distinguished, unfinished
from kvdrift.report.sections.contrasts import Sample, grounds_of, said_once, shown
from kvdrift.report.sections.frontier import (
    bits_sentences,
    bytes_figure,
    frontier_sentence,
    has_bytes,
    policies_sentence,
)
from kvdrift.report.sections.ranking import glance_table, ranked_table
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.stats.quantities import SIMULTANEOUS_GAP
from kvdrift.stats.registry import Scale
from kvdrift.stats.resampling.intervals import EXPLORATORY, PRESPECIFIED, SEEN

_MOST = 3  # most actions that a sentence names
_MOST_OPEN = 6  # most actions of unsettled pairs that a sentence names
_MOST_PAIRS = 12  # most pairs that get a paragraph


@dataclass(frozen=True)
class Recommendation:
    """The page's recommendation in words."""

    lead: str  # the recommendation, or why there is none, in about three sentences however many actions there are
    reasons: list[str]  # the cost of the recommended actions, and the actions that are ruled out; a sentence each
    settles: list[str]  # what would settle open questions, or confirm the recommendation; a sentence each
    # if several pairs are not told apart, a paragraph for each pair and what would settle it
    pairs: list[str] = field(default_factory=list)
    open: bool = True  # whether a pair is not told apart, or nothing is recommended


def recommendation(content: PageContent, choice: Choice) -> Recommendation:
    """Put a choice into words."""
    if choice.obstacle:
        return Recommendation(_none(f"{choice.obstacle}."), _costs(content, choice), obstacle_settles(content, choice))
    lead = " ".join([_lead(content, choice), *_unfit(content, choice)])
    sample = Sample.of(content, choice.candidates)
    if sample.few:
        lead = f"{lead} This rests on only {sample.words}."
    reasons = [
        *_costs(content, choice), *_floors(content), *_not_settled(content, choice), *_ruled_out(content, choice),
        *planned(content, choice),
    ]  # fmt: skip
    settles = [*unsettled(content, choice), *fresh(content, choice)]
    is_open = bool(choice.unsettled) or not choice.recommended
    return Recommendation(lead, reasons, settles, _pairs(content, choice), is_open)


def _none(because: str) -> str:
    return f"No action can be recommended: {because}"


def _lead(content: PageContent, choice: Choice) -> str:
    taken = choice.recommended
    if not taken:
        answers = "what is not ruled out loses more than half of the right answers"
        return _none(f"{_open(content, choice) or answers}.")
    if len(taken) > 1 or choice.unsettled:
        return _several(content, choice)
    (only,) = taken
    if choice.unfit:
        return f"Take {only}, which holds {_held(content, only)}."
    others = [action for action in choice.candidates if action != only]
    whole = content.facts.whole
    if len(others) > 1:
        both = " of cache and of weights" if content.facts.own_weights else ""
        rest = f"each of the other {counted(len(others), 'action')} holds at least as many bytes{both}"
        rests_on = grounds_of(difference(content.estimates, other, only) for other in others)
        return f"Take {only}: {rest} and disagrees more with {whole}{rests_on}."
    (other,) = others
    more = shown(difference(content.estimates, other, only), Scale.POINTS)
    holding = _holding(content, other, only)
    return f"Take {only}: {other}{holding}disagrees with {whole} on more positions, by {more}."


def _several(content: PageContent, choice: Choice) -> str:
    """Write the recommendation of several actions, or of one action beside open pairs."""
    taken, also_open = choice.recommended, f"; {_left(choice)}" if choice.unsettled else ""
    rests_on = grounds_of(
        difference(content.estimates, one, other)
        for one, other in combinations([*taken, *choice.unfit, *_of_pairs(choice)], 2)
    )
    if len(taken) > _MOST:
        most = _held(content, taken[0]) if content.facts.own_weights else _bytes(content, taken[0])
        return (
            f"The choice is one of bytes: {counted(len(taken), 'action')} can be recommended, "
            f"from {taken[0]} at {most} down to {taken[-1]} at {_held(content, taken[-1])}{also_open}{rests_on}."
        )
    if choice.unsettled:
        at = listed([f"{action} at {_held(content, action)}" for action in taken])
        return f"Take {at}{also_open}{rests_on}."
    first = [f"{action} if {_held(content, action)} fit" for action in taken[:-1]]
    least = _held(content, taken[-1]) if content.facts.own_weights else _bytes(content, taken[-1])
    last = f"{taken[-1]} if no more than {least} fit"
    return f"The choice is one of bytes: take {listed([*first, last])}{rests_on}."


def _unfit(content: PageContent, choice: Choice) -> list[str]:
    """Name the actions that lose too many right answers to be recommended."""
    if not choice.unfit or not choice.recommended:
        return []
    least = min(content.facts.times_bytes(action, choice.recommended[-1]) or 0.0 for action in choice.unfit)
    compared = content.facts.bytes_of(*choice.unfit, choice.recommended[-1])
    fewer = ("hold", "holds")[len(choice.unfit) == 1] + f" fewer {compared}, but " if least < 1 else ""
    loses = "loses" if len(choice.unfit) == 1 else "lose"
    lost = [content.estimates.get("lost_share", action) for action in choice.unfit]
    shares = [shown(one, Scale.PERCENT) for one in lost[:_MOST]]
    if len(choice.unfit) > 1:
        shares = [f"{action} {share}" for action, share in zip(choice.unfit, shares, strict=False)]
    told = listed(shares)
    return [f"{_some(choice.unfit)} {fewer}{loses} more than half of the right answers: {said_once(told)}."]


def _holding(content: PageContent, action: str, other: str) -> str:
    """Compare an action's bytes with another's, as a phrase between an action and its verb."""
    times, compared = content.facts.times_bytes(action, other), content.facts.bytes_of(action, other)
    if content.facts.same_bytes(action, other):
        return f" holds the same {compared} and "
    if times == 1:
        return f" holds about the same {compared} and "
    return f" holds {fixed(times, 2)} times the {compared} of {other} and "


def _bytes(content: PageContent, action: str) -> str:
    return size(content.facts.storage[action].mean_prompt_cache)


def _held(content: PageContent, action: str) -> str:
    """Return the bytes of an action's cache, and of its weights if they differ between actions."""
    cache = f"{_bytes(content, action)} of {content.facts.cache}"
    return f"{cache} and {size(content.facts.weight_bytes(action))} of weights" if content.facts.own_weights else cache


def _left(choice: Choice) -> str:
    """Name the pair that is not told apart, or how many actions are not settled, as a clause."""
    if len(choice.unsettled) == 1:
        return f"{listed(choice.unsettled[0])} are not told apart"
    return f"{counted(len(_of_pairs(choice)), 'other')} are not settled"


def _of_pairs(choice: Choice) -> list[str]:
    """Return the actions that are not told apart from some other action, by R."""
    return [action for action in choice.candidates if any(action in pair for pair in choice.unsettled)]


def _not_settled(content: PageContent, choice: Choice) -> list[str]:
    """Say which actions are not told apart, beside a recommendation; empty if the first sentence says so."""
    pairs = choice.unsettled
    if not pairs or not choice.recommended:
        return []
    if len(pairs) == 1:
        return [f"{_pair(content, *pairs[0])}."]
    intervals = counted(len(pairs), "interval")
    names = _some(_of_pairs(choice), _MOST_OPEN)
    rests_on = grounds_of(difference(content.estimates, *pair) for pair in pairs)
    return [f"Not settled are {names}: {intervals} of differences in R between two of them include 0{rests_on}."]


def _open(content: PageContent, choice: Choice) -> str:
    """Say which pair is not told apart, or how many pairs of how many actions, as a clause."""
    pairs = choice.unsettled
    if len(pairs) < 2:
        return "".join(_pair(content, *pair) for pair in pairs)
    left = _of_pairs(choice)
    others = len(choice.ruled_out)
    ruled_out = f", and {counted(others, 'other')} {'is' if others == 1 else 'are'} ruled out" if others else ""
    rests_on = grounds_of(difference(content.estimates, *pair) for pair in [*pairs, *choice.ruled_out.items()])
    return (
        f"{counted(len(pairs), 'pair')} of {counted(len(left), 'action')} are not told apart in R{ruled_out}{rests_on}"
    )


def _pairs(content: PageContent, choice: Choice) -> list[str]:
    """Describe the first of several pairs that are not told apart; empty for one pair, which the first sentence has."""
    pairs = choice.unsettled
    if len(pairs) < 2:
        return []
    told = [f"{_pair(content, *pair)}. {settled_by(content, *pair)}" for pair in pairs[:_MOST_PAIRS]]
    return [*told, *([f"There are {len(pairs) - _MOST_PAIRS} more."] if pairs[_MOST_PAIRS:] else [])]


def _some(actions: Sequence[str], most: int = _MOST) -> str:
    """List the names of some actions, and how many others there are."""
    return listed([*actions[:most], *([f"{len(actions) - most} more"] if actions[most:] else [])])


def _pair(content: PageContent, one: str, other: str) -> str:
    """Describe two actions that are not told apart, the action with more bytes first."""
    times = content.facts.times_bytes(one, other)
    if times is not None and times < 1:
        one, other = other, one
        times = content.facts.times_bytes(one, other)
    gap = difference(content.estimates, one, other)
    if gap.estimate is None or not gap.has_interval:
        return f"the difference between {one} and {other} has no interval"
    apart = f"the interval of their difference in R includes 0: {shown(gap, Scale.POINTS)}"
    if times == 1:
        same = "the same" if content.facts.same_bytes(one, other) else "about the same"
        return f"{one} and {other} hold {same} {content.facts.bytes_of(one, other)}, and {apart}"
    held = "bytes" if content.facts.same_weights(one, other) else "cache bytes"
    return f"{one} holds {fixed(times, 2)} times the {held} of {other}, and {apart}"


def _costs(content: PageContent, choice: Choice) -> list[str]:
    """Write the cost of each recommended action; of all candidates if none is recommended."""
    told = []
    for action in ([*choice.recommended, *choice.unfit] if choice.recommended else choice.candidates)[:_MOST]:
        risk = content.estimates.get("mismatch", action)
        if risk.estimate is None:
            continue
        lost = content.estimates.get("lost_share", action)
        answers = "" if lost.estimate is None else f" and loses {shown(lost, Scale.PERCENT)} of the right answers"
        told.append(
            said_once(
                f"{action} disagrees with {content.facts.whole} on {shown(risk, Scale.PERCENT)} of positions{answers}."
            )
        )
    return told


def _floors(content: PageContent) -> list[str]:
    """Describe what repetition and rounding alone do, and name the actions not distinguished from either."""
    facts = content.facts
    said = [text for name in facts.noise_floors if (text := _floor(content, name))]
    if facts.engine and not facts.kernel_floors:
        said.append(
            "No kernel floor was measured: what rounding alone does, once continuations amplify it, is not known, and "
            "may be as much as an action's R."
        )
    return [*said, *_near_floors(content)]


def _floor(content: PageContent, name: str) -> str:
    """Say what a floor is and how far it is from the reference; empty if it is not estimated."""
    facts, risk = content.facts, content.estimates.get("mismatch", name)
    distance = content.estimates.get("rollout_tv", name).estimate
    if risk.estimate is None or distance is None:
        return ""
    if not facts.engine:
        return (
            f"{name} leaves out nothing and computes in another way: it disagrees on {shown(risk, Scale.PERCENT)} of "
            "positions."
        )
    if name in facts.kernel_floors:
        return (
            f"{capital(name)}, {facts.described(name)}, disagrees on {shown(risk, Scale.PERCENT)} of positions: that "
            "is what rounding alone does."
        )
    made = (
        f"has a mean δ of {distance:.1e}, the effect of other batches and another placement of entries"
        if distance
        else "has δ = 0 exactly: the engine repeats itself, which says nothing of rounding"
    )
    return f"{capital(name)}, a second run of the reference with streams of its own, {made}."


def _near_floors(content: PageContent) -> Iterator[str]:
    """Name the actions that are not distinguished from the larger floor, and those not from another one alone."""
    floors = content.facts.noise_floors
    near = not_distinguished(content)
    larger = max(floors, key=lambda name: content.estimates.get("mismatch", name).estimate or 0.0, default="")
    for floor in sorted(floors, key=lambda name: name != larger):
        actions = [
            action for action, names in near.items() if floor in names and (floor == larger or larger not in names)
        ]
        if actions:
            which = ", the larger floor" if floor == larger and floors[1:] else ""
            rests_on = grounds_of(content.estimates.get(SIMULTANEOUS_GAP, action, floor) for action in actions)
            yield f"Not distinguished from {floor}{which}: {listed(actions)}{rests_on}."


def _ruled_out(content: PageContent, choice: Choice) -> list[str]:
    """Say which action rules out which; empty if the first sentence has said so."""
    if len(choice.candidates) == 2 and len(choice.ruled_out) == 1 and choice.recommended:
        return []
    if len(choice.ruled_out) > _MOST:
        by: dict[str, list[str]] = {}
        for action, better in choice.ruled_out.items():
            by.setdefault(better, []).append(action)
        told = "; ".join(f"{listed(actions)} by {better}" for better, actions in by.items())
        rests_on = grounds_of(difference(content.estimates, *pair) for pair in choice.ruled_out.items())
        return [f"Ruled out, each by an action that holds no more bytes and surely has less R{rests_on}: {told}."]
    return [
        f"{action} is ruled out by {better}: it{_holding(content, action, better)}disagrees on more positions, by "
        f"{shown(difference(content.estimates, action, better), Scale.POINTS)}."
        for action, better in choice.ruled_out.items()
    ]


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


def section(content: PageContent) -> Section:
    """Make the section with each action at a glance, the recommendation, and the ranked actions."""
    choice = choose(content)
    tables = (glance_table(content, choice), ranked_table(content, choice))
    words = "R of each action against the bytes of its cache"
    drawn = not content.facts.finite and has_bytes(content)
    drawings = (Drawing("bytes", words, partial(bytes_figure, content, choice)),) if drawn else ()
    values = {
        "said": recommendation(content, choice),
        "frontier": frontier_sentence(content, choice) if drawn else "",
        "policies": policies_sentence(content),
        "endless": _endless(content),
        "bits": bits_sentences(content),
    }
    return Section("verdict", "Verdict", tables, drawings, values)


def _endless(content: PageContent) -> str:
    """Say that no text ended although a chat template was applied; empty otherwise."""
    ended, texts = content.ended
    if not content.facts.has_chats or ended or not texts:
        return ""
    return (
        f"A chat template was applied, and none of {counted(texts, 'continuation')} X ended within H = "
        f"{content.windows.horizon} tokens. Either answers are longer, or the tokens that end a text lack the one by "
        "which this model ends an answer: then positions after the answer count as text. kvdrift run --dry-run names "
        "the tokens, and eos under [study] chooses them."
    )
