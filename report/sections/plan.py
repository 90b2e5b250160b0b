"""The sections on the frozen plan, the estimates that it named, and the interim looks of a sequential study.

Endpoints and the cost curve are tables. The plan's choices are listed before the numbers that they rest on. Entries
that a plan lacks are left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

from kvdrift.report.figures.canvas import INK, QUIET, Axes, Figure, new_figure
from kvdrift.report.figures.strokes import WIDTH
from kvdrift.report.printing.estimate_tables import estimate_cells, marks, status_note
from kvdrift.report.printing.numbers import MISSING, count, duration, fixed, level, sure_decimals
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate, ViewRow
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.schema.frozen_text import with_measured
from kvdrift.stats.bootstrap import PRESPECIFIED, SEEN
from kvdrift.stats.ends import STUDENTIZED
from kvdrift.stats.quantities import ALL_QUANTITIES, ANSWER_QUANTITIES
from kvdrift.stats.reduction import saving
from kvdrift.stats.registry import Quantity, Scale
from kvdrift.stats.repeated import STUDENT
from kvdrift.stats.sequential import EQUIVALENCE, HALF_WIDTH, InterimLook, Resolution, median_unbiased

# Labels of the plan's entries: first the decisions, then the numbers that they rest on.
_CHOSEN = {
    "replicates": "replicates K", "documents_per_stratum": "documents per stratum N", "baseline": "baseline",
    "actions": "actions", "target_half_width": "target half-width (fraction, or tokens)",
    "variance": "variance that chose K and N", "saving": "saved by reduced estimates",
    "reachable": "targets reachable", "reason": "reason", "alpha": "alpha, over all primary intervals",
    "family_size": "primary intervals", "level": "level of each primary interval", "interval": "intervals",
    "draws": "bootstrap draws, primary", "exploratory_draws": "bootstrap draws, exploratory",
    "expected_seconds": "expected time", "seen": "evaluation documents seen before",
    "forgotten": "documents removed for good since",
}  # fmt: skip
_REST = {
    "seed": "seed", "horizon": "horizon H", "strata": "strata", "windows": "windows", "calibration": "calibration",
    "residual_branching": "residual branching", "development": "development",
    "study_sha256": "study file SHA-256", "plan_section_sha256": "[plan] and [windows] SHA-256",
}  # fmt: skip

_OF_REVISION = "evaluation documents of this study had been generated when this revision of the plan was frozen"
_OF_DOCUMENTS = "another study of this store had evaluated documents of the plan before the plan was frozen"
_OF_ACTIONS = "their action, or its baseline, was redone after its evaluation documents had been generated"
_OF_ANSWERS = "answers of their documents were corrected after the plan was frozen"
_BY_ERRORS = (STUDENT, STUDENTIZED)  # kinds of intervals that reach some standard errors to each side
_PANELS = 3  # panels in a row


def section(content: PageContent) -> Section:
    """Make the section: the plan, its primary endpoints, and estimates of quantities that kvdrift's list lacks."""
    plan = with_measured(content.facts.plan.content) if content.facts.plan else {}
    plan |= {"saving": saved} if (saved := saving(plan)) else {}
    estimates = content.estimates.all()
    primary = [row for row in estimates if row.standing in {PRESPECIFIED, SEEN}]
    other = [row for row in estimates if row.quantity not in ALL_QUANTITIES and row.x is None]
    listings = _listing("primary", "Primary endpoints", primary), _listing("other", "Other estimates", other)
    tables = tuple(table for table in (endpoints_table(plan), cost_table(plan), *listings) if table is not None)
    seen = any(row.standing == SEEN for row in primary)
    values = {
        "seen": _why_seen(content, plan, [row for row in primary if row.standing == SEEN]) if seen else "",
        "chosen": plan_rows(plan, _CHOSEN),
        "rest": plan_rows(plan, _REST),
        "added": content.facts.added,
    }
    return Section("plan", "Plan", tables, values=values)


