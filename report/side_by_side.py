"""The page of several studies side by side: the leaderboard, its figure, temperatures, and differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from kvdrift.report.figures.canvas import ACTION_COLOURS, Axes, Figure, action_styles, legend_line, new_figure
from kvdrift.report.figures.labels import Mark, name_marks
from kvdrift.report.figures.strokes import (
    HALF_WIDTH,
    WIDTH,
    action_legend,
    errors,
    moved_aside,
    percent_axis,
    round_ticks,
)
from kvdrift.report.page import draw_figures, relative_link
from kvdrift.report.printing.bars import Bar, bars, share_bar
from kvdrift.report.printing.estimate_tables import quantity_columns
from kvdrift.report.printing.html import rendered
from kvdrift.report.printing.numbers import MISSING, count, count_range, fixed, size
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate, ViewRow
from kvdrift.report.sections.section import Drawing
from kvdrift.stats.quantities import ALL_QUANTITIES

_BUDGET = ("keep", "codec", "codec_parameters", "policy", "policy_parameters")

Identity = tuple[str | None, ...]
_RANKED = ("mismatch", "divergence_probability", "mean_entry", "exposure", "accuracy")
_ASIDE = 8.0  # points between marks of the same share
_SAME = 0.004  # shares of the full cache that differ by less are drawn as equal
_ROOM = 0.05  # margin beyond the lowest and the highest temperature
_BESIDE = 0.02  # distance between two actions, as a fraction of the range of temperatures
_BY_TEMPERATURE = ("mismatch", "divergence_probability", "mean_entry", "exposure")


@dataclass(frozen=True)
class Entry:
    """One study and model of a store."""

    name: str  # its name on the page, which no other entry has
    location: str  # the store's folder or URL
    content: PageContent  # the content of the study's own page
    documents: Mapping[str, ViewRow]  # the documents of the page's split that have events, by name
    # the hashes of weights, tokenizer, selector and arithmetic that made each action's units
    identities: Mapping[str, Identity]
    page: Path | None = None  # the study's own page; None if there is none

    @property
    def study(self) -> str:
        """The study's name."""
        return self.content.facts.study

    @property
    def model(self) -> str:
        """The model's id."""
        return self.content.facts.model

    def budget(self, action: str) -> tuple[Any, ...] | None:
        """Return the settings that decide how many bytes an action keeps; None if they are unknown."""
        (row,) = [row for row in self.content.facts.actions if row["action"] == action]
        return None if row["keep"] == "unknown" else tuple(row.get(name) for name in _BUDGET)


@dataclass(frozen=True)
class Difference:
    """The difference of two actions by quantity: a later entry's action less an earlier entry's.

    ``same`` says whether both actions' units were made with the same weights, tokenizer, selector and arithmetic.
    """

    first_action: str
    other_action: str
    same: bool
    estimates: Mapping[str, Estimate]


@dataclass(frozen=True)
class Pairing:
    """Two entries, their shared documents, and the differences of their actions."""

    first: Entry  # the earlier entry
    other: Entry  # the later entry
    documents: int  # how many documents both entries have
    # whether documents are matched by name, stratum and cluster alone, since another model has other tokens
    by_name: bool
    obstacle: str | None  # why no actions are subtracted; None if actions are subtracted
    differences: tuple[Difference, ...] = ()  # one for each two actions of the same name or of the same budget


@dataclass(frozen=True)
class Comparison:
    """The content of a comparison's page."""

    entries: tuple[Entry, ...]
    pairings: tuple[Pairing, ...]


@dataclass(frozen=True)
class Place:
    """One action of one study on the leaderboard."""

    entry: Entry  # the study
    action: str  # the action

    @property
    def share(self) -> float | None:
        """Its cache as a share of the full cache; None if unknown."""
        return self.entry.content.facts.share_of_whole(self.action)

    @property
    def bytes(self) -> float | None:
        """Mean bytes of a document's kept prompt; None if unknown."""
        return self.entry.content.facts.cache_bytes(self.action)

    def estimate(self, quantity: str) -> Estimate:
        """Return a quantity's estimate over the pooled strata; without a number if there is no estimate."""
        return self.entry.content.estimates.get(quantity, self.action)

    @property
    def risk(self) -> float:
        """The action's R; 0 if it is not estimated."""
        return self.estimate("mismatch").estimate or 0.0

    def record(self) -> dict[str, Any]:
        """Return the action's line in the leaderboard's CSV file, by column."""
        risk, content = self.estimate("mismatch"), self.entry.content
        numbers = {column: value for name in _RANKED for column, value in self.estimate(name).as_columns().items()}
        return {
            "store": self.entry.location, "study": self.entry.study, "model": self.entry.model, "action": self.action,
            "does": content.facts.described(self.action),
            "split": content.split, "horizon": content.windows.horizon, "documents": risk.documents,
            "cache_share": self.share, "prompt_cache_bytes": self.bytes, **numbers,
            "level": risk.level, "status": risk.status,
        }  # fmt: skip


