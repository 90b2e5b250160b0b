"""The page's first table: for each action when it diverges, how much of its text differs, and its cost."""

from __future__ import annotations

from kvdrift.report.parts.verdict.choice import Choice
from kvdrift.report.parts.verdict.ranking import verdict_of
from kvdrift.report.printing.estimate_tables import EstimateColumn, action_table
from kvdrift.report.printing.tables import Cell, PrintedTable, TableRow
from kvdrift.report.reading.content import PageContent


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
    table = action_table("glance", "At a glance", content.estimates, order, columns, note=note)
    rows = tuple(TableRow((_named(content, choice, row.cells[0].text), *row.cells[1:])) for row in table.rows)
    return PrintedTable(table.name, table.title, table.columns, rows, table.note, table.records)


def _named(content: PageContent, choice: Choice, action: str) -> Cell:
    return Cell(action, ", ".join(filter(None, verdict_of(content, choice, action))))
