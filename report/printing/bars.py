"""Numbers as bars with their intervals, for the rows of a first screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdrift.report.printing.numbers import MISSING, fixed, interval, scaled, size
from kvdrift.report.reading.estimates import Estimate
from kvdrift.stats.registry import Scale


@dataclass(frozen=True)
class Bar:
    """A number as text, and as a bar with an interval; their ends are in percent of the column's largest number."""

    text: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    under: str = ""  # the interval as text
    mark: str = ""  # says that an interval is of few documents or skewed


def bars(rows: Sequence[Estimate], scale: Scale) -> list[Bar]:
    """Return a bar for each estimate of a quantity, on one scale up to the largest estimate or interval end."""
    largest = max((abs(end) for row in rows for end in (row.estimate, row.high) if end is not None), default=0.0)

    def part(end: float | None) -> float | None:
        return None if end is None or not largest else max(0.0, 100 * end / largest)

    return [
        Bar(MISSING)
        if row.estimate is None
        else Bar(
            scaled(row.estimate, scale, 1), part(row.estimate), part(row.low), part(row.high), interval(row, scale, 1),
            "*" if row.of_few_clusters or row.is_skewed else "",
        )
        for row in rows
    ]  # fmt: skip


def share_bar(share: float | None, held: float | None, part: float | None) -> Bar:
    """Return the bar of ``held`` bytes, as a share of a whole if that is known; ``part`` is the bar's length."""
    if share is None:
        return Bar(size(held), part)
    return Bar(f"{fixed(100 * share, 0 if share >= 0.1 else 1)}%", part, under=size(held))
