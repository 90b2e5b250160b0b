"""The leaderboard: every action of every compared study, ranked by divergence, with its bytes, as table and figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdrift.report.figures.canvas import Figure, action_styles, legend_line, new_figure
from kvdrift.report.figures.labels import Mark, name_marks
from kvdrift.report.figures.strokes import WIDTH, errors, moved_aside, percent_axis, round_ticks
from kvdrift.report.printing.estimate_tables import QuantityColumns
from kvdrift.report.printing.numbers import MISSING, count, count_range, fixed, size
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.side_by_side.content import Comparison, Entry

_QUANTITIES = ("mismatch", "divergence_probability", "mean_entry", "exposure", "accuracy")


@dataclass(frozen=True)
class Place:
    """One action of one study on the leaderboard."""

    entry: Entry  # the study
    action: str  # the action
    share: float | None  # its cache as a share of the full cache; None if unknown
    bytes: float | None  # mean bytes of a document's kept prompt; None if unknown

    def estimate(self, quantity: str) -> Estimate:
        """Return a quantity's estimate over the pooled strata; without a number if there is no estimate."""
        return self.entry.content.estimates.get(quantity, self.action)

    def record(self) -> dict[str, Any]:
        """Return one line of the CSV file."""
        own, content = self.estimate("mismatch"), self.entry.content
        numbers = {name: self.estimate(name) for name in _QUANTITIES}
        return {
            "store": self.entry.location, "study": self.entry.study, "model": self.entry.model, "action": self.action,
            "does": content.facts.described(self.action),
            "split": content.split, "horizon": content.windows.horizon, "documents": own.documents,
            "cache_share": self.share, "prompt_cache_bytes": self.bytes,
            **{
                f"{name}{end}": value
                for name, row in numbers.items()
                for end, value in (("", row.estimate), ("_low", row.low), ("_high", row.high))
            },
            "level": own.level, "status": own.status,
        }  # fmt: skip


def leaderboard(comparison: Comparison) -> list[Place]:
    """Return all actions by rising R; those without an estimate of R come last."""
    places = [_place(entry, action) for entry in comparison.entries for action in entry.content.actions]

    def rank(place: Place) -> tuple[bool, float, str, str]:
        risk = place.estimate("mismatch").estimate
        return risk is None, risk or 0.0, place.entry.name, place.action

    return sorted(places, key=rank)


def _place(entry: Entry, action: str) -> Place:
    facts = entry.content.facts
    held, whole = facts.storage.get(action), facts.whole_cache
    share = None if whole is None else facts.times_bytes(action, whole)
    return Place(entry, action, share, held.mean_prompt_cache if held else None)


def shown_quantities(places: Sequence[Place]) -> list[str]:
    """Return the quantities with a column on the leaderboard: those that are estimated for any action."""
    return [name for name in _QUANTITIES if any(place.estimate(name).estimate is not None for place in places)]


def leaderboard_table(places: Sequence[Place]) -> PrintedTable:
    """Make the leaderboard's table, with intervals under the numbers."""
    shown = QuantityColumns({name: [place.estimate(name) for place in places] for name in shown_quantities(places)})
    rows = [
        table_row(
            Cell(place.action, _told(place)),
            Cell(MISSING if place.share is None else f"{fixed(100 * place.share, 1)}%", _bytes(place)),
            *own,
            count(place.estimate("mismatch").documents),
            _replicates(place),
            str(place.entry.content.windows.horizon),
        )
        for place, *own in zip(places, *shown.cells, strict=True)
    ]
    columns = (
        label_column("action"),
        Column(
            "cache", "",
            "share of the full prompt's bytes, and below it the bytes: the mean of the stored prompt, with scales and "
            "indices, or the most that a decode-time policy holds, generated entries included",
        ),
        *shown.heads,
        Column("documents"), Column("K", "", "replicates per document"), Column("H", "tokens", "horizon"),
    )  # fmt: skip
    records = tuple(place.record() for place in places)
    return PrintedTable("leaderboard", "Actions by R", columns, tuple(rows), shown.note, records)


def _told(place: Place) -> str:
    does = place.entry.content.facts.described(place.action)
    return f"{place.entry.name}: {does}" if does else place.entry.name


def _bytes(place: Place) -> str:
    return "" if place.bytes is None else size(place.bytes)


