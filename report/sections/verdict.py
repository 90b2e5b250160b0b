"""The first section: each action at a glance, the recommendation in words, the ranked table, and bytes against R."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvdrift.report.printing.estimate_tables import (
    NOISE_FLOOR,
    CellColumn,
    EstimateColumn,
    action_table,
    columns_of,
    estimate_cells,
)
from kvdrift.report.printing.numbers import MISSING, count, fixed, in_text, listed, size
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, TableRow, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.reading.facts import FEW_IN_STRATUM, Storage
from kvdrift.report.sections.choice import Choice, choose, difference, not_distinguished
from kvdrift.report.sections.contrasts import grounds_of, standing_of
from kvdrift.report.sections.frontier import bytes_figure, frontier_values, has_bytes
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.schema.study import POOLED
from kvdrift.stats.bootstrap import PRESPECIFIED
from kvdrift.stats.registry import Scale

RECOMMENDED, OPEN, RULED_OUT = "recommended", "not settled", "ruled out"
_MOST = 3  # most actions that a sentence names
_FURTHER = 25.0  # never suggest more than 25 times the documents


def ranked_table(content: PageContent, choice: Choice) -> PrintedTable:
    """Make the table of all actions by R, the full cache last: bytes, R, time of divergence, answers, and verdict."""
    order = [*choice.candidates, *content.facts.noise_floors]
    shown = ["mismatch", "divergence_probability", "mean_entry", "exposure", "exposure_written"]
    if content.estimates.known("accuracy"):
        shown += ["accuracy", "lost_share"]
    columns: list[EstimateColumn | CellColumn] = [_places(choice)]
    if not content.facts.finite:
        columns.append(_prompt_cache(content, order))
    if content.facts.own_weights:
        columns.append(_weights(content, order))
    columns += columns_of(*shown)
    columns.append(_verdicts(content, choice, order))
    records = tuple(_record(content, choice, action) for action in order)
    measured = "all strata but those without a measured document" if content.unmeasured_strata else "all strata"
    note = f"By R, over {measured}. Place is the rank; a range means that the order is undecided."
    floors = dict.fromkeys(content.facts.noise_floors, f"{NOISE_FLOOR}: ")
    under = {action: floors.get(action, "") + content.facts.described(action) for action in order}
    table = action_table(
        "ranking", "Actions by divergence", content.estimates, order, columns, note=note, records=records, under=under
    )
    whole = [_whole_row(content, control.action, len(columns)) for control in content.facts.controls[:1]]
    return replace(table, rows=(*table.rows, *whole))


def _places(choice: Choice) -> CellColumn:
    cells = {
        (POOLED, action): Cell(count(first) if first == last else f"{count(first)}–{count(last)}")
        for action, (first, last) in choice.places.items()
    }
    return CellColumn(
        Column(
            "place",
            "",
            "by R, the least first; a range means that the order is undecided: intervals of differences include 0",
        ),
        cells,
    )


def _prompt_cache(content: PageContent, order: list[str]) -> CellColumn:
    cells, full = {}, "the reference’s" if content.facts.engine else "full"
    for action in order:
        share = content.facts.share_of_whole(action)
        of_full = "" if share is None else f"{fixed(100 * share, 0 if share >= 0.1 else 1)}% of {full}"
        cells[POOLED, action] = _held_bytes(content.facts.storage.get(action), of_full)
    meaning = "mean bytes of the stored prompt, with scales and indices; counted once for all replicates"
    if content.facts.policies:
        meaning += "; for a decode-time policy, the most that one continuation holds, generated entries included"
    if any(held.fixed_bytes for held in content.facts.storage.values()):
        meaning += "; windows and states are not evictable"
    return CellColumn(Column(content.facts.cache, "", meaning), cells)


def _held_bytes(held: Storage | None, of_full: str) -> Cell:
    """Make the cell of a cache's bytes, with their share of the full cache and the bytes that no action can evict."""
    fixed_bytes = f"{size(held.fixed_bytes)} not evictable" if held and held.fixed_bytes else ""
    under = "; ".join(filter(None, (of_full, fixed_bytes)))
    return Cell(size(held.mean_prompt_cache if held else None), under)


def _weights(content: PageContent, order: list[str]) -> CellColumn:
    facts = content.facts
    whole = None if facts.whole_cache is None else facts.weight_bytes(facts.whole_cache)
    cells = {}
    for action in order:
        weight_bytes = facts.weight_bytes(action)
        under = (
            "" if weight_bytes is None or not whole else f"{fixed(100 * weight_bytes / whole, 0)}% of the reference’s"
        )
        cells[POOLED, action] = Cell(size(weight_bytes), under)
    return CellColumn(Column("weights", "", "bytes of the files with the weights of the action’s side"), cells)


