"""The table of differences to the baseline, and the standing of an interval in words."""

from __future__ import annotations

from kvdrift.report.printing.estimate_tables import NOISE_FLOOR, CellColumn, EstimateColumn, action_table, columns_of
from kvdrift.report.printing.numbers import fixed, level
from kvdrift.report.printing.tables import Cell, Column, PrintedTable
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.sections.choice import by_divergence
from kvdrift.report.sections.findings import signs
from kvdrift.report.sections.section import Section
from kvdrift.schema.study import POOLED
from kvdrift.stats.quantities import SIMULTANEOUS_GAP
from kvdrift.stats.registry import DIFFERENCE

_DIFFERENCES = ("gap", f"mean_entry{DIFFERENCE}", "exposure_term", "rate_term", "occurrence_term")


def section(content: PageContent) -> Section | None:
    """Make the section; None without an action beside the baseline."""
    if not content.others:
        return None
    shows = signs(content, "gap", f"R less R of {content.baseline}", content.baseline)
    return Section("contrasts", f"Against {content.baseline}", (contrasts_table(content),), shows=shows)


def contrasts_table(content: PageContent) -> PrintedTable:
    """Make the table of differences to the baseline: bytes, R, entry and terms of R's difference, least R first."""
    facts, baseline = content.facts, content.baseline
    under = dict.fromkeys(facts.noise_floors, NOISE_FLOOR) | dict.fromkeys(facts.added, "added after the plan")
    order = by_divergence(content, content.others)
    cells = {(POOLED, action): Cell(fixed(facts.times_bytes(action, baseline), 2)) for action in order}
    name = "bytes of cache" if facts.own_weights else "bytes"
    ratio = CellColumn(Column(name, "×", "of the cache over the baseline’s"), cells)
    columns: list[EstimateColumn | CellColumn] = [*([] if facts.finite else [ratio]), *columns_of(*_DIFFERENCES)]
    title, note = f"Differences to {baseline}", "Less R, later entry and a negative term are the action’s advantage."
    return action_table(
        "contrasts", title, content.estimates, order, columns, baseline=baseline, note=note, under=under
    )


def standing_of(estimate: Estimate) -> str:
    """Return the level of an estimate's interval and its status; empty without an interval."""
    if not estimate.has_interval:
        return ""
    together = " over all pairs" if estimate.quantity == SIMULTANEOUS_GAP else ""
    return f"{level(estimate.level)}{together}, {estimate.standing}"
