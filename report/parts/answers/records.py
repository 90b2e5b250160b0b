"""Lost answers against what was kept of their records: a table and its sentences, of the section on answers."""

from __future__ import annotations

from report.printing.numbers import count, fixed
from report.printing.tables import Column, PrintedTable, TableRow, label_column, table_row
from report.reading.content import PageContent
from report.reading.source import ViewRow

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
_SHARES = ("lost_gone", "lost_partly", "lost_whole", "gone", "partly", "whole")


def records_table(content: PageContent) -> PrintedTable | None:
    """The table of lost answers against their records; None if the store has no prompts or nothing was lost."""
    rows = [row for row in _rows(content) if row["lost"]]
    if not rows:
        return None
    return PrintedTable("lost_records", "Lost answers and their records", _COLUMNS, tuple(map(_printed, rows)))


def records_sentence(content: PageContent) -> str:
    """How many lost answers have a record that was evicted, and what lost the others."""
    rows = [row for row in _rows(content) if row["lost"]]
    told = [_sentence(row) for row in rows if row["lost_whole"] < 1]
    if any(row["lost_whole"] > 0 for row in rows):
        told.append(
            "Answers whose record is whole are lost by something else: the model lacks other entries by which it finds "
            "a record, or reads entries less exactly; and once a pair has parted, each side draws tokens of its own."
        )
    return " ".join(told)


def _rows(content: PageContent) -> list[ViewRow]:
    known = {row["action"]: row for row in content.pooled("lost_records")}
    return [known[action] for action in content.actions if action in known]


def _sentence(row: ViewRow) -> str:
    evicted, of_all = row["lost_gone"] + row["lost_partly"], row["gone"] + row["partly"]
    return (
        f"Of the {count(row['lost'])} answers that are lost with {row['action']}, {fixed(100 * evicted, 1)}% have a "
        f"record that was evicted at least in part ({fixed(100 * row['lost_gone'], 1)}% wholly); of all answers "
        f"{fixed(100 * of_all, 1)}% have."
    )


def _printed(row: ViewRow) -> TableRow:
    return table_row(row["action"], count(row["lost"]), *(fixed(100 * row[name], 1) for name in _SHARES))