def leaderboard(comparison: Comparison) -> list[Place]:
    """Return all actions by rising R; those without an estimate of R come last."""
    places = [Place(entry, action) for entry in comparison.entries for action in entry.content.actions]

    def rank(place: Place) -> tuple[bool, float, str, str]:
        return place.estimate("mismatch").estimate is None, place.risk, place.entry.name, place.action

    return sorted(places, key=rank)


def shown_quantities(places: Sequence[Place]) -> list[str]:
    """Return the quantities with a column on the leaderboard: those that are estimated for any action."""
    return [name for name in _RANKED if any(place.estimate(name).estimate is not None for place in places)]


def leaderboard_table(places: Sequence[Place]) -> PrintedTable:
    """Make the leaderboard's table, with intervals under the numbers."""
    shown = {name: [place.estimate(name) for place in places] for name in shown_quantities(places)}
    heads, cells, note = quantity_columns(shown)
    rows = []
    for place, *row_cells in zip(places, *cells, strict=True):
        facts, stored = place.entry.content.facts, place.entry.content.facts.storage.get(place.action)
        rows.append(
            table_row(
                Cell(place.action, ": ".join(filter(None, (place.entry.name, facts.described(place.action))))),
                Cell(
                    MISSING if place.share is None else f"{fixed(100 * place.share, 1)}%",
                    "" if place.bytes is None else size(place.bytes),
                ),
                *row_cells,
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
        *heads,
        Column("documents"), Column("K", "", "replicates per document"), Column("H", "tokens", "horizon"),
    )  # fmt: skip
    records = tuple(place.record() for place in places)
    return PrintedTable("leaderboard", "Actions by R", columns, tuple(rows), note, records)


@dataclass(frozen=True)
class StandingRow:
    """A row of the first screen: an action of a study with its numbers as bars."""

    place: Place
    colour: int  # the number of its study's colour in the figure, from 1
    held: Bar
    risk: Bar
    accuracy: Bar
    entry: Bar


def standing(places: Sequence[Place], studies: Sequence[str]) -> list[StandingRow]:
    """Return the rows of the first screen, in the order of the places."""
    columns = [
        bars([place.estimate(name) for place in places], ALL_QUANTITIES[name].scale)
        for name in ("mismatch", "score_gap", "mean_entry")
    ]
    largest = max(1.0, *(place.share or 0.0 for place in places))
    known = [name for name in studies if any(place.entry.name == name for place in drawn(places))]
    rows = []
    for place, *numbers in zip(places, *columns, strict=True):
        held = share_bar(place.share, place.bytes, None if place.share is None else 100 * place.share / largest)
        colour = known.index(place.entry.name) % len(ACTION_COLOURS) + 1 if place.entry.name in known else 0
        rows.append(StandingRow(place, colour, held, *numbers))
    return rows


def drawn(places: Sequence[Place]) -> list[Place]:
    """Return the actions that a figure can show: those whose share of the full cache and R are known."""
    return [place for place in places if place.share is not None and place.estimate("mismatch").estimate is not None]


def leaderboard_figure(places: Sequence[Place], studies: Sequence[str]) -> Figure:
    """Draw R with intervals over the share of the full cache, study by study; each action is named once."""
    figure = new_figure(HALF_WIDTH, 5.4 + 0.1 * max(0, len(places) - 12))
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
    """Group the places of the leaderboard that hold about the same share of the full cache, by rising share.

    Within a group the places of one action stand together.
    """
    columns: list[list[Place]] = []
    for place in sorted(places, key=lambda place: place.share or 0.0):
        if not columns or (place.share or 0.0) - (columns[-1][0].share or 0.0) > _SAME:
            columns.append([])
        columns[-1].append(place)
    least = {place.action: place.risk for place in sorted(places, key=lambda place: -place.risk)}
    return [
        sorted(column, key=lambda place: (least[place.action], place.action, place.entry.name)) for column in columns
    ]


@dataclass(frozen=True)
class Temperatures:
    """Studies of one model on the same documents, by rising temperature, each temperature once."""

    entries: tuple[Entry, ...]

    @property
    def actions(self) -> list[str]:
        """Return the actions that any of the studies has."""
        return list(dict.fromkeys(action for entry in self.entries for action in entry.content.actions))

    def of(self, action: str, quantity: str) -> list[tuple[float, Estimate]]:
        """Return (temperature, estimate) for each temperature at which the action's quantity has an estimate."""
        estimates = [(temperature_of(entry), entry.content.estimates.get(quantity, action)) for entry in self.entries]
        return [(temperature, estimate) for temperature, estimate in estimates if estimate.estimate is not None]


def temperature_of(entry: Entry) -> float:
    """Return the temperature of a study whose sampling is recorded."""
    sampling = entry.content.facts.sampling
    if sampling is None:
        raise ValueError(entry.name)  # ``by_temperature`` excludes such studies
    return sampling.temperature


def by_temperature(comparison: Comparison) -> list[Temperatures]:
    """Group the studies that differ in temperature alone; groups of a single study are left out.

    Studies of a group have the same model, horizon, split, ``top_p`` and ``top_k``, and share documents; one study's
    plan may use more documents than another's. A study at temperature 0, which has no ``top_p`` or ``top_k``, fits any
    group.
    """
    recorded = [(law.greedy, entry) for entry in comparison.entries if (law := entry.content.facts.sampling)]
    groups: list[list[Entry]] = []
    for greedy, entry in sorted(recorded, key=lambda law_entry: law_entry[0]):  # greedy studies last
        fitting = [group for group in groups if all(_comparable(entry, other) for other in group)]
        if not greedy:
            fitting = fitting[:1] or [[]]
            groups += [group for group in fitting if not group]
        for group in fitting:
            group.append(entry)
    ordered = [sorted(group, key=temperature_of) for group in groups]
    distinct = [tuple(next(same) for _, same in groupby(entries, temperature_of)) for entries in ordered]
    return [Temperatures(entries) for entries in distinct if len(entries) > 1]


def _comparable(entry: Entry, other: Entry) -> bool:
    """Tell whether two studies have one model, horizon and split, one truncation, and shared documents and prompts.

    The truncation of a greedy ``entry`` does not count.
    """
    pair = (entry, other)
    traits = [(one.model, one.content.windows.horizon, one.content.split) for one in pair]
    laws = [(law.top_p, law.top_k) for one in pair if (law := one.content.facts.sampling) and not law.greedy]
    shared = sorted(entry.documents.keys() & other.documents.keys())
    prompts = [[one.documents[doc]["prompt_sha256"] for doc in shared] for one in pair]
    return bool(shared) and traits[0] == traits[1] and prompts[0] == prompts[1] and len(set(laws)) < 2


def temperatures_table(shown: Temperatures, name: str) -> PrintedTable:
    """Make a table with a row for each action and temperature, with intervals under the numbers."""
    places = [(action, entry) for action in shown.actions for entry in shown.entries if action in entry.content.actions]
    columns = {
        quantity: [entry.content.estimates.get(quantity, action) for action, entry in places]
        for quantity in _BY_TEMPERATURE
    }
    heads, cells, note = quantity_columns(columns)
    rows = [
        table_row(f"{temperature_of(entry):.12g}", *row_cells, group=action)
        for (action, entry), *row_cells in zip(places, *cells, strict=True)
    ]
    records = tuple(
        {"study": entry.study, "model": entry.model, "temperature": temperature_of(entry)} | estimate.as_row()
        for estimates in columns.values()
        for (_, entry), estimate in zip(places, estimates, strict=True)
    )
    title = f"By temperature, {shown.entries[0].model}"
    return PrintedTable(name, title, (label_column("temperature"), *heads), tuple(rows), note, records)


def temperatures_figure(shown: Temperatures) -> Figure:
    """Draw four panels over the temperature, one for each quantity, with a line and intervals for each action."""
    styles = action_styles(shown.actions)
    figure = new_figure(WIDTH, 6.0)
    for axes, letter, quantity in zip(figure.subplots(2, 2).flat, "abcd", _BY_TEMPERATURE, strict=True):
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


def differences_table(comparison: Comparison) -> PrintedTable | None:
    """Make the table of differences: a row for each pair of actions, a column for each quantity; None without any."""
    pairs = [(pairing, difference) for pairing in comparison.pairings for difference in pairing.differences]
    if not pairs:
        return None
    heads, cells, note = quantity_columns(
        {name: [difference.estimates[name] for _, difference in pairs] for name in pairs[0][1].estimates}
    )
    rows = [
        table_row(
            Cell(
                difference.other_action,
                "" if difference.other_action == difference.first_action else f"less {difference.first_action}",
            ),
            *row_cells,
            count(pairing.documents),
            "yes" if difference.same else "no",
            group=f"{pairing.other.name} less {pairing.first.name}",
        )
        for (pairing, difference), *row_cells in zip(pairs, *cells, strict=True)
    ]
    columns = (
        label_column("action"),
        *heads,
        Column("documents", "", "that are the same in both"),
        Column(
            "same weights and code", "", "whether weights, tokenizer, selector and numerics are the same on both sides",
        ),
    )  # fmt: skip
    records = tuple(
        {
            "first": pairing.first.name, "first_action": difference.first_action, "other": pairing.other.name,
            "other_action": difference.other_action, "quantity": estimate.quantity, "estimate": estimate.estimate,
            "low": estimate.low, "high": estimate.high, "level": estimate.level, "draws": estimate.draws,
            "interval": estimate.interval, "documents": estimate.documents, "clusters": estimate.clusters,
            "matched_by_name": pairing.by_name, "same_identity": difference.same, "status": estimate.status,
        }
        for pairing, difference in pairs
        for estimate in difference.estimates.values()
    )  # fmt: skip
    return PrintedTable("differences", "Differences", columns, tuple(rows), note, records)


def obstacles(comparison: Comparison) -> list[str]:
    """Say which studies are not subtracted and why, which are matched by name alone, and which share few documents."""
    sentences = []
    for pairing in comparison.pairings:
        both = f"{pairing.first.name} and {pairing.other.name}"
        counts = [len(entry.documents) for entry in (pairing.first, pairing.other)]
        if pairing.obstacle:
            sentences.append(f"{both} are not subtracted: {pairing.obstacle}.")
        elif pairing.by_name:
            sentences.append(
                f"{both} have different models, whose prompts have other tokens: {count(pairing.documents)} documents "
                "are matched by name, stratum and cluster, and nothing shows that their texts are the same."
            )
        if not pairing.obstacle and pairing.documents < max(counts):
            sentences.append(
                f"{both} share {count(pairing.documents)} documents, of {count(counts[0])} and {count(counts[1])}; "
                "the leaderboard has each study on all of its documents."
            )
    return sentences


def build_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write ``index.html``, ``figures/`` and ``tables/`` under ``folder``. The same input gives the same bytes."""
    places = leaderboard(comparison)
    tables = {"leaderboard": leaderboard_table(places), "entries": _entries_table(comparison)}
    if (differences := differences_table(comparison)) is not None:
        tables["differences"] = differences
    for part in ("figures", "tables"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    drawings, studies = [], [entry.name for entry in comparison.entries]
    if shown := drawn(places):
        words = "R of every action against its bytes as a share of the full prompt's, one colour for each study"
        drawings.append(Drawing("leaderboard", words, partial(leaderboard_figure, shown, studies)))
    temperatures = {f"by_temperature_{number}": shown for number, shown in enumerate(by_temperature(comparison), 1)}
    for name, group in temperatures.items():
        words = (
            "R, the share of pairs that diverge, mean entry and exposure against temperature, a line for each action"
        )
        drawings.append(Drawing(name, words, partial(temperatures_figure, group)))
        tables[name] = temperatures_table(group, name)
    for table in tables.values():
        table.write_csv(folder / "tables")
    figures = draw_figures(drawings, folder / "figures")
    page = folder / "index.html"
    html = rendered(
        "side_by_side",
        comparison=comparison,
        rows=standing(places, studies),
        scored="accuracy" in shown_quantities(places),
        pages=[(entry.name, relative_link(entry.page, folder)) for entry in comparison.entries if entry.page],
        tables=tables,
        figures=figures,
        temperatures=list(temperatures),
        obstacles=obstacles(comparison),
        policies=any(entry.content.facts.policies for entry in comparison.entries),
    )  # fmt: skip
    page.write_text(html, encoding="utf-8", newline="\n")
    return page


def _entries_table(comparison: Comparison) -> PrintedTable:
    rows = []
    for entry in comparison.entries:
        facts = entry.content.facts
        rows.append(table_row(
            entry.name, entry.location, entry.model,
            f"{count(len(entry.documents))} {entry.content.split}",
            "not recorded" if facts.sampling is None else facts.sampling.words,
            "none" if facts.plan is None else f"{facts.plan.sha256[:12]}…",
            "not recorded" if facts.seed is None else str(facts.seed),
        ))  # fmt: skip
    columns = tuple(map(label_column, ("study", "store", "model", "documents", "sampling", "plan", "seed")))
    return PrintedTable("entries", "What is compared", columns, tuple(rows))