def verdict_of(content: PageContent, choice: Choice, action: str) -> tuple[str, str]:
    """Return the verdict on an action in a word, and a further remark."""
    if action in content.facts.noise_floors:
        kernel = "the kernel floor" if action in content.facts.kernel_floors else "the floor"
        return (kernel if content.facts.engine else "leaves out nothing"), ""
    if content.facts.weights(action) is not None and content.facts.weight_bytes(action) is None:
        return "other weights", ""
    if action in choice.recommended:
        return RECOMMENDED, ""
    if action in choice.unfit:
        return "not recommended", "loses right answers"
    if action in choice.ruled_out:
        return RULED_OUT, f"by {choice.ruled_out[action]}"
    return OPEN, ""


def _verdicts(content: PageContent, choice: Choice, order: list[str]) -> CellColumn:
    """Make the column of verdicts: the action that rules each out, and the level and status of the interval."""
    cells, near_floors = {}, not_distinguished(content)
    for action in order:
        verdict, further = verdict_of(content, choice, action)
        added = "added after the plan" if action in content.facts.added else ""
        near = "" if action not in near_floors else f"not distinguished from {listed(near_floors[action])}"
        cells[POOLED, action] = Cell(
            verdict, ", ".join(filter(None, (further, _standing_behind(content, choice, action), near, added)))
        )
    both = " of cache and of weights" if content.facts.own_weights else ""
    meaning = (
        f"ruled out: another action holds no more bytes{both} and has surely less R; not settled: an interval includes "
        "0. Below: the action that rules it out, the level and the status of the deciding interval, and the floors "
        "that the action is not distinguished from"
    )
    return CellColumn(Column("verdict", "", meaning, left=True), cells)


def _standing_behind(content: PageContent, choice: Choice, action: str) -> str:
    """Return the level and status of the interval by which an action is ruled out or unfit."""
    if (better := choice.ruled_out.get(action)) is not None:
        return standing_of(difference(content.estimates, better, action))
    return standing_of(content.estimates.get("lost_share", action)) if action in choice.unfit else ""


def _whole_row(content: PageContent, control: str, columns: int) -> TableRow:
    """Make the row of the full cache, whose differences are 0."""
    facts = content.facts
    held = facts.storage.get(control)
    known = next(row for row in facts.controls if row.action == control)
    exact = Cell("0", "exactly") if known.pairs and known.zero else Cell(MISSING)
    cells = [Cell(control, "control" if facts.finite else "full cache, control"), Cell(MISSING)]
    if not facts.finite:
        cells.append(_held_bytes(held, "100% of full" if held else ""))
    if facts.own_weights:
        cells.append(Cell(size(held.weight_bytes if held else None)))
    cells += [exact, exact, Cell(MISSING), exact, exact]
    if content.estimates.known("accuracy"):
        reference = content.estimates.get("accuracy_reference", content.baseline).estimate
        cells += [Cell(fixed(None if reference is None else 100 * reference, 1), "reference"), exact]
    cells += [Cell(MISSING)] * (columns + 1 - len(cells))
    return TableRow(tuple(cells))


def _record(content: PageContent, choice: Choice, action: str) -> dict[str, Any]:
    first, last = choice.places.get(action, (None, None))
    held = content.facts.storage.get(action)
    record: dict[str, Any] = {
        "action": action, "first_place": first, "last_place": last,
        "prompt_cache_bytes": held.mean_prompt_cache if held else None,
        "share_of_full": content.facts.share_of_whole(action),
        "weight_bytes": held.weight_bytes if held else None,
        "fixed_bytes": held.fixed_bytes if held else None,
    }  # fmt: skip
    for quantity in (
        "mismatch",
        "divergence_probability",
        "mean_entry",
        "exposure",
        "exposure_written",
        "accuracy",
        "lost_share",
    ):
        row = content.estimates.get(quantity, action)
        record |= {quantity: row.estimate, f"{quantity}_low": row.low, f"{quantity}_high": row.high}
    risk = content.estimates.get("mismatch", action)
    return record | {
        "level": risk.level, "status": risk.status, "verdict": " ".join(verdict_of(content, choice, action)).strip(),
    }  # fmt: skip


def glance_table(content: PageContent, choice: Choice) -> PrintedTable:
    """Make a table with a row for each action, in the order of the ranked table, and its verdict below its name."""
    order = [*choice.candidates, *content.facts.noise_floors]
    columns = [
        EstimateColumn("mean_entry", head="diverges at τ", meaning="mean position of the first mismatch"),
        EstimateColumn(
            "mismatch_written", head="written tokens that differ", meaning="of the tokens until both texts have ended"
        ),
    ]
    less = f"less {content.facts.whole}’s"
    costs = f" The change of accuracy is Y’s accuracy {less}." if content.estimates.known("score_gap") else ""
    if costs:
        columns.append(EstimateColumn("score_gap", head="accuracy, change", meaning=less))
    note = (
        f"Against {content.facts.whole}. τ is the mean position of the first mismatch, over texts that diverge. "
        f"Written tokens are those until both texts have ended.{costs}"
    )
    under = {action: ", ".join(filter(None, verdict_of(content, choice, action))) for action in order}
    return action_table("glance", "At a glance", content.estimates, order, columns, note=note, under=under)