def _why_seen(content: PageContent, plan: dict[str, Any], rows: Sequence[Estimate]) -> str:
    """Say what was already known about these primary endpoints when they were planned."""
    if plan.get("seen"):
        return _OF_REVISION if plan.get("evaluated_documents") else _OF_DOCUMENTS
    corrected = any(row["document_revision"] for row in content.source.of("documents", split="evaluation"))
    reasons = [_OF_ANSWERS if corrected and row.quantity in ANSWER_QUANTITIES else _OF_ACTIONS for row in rows]
    return "; or ".join(dict.fromkeys(reasons))


def plan_rows(plan: dict[str, Any], labels: dict[str, str]) -> list[tuple[str, str]]:
    """Return the plan's entries that ``labels`` names, as pairs of label and text."""
    return [(label, _printed(name, plan[name])) for name, label in labels.items() if name in plan]


def _printed(name: str, value: Any) -> str:
    if name.endswith("draws"):
        return count(value)
    return duration(value) if name.endswith("seconds") else plan_text(value)


def plan_text(value: Any) -> str:
    """Write a value of a plan's JSON, such as a list or a dict, as text on one line."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{'−' if value < 0 else ''}{abs(value):.4g}"
    if isinstance(value, list):
        return ", ".join(plan_text(entry) for entry in value) or MISSING
    if isinstance(value, dict):
        return "; ".join(f"{name.replace('_', ' ')}: {_entry_text(entry)}" for name, entry in value.items()) or MISSING
    return str(value)


def _entry_text(entry: Any) -> str:
    """Write an entry of a dict; the keys of a dict in a dict are actions' names, which stay as they are."""
    if isinstance(entry, dict):
        return "; ".join(f"{name}: {plan_text(value)}" for name, value in entry.items()) or MISSING
    return plan_text(entry)


def endpoints_table(plan: dict[str, Any]) -> PrintedTable | None:
    """Make the table of primary endpoints and their development results, each in its own unit; None without endpoints.

    The spreads are the square roots of the plan's variance components.
    """
    rows, ratios = [], plan.get("reduction", [])
    for place, entry in enumerate(plan.get("primary_endpoints", [])):
        known, scale = _known(entry["quantity"])
        spread = Scale.POINTS if scale is Scale.PERCENT else scale
        numbers = (
            (entry.get("development_value"), scale),
            (_root(entry.get("variance_between_documents")), spread),
            (_root(entry.get("variance_between_replicates")), spread),
            (entry.get("expected_half_width"), spread),
        )
        cells = ("" if value is None else f"{fixed(value * unit.factor, 2)} {unit.sign}" for value, unit in numbers)
        label = Cell(entry["quantity"], known.meaning if known else "")
        ratio = fixed(ratios[place]["variance_ratio"], 2) if ratios else ""
        rows.append(table_row(label, _subject(entry["action"], entry.get("baseline")), *cells, ratio))
    if not rows:
        return None
    meaning = "variance between replicates: the reduced estimate’s divided by the plain estimate’s"
    columns = (
        label_column("endpoint"),
        label_column("action"),
        Column("development", "", "value on development documents"),
        Column("sd, documents", "", "standard deviation between documents: variance component of the plan"),
        Column("sd, replicates", "", "standard deviation between replicates of a document"),
        Column("expected half-width", "", "of the interval, at the plan’s K and N"),
        Column("reduced variance", "", meaning),
    )
    note = "From development documents alone; the standard deviations decided K and N."
    return PrintedTable("plan_endpoints", "Planned endpoints and variance components", columns, tuple(rows), note)


def cost_table(plan: dict[str, Any]) -> PrintedTable | None:
    """Make the table of the cost curve, a row for each K with a half-width; None if there are fewer than two."""
    known = [entry for entry in plan.get("cost_curve", []) if entry["widest_half_width"] is not None]
    if len(known) < 2:
        return None
    curve = sorted(known, key=lambda entry: int(entry["replicates"]))
    rows = tuple(
        table_row(
            Cell(count(entry["replicates"]), "chosen" if entry["replicates"] == plan["replicates"] else ""),
            count(entry["documents_per_stratum"]),
            plan_text(entry["widest_half_width"]), duration(entry["seconds"]), plan_text(entry["reachable"]),
        )
        for entry in curve
    )  # fmt: skip
    columns = (Column("K"), Column("N per stratum"), Column("widest half-width", "", "fraction, or tokens"),
               Column("expected time"), Column("all targets met"))  # fmt: skip
    note = "The cost of precision: the documents per stratum N that each number of replicates K needs."
    return PrintedTable("cost_curve", "Cost curve", columns, rows, note, tuple(curve))


