"""The leaderboard: every action of every compared study, ranked by divergence, with its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
