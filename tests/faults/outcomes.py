"""Outcomes of the trials of ``make faults``, and the table that it prints of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

SURVIVED, MENDED, REFUSED = "survived", "refused, then mended", "stays refused"
COLUMNS = (SURVIVED, MENDED, REFUSED, "lost", "doubled", "wrong", "traceback", "hang")

_TOLD: dict[tuple[str, str], Counter[str]] = {}


def tell(kind: str, trial: str, outcomes: Iterable[str]) -> None:
    """Add the outcomes of a trial to the table; its kind is that of the file of tests: crash, I/O error, and so on."""
    _TOLD.setdefault((kind, trial), Counter()).update(map(_column, outcomes))


def told() -> list[tuple[str, str, dict[str, int]]]:
    """Return the kind, trial and counts by column of all trials of this process."""
    return [(kind, trial, dict(counts)) for (kind, trial), counts in _TOLD.items()]


def add(rows: Iterable[tuple[str, str, dict[str, int]]]) -> None:
    """Add the trials of another process to the table."""
    for kind, trial, counts in rows:
        _TOLD.setdefault((kind, trial), Counter()).update(counts)


def _column(outcome: str) -> str:
    """Return the column of an outcome; an outcome that names no column is wrong."""
    return next((column for column in COLUMNS if column in outcome), "wrong")


def table() -> list[str]:
    """Return the lines of the table, as Markdown; none if no trial was made."""
    if not _TOLD:
        return []
    lines = [f"| kind | trial | tried | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 3) + "|"]
    for (kind, trial), counts in sorted(_TOLD.items()):
        lines.append(
            f"| {kind} | {trial} | {counts.total()} | {' | '.join(str(counts[column]) for column in COLUMNS)} |"
        )
    return lines