def _listing(name: str, title: str, rows: list[Estimate]) -> PrintedTable | None:
    if not rows:
        return None
    lines, mark, meaning = [], marks(rows), "the estimate less control variates of mean zero"
    for row in rows:
        known, scale = _known(row.quantity)
        cell = estimate_cells([row], scale, mark)[0]
        shown = "" if row.estimate is None else Cell(f"{cell.text} {scale.sign}", cell.under, cell.mark)
        label = Cell(row.quantity if row.x is None else f"{row.quantity} ({row.x})", known.meaning if known else "")
        counts = count(row.draws), count(row.documents), count(row.clusters)
        rest = level(row.level), row.interval or "", *counts, row.standing
        less = estimate_cells([row.reduced], scale, {})[0]
        beside = "" if row.estimate_reduced is None else Cell(f"{less.text} {scale.sign}", less.under)
        lines.append(table_row(label, _subject(row.action, row.baseline), row.stratum, shown, beside, *rest))
    columns = (
        label_column("quantity"), label_column("action"), label_column("stratum"), Column("estimate"),
        Column("reduced", "", meaning),
        Column("level"), label_column("interval"), Column("draws"), Column("documents"), Column("clusters"),
        label_column("status"),
    )  # fmt: skip
    return PrintedTable(name, title, columns, tuple(lines), status_note(rows), tuple(row.as_row() for row in rows))


def _known(quantity: str) -> tuple[Quantity | None, Scale]:
    """Return the registered quantity, None if there is none, and the scale of its values."""
    known = ALL_QUANTITIES.get(quantity)
    return known, known.scale if known else Scale.PERCENT


def _subject(action: str, baseline: str | None) -> str:
    return f"{action} − {baseline}" if baseline else action


def _root(value: float | None) -> float | None:
    return None if value is None else value**0.5


@dataclass(frozen=True)
class Progress:
    """The interim looks of a sequential study that were taken, and their result."""

    looks: int  # how many interim looks the plan has
    reached: int  # the number of the last interim look that was taken; 0 if there was none
    endpoints: int  # how many primary endpoints the last interim look estimated
    unresolved: int  # how many of these endpoints are unresolved

    @property
    def stopped(self) -> bool:
        """Whether no further interim look will be taken."""
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


def looks_section(content: PageContent) -> Section | None:
    """Make the section on interim looks; None if the study is not sequential."""
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
    words = "Estimates of primary endpoints with their intervals, at each interim look"
    drawings = (Drawing("sequence", words, partial(sequence_figure, rows, planned)),) if rows else ()
    tables = (sequence_table(rows, corrected),) if rows else ()
    return Section("sequence", "Interim looks", tables, drawings, values=values)


