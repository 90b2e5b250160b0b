"""The section on answers: how many right answers divergence costs, when, and whether their records were kept."""

from __future__ import annotations

from functools import partial

from kvdrift.report.figures.canvas import Figure, action_styles, new_figure
from kvdrift.report.figures.strokes import WIDTH, action_legend, mark, percent_axis, round_ticks
from kvdrift.report.printing.estimate_tables import (
    CellColumn,
    EstimateColumn,
    action_tables,
    columns_of,
    differences_table,
)
from kvdrift.report.printing.numbers import count, fixed
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import ViewRow
from kvdrift.report.sections.findings import span
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.schema.study import POOLED
from kvdrift.stats.registry import DIFFERENCE

PLACES = ("before", "inside", "after")
_FEWEST = 5  # fewest actions of a correlation
_PLACE_WORDS = {
    "before": "of right X: the pair diverges before the first token of the answer",
    "inside": "of right X: the pair diverges from the first to the last token of the answer",
    "after": "of right X: the pair diverges after the last token of the answer",
}
_RECORD_COLUMNS = (
    label_column("action"),
    Column("lost answers", "", "answers that X states and Y does not, over all pairs"),
    Column("gone", "%", "of the lost answers: no token of the record is kept"),
    Column("partly", "%", "of the lost answers: some layers or KV heads lack some of its tokens"),
    Column("whole", "%", "of the lost answers: all layers and KV heads have the record"),
    Column("all: gone", "%", "the same share of all answers of the documents, lost or not"),
    Column("all: partly", "%", "the same share of all answers, lost or not"),
    Column("all: whole", "%", "the same share of all answers, lost or not"),
)
_RECORD_SHARES = ("lost_gone", "lost_partly", "lost_whole", "gone", "partly", "whole")


def section(content: PageContent) -> Section | None:
    """Make the section: accuracy, lost and gained answers, and when they are lost; None if no document has answers."""
    answered = sum(bool(row["answers"]) for row in content.facts.documents if row["split"] == content.split)
    rows = content.source.of("answers", split=content.split)
    if not rows:
        values = {"rows": rows, "answered": answered}
        return Section("answers", "Does it matter?", values=values) if answered else None
    tables = [
        *action_tables("answers", "Answers", content, columns_of(
            "accuracy_reference", "accuracy", "score_gap", "lost", "gained", "lost_share"
        )),
        *action_tables("answers_when", "When answers are lost", content, _when_columns(rows)),
    ]  # fmt: skip
    differences = [f"{name}{DIFFERENCE}" for name in ("accuracy", "lost", "gained", "lost_share")]
    if content.others and content.estimates.known(*differences):
        title = f"Answers: differences to {content.baseline}"
        tables.append(differences_table("answer_differences", title, content, differences))
    lost = records_table(content)
    tables += [] if lost is None else [lost]
    words = "Share of right answers that are lost against token mismatch, one mark per action"
    drawings = (Drawing("answers", words, partial(answers_figure, content)),)
    values = {
        "rows": rows,
        "correlation": correlation_sentence(content),
        "basis": _basis_sentence(content, rows),
        "losing": [action for action in content.actions if content.estimates.get("lost", action).estimate],
    }
    lost_share = span(content, {"lost_share": "The share of right answers that are lost"})
    shows = lost_share or span(content, {"accuracy": "Accuracy of Y"})  # no X may be right
    return Section("answers", "Does it matter?", tuple(tables), drawings, shows, values)


def correlation_sentence(content: PageContent) -> str:
    """Write the correlation of R with lost answers over the actions; empty with fewer than ``_FEWEST`` actions."""
    rows = content.pooled("answer_correlations")
    if not rows or rows[0]["lost"] is None or rows[0]["actions"] < _FEWEST:
        return ""
    (row,) = rows
    return (
        f"Over the {row['actions']} actions, the correlation of R with answers lost is {fixed(row['lost'], 2)}, "
        f"and with the score gap {fixed(row['score_gap'], 2)}."
    )


def records_table(content: PageContent) -> PrintedTable | None:
    """Make the table of how much was kept of the records of lost answers: the parts of prompts that state the answers.

    None if the store has no prompts, or if no answer was lost.
    """
    known = {row["action"]: row for row in content.pooled("lost_records") if row["lost"]}
    rows = [
        table_row(action, count(row["lost"]), *(fixed(100 * row[name], 1) for name in _RECORD_SHARES))
        for action in content.actions if (row := known.get(action))
    ]  # fmt: skip
    return (
        PrintedTable("lost_records", "Lost answers and their records", _RECORD_COLUMNS, tuple(rows)) if rows else None
    )


def answers_figure(content: PageContent) -> Figure:
    """Draw the share of right answers that are lost against R, for each action and stratum."""
    figure = new_figure(WIDTH, 3.7)
    axes = figure.add_subplot()
    styles = action_styles(content.actions)
    for action, style in styles.items():
        for stratum in (*content.facts.strata, POOLED):
            risk, lost = (content.estimates.get(name, action, stratum=stratum) for name in ("mismatch", "lost_share"))
            mark(axes, risk, lost, style, pale=stratum != POOLED)
    percent_axis(axes, "right answers lost (%)")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_xlim(left=0)
    round_ticks(axes.xaxis)
    axes.set_xlabel("R (token): positions with different tokens (%)")
    action_legend(figure, styles, marker=True)
    return figure


def _when_columns(rows: list[ViewRow]) -> list[EstimateColumn | CellColumn]:
    columns = list[EstimateColumn | CellColumn]()
    for place in PLACES:
        cells = {
            (row["stratum"], row["action"]): Cell(fixed(100 * row[place], 1)) for row in rows if row[place] is not None
        }
        columns.append(CellColumn(Column(f"τ {place}", "%", _PLACE_WORDS[place]), cells))
        columns.append(EstimateColumn(f"lost_{place}"))
    return columns


def _basis_sentence(content: PageContent, rows: list[ViewRow]) -> str:
    pooled = [row for row in rows if row["stratum"] == POOLED and row["action"] in content.actions]
    total = content.facts.count(content.split)
    scored = max((row["documents"] for row in pooled), default=0)
    without = f"; the rest ({count(total - scored)}) is not scored" if scored < total else ""
    return f"{count(scored)} of {count(total)} {content.split} documents have known answers{without}."
