"""The leaderboard: every action of every compared study, ranked by divergence, with its bytes, as table and figure."""

from __future__ import annotations

from collections.abc import Sequence
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


_ASIDE = 8.0  # points between marks of the same share
_SAME = 0.004  # shares of the full cache that differ by less look the same


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

    @property
    def risk(self) -> float:
        """The action's R; 0 if it is not estimated."""
        return self.estimate("mismatch").estimate or 0.0

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
    places = []
    for entry in comparison.entries:
        facts = entry.content.facts
        for action in entry.content.actions:
            held = facts.storage.get(action)
            places.append(Place(entry, action, facts.share_of_whole(action), held.mean_prompt_cache if held else None))

    def rank(place: Place) -> tuple[bool, float, str, str]:
        return place.estimate("mismatch").estimate is None, place.risk, place.entry.name, place.action

    return sorted(places, key=rank)


def shown_quantities(places: Sequence[Place]) -> list[str]:
    """Return the quantities with a column on the leaderboard: those that are estimated for any action."""
    return [name for name in _QUANTITIES if any(place.estimate(name).estimate is not None for place in places)]


def leaderboard_table(places: Sequence[Place]) -> PrintedTable:
    """Make the leaderboard's table, with intervals under the numbers."""
    shown = QuantityColumns({name: [place.estimate(name) for place in places] for name in shown_quantities(places)})
    rows = []
    for place, *own in zip(places, *shown.cells, strict=True):
        facts, stored = place.entry.content.facts, place.entry.content.facts.storage.get(place.action)
        rows.append(
            table_row(
                Cell(place.action, ": ".join(filter(None, (place.entry.name, facts.described(place.action))))),
                Cell(
                    MISSING if place.share is None else f"{fixed(100 * place.share, 1)}%",
                    "" if place.bytes is None else size(place.bytes),
                ),
                *own,
                count(place.estimate("mismatch").documents),
                MISSING if stored is None else count_range(stored.replicates),
                str(facts.windows.horizon),
            )
        )
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
        for turn, place in enumerate(column):
            aside = _ASIDE * (turn - (len(column) - 1) / 2)
            style, risk, y = styles[place.entry.name], place.estimate("mismatch"), 100 * place.risk
            below, above = errors(risk)
            mark = Mark(place.action, 100 * (place.share or 0.0), y, y - below[0], y + above[0], aside)
            axes.errorbar(
                [mark.x], [mark.y], yerr=[below, above], fmt=style.marker, color=style.colour,
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


def _columns(places: Sequence[Place]) -> list[list[Place]]:
    """Group the places of about the same share of the full cache; those of an action stand together."""
    columns: list[list[Place]] = []
    for place in sorted(places, key=lambda place: place.share or 0.0):
        if not columns or (place.share or 0.0) - (columns[-1][0].share or 0.0) > _SAME:
            columns.append([])
        columns[-1].append(place)
    least = {place.action: place.risk for place in sorted(places, key=lambda place: -place.risk)}
    return [sorted(own, key=lambda place: (least[place.action], place.action, place.entry.name)) for own in columns]
