"""Divergence against temperature, for compared studies that differ in temperature alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvdrift.report.figures.canvas import Axes, Figure, action_styles, new_figure
from kvdrift.report.figures.strokes import WIDTH, action_legend, errors, round_ticks
from kvdrift.report.printing.estimate_tables import QuantityColumns
from kvdrift.report.printing.tables import PrintedTable, label_column, table_row
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.side_by_side.content import Comparison, Entry
from kvdrift.stats.quantities import ALL_QUANTITIES

_ROOM = 0.05  # margin beyond the lowest and the highest temperature
_BESIDE = 0.02  # distance between two actions, as a fraction of the range of temperatures
_QUANTITIES = ("mismatch", "divergence_probability", "mean_entry", "exposure")


@dataclass(frozen=True)
class Temperatures:
    """Studies of one model on the same documents, by rising temperature, each temperature once."""

    entries: tuple[Entry, ...]

    @property
    def actions(self) -> list[str]:
        """Return the actions that any of the studies has."""
        return list(dict.fromkeys(action for entry in self.entries for action in entry.content.actions))

    def of(self, action: str, quantity: str) -> list[tuple[float, Estimate]]:
        """Return a quantity of an action by temperature, at the temperatures that have an estimate."""
        found = [(temperature_of(entry), entry.content.estimates.get(quantity, action)) for entry in self.entries]
        return [(temperature, estimate) for temperature, estimate in found if estimate.estimate is not None]


def temperature_of(entry: Entry) -> float:
    """Return the temperature of a study whose law is recorded."""
    law = entry.content.facts.law
    if law is None:
        raise ValueError(entry.name)  # ``by_temperature`` excludes such studies
    return law.temperature


def by_temperature(comparison: Comparison) -> list[Temperatures]:
    """Group the studies that differ in temperature alone; groups of a single study are left out.

    Studies of a group have the same model, horizon, split and truncation, and share documents; one study's plan may use
    more documents than another's. A greedy law has no truncation and fits any group.
    """
    laws = [(entry, law) for entry in comparison.entries if (law := entry.content.facts.law) is not None]
    groups: dict[tuple[float | None, int | None], list[list[Entry]]] = {}
    for entry, law in laws:
        if not law.greedy:
            _join(groups.setdefault((law.top_p, law.top_k), []), entry, alone=True)
    for entry in (entry for entry, law in laws if law.greedy):
        for alike in groups.values():
            _join(alike, entry, alone=False)
    ordered = [sorted(group, key=temperature_of) for alike in groups.values() for group in alike]
    distinct = [tuple(next(same) for _, same in groupby(entries, temperature_of)) for entries in ordered]
    return [Temperatures(entries) for entries in distinct if len(entries) > 1]


def _join(groups: list[list[Entry]], entry: Entry, *, alone: bool) -> None:
    """Add a study to the groups that it shares documents with, or, if ``alone``, start a group if there is none."""
    for group in groups:
        if all(_alike(entry, other) for other in group):
            group.append(entry)
            return
    if alone:
        groups.append([entry])


def _alike(one: Entry, other: Entry) -> bool:
    """Tell whether two studies have the same model, horizon, split and some documents with equal prompts."""
    traits = [(entry.model, entry.content.windows.horizon, entry.content.split) for entry in (one, other)]
    shared = one.documents.keys() & other.documents.keys()
    prompts = [[entry.documents[doc]["prompt_sha256"] for doc in sorted(shared)] for entry in (one, other)]
    return bool(shared) and traits[0] == traits[1] and prompts[0] == prompts[1]


def temperatures_table(shown: Temperatures, name: str) -> PrintedTable:
    """Make a table with a row for each action and temperature, with intervals under the numbers."""
    places = [(action, entry) for action in shown.actions for entry in shown.entries if action in entry.content.actions]
    columns = QuantityColumns({
        quantity: [entry.content.estimates.get(quantity, action) for action, entry in places]
        for quantity in _QUANTITIES
    })  # fmt: skip
    rows = [
        table_row(f"{temperature_of(entry):.12g}", *own, group=action)
        for (action, entry), *own in zip(places, *columns.cells, strict=True)
    ]
    records = tuple(
        {"study": entry.study, "model": entry.model, "temperature": temperature_of(entry)} | estimate.as_row()
        for estimates in columns.estimates.values()
        for (_, entry), estimate in zip(places, estimates, strict=True)
    )
    title = f"By temperature, {shown.entries[0].model}"
    heads = label_column("temperature"), *columns.heads
    return PrintedTable(name, title, heads, tuple(rows), columns.note, records)


def temperatures_figure(shown: Temperatures) -> Figure:
    """Draw four panels over the temperature, one for each quantity, with a line and intervals for each action."""
    styles = action_styles(shown.actions)
    figure = new_figure(WIDTH, 6.0)
    for axes, letter, quantity in zip(figure.subplots(2, 2).flat, "abcd", _QUANTITIES, strict=True):
        known = ALL_QUANTITIES[quantity]
        places = [temperature_of(entry) for entry in shown.entries]
        span = places[-1] - places[0]
        for number, (action, style) in enumerate(styles.items()):
            beside = _BESIDE * span * (number - (len(styles) - 1) / 2)  # so no interval hides another
            points = [(place + beside, row) for place, row in shown.of(action, quantity)]
            values = [known.scale.factor * (row.estimate or 0.0) for _, row in points]
            axes.plot([place for place, _ in points], values, color=style.colour, linestyle=style.dashes,
                      marker=style.marker, markersize=4.5, linewidth=1.2)  # fmt: skip
            _bars(axes, points, known.scale.factor, style.colour)
        axes.set(title=f"{letter}  {known.label}: {known.meaning}", xlabel="temperature", ylabel=known.scale.sign)
        axes.set_ylim(bottom=0)
        round_ticks(axes.yaxis)
        room = _ROOM * span + _BESIDE * span * (len(styles) - 1) / 2
        axes.set(xlim=(places[0] - room, places[-1] + room))
        axes.set_xticks(places)
    action_legend(figure, styles, marker=True)
    return figure


def _bars(axes: Axes, points: Sequence[tuple[float, Estimate]], factor: float, colour: str) -> None:
    for place, row in points:
        if row.has_interval:
            value = factor * (row.estimate or 0.0)
            axes.errorbar([place], [value], yerr=errors(row, factor), color=colour, linewidth=1.2, capsize=3)
