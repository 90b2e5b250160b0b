"""Bytes against divergence: the figure, the Pareto front, the effect of fewer bits, and curves of sweeps."""

from __future__ import annotations

from functools import partial

from kvdrift.report.figures.canvas import INK, QUIET, Figure, action_styles, legend_line, library, new_figure
from kvdrift.report.figures.labels import Mark, name_marks
from kvdrift.report.figures.strokes import WIDTH, errors, moved_aside, percent_axis, round_ticks
from kvdrift.report.printing.estimate_tables import CellColumn, action_table, columns_of
from kvdrift.report.printing.numbers import fixed, listed, size
from kvdrift.report.printing.tables import Cell, Column, PrintedTable
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.sections.choice import Choice
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.schema.study import POOLED
from kvdrift.schema.study.reading import families
from kvdrift.stats.quantities import SIMULTANEOUS_OF

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
_WIDE = 20.0  # from this ratio of bytes on, the axis is logarithmic
_ASIDE = 9.0  # points between the marks of actions with the same bytes


def has_bytes(content: PageContent) -> bool:
    """Tell whether an action has known bytes and R, so that the figure can be drawn."""
    return bool(_points(content, content.actions))


def undominated(content: PageContent, choice: Choice) -> list[str]:
    """Return the Pareto front of the candidates by bytes and the points of R; candidates with more bytes come first.

    Bytes are those of the cache; if weights differ, those of the weights count too.
    """
    points, facts = _points(content, choice.candidates), content.facts
    best = [
        action
        for action, (held, risk) in points.items()
        if not any(
            other <= held
            and less <= risk
            and facts.no_more_weights(name, action)
            and ((other, less) != (held, risk) or not facts.no_more_weights(action, name))
            for name, (other, less) in points.items()
        )
    ]  # fmt: skip
    return sorted(best, key=lambda action: -points[action][0])


def frontier_values(content: PageContent, choice: Choice) -> dict[str, str]:
    """Return the values of the figure's caption: the Pareto front, the whole cache and its dtypes, and policies."""
    front = undominated(content, choice) if len(choice.candidates) > 1 else []
    whole = _whole(content)
    dtypes = [] if content.facts.engine else sorted({device.rpartition(", ")[2] for device in content.facts.devices})
    return {
        "front": listed(front),
        "whole": "" if whole is None else size(whole),
        "dtypes": listed(dtypes),
        "policies": listed([action for action in content.actions if action in content.facts.policies]),
    }


def _points(content: PageContent, actions: list[str]) -> dict[str, tuple[float, float]]:
    """Return bytes and R of the actions for which both are known."""
    points = {}
    for action in actions:
        held, risk = content.facts.storage.get(action), content.estimates.get("mismatch", action).estimate
        if held is not None and held.mean_prompt_cache and risk is not None:
            points[action] = (held.mean_prompt_cache, risk)
    return points


def _whole(content: PageContent) -> float | None:
    """Return the mean bytes of the full cache; None without a control that is exactly 0."""
    facts = content.facts
    moved = any(not control.zero for control in facts.controls[:1])
    whole = None if moved or facts.whole_cache is None else facts.storage.get(facts.whole_cache)
    return None if whole is None else whole.mean_prompt_cache


def bytes_figure(content: PageContent, choice: Choice) -> Figure:
    """Draw R of each action against its bytes, with intervals and, if there is room, names."""
    points, whole, facts = _points(content, content.actions), _whole(content), content.facts
    figure = new_figure(WIDTH, 3.6 + 0.16 * max(0, len(points) - 5))
    axes = figure.add_subplot()
    styles = action_styles(content.actions)
    largest = max([*(held for held, _ in points.values()), whole or 0.0])
    scale, unit = next((factor, unit) for factor, unit in _UNITS if largest >= factor or factor == 1)
    factor = whole / 100 if whole else scale
    marks, handles = [], []
    for action, (held, value) in points.items():
        risk, style = content.estimates.get("mismatch", action), styles[action]
        same_bytes = [other for other in points if facts.times_bytes(action, other) == 1]
        aside = _ASIDE * (same_bytes.index(action) - (len(same_bytes) - 1) / 2)
        fill = style.colour if action in choice.recommended or not choice.recommended else "white"
        axes.errorbar([held / factor], [100 * value], yerr=errors(risk), fmt=style.marker, color=style.colour,
                      markersize=8, markerfacecolor=fill, markeredgewidth=1.4, linewidth=1.4, capsize=3, zorder=3,
                      clip_on=False, transform=moved_aside(axes, aside))  # fmt: skip
        below, above = errors(risk)
        marks.append(Mark(action, held / factor, 100 * value, 100 * value - below[0], 100 * value + above[0], aside))
        handles.append(
            legend_line(f" {action}", linestyle="none", marker=style.marker, color=style.colour, markerfacecolor=fill)
        )
    if whole and facts.controls:
        axes.plot([100], [0], linestyle="none", marker="o", markersize=8, color=INK, markerfacecolor="white",
                  clip_on=False, zorder=4)  # fmt: skip
        control = facts.controls[0].action
        marks.append(Mark(control, 100.0, 0.0, 0.0, 0.0))
        handles.append(legend_line(f" {control}", linestyle="none", marker="o", color=INK, markerfacecolor="white"))
    if min(held for held, _ in points.values()) * _WIDE < largest:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(library().ticker.FuncFormatter(lambda value, _: f"{value:,.12g}"))
    else:
        axes.set_xlim(0, 1.08 * largest / factor)
        round_ticks(axes.xaxis)
    risks = [content.estimates.get("mismatch", action) for action in points]
    top = max(100 * (row.estimate or 0.0) + errors(row)[1][0] for row in risks)
    axes.set_ylim(0, 1.08 * top or 1.0)  # set explicitly, because points that are moved aside do not extend the limits
    percent_axis(axes, "R (token): positions that differ (%)")
    full = "the full prompt’s" if facts.policies else "the reference’s" if facts.engine else "the full one"
    share = f"{facts.cache} (% of {full}, {size(whole)} a document)" if whole else ""
    axes.set_xlabel(share or f"{facts.cache} ({unit} a document, mean)")
    if choice.recommended:
        handles.append(
            legend_line("filled: recommended", linestyle="none", marker="o", color=QUIET, markerfacecolor=QUIET)
        )
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 5))
    best = [] if facts.own_weights else undominated(content, choice)  # with weights, the front is no line
    line = [mark for action in best for mark in marks if mark.name == action]
    name_marks(axes, marks, line, in_legend=True)
    return figure


