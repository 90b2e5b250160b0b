"""The section on the looks of a sequential study: the intervals of each look, and where the study stopped."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

from kvdrift.report.figures.canvas import INK, QUIET, Axes, Figure, new_figure
from kvdrift.report.figures.strokes import WIDTH
from kvdrift.report.printing.numbers import count, fixed, level, sure_decimals
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import ViewRow
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.stats.ends import STUDENTIZED
from kvdrift.stats.quantities import ALL_QUANTITIES
from kvdrift.stats.registry import Scale
from kvdrift.stats.repeated import STUDENT
from kvdrift.stats.sequential import EQUIVALENCE, HALF_WIDTH, LookSaid, Resolution, median_unbiased

_BY_ERRORS = (STUDENT, STUDENTIZED)  # kinds of intervals that reach some standard errors to each side
_ACROSS = 3  # panels in a row


@dataclass(frozen=True)
class Progress:
    """How many interim looks of a sequential study were taken, and with what result."""

    looks: int  # how many the plan has
    reached: int  # the last look that was taken; 0 if there was none
    endpoints: int  # how many primary endpoints the last look estimated
    unresolved: int  # how many of them it did not resolve

    @property
    def stopped(self) -> bool:
        """Whether no further look will be taken."""
        return self.reached == self.looks or (self.endpoints > 0 and not self.unresolved)


def progress(content: PageContent) -> Progress | None:
    """Return how far a sequential study is; None for other studies."""
    planned = _planned(content)
    if planned is None:
        return None
    rows = content.source.of("sequence")
    reached = max((row["look"] for row in rows), default=0)
    last = [row for row in rows if row["look"] == reached]
    return Progress(len(planned["looks"]), reached, len(last), sum(not row["resolved"] for row in last))


def section(content: PageContent) -> Section | None:
    """Make the section; None if the study is not sequential."""
    planned = _planned(content)
    if planned is None:
        return None
    rows = sorted(content.source.of("sequence"), key=lambda row: (*_endpoint(row), row["look"]))
    corrected = corrected_estimates(rows, planned) if rows else {}
    values = {
        "rule": f"{Resolution(planned['resolve'], planned['bound'])}{_in_points(rows, planned)}",
        "resolve": planned["resolve"],
        "progress": progress(content),
        "level": level(rows[0]["level"]) if rows else "",
        "corrected": bool(corrected),
    }
    words = "Estimates of primary endpoints with their intervals, look by look"
    drawings = (Drawing("sequence", words, partial(sequence_figure, rows, planned)),) if rows else ()
    tables = (sequence_table(rows, corrected),) if rows else ()
    return Section("sequence", "Looks", tables, drawings, values)


def corrected_estimates(rows: list[ViewRow], planned: dict[str, Any]) -> dict[tuple[str, str, str, str], float]:
    """Return the median-unbiased estimates of a study that has stopped, by endpoint.

    There is no estimate before the study stops, if the width of intervals stopped it (which favours no estimate), or
    for an interval over documents that are all alike.
    """
    reached = max(row["look"] for row in rows)
    resolution = Resolution(planned["resolve"], planned["bound"])
    resolved = all(row["resolved"] for row in rows if row["look"] == reached)
    if resolution.rule == HALF_WIDTH or not (resolved or reached == len(planned["looks"])):
        return {}
    unresolved: dict[int, set[tuple[str, str, str, str]]] = defaultdict(set)
    for row in rows:
        if not row["resolved"]:
            unresolved[row["look"]].add(_endpoint(row))
    found = {}
    for endpoint, of_endpoint in groupby(rows, key=_endpoint):
        own = list(of_endpoint)
        bounded = [row for row in own if row["interval"] in _BY_ERRORS]
        if own[-1]["look"] == reached and own[-1] in bounded:
            said = [
                LookSaid(
                    planned["looks"][row["look"] - 1]["share"],
                    row["constant"],
                    row["estimate"],
                    row["low"],
                    row["high"],
                    unresolved[row["look"]] <= {endpoint},
                )
                for row in bounded
            ]
            found[endpoint] = median_unbiased(said, resolution)
    return found


def sequence_table(
    rows: list[ViewRow], corrected: Mapping[tuple[str, str, str, str], float] = MappingProxyType({})
) -> PrintedTable:
    """Make the table of every endpoint at every look, in its own unit; median-unbiased estimates at the last look."""
    last = max((row["look"] for row in rows), default=0)
    lines = []
    for row in rows:
        scale = _scale(row)
        interval = "no interval yet" if row["low"] is None else _between(row, scale)
        value = corrected.get(_endpoint(row)) if row["look"] == last else None
        beside = [_number(value, scale)] if corrected else []
        lines.append(
            table_row(
                count(row["look"]), count(row["documents"]), count(row["clusters"]),
                Cell(f"{_number(row['estimate'], scale)} {scale.sign}", interval),
                *beside,
                row["interval"] or "",
                "yes" if row["resolved"] else "no", group=_label(row),
            )
        )  # fmt: skip
    columns = (
        Column("look"), Column("documents"), Column("clusters"), Column("estimate"),
        *([Column("median-unbiased", "", "by the stage-wise ordering of outcomes")] if corrected else []),
        Column("interval", "", "studentized, student (by Student’s law) or expanded percentiles", left=True),
        label_column("resolved"),
    )  # fmt: skip
    return PrintedTable("sequence", "Looks at the primary endpoints", columns, tuple(lines), records=tuple(rows))


def sequence_figure(rows: list[ViewRow], planned: dict[str, Any]) -> Figure:
    """Draw a panel for each endpoint: its intervals by the number of documents, and the bound that resolves it."""
    panels = [list(own) for _, own in groupby(rows, key=_endpoint)]
    across = 2 if len(panels) in {2, 4} else _ACROSS
    lines = math.ceil(len(panels) / across)
    figure = new_figure(WIDTH, 0.3 + 2.5 * lines)
    axes = figure.subplots(lines, across, squeeze=False).ravel()
    for place, own in zip(axes, panels, strict=False):
        _panel(place, own, planned)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    return figure


def _panel(axes: Axes, rows: list[ViewRow], planned: dict[str, Any]) -> None:
    scale = _scale(rows[0])
    known = [row for row in rows if row["estimate"] is not None]
    limit = planned["bound"] * scale.factor
    for row in known:
        x, y = row["documents"], row["estimate"] * scale.factor
        if row["low"] is not None:
            ends = [row[name] * scale.factor for name in ("low", "high")]
            axes.plot([x, x], ends, color=INK, linewidth=1.3)
        axes.plot([x], [y], marker="o", markersize=6, color=INK, markerfacecolor=INK if row["resolved"] else "white")
    if planned["resolve"] == HALF_WIDTH:
        x = [row["documents"] for row in known]
        for side in (-limit, limit):
            y = [row["estimate"] * scale.factor + side for row in known]
            axes.plot(x, y, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)))
    else:
        for side in {-limit, limit}:
            axes.axhline(side, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xticks([row["documents"] for row in rows], [count(row["documents"]) for row in rows])
    axes.margins(x=0.15)
    axes.set_title(_label(rows[0], "\n"), fontsize=8)
    axes.set(xlabel="documents", ylabel=scale.sign)


def _planned(content: PageContent) -> dict[str, Any] | None:
    """Return the plan's entry on looks; None if the study is not sequential."""
    return content.facts.plan.content.get("sequential") if content.facts.plan else None