def _replicates(place: Place) -> str:
    stored = place.entry.content.facts.storage.get(place.action)
    return MISSING if stored is None else count_range(stored.replicates)


_ASIDE = 8.0  # points between studies whose actions hold the same share
_BETWEEN = 0.7  # fraction of that between two actions of the same share whose intervals overlap
_ROOM = 1.0  # percentage points of R kept free above and below an action's mark
_SAME = 0.004  # shares of the full cache that differ by less look the same


def drawn(places: Sequence[Place]) -> list[Place]:
    """Return the actions that a figure can show: those whose share of the full cache and R are known."""
    return [place for place in places if place.share is not None and place.estimate("mismatch").estimate is not None]


def leaderboard_figure(places: Sequence[Place], studies: Sequence[str]) -> Figure:
    """Draw R with intervals over the share of the full cache, study by study; each action is named once."""
    figure = new_figure(WIDTH, 4.2)
    axes = figure.add_subplot()
    there = {place.entry.name for place in places}
    styles = action_styles([name for name in studies if name in there])
    marks = []
    for column in _columns(places):
        for place, aside in _asides(column, list(styles)):
            style, mark = styles[place.entry.name], _mark(place, aside)
            axes.errorbar(
                [mark.x], [mark.y], yerr=errors(place.estimate("mismatch")), fmt=style.marker, color=style.colour,
                markersize=7, linewidth=1.3, capsize=3, zorder=3, transform=moved_aside(axes, aside),
            )  # fmt: skip
            marks.append(mark)
    top, widest = max(mark.high for mark in marks), max(mark.x for mark in marks)  # above 100: more than the prompt
    axes.set(xlim=(0, max(104, 1.08 * widest)), ylim=(0, 1.1 * top or 1.0), xlabel="cache (% of the full prompt’s)")
    round_ticks(axes.xaxis)
    percent_axis(axes, "R (token): positions that differ (%)")
    handles = [legend_line(f" {name}", linestyle="none", marker=style.marker, color=style.colour)
               for name, style in styles.items()]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 4))
    name_marks(axes, marks)
    return figure


def _mark(place: Place, aside: float = 0.0) -> Mark:
    risk = place.estimate("mismatch")
    y, (below, above) = 100 * (risk.estimate or 0.0), errors(risk)
    return Mark(place.action, 100 * (place.share or 0.0), y, y - below[0], y + above[0], aside)


def _columns(places: Sequence[Place]) -> list[list[Place]]:
    """Group the places of about the same share of the full cache, whose marks would overlap."""
    columns: list[list[Place]] = []
    for place in sorted(places, key=lambda one: one.share or 0.0):
        if not columns or (place.share or 0.0) - (columns[-1][0].share or 0.0) > _SAME:
            columns.append([])
        columns[-1].append(place)
    return columns


def _asides(column: Sequence[Place], studies: Sequence[str]) -> list[tuple[Place, float]]:
    """Return how many points each mark of a column moves: studies stand side by side, and so do overlapping actions."""
    of: dict[str, list[Place]] = {}
    for place in column:
        of.setdefault(place.action, []).append(place)
    present = [name for name in studies if any(place.entry.name == name for place in column)]
    width = len(present) + _BETWEEN
    asides = []
    for beside in _overlapping({action: _span(own) for action, own in of.items()}):
        middle = (len(beside) * width - _BETWEEN - 1) / 2
        for slot, action in enumerate(beside):
            steps = [slot * width + present.index(place.entry.name) - middle for place in of[action]]
            asides += [(place, _ASIDE * step) for place, step in zip(of[action], steps, strict=True)]
    return asides


def _overlapping(spans: Mapping[str, tuple[float, float]]) -> list[list[str]]:
    """Group the actions whose spans overlap, directly or through others; the lowest group first."""
    groups: list[list[str]] = []
    reached = -math.inf
    for action in sorted(spans, key=lambda one: (spans[one], one)):
        low, high = spans[action]
        if low > reached:
            groups.append([])
        groups[-1].append(action)
        reached = max(reached, high)
    return groups


def _span(places: Sequence[Place]) -> tuple[float, float]:
    marks = [_mark(place) for place in places]
    return min(mark.low for mark in marks) - _ROOM, max(mark.high for mark in marks) + _ROOM