def sweeps_section(content: PageContent) -> Section | None:
    """Make the section on sweeps; None if no sweep has two actions, or if bytes are unknown."""
    curves = _curves(content)
    if not curves:
        return None
    members = [member for curve in curves.values() for member in curve]
    together = [content.estimates.get(SIMULTANEOUS_OF["mismatch"], member) for member in members]
    level = next((row.level for row in together if row.has_interval), None)
    values = {
        "bands": level is not None,
        "members": len(members),
        "level": "" if level is None else f" with probability {fixed(100 * level, 0)}%",
    }
    drawing = Drawing("sweeps", "R and accuracy against bytes, a curve a sweep", partial(sweeps_figure, content))
    return Section("sweeps", "Sweeps", (_sweeps_table(content, members),), (drawing,), values)


def sweeps_figure(content: PageContent) -> Figure:
    """Draw R, and accuracy if answers are known, against the share of the full cache."""
    names = ["mismatch", *(["accuracy"] if content.estimates.known("accuracy") else [])]
    figure = new_figure(WIDTH, 3.8)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    curves = _curves(content)
    styles = action_styles([*curves])
    labels = {"mismatch": "R (token): positions that differ (%)", "accuracy": "accuracy of Y (%)"}
    for axes, name in zip(panels, names, strict=True):
        for family, curve in curves.items():
            points = [(100 * share, _reported(content, name, member)) for member, share in curve.items()]
            known = [(x, 100 * row.estimate) for x, row in points if row.estimate is not None]
            family_style = styles[family]
            style = {"marker": family_style.marker, "color": family_style.colour, "linestyle": family_style.dashes}
            if known:
                axes.plot(*zip(*known, strict=True), **style, linewidth=1.6, markersize=6)
            ends = [
                (x, 100 * row.low, 100 * row.high)
                for x, row in points
                if row.has_interval and row.low is not None and row.high is not None
            ]
            if ends:
                axes.fill_between(*zip(*ends, strict=True), color=family_style.colour, alpha=0.17, linewidth=0)
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
    curves = {}
    for family, members in families(content.actions).items():
        shares = {member: content.facts.share_of_whole(member) for member in members}
        known = {member: share for member, share in shares.items() if share is not None}
        if len(known) > 1:
            curves[family] = dict(sorted(known.items(), key=lambda member_share: member_share[1]))
    return curves


def _reported(content: PageContent, name: str, member: str) -> Estimate:
    together = content.estimates.get(SIMULTANEOUS_OF[name], member)
    return together if together.estimate is not None else content.estimates.get(name, member)


def _sweeps_table(content: PageContent, members: list[str]) -> PrintedTable:
    """Make a table with a row for each member, fewest bytes first."""
    shares = {member: content.facts.share_of_whole(member) or 0.0 for member in members}
    order = sorted(members, key=lambda member: (shares[member], member))
    cells = {}
    for member in order:
        held = content.facts.storage.get(member)
        cells[POOLED, member] = Cell(
            size(held.mean_prompt_cache if held else None), f"{fixed(100 * shares[member], 1)}% of full"
        )
    held_bytes = CellColumn(Column(content.facts.cache, "", "mean bytes of the stored prompt"), cells)
    known = [together for name, together in SIMULTANEOUS_OF.items() if content.estimates.known(together)]
    shown = columns_of(*(known or ["mismatch"]))
    note = "Fewest bytes first. Intervals hold for all members of sweeps together." if known else "Fewest bytes first."
    return action_table("sweeps", "Sweeps by bytes", content.estimates, order, [held_bytes, *shown], note=note)
