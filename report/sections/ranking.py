"""The table behind the verdict: all actions with all their numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvdrift.report.printing.estimate_tables import (
    NOISE_FLOOR,
    CellColumn,
    EstimateColumn,
    action_table,
    columns_of,
)
from kvdrift.report.printing.numbers import MISSING, count, fixed, listed, size
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, TableRow
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.facts import Storage
from kvdrift.report.sections.choice import Choice, choose
from kvdrift.report.sections.contrasts import standing_of
from kvdrift.report.sections.findings import span
from kvdrift.report.sections.section import Section
from kvdrift.report.sections.verdict import ActionVerdict, Says, action_verdicts
from kvdrift.schema.study import POOLED

_SHOWN = ("mismatch", "divergence_probability", "mean_entry", "exposure", "exposure_written")
_SCORED = ("accuracy", "lost_share")


def section(content: PageContent) -> Section:
    """Make the section: the ranked table."""
    choice = choose(content)
    table = ranked_table(content, choice, action_verdicts(content, choice))
    return Section("ranking", "Ranking", (table,), shows=span(content, {"mismatch": "R"}))


def ranked_table(content: PageContent, choice: Choice, verdicts: list[ActionVerdict]) -> PrintedTable:
    """Make the table of actions, least R first, full cache last: bytes, R, time of divergence, answers, verdict."""
    order = [*choice.candidates, *content.facts.noise_floors]
    known = {verdict.action: verdict for verdict in verdicts if verdict.action in order}
    shown = _SHOWN + _SCORED if content.estimates.known("accuracy") else _SHOWN
    columns: list[EstimateColumn | CellColumn] = [_places(choice)]
    if not content.facts.finite:
        columns.append(_prompt_cache(content, order))
    if content.facts.own_weights:
        columns.append(_weights(content, order))
    columns += columns_of(*shown)
    columns.append(_badges(known, content))
    records = tuple(_record(content, choice, known[action]) for action in order)
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


def _badges(verdicts: dict[str, ActionVerdict], content: PageContent) -> CellColumn:
    """Make the column of badges, and of what stands below each badge.

    That is the action that rules this one out, the level and status of the deciding interval, the noise floors that the
    action is not distinguished from, and whether the action was added after the plan.
    """
    cells = {}
    for action, verdict in verdicts.items():
        near = [str(reason.other) for reason in verdict.reasons if reason.says is Says.NEAR]
        deciding = next((reason for reason in verdict.reasons if reason.says in {Says.RULED_OUT, Says.LOSES}), None)
        under = [
            "" if deciding is None or deciding.other is None else f"by {deciding.other}",
            "" if deciding is None else standing_of(deciding.estimate),
            f"not distinguished from {listed(near)}" if near else "",
            "added after the plan" if action in content.facts.added else "",
        ]
        cells[POOLED, action] = Cell(str(verdict.badge), ", ".join(filter(None, under)))
    both = " of cache and of weights" if content.facts.own_weights else ""
    meaning = (
        f"ruled out: another action holds no more bytes{both} and has surely less R; undecided: an interval includes "
        "0. Below: the action that rules it out, the level and the status of the deciding interval, and the floors "
        "that the action is not distinguished from"
    )
    return CellColumn(Column("verdict", "", meaning, left=True), cells)


def _whole_row(content: PageContent, control: str, columns: int) -> TableRow:
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


def _record(content: PageContent, choice: Choice, verdict: ActionVerdict) -> dict[str, Any]:
    action = verdict.action
    first, last = choice.places.get(action, (None, None))
    held = content.facts.storage.get(action)
    record: dict[str, Any] = {
        "action": action, "first_place": first, "last_place": last,
        "prompt_cache_bytes": held.mean_prompt_cache if held else None,
        "share_of_full": content.facts.share_of_whole(action),
        "weight_bytes": held.weight_bytes if held else None,
        "fixed_bytes": held.fixed_bytes if held else None,
    }  # fmt: skip
    for quantity in _SHOWN + _SCORED:
        record |= content.estimates.get(quantity, action).as_columns()
    risk = content.estimates.get("mismatch", action)
    return record | {"level": risk.level, "status": risk.status, "verdict": str(verdict.badge)}
