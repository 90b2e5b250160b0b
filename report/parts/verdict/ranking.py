"""The ranked table of actions, and the figure of bytes against divergence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from report.parts.verdict.choice import Choice
from report.printing.canvas import action_styles, legend_line, library, new_figure
from report.printing.numbers import MISSING, count, fixed, size
from report.printing.palette import INK, QUIET
from report.printing.strokes import WIDTH, errors, moved_aside, percent_axis, round_ticks
from report.printing.tables import (
    NOISE_FLOOR,
    Cell,
    CellColumn,
    Column,
    EstimateColumn,
    PrintedTable,
    TableRow,
    action_table,
    columns_of,
)
from report.reading.content import PageContent
from schema.study import POOLED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
_WIDE = 20.0  # times as many bytes: from there on the axis is logarithmic
_ASIDE = 7.0  # points between actions of the same bytes

RECOMMENDED, OPEN, RULED_OUT = "recommended", "not settled", "ruled out"


def ranked_table(content: PageContent, choice: Choice) -> PrintedTable:
    """Every action by R, the full cache last: bytes, R, when and how long it diverges, answers, and its verdict."""
    order = [*choice.candidates, *content.facts.noise_floors]
    columns: list[EstimateColumn | CellColumn] = [_places(choice)]
    if not content.facts.finite:
        columns.append(_prompt_cache(content, order))
    columns += columns_of("mismatch", "divergence_probability", "mean_entry", "exposure")
    if content.estimates.known("accuracy"):
        columns += columns_of("accuracy", "lost_share")
    columns += [_verdicts(content, choice, order), _statuses(content, order)]
    records = tuple(_record(content, choice, action) for action in order)
    note = "By R, over all strata. The place is what the intervals of the differences leave open."
    table = action_table(
        "ranking", "Actions by divergence", content.estimates, order, columns, note=note, records=records
    )
    rows = [_marked(row, content) for row in table.rows]
    rows += [_whole(content, control.action, len(columns)) for control in content.facts.controls[:1]]
    return PrintedTable(table.name, table.title, table.columns, tuple(rows), table.note, table.records)


def _marked(row: TableRow, content: PageContent) -> TableRow:
    name = row.cells[0].text
    under = NOISE_FLOOR if name in content.facts.noise_floors else ""
    return TableRow((Cell(name, under), *row.cells[1:]))


def _places(choice: Choice) -> CellColumn:
    cells = {
        (POOLED, action): Cell(count(first) if first == last else f"{count(first)}–{count(last)}")
        for action, (first, last) in choice.places.items()
    }
    return CellColumn(
        Column("place", "", "by R, the least first; a range where intervals of differences include 0"), cells
    )


def _prompt_cache(content: PageContent, order: list[str]) -> CellColumn:
    cells = {}
    for action in order:
        share = share_of_whole(content, action)
        under = "" if share is None else f"{fixed(100 * share, 0 if share >= 0.1 else 1)}% of full"
        held = content.facts.storage.get(action)
        cells[POOLED, action] = Cell(size(held.mean_prompt_cache if held else None), under)
    meaning = "mean bytes of the kept prompt with its indices, stored once however many replicates read it"
    return CellColumn(Column("prompt cache", "", meaning), cells)


def share_of_whole(content: PageContent, action: str) -> float | None:
    """The prompt cache of an action as a share of the full one; None where there is no control."""
    controls = content.facts.controls
    return content.facts.times_bytes(action, controls[0].action) if controls else None


def verdict_of(content: PageContent, choice: Choice, action: str) -> tuple[str, str]:
    """What is said of an action, in a word, and what is said of it further."""
    if action in content.facts.noise_floors:
        return "evicts nothing", ""
    if action in choice.recommended:
        return RECOMMENDED, ""
    if action in choice.unfit:
        return "not recommended", "loses right answers"
    if action in choice.ruled_out:
        return RULED_OUT, f"by {choice.ruled_out[action]}"
    return OPEN, ""


def _verdicts(content: PageContent, choice: Choice, order: list[str]) -> CellColumn:
    cells = {(POOLED, action): Cell(*verdict_of(content, choice, action)) for action in order}
    meaning = "ruled out: another action holds no more bytes and has surely less R; not settled: an interval includes 0"
    return CellColumn(Column("verdict", "", meaning, left=True), cells)


def _statuses(content: PageContent, order: list[str]) -> CellColumn:
    cells = {}
    for action in order:
        risk = content.estimates.get("mismatch", action)
        added = "added after the plan" if action in content.facts.added else ""
        cells[POOLED, action] = Cell(_standing(risk) if risk.has_interval else MISSING, added)
    meaning = "of the interval of R"
    return CellColumn(Column("status", "", meaning, left=True), cells)


def _whole(content: PageContent, control: str, columns: int) -> TableRow:
    """The row of the full cache, from which nothing differs."""
    facts = content.facts
    held = facts.storage.get(control)
    known = next(one for one in facts.controls if one.action == control)
    exact = Cell("0", "exactly") if known.pairs and known.zero else Cell(MISSING)
    cells = [Cell(control, "control" if facts.finite else "full cache, control"), Cell(MISSING)]
    if not facts.finite:
        cells.append(Cell(size(held.mean_prompt_cache if held else None), "100% of full" if held else ""))
    cells += [exact, exact, Cell(MISSING), exact]
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
        "share_of_full": share_of_whole(content, action),
    }  # fmt: skip
    for quantity in ("mismatch", "divergence_probability", "mean_entry", "exposure", "accuracy", "lost_share"):
        row = content.estimates.get(quantity, action)
        record |= {quantity: row.estimate, f"{quantity}_low": row.low, f"{quantity}_high": row.high}
    risk = content.estimates.get("mismatch", action)
    return record | {
        "level": risk.level, "status": risk.status, "verdict": " ".join(verdict_of(content, choice, action)).strip(),
    }  # fmt: skip


def bytes_figure(content: PageContent, choice: Choice) -> Figure:
    """R of each action against the bytes of its prompt cache, with intervals; the full cache at 0."""
    figure = new_figure(WIDTH, 3.6)
    axes = figure.add_subplot()
    styles, facts = action_styles(content.actions), content.facts
    held = {action: facts.storage[action].mean_prompt_cache for action in content.actions if action in facts.storage}
    known = {action: value for action, value in held.items() if value}
    controls = [one for one in facts.controls[:1] if one.action in facts.storage and one.zero]
    whole = facts.storage[controls[0].action].mean_prompt_cache if controls else None
    largest = max([*known.values(), whole or 0.0])
    factor, unit = next((factor, unit) for factor, unit in _UNITS if largest >= factor or factor == 1)
    handles = []
    for action, value in known.items():
        risk, style = content.estimates.get("mismatch", action), styles[action]
        if risk.estimate is None:
            continue
        alike = [other for other in known if facts.times_bytes(action, other) == 1]
        aside = _ASIDE * (alike.index(action) - (len(alike) - 1) / 2)
        fill = style.colour if action in choice.recommended or not choice.recommended else "white"
        axes.errorbar([value / factor], [100 * risk.estimate], yerr=errors(risk), fmt=style.marker, color=style.colour,
                      markersize=8, markerfacecolor=fill, markeredgewidth=1.4, linewidth=1.4, capsize=3, zorder=3,
                      transform=moved_aside(axes, aside))  # fmt: skip
        handles.append(
            legend_line(f" {action}", linestyle="none", marker=style.marker, color=style.colour, markerfacecolor=fill)
        )
    if whole:
        axes.plot([whole / factor], [0], linestyle="none", marker="o", markersize=8, color=INK, markerfacecolor="white",
                  clip_on=False, zorder=4)  # fmt: skip
        handles.append(
            legend_line(f" {controls[0].action}", linestyle="none", marker="o", color=INK, markerfacecolor="white")
        )
    if min(known.values()) * _WIDE < largest:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(library().ticker.FuncFormatter(lambda value, _: f"{value:,.12g}"))
    else:
        axes.set_xlim(0, 1.08 * largest / factor)
        round_ticks(axes.xaxis)
    risks = [content.estimates.get("mismatch", action) for action in known]
    top = max(100 * (row.estimate or 0.0) + errors(row)[1][0] for row in risks)
    axes.set_ylim(0, 1.08 * top or 1.0)  # set here, because points that are moved aside do not set it
    percent_axis(axes, "R (token): positions that differ (%)")
    axes.set_xlabel(f"prompt cache ({unit} a document, mean)")
    if choice.recommended:
        handles.append(
            legend_line("filled: recommended", linestyle="none", marker="o", color=QUIET, markerfacecolor=QUIET)
        )
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 5))
    return figure


def has_bytes(content: PageContent) -> bool:
    """Whether there is anything to draw: an action with bytes and with R."""
    held = [action for action in content.actions if action in content.facts.storage]
    known = [action for action in held if content.facts.storage[action].mean_prompt_cache]
    return any(content.estimates.get("mismatch", action).estimate is not None for action in known)


def _standing(risk: Any) -> str:
    return "prespecified" if risk.standing == "primary" else str(risk.standing)
