"""Sweeps: divergence and accuracy against bytes, a curve for each, with bands that hold for all members together."""

from __future__ import annotations

from functools import partial

from kvdrift.report.parts.verdict.ranking import share_of_whole
from kvdrift.report.printing.canvas import Figure, action_styles, legend_line, new_figure
from kvdrift.report.printing.estimate_tables import CellColumn, action_table, columns_of
from kvdrift.report.printing.numbers import fixed, size
from kvdrift.report.printing.palette import QUIET
from kvdrift.report.printing.section import Drawing, Section
from kvdrift.report.printing.strokes import WIDTH, percent_axis, round_ticks
from kvdrift.report.printing.tables import Cell, Column, PrintedTable
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.schema.study import POOLED
from kvdrift.schema.study.sweeps import families
from kvdrift.stats.quantities import SIMULTANEOUS_OF

TEMPLATE = """
{% call figure("sweeps") %}<b>Sweeps: bytes against divergence and accuracy.</b> A curve joins the members of a sweep, by the bytes that they hold.{% if bands %} The bands hold for all {{ members }} members of all sweeps together{{ level }}, so whole curves may be compared.{% endif %} To the left a member holds fewer bytes.{% endcall %}
{{ table(tables.sweeps) }}
"""  # noqa: E501


def section(content: PageContent) -> Section | None:
    """Make the section on sweeps; None if no sweep has two actions, or if bytes are unknown."""
    found = _curves(content)
    if not found:
        return None
    members = [member for curve in found.values() for member in curve]
    together = [content.estimates.get(SIMULTANEOUS_OF["mismatch"], member) for member in members]
    level = next((row.level for row in together if row.has_interval), None)
    values = {
        "bands": level is not None,
        "members": len(members),
        "level": "" if level is None else f" with probability {fixed(100 * level, 0)}%",
    }
    drawing = Drawing("sweeps", "R and accuracy against bytes, a curve a sweep", partial(sweeps_figure, content))
    return Section("sweeps", "Sweeps", TEMPLATE, (_table(content, members),), (drawing,), values)


def sweeps_figure(content: PageContent) -> Figure:
    """Draw R, and accuracy if answers are known, against the share of the full cache."""
    names = ["mismatch", *(["accuracy"] if content.estimates.known("accuracy") else [])]
    figure = new_figure(WIDTH, 3.8)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    found = _curves(content)
    styles = action_styles([*found])
    labels = {"mismatch": "R (token): positions that differ (%)", "accuracy": "accuracy of Y (%)"}
    for axes, name in zip(panels, names, strict=True):
        for family, curve in found.items():
            points = [(100 * share, _reported(content, name, member)) for member, share in curve.items()]
            known = [(x, 100 * row.estimate) for x, row in points if row.estimate is not None]
            look = styles[family]
            style = {"marker": look.marker, "color": look.colour, "linestyle": look.dashes}
            if known:
                axes.plot(*zip(*known, strict=True), **style, linewidth=1.6, markersize=6)
            ends = [
                (x, 100 * row.low, 100 * row.high)
                for x, row in points
                if row.has_interval and row.low is not None and row.high is not None
            ]
            if ends:
                axes.fill_between(*zip(*ends, strict=True), color=look.colour, alpha=0.17, linewidth=0)
        if name == "accuracy":
            reference = content.estimates.get("accuracy_reference", content.baseline).estimate
            if reference is not None:
                axes.axhline(100 * reference, color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
        percent_axis(axes, labels[name])
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        round_ticks(axes.xaxis)
        axes.set_xlabel(f"{content.facts.cache} (% of the full one)")
    handles = [style.handle(family, marker=True) for family, style in styles.items()]
    if len(names) > 1:
        handles.append(legend_line(" full cache", color=QUIET, linewidth=1, linestyle=(0, (4, 3))))
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 5))
    return figure


def _curves(content: PageContent) -> dict[str, dict[str, float]]:
    """Return the members of each sweep with their bytes as a share of the full cache, fewest bytes first."""
    found = {}
    for family, members in families(content.actions).items():
        shares = {member: share_of_whole(content, member) for member in members}
        known = {member: share for member, share in shares.items() if share is not None}
        if len(known) > 1:
            found[family] = dict(sorted(known.items(), key=lambda one: one[1]))
    return found


def _reported(content: PageContent, name: str, member: str) -> Estimate:
    together = content.estimates.get(SIMULTANEOUS_OF[name], member)
    return together if together.estimate is not None else content.estimates.get(name, member)


def _table(content: PageContent, members: list[str]) -> PrintedTable:
    """Make a table with a row for each member, fewest bytes first."""
    shares = {member: share_of_whole(content, member) or 0.0 for member in members}
    order = sorted(members, key=lambda member: (shares[member], member))
    cells = {}
    for member in order:
        held = content.facts.storage.get(member)
        cells[POOLED, member] = Cell(
            size(held.mean_prompt_cache if held else None), f"{fixed(100 * shares[member], 1)}% of full"
        )
    held_bytes = CellColumn(Column(content.facts.cache, "", "mean bytes of the prompt as it is stored"), cells)
    known = [together for name, together in SIMULTANEOUS_OF.items() if content.estimates.known(together)]
    shown = columns_of(*(known or ["mismatch"]))
    note = "Fewest bytes first. Intervals hold for all members of sweeps together." if known else "Fewest bytes first."
    return action_table("sweeps", "Sweeps by bytes", content.estimates, order, [held_bytes, *shown], note=note)