@dataclass(frozen=True)
class Recommendation:
    """The page's recommendation in words."""

    lead: str  # the recommended actions with their bytes, or why there are none
    reasons: list[str]  # the effect of rounding and repetition alone, and actions not distinguished from it
    settles: list[str]  # how to settle open questions, or to confirm the recommendation
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
    """Put a choice into words; the tables have the intervals that it rests on."""
    reasons = [*_floors(content), *_few_clusters(content)]
    if choice.obstacle:
        lead = f"No action can be recommended: {choice.obstacle}."
        return Recommendation(lead, reasons, [choice.remedy] if choice.remedy else [])
    rows = [difference(content.estimates, *pair) for pairs in choice.deciding.values() for pair in pairs]
    parts = [f"Recommended: {_some([f'{action} ({_held(content, action)})' for action in choice.recommended])}"]
    if not choice.recommended:
        parts = ["No action can be recommended"]
    if choice.unsettled:
        parts.append(f"pairs not distinguished in R: {len(choice.unsettled)}, such as {listed(choice.unsettled[0])}")
    if choice.ruled_out:
        parts.append(f"ruled out: {_some([*choice.ruled_out])}")
    if choice.unfit:
        parts.append(f"more than half of the right answers are lost by: {_some(choice.unfit)}")
    settles = []
    if choice.unsettled:
        settles.append(
            "A fold below says how many documents would distinguish them. If a small difference does "
            "not matter, kvdrift gate says whether one action is at most a margin worse than another."
        )
    if choice.recommended and any(row.standing != PRESPECIFIED for row in rows):
        settles.append(
            "Not all of these intervals were planned. kvdrift confirm writes a study of documents that nobody has "
            "seen, whose plan names the actions."
        )
    lead = f"{'; '.join(parts)}{grounds_of(rows)}."
    return Recommendation(lead, reasons, settles, bool(choice.unsettled) or not choice.recommended)


def _held(content: PageContent, action: str) -> str:
    """Return the bytes of an action's cache, and of its weights if they differ between actions."""
    facts = content.facts
    cache = f"{size(facts.storage[action].mean_prompt_cache)} of {facts.cache}"
    return f"{cache} and {size(facts.weight_bytes(action))} of weights" if facts.own_weights else cache


def _some(names: Sequence[str]) -> str:
    """List the first names, and how many others there are."""
    return listed([*names[:_MOST], *([f"{len(names) - _MOST} more"] if names[_MOST:] else [])])


def _few_clusters(content: PageContent) -> Iterator[str]:
    small_strata = [
        name for name in content.facts.strata if content.facts.clusters(content.split, name) < FEW_IN_STRATUM
    ]
    if small_strata:
        yield f"Fewer than {FEW_IN_STRATUM} clusters in {listed(small_strata)}: intervals may be too narrow."


def _floors(content: PageContent) -> Iterator[str]:
    """Describe the effect of repetition and rounding alone, and name actions not distinguished from it."""
    facts, floors = content.facts, content.facts.noise_floors
    for name in floors:
        risk, distance = content.estimates.get("mismatch", name), content.estimates.get("rollout_tv", name).estimate
        if risk.estimate is None or distance is None:
            continue
        if name not in facts.kernel_floors:
            what = "a second run of the reference with streams of its own"
        else:
            what = facts.described(name) if facts.engine else "the whole cache, computed in another way"
        delta = f"mean δ {distance:.1e}" if distance else "δ = 0 exactly, which says nothing about rounding"
        yield f"{name}: {what}; R {in_text(risk, Scale.PERCENT)}{grounds_of([risk])}, {delta}."
    if facts.engine and not facts.kernel_floors:
        yield "No kernel floor was measured: the effect of rounding alone is not known."
    near = not_distinguished(content)
    larger = max(floors, key=lambda name: content.estimates.get("mismatch", name).estimate or 0.0, default="")
    for floor in sorted(floors, key=lambda name: name != larger):
        actions = [name for name, of in near.items() if floor in of and (floor == larger or larger not in of)]
        if actions:
            which = ", the larger floor" if floor == larger and floors[1:] else ""
            yield f"Not distinguished from {floor}{which}: {listed(actions)}."


def deciding_table(content: PageContent, choice: Choice) -> PrintedTable | None:
    """Make the table of the differences in R that decide, grouped by what their intervals say; None without any."""
    pairs = [(says, *pair) for says, group_pairs in choice.deciding.items() for pair in group_pairs]
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
            "documents needed",
            "",
            "would distinguish the two in about half of such studies if this difference is the true one",
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
    """Estimate how many documents would distinguish two actions if the true difference equals the estimate.

    With that many documents the interval is about as wide as the difference to each side, and excludes 0 if the
    estimate is larger. None if more than 25 times the documents are needed, or if the difference has no interval.
    """
    if not gap.estimate or gap.low is None or gap.high is None or gap.documents is None:
        return None
    times = ((gap.high - gap.low) / 2 / abs(gap.estimate)) ** 2
    return None if times > _FURTHER else math.ceil(max(times, 1.1) * gap.documents)