def _in_points(rows: list[ViewRow], planned: dict[str, Any]) -> str:
    """Write the bound in parentheses as the estimates are printed; empty if their units differ."""
    scales = {_scale(row) for row in rows}
    if planned["resolve"] not in {HALF_WIDTH, EQUIVALENCE} or not scales or not scales <= {Scale.POINTS, Scale.PERCENT}:
        return ""
    return f" ({planned['bound'] * Scale.POINTS.factor:.4g} {Scale.POINTS.sign})"


def _endpoint(row: ViewRow) -> tuple[str, str, str, str]:
    return row["quantity"], row["stratum"], row["action"], row["baseline"] or ""


def _label(row: ViewRow, between: str = ": ") -> str:
    subject = row["action"] if row["baseline"] is None else f"{row['action']} − {row['baseline']}"
    known = ALL_QUANTITIES.get(row["quantity"])
    return f"{known.meaning if known else row['quantity']}{between}{subject}"


def _scale(row: ViewRow) -> Scale:
    known = ALL_QUANTITIES.get(row["quantity"])
    return known.scale if known else Scale.PERCENT


def _between(row: ViewRow, scale: Scale) -> str:
    """Write the ends of a look's interval, with the decimals that its draws support."""
    low, high = row["low"] * scale.factor, row["high"] * scale.factor
    draws = 0 if row["interval"] == STUDENT else row["draws"]
    decimals = sure_decimals(low, high, 1 - 2 * NormalDist().cdf(-row["constant"]), draws, 2)
    return f"{fixed(low, decimals)} to {fixed(high, decimals)}"


def _number(value: float | None, scale: Scale) -> str:
    return "—" if value is None else fixed(value * scale.factor, 2)
