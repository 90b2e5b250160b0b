"""The first section: each action at a glance, the recommendation in words, the ranked table, and bytes against R."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvdrift.report.printing.estimate_tables import estimate_cells
from kvdrift.report.printing.numbers import capital, count, counted, fixed, listed, size
from kvdrift.report.printing.tables import Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.sections.choice import Choice, choose, difference, not_distinguished
from kvdrift.report.sections.contrasts import Claim, Sample, grounds_of, standing_of, with_grounds
from kvdrift.report.sections.frontier import bytes_figure, frontier_values, has_bytes
from kvdrift.report.sections.ranking import glance_table, ranked_table
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.stats.bootstrap import PRESPECIFIED
from kvdrift.stats.quantities import SIMULTANEOUS_GAP
from kvdrift.stats.registry import Scale

_MOST = 3  # most actions that a sentence names
_FURTHER = 25.0  # beyond so many times the documents, more of them are no way to settle a difference


@dataclass(frozen=True)
class Recommendation:
    """The page's recommendation in words."""

    lead: str  # the recommendation, or why there is none, in about three sentences however many actions there are
    reasons: list[str]  # the cost of the recommended actions, noise floors, and what is ruled out; a sentence each
    settles: list[str]  # what would settle open questions, or confirm the recommendation; a sentence each
    open: bool = True  # whether a pair is not settled, or nothing is recommended


def section(content: PageContent) -> Section:
    """Make the section with each action at a glance, the recommendation, and the ranked actions."""
    choice = choose(content)
    deciding = deciding_table(content, choice)
    tables = (glance_table(content, choice), ranked_table(content, choice), *([deciding] if deciding else []))
    words = "R of each action against the bytes of its cache"
    drawn = not content.facts.finite and has_bytes(content)
    drawings = (Drawing("bytes", words, partial(bytes_figure, content, choice)),) if drawn else ()
    values = frontier_values(content, choice) | {
        "recommendation": recommendation(content, choice),
        # whether a chat template was applied although no text ended
        "endless": content.ended[1] if content.facts.has_chats and not content.ended[0] else 0,
    }
    return Section("verdict", "Verdict", tables, drawings, values)


def recommendation(content: PageContent, choice: Choice) -> Recommendation:
    """Put a choice into words."""
    if choice.obstacle:
        lead = f"No action can be recommended: {choice.obstacle}."
        return Recommendation(lead, _costs(content, choice), [choice.remedy] if choice.remedy else [])
    lead, sample = _lead(content, choice), Sample.of(content, choice.candidates)
    if choice.unfit and choice.recommended:
        loses = "loses" if len(choice.unfit) == 1 else "lose"
        lead += f" {_some(choice.unfit)} {loses} more than half of the right answers."
    if sample.few:
        lead += f" This rests on only {sample.words}."
    reasons, settles = [*_costs(content, choice), *_floors(content), *_ruled_out(content, choice)], []
    if choice.unsettled:
        settles.append(
            "A fold below says how many documents would distinguish them. Where a small difference does "
            "not matter, kvdrift gate says whether one action is at most a margin worse than another."
        )
    standings = Counter(row.standing for row in _resting(content, choice))
    if standings.keys() == {PRESPECIFIED}:
        reasons.append(
            "The plan named these differences before their outcomes were known; their intervals hold together."
        )
    elif standings:
        counts = listed([counted(number, f"{status} interval") for status, number in sorted(standings.items())])
        hold = "those of differences hold for all pairs of actions together"
        if content.estimates.pairs < 2:
            hold = "exploratory intervals hold for one difference at a time"
        settles.append(
            f"This rests on {counts}; {hold}. kvdrift confirm writes a study of documents that nobody has seen, whose "
            "plan names the actions."
        )
    return Recommendation(lead, reasons, settles, bool(choice.unsettled) or not choice.recommended)


def _lead(content: PageContent, choice: Choice) -> str:
    """Name the recommended actions with their bytes, and count those that are ruled out or not settled."""
    taken, pairs = choice.recommended, choice.unsettled
    left = list(dict.fromkeys(action for pair in pairs for action in pair))
    clauses = []
    if pairs:
        which = f"{counted(len(pairs), 'pair')} of {counted(len(left), 'action')}" if pairs[1:] else listed(pairs[0])
        clauses.append(f"{which} are not distinguished in R")
    if choice.ruled_out:
        others = len(choice.ruled_out)
        clauses.append(f"{counted(others, 'other')} {'is' if others == 1 else 'are'} ruled out")
    rows = [difference(content.estimates, *pair) for own in choice.deciding.values() for pair in own]
    if not taken:
        because = clauses if pairs else ["each action that is not ruled out loses more than half of the right answers"]
        return f"No action can be recommended: {'; '.join(because)}{grounds_of(rows)}."
    at = [f"{action} at {_held(content, action)}" for action in taken]
    words = f"Take {at[0]}"
    if len(taken) > 1:
        which = f"take {' or '.join(at)}"
        if len(taken) > _MOST:
            which = f"{counted(len(taken), 'action')} can be recommended, from {at[0]} down to {at[-1]}"
        words = f"The choice is one of bytes: {which}"
    return f"{'; '.join([words, *clauses])}{grounds_of(rows)}."


def _held(content: PageContent, action: str) -> str:
    """Return the bytes of an action's cache, and of its weights if they differ between actions."""
    facts = content.facts
    cache = f"{size(facts.storage[action].mean_prompt_cache)} of {facts.cache}"
    return f"{cache} and {size(facts.weight_bytes(action))} of weights" if facts.own_weights else cache


