"""The two tables of the verdict: each action at a glance, and all actions ranked by R."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvdrift.report.printing.estimate_tables import NOISE_FLOOR, CellColumn, EstimateColumn, action_table, columns_of
from kvdrift.report.printing.numbers import MISSING, count, fixed, listed, meanings, size
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, TableRow
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.facts import Storage
from kvdrift.report.sections.choice import Choice, difference, not_distinguished
from kvdrift.report.sections.contrasts import standing_of
from kvdrift.schema.study import POOLED

RECOMMENDED, OPEN, RULED_OUT = "recommended", "not settled", "ruled out"


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
    note = (
        f"By R, over {measured}. Place is the rank; a range means that the order is undecided. "
        f"{meanings(content.facts.whole, content.facts.other, f'H = {content.windows.horizon}', shown)}"
    )
    floors = dict.fromkeys(content.facts.noise_floors, f"{NOISE_FLOOR}: ")
    under = {action: floors.get(action, "") + content.facts.described(action) for action in order}
    table = action_table(
        "ranking", "Actions by divergence", content.estimates, order, columns, note=note, records=records, under=under
    )
    whole = [_whole(content, control.action, len(columns)) for control in content.facts.controls[:1]]
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
    """Make the cell of a cache's bytes, and below them their share of the full cache and what no action can evict."""
    fixed_bytes = f"{size(held.fixed_bytes)} not evictable" if held and held.fixed_bytes else ""
    under = "; ".join(filter(None, (of_full, fixed_bytes)))
    return Cell(size(held.mean_prompt_cache if held else None), under)


def _weights(content: PageContent, order: list[str]) -> CellColumn:
    facts = content.facts
    whole = None if facts.whole_cache is None else facts.weight_bytes(facts.whole_cache)
    cells = {}
    for action in order:
        own = facts.weight_bytes(action)
        under = "" if own is None or not whole else f"{fixed(100 * own / whole, 0)}% of the reference’s"
        cells[POOLED, action] = Cell(size(own), under)
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
        said, further = verdict_of(content, choice, action)
        added = "added after the plan" if action in content.facts.added else ""
        near = "" if action not in near_floors else f"not distinguished from {listed(near_floors[action])}"
        cells[POOLED, action] = Cell(
            said, ", ".join(filter(None, (further, _resting(content, choice, action), near, added)))
        )
    both = " of cache and of weights" if content.facts.own_weights else ""
    meaning = (
        f"ruled out: another action holds no more bytes{both} and has surely less R; not settled: an interval includes "
        "0. Below: the action that rules it out, the level and the status of the deciding interval, and the floors "
        "that the action is not distinguished from"
    )
    return CellColumn(Column("verdict", "", meaning, left=True), cells)


def _resting(content: PageContent, choice: Choice, action: str) -> str:
    """Return the level and status of the interval by which an action is ruled out or unfit."""
    if (better := choice.ruled_out.get(action)) is not None:
        return standing_of(difference(content.estimates, better, action))
    return standing_of(content.estimates.get("lost_share", action)) if action in choice.unfit else ""


def _whole(content: PageContent, control: str, columns: int) -> TableRow:
    """Make the row of the full cache, whose differences are 0."""
    facts = content.facts
    held = facts.storage.get(control)
    known = next(one for one in facts.controls if one.action == control)
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