def corrected_estimates(rows: list[ViewRow], planned: dict[str, Any]) -> dict[tuple[str, str, str, str], float]:
    """Return the median-unbiased estimates of a study that has stopped, by endpoint.

    There are none before the study stops, and none if it stops when its intervals are narrow enough, since that
    rule favours neither large nor small estimates. An endpoint is left out unless its last interval is made
    from standard errors (Student or studentized).
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
    corrected = {}
    for endpoint, of_endpoint in groupby(rows, key=_endpoint):
        endpoint_rows = list(of_endpoint)
        bounded = [row for row in endpoint_rows if row["interval"] in _BY_ERRORS]
        if endpoint_rows[-1]["look"] == reached and endpoint_rows[-1] in bounded:
            interim_looks = [
                InterimLook(
                    planned["looks"][row["look"] - 1]["share"],
                    row["constant"],
                    row["estimate"],
                    row["low"],
                    row["high"],
                    unresolved[row["look"]] <= {endpoint},
                )
                for row in bounded
            ]
            corrected[endpoint] = median_unbiased(interim_looks, resolution)
    return corrected


def sequence_table(
    rows: list[ViewRow], corrected: Mapping[tuple[str, str, str, str], float] = MappingProxyType({})
) -> PrintedTable:
    """Make the table of every endpoint at every interim look, with median-unbiased estimates at the last one."""
    last = max((row["look"] for row in rows), default=0)
    lines = []
    for row in rows:
        scale = _known(row["quantity"])[1]
        interval = "no interval yet" if row["low"] is None else _between(row, scale)
        value = corrected.get(_endpoint(row)) if row["look"] == last else None
        beside = [_in_unit(value, scale)] if corrected else []
        lines.append(
            table_row(
                count(row["look"]), count(row["documents"]), count(row["clusters"]),
                Cell(f"{_in_unit(row['estimate'], scale)} {scale.sign}", interval),
                *beside,
                row["interval"] or "",
                "yes" if row["resolved"] else "no", group=_label(row),
            )
        )  # fmt: skip
    columns = (
        Column("interim look"), Column("documents"), Column("clusters"), Column("estimate"),
        *([Column("median-unbiased", "", "by the stage-wise ordering of outcomes")] if corrected else []),
        Column("interval", "", "studentized, student (by Student’s t) or expanded percentiles", left=True),
        label_column("resolved"),
    )  # fmt: skip
    return PrintedTable(
        "sequence", "Primary endpoints at the interim looks", columns, tuple(lines), records=tuple(rows)
    )


def sequence_figure(rows: list[ViewRow], planned: dict[str, Any]) -> Figure:
    """Draw a panel for each endpoint: its intervals by the number of documents, and the bound that resolves it."""
    panels = [list(endpoint_rows) for _, endpoint_rows in groupby(rows, key=_endpoint)]
    across = 2 if len(panels) in {2, 4} else _PANELS
    lines = math.ceil(len(panels) / across)
    figure = new_figure(WIDTH, 0.3 + 2.5 * lines)
    axes = figure.subplots(lines, across, squeeze=False).ravel()
    for place, endpoint_rows in zip(axes, panels, strict=False):
        _panel(place, endpoint_rows, planned)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    return figure


def _panel(axes: Axes, rows: list[ViewRow], planned: dict[str, Any]) -> None:
    scale = _known(rows[0]["quantity"])[1]
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
    return content.facts.plan.content.get("sequential") if content.facts.plan else None


def _in_points(rows: list[ViewRow], planned: dict[str, Any]) -> str:
    """Write the plan's bound in percentage points, in parentheses; empty if any endpoint has another unit."""
    scales = {_known(row["quantity"])[1] for row in rows}
    if planned["resolve"] not in {HALF_WIDTH, EQUIVALENCE} or not scales or not scales <= {Scale.POINTS, Scale.PERCENT}:
        return ""
    return f" ({planned['bound'] * Scale.POINTS.factor:.4g} {Scale.POINTS.sign})"


def _endpoint(row: ViewRow) -> tuple[str, str, str, str]:
    return row["quantity"], row["stratum"], row["action"], row["baseline"] or ""


def _label(row: ViewRow, between: str = ": ") -> str:
    known, _ = _known(row["quantity"])
    return f"{known.meaning if known else row['quantity']}{between}{_subject(row['action'], row['baseline'])}"


def _between(row: ViewRow, scale: Scale) -> str:
    """Write the ends of an interim look's interval, with as many decimals as its bootstrap draws support."""
    low, high = row["low"] * scale.factor, row["high"] * scale.factor
    draws = 0 if row["interval"] == STUDENT else row["draws"]
    decimals = sure_decimals(low, high, 1 - 2 * NormalDist().cdf(-row["constant"]), draws, 2)
    return f"{fixed(low, decimals)} to {fixed(high, decimals)}"


def _in_unit(value: float | None, scale: Scale) -> str:
    return "—" if value is None else fixed(value * scale.factor, 2)