def _some(actions: Sequence[str]) -> str:
    """List the names of some actions, and how many others there are."""
    return listed([*actions[:_MOST], *([f"{len(actions) - _MOST} more"] if actions[_MOST:] else [])])


def _costs(content: PageContent, choice: Choice) -> list[str]:
    """Write the cost of each recommended action; of all candidates if none is recommended."""
    sentences = []
    for action in ([*choice.recommended, *choice.unfit] if choice.recommended else choice.candidates)[:_MOST]:
        risk, lost = (content.estimates.get(name, action) for name in ("mismatch", "lost_share"))
        answers: list[Claim] = [] if lost.estimate is None else [" and loses ", lost, " of the right answers"]
        if risk.estimate is not None:
            start = f"{action} disagrees with {content.facts.whole} on "
            sentences.append(with_grounds(start, risk, " of positions", *answers))
    return sentences


def _ruled_out(content: PageContent, choice: Choice) -> list[str]:
    """Say which action rules out which; empty if there are too many, which the table has."""
    if len(choice.ruled_out) > _MOST:
        return []
    both = " of cache and of weights" if content.facts.own_weights else ""
    return [
        with_grounds(
            f"{action} is ruled out by {better}, which holds no more bytes{both}: R is larger by ",
            difference(content.estimates, action, better),
        )
        for action, better in choice.ruled_out.items()
    ]


def _floors(content: PageContent) -> Iterator[str]:
    """Describe what repetition and rounding alone do, and name the actions not distinguished from either."""
    facts, floors = content.facts, content.facts.noise_floors
    for name in floors:
        risk, distance = content.estimates.get("mismatch", name), content.estimates.get("rollout_tv", name).estimate
        if risk.estimate is None or distance is None:
            continue
        if name in facts.kernel_floors:
            what = facts.described(name) if facts.engine else "which leaves out nothing and computes in another way"
            yield with_grounds(f"{capital(name)}, {what}, disagrees on ", risk, " of positions")
        else:
            does = f"a mean δ of {distance:.1e}, the effect of other batches and another placement of entries"
            does = does if distance else "δ = 0 exactly: the engine repeats itself, which says nothing of rounding"
            yield f"{capital(name)}, a second run of the reference with streams of its own, has {does}."
    if facts.engine and not facts.kernel_floors:
        yield (
            "No kernel floor was measured: what rounding alone does, once continuations amplify it, is not known, and "
            "may be as much as an action's R."
        )
    near = not_distinguished(content)
    larger = max(floors, key=lambda name: content.estimates.get("mismatch", name).estimate or 0.0, default="")
    for floor in sorted(floors, key=lambda name: name != larger):
        actions = [name for name, of in near.items() if floor in of and (floor == larger or larger not in of)]
        if actions:
            which = ", the larger floor" if floor == larger and floors[1:] else ""
            rests_on = grounds_of(content.estimates.get(SIMULTANEOUS_GAP, action, floor) for action in actions)
            yield f"Not distinguished from {floor}{which}: {listed(actions)}{rests_on}."


def _resting(content: PageContent, choice: Choice) -> list[Estimate]:
    """Return the intervals that a recommendation rests on, of lost answers too; none without a recommendation."""
    if not choice.recommended:
        return []
    pairs = [pair for says, own in choice.deciding.items() if says != "not settled" for pair in own]
    rows = [difference(content.estimates, *pair) for pair in pairs]
    return rows + [content.estimates.get("lost_share", action) for action in choice.unfit]


def deciding_table(content: PageContent, choice: Choice) -> PrintedTable | None:
    """Make the table of the differences in R that decide, grouped by what their intervals say; None without any."""
    pairs = [(says, *pair) for says, own in choice.deciding.items() for pair in own]
    if not pairs:
        return None
    rows = [difference(content.estimates, action, other) for _, action, other in pairs]
    times = [content.facts.times_bytes(action, other) for _, action, other in pairs]
    needed = [
        documents_needed(row) if says == "not settled" else None for (says, *_), row in zip(pairs, rows, strict=True)
    ]
    lines = [
        table_row(action, other, fixed(ratio, 2), cell, standing_of(row), count(wanted), group=says)
        for (says, action, other), ratio, cell, row, wanted in zip(
            pairs, times, estimate_cells(rows, Scale.POINTS, {}), rows, needed, strict=True
        )
    ]
    columns = (
        label_column("action"),
        label_column("less"),
        Column(content.facts.bytes_of(*choice.candidates), "×", "bytes of the first action’s cache over the second’s"),
        Column("difference in R", "pp"),
        Column("level and status", left=True),
        Column(
            "documents needed", "", "that would distinguish the two in about half of such studies if they differ so"
        ),
    )
    records = tuple(
        row.as_row() | {"says": says, "bytes_ratio": ratio, "documents_needed": wanted}
        for (says, *_), ratio, row, wanted in zip(pairs, times, rows, needed, strict=True)
    )
    note = (
        f"Over {count(max(row.documents or 0 for row in rows))} documents. A dash below “documents needed”: the "
        "interval decides already, or more documents will hardly distinguish the two."
    )
    return PrintedTable("deciding", "Differences in R that decide", columns, tuple(lines), note, records)


def documents_needed(gap: Estimate) -> int | None:
    """Estimate how many documents would distinguish two actions if the true difference is the estimate.

    With that many documents the interval is about as wide as the difference to each side, and excludes 0 if the
    estimate is larger. None if more documents are no way to settle the difference, or if it has no interval.
    """
    if not gap.estimate or gap.low is None or gap.high is None or gap.documents is None:
        return None
    times = ((gap.high - gap.low) / 2 / abs(gap.estimate)) ** 2
    return None if times > _FURTHER else math.ceil(max(times, 1.1) * gap.documents)
