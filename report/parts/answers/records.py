"""Lost answers by how much of their records was kept: a table and its sentences in the section on answers."""

from __future__ import annotations

from kvdrift.report.printing.numbers import count, fixed
from kvdrift.report.printing.tables import Column, PrintedTable, TableRow, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.source import ViewRow

_COLUMNS = (
    label_column("action"),
    Column("lost answers", "", "answers that X states and Y does not, over all pairs"),
    Column("gone", "%", "of the lost answers: nothing of the record is kept"),
    Column("partly", "%", "of the lost answers: some layers or KV heads lack some of its tokens"),
    Column("whole", "%", "of the lost answers: all layers and KV heads have the record"),
    Column("all: gone", "%", "the same of all answers of the documents, lost or not"),
    Column("all: partly", "%", "likewise"),
    Column("all: whole", "%", "likewise"),
)
_MOST = 3  # actions that the sentences name; if there are more, those that lose most answers
_SHARES = ("lost_gone", "lost_partly", "lost_whole", "gone", "partly", "whole")


def records_table(content: PageContent) -> PrintedTable | None:
    """Make the table of lost answers by their records; None if the store has no prompts or nothing was lost."""
    rows = [row for row in _rows(content) if row["lost"]]
    if not rows:
        return None
    return PrintedTable("lost_records", "Lost answers and their records", _COLUMNS, tuple(map(_printed, rows)))


def records_sentence(content: PageContent) -> str:
    """Say of how many lost answers the record was evicted, compared with all answers, and how else answers are lost."""
    rows = [row for row in _rows(content) if row["lost"]]
    evicted = [row for row in rows if row["lost_whole"] < 1]
    named = sorted(evicted, key=lambda row: -row["lost"])[:_MOST] if len(evicted) > _MOST else evicted
    told = [_sentence(row) for row in named]
    if told:
        told.append(
            "The more these shares differ from the shares of all answers, the more of the loss is associated with "
            "eviction. “In part” means that some layers or KV heads lack some tokens of the record; other layers or "
            "heads may still read these tokens."
        )
    if any(row["lost_whole"] > 0 for row in rows):
        told.append(
            "An answer whose record is whole is lost by something else: entries by which the model finds the record "
            "are missing or less exact; or the pair had parted, and Y drew other tokens by chance."
        )
    return " ".join(told)


def _rows(content: PageContent) -> list[ViewRow]:
    known = {row["action"]: row for row in content.pooled("lost_records")}
    return [known[action] for action in content.actions if action in known]


def _sentence(row: ViewRow) -> str:
    """Write the shares of an action's lost answers, and below them the same shares of all answers."""
    gone, partly, whole, *of_all = (f"{fixed(100 * row[name], 1)}%" for name in _SHARES)
    return (
        f"{row['action']} loses {count(row['lost'])} answers: the record of {gone} was wholly evicted, that of "
        f"{partly} in part, and {whole} have their whole record. Of all answers, lost or not, these shares are "
        f"{of_all[0]}, {of_all[1]} and {of_all[2]}."
    )


def _printed(row: ViewRow) -> TableRow:
    return table_row(row["action"], count(row["lost"]), *(fixed(100 * row[name], 1) for name in _SHARES))
