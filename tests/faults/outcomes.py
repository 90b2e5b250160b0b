"""Outcomes of the trials of ``make faults``, and the table that it prints of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

SURVIVED, MENDED, REFUSED = "survived", "refused, then mended", "stays refused"
COLUMNS = (SURVIVED, MENDED, REFUSED, "lost", "doubled", "wrong", "traceback", "hang")

_TOLD: dict[str, Counter[str]] = {}


def tell(trial: str, outcomes: Iterable[str]) -> None:
    """Add the outcomes of one kind of trial to the table."""
    _TOLD.setdefault(trial, Counter()).update(map(_column, outcomes))


def _column(outcome: str) -> str:
    """Return the column of an outcome; an outcome that names no column is wrong."""
    return next((column for column in COLUMNS if column in outcome), "wrong")


def table() -> list[str]:
    """Return the lines of the table, as Markdown; none if no trial was made."""
    if not _TOLD:
        return []
    lines = [f"| trial | tried | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 2) + "|"]
    for trial, counts in _TOLD.items():
        lines.append(f"| {trial} | {counts.total()} | {' | '.join(str(counts[column]) for column in COLUMNS)} |")
    return lines
