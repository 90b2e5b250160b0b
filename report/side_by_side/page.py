"""The page of a comparison: the leaderboard, its figure, and differences over common documents."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvdrift.report.page import draw_figures, page_environment, relative_link
from kvdrift.report.printing.numbers import count
from kvdrift.report.printing.palette import properties
from kvdrift.report.printing.section import Drawing
from kvdrift.report.printing.tables import PrintedTable, label_column, table_row
from kvdrift.report.printing.wording import meanings
from kvdrift.report.side_by_side.content import Comparison, Entry
from kvdrift.report.side_by_side.differences import difference_sentences, differences_table, obstacles
from kvdrift.report.side_by_side.figure import drawn, leaderboard_figure
from kvdrift.report.side_by_side.leaderboard import leaderboard, leaderboard_table, shown_quantities
from kvdrift.report.side_by_side.temperatures import by_temperature, temperatures_figure, temperatures_table


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
    html = page_environment().get_template("side_by_side.html.j2").render(
        comparison=comparison,
        pages=[(entry.name, relative_link(entry.page, folder)) for entry in comparison.entries if entry.page],
        tables=tables,
        figures=figures,
        temperatures=list(temperatures),
        sentences=difference_sentences(comparison),
        obstacles=obstacles(comparison),
        meanings=meanings("the full cache", "the compressed model", "H", shown_quantities(places)),
        policies=any(entry.content.facts.policies for entry in comparison.entries),
        colours=[properties(dark=dark) for dark in (False, True)],
    )  # fmt: skip
    page.write_text(html, encoding="utf-8", newline="\n")
    return page


def _entries_table(comparison: Comparison) -> PrintedTable:
    """Make the table of compared studies: where each lies, and what made its numbers."""
    columns = (
        label_column("study"), label_column("store"), label_column("model"), label_column("documents"),
        label_column("law"), label_column("plan"), label_column("seed"),
    )  # fmt: skip
    rows = tuple(
        table_row(entry.name, entry.location, entry.model, _documents(entry), _law(entry), _plan(entry),
                  _seed(entry))
        for entry in comparison.entries
    )  # fmt: skip
    return PrintedTable("entries", "What is compared", columns, rows)


def _documents(entry: Entry) -> str:
    return f"{count(len(entry.documents))} {entry.content.split}"


def _law(entry: Entry) -> str:
    law = entry.content.facts.law
    return "not recorded" if law is None else law.words


def _seed(entry: Entry) -> str:
    seed = entry.content.facts.seed
    return "not recorded" if seed is None else str(seed)


def _plan(entry: Entry) -> str:
    plan = entry.content.facts.plan
    return "none" if plan is None else f"{plan.sha256[:12]}…"
