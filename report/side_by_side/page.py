"""The page of a comparison: the leaderboard, its figure, and differences over common documents."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvdrift.report.page import draw_figures, relative_link
from kvdrift.report.printing.estimate_tables import QuantityColumns
from kvdrift.report.printing.html import rendered
from kvdrift.report.printing.numbers import count, meanings
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.sections.section import Drawing
from kvdrift.report.side_by_side.content import Comparison, Difference, Pairing
from kvdrift.report.side_by_side.leaderboard import (
    drawn,
    leaderboard,
    leaderboard_figure,
    leaderboard_table,
    shown_quantities,
)
from kvdrift.report.side_by_side.temperatures import by_temperature, temperatures_figure, temperatures_table


def differences_table(comparison: Comparison) -> PrintedTable | None:
    """Make a row for each two subtracted actions, with a column for each quantity; None without differences."""
    found = [(pairing, one) for pairing in comparison.pairings for one in pairing.differences]
    if not found:
        return None
    shown = QuantityColumns({name: [one.estimates[name] for _, one in found] for name in found[0][1].estimates})
    rows = [
        table_row(_called(one), *own, count(pairing.documents), "yes" if one.same else "no", group=_between(pairing))
        for (pairing, one), *own in zip(found, *shown.cells, strict=True)
    ]
    columns = (
        label_column("action"),
        *shown.heads,
        Column("documents", "", "that are the same in both"),
        Column(
            "same weights and code", "", "whether weights, tokenizer, selector and numerics are the same on both sides",
        ),
    )  # fmt: skip
    records = tuple(
        comparison.record(pairing, one, estimate) for pairing, one in found for estimate in one.estimates.values()
    )
    return PrintedTable("differences", "Differences", columns, tuple(rows), shown.note, records)


def _called(one: Difference) -> Cell:
    return Cell(one.other_action, "" if one.other_action == one.first_action else f"less {one.first_action}")


def _between(pairing: Pairing) -> str:
    return f"{pairing.other.name} less {pairing.first.name}"


def obstacles(comparison: Comparison) -> list[str]:
    """Say why the documents of two studies are not subtracted, or are matched without comparing their prompts."""
    said = []
    for pairing in comparison.pairings:
        both = f"{pairing.first.name} and {pairing.other.name}"
        counts = [len(entry.documents) for entry in (pairing.first, pairing.other)]
        if pairing.obstacle:
            said.append(f"{both} are not subtracted: {pairing.obstacle}.")
        elif pairing.by_name:
            said.append(
                f"{both} have unlike models, whose prompts are other tokens: {count(pairing.documents)} documents are "
                "matched by name, stratum and cluster, and nothing shows that their texts are the same."
            )
        if not pairing.obstacle and pairing.documents < max(counts):
            said.append(
                f"{both} share {count(pairing.documents)} documents, of {count(counts[0])} and {count(counts[1])}; "
                "the leaderboard has each study on all of its own."
            )
    return said


def build_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write ``index.html``, ``figures/`` and ``tables/`` under ``folder``. The same input gives the same bytes."""
    places = leaderboard(comparison)
    tables = {"leaderboard": leaderboard_table(places), "entries": _entries_table(comparison)}
    if (differences := differences_table(comparison)) is not None:
        tables["differences"] = differences
    for part in ("figures", "tables"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    drawings = []
    if shown := drawn(places):
        words = "R of every action against its bytes as a share of the full prompt's, one colour for each study"
        studies = [entry.name for entry in comparison.entries]
        drawings.append(Drawing("leaderboard", words, partial(leaderboard_figure, shown, studies)))
    temperatures = {f"by_temperature_{number}": shown for number, shown in enumerate(by_temperature(comparison), 1)}
    for name, one in temperatures.items():
        words = "R, the share of pairs that part, mean entry and exposure against temperature, a line for each action"
        drawings.append(Drawing(name, words, partial(temperatures_figure, one)))
        tables[name] = temperatures_table(one, name)
    for table in tables.values():
        table.write_csv(folder / "tables")
    figures = draw_figures(drawings, folder / "figures")
    page = folder / "index.html"
    html = rendered(
        "side_by_side",
        comparison=comparison,
        pages=[(entry.name, relative_link(entry.page, folder)) for entry in comparison.entries if entry.page],
        tables=tables,
        figures=figures,
        temperatures=list(temperatures),
        obstacles=obstacles(comparison),
        meanings=meanings("the full cache", "the compressed model", "H", shown_quantities(places)),
        policies=any(entry.content.facts.policies for entry in comparison.entries),
    )  # fmt: skip
    page.write_text(html, encoding="utf-8", newline="\n")
    return page


def _entries_table(comparison: Comparison) -> PrintedTable:
    """Make the table of compared studies: where each lies, and what made its numbers."""
    rows = []
    for entry in comparison.entries:
        facts = entry.content.facts
        rows.append(table_row(
            entry.name, entry.location, entry.model,
            f"{count(len(entry.documents))} {entry.content.split}",
            "not recorded" if facts.law is None else facts.law.words,
            "none" if facts.plan is None else f"{facts.plan.sha256[:12]}…",
            "not recorded" if facts.seed is None else str(facts.seed),
        ))  # fmt: skip
    columns = tuple(map(label_column, ("study", "store", "model", "documents", "law", "plan", "seed")))
    return PrintedTable("entries", "What is compared", columns, tuple(rows))
