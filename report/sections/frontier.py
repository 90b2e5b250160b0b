"""Bytes against divergence: the figure, the Pareto front, the effect of fewer bits, and curves of sweeps."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

from kvdrift.report.figures.canvas import (
    INK,
    PAPER,
    QUIET,
    SHADE,
    Axes,
    Figure,
    action_styles,
    legend_line,
    new_figure,
)
from kvdrift.report.figures.labels import Mark, name_ends, name_marks
from kvdrift.report.figures.strokes import HALF_WIDTH, WIDTH, errors, log_ticks, moved_aside, percent_axis, round_ticks
from kvdrift.report.printing.estimate_tables import CellColumn, action_table, columns_of
from kvdrift.report.printing.numbers import fixed, in_text, listed, size
from kvdrift.report.printing.tables import Cell, Column, PrintedTable
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate
from kvdrift.report.sections.choice import Choice
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.schema.study import POOLED
from kvdrift.schema.study.reading import families
from kvdrift.stats.quantities import SIMULTANEOUS_OF
from kvdrift.stats.registry import Scale

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
_WIDE = 20.0  # from this ratio of its values on, an axis is logarithmic
_ASIDE = 9.0  # points between the marks of actions with the same bytes
_KEY: Any = {"linestyle": "none", "markersize": 6.5, "color": QUIET, "markerfacecolor": PAPER, "markeredgewidth": 1.2}


_Ends = tuple[float, float, float]  # the lower end of an interval, the value, and the upper end


_KINDS = {  # the marker of each kind of action, the marker's shape in words, and the kind in words
    "evicted": ("o", "circle", "entries evicted"),
    "coded": ("s", "square", "fewer bits"),
    "both": ("D", "diamond", "both"),
    "policy": ("^", "triangle", "decode-time policy"),
    "settings": ("s", "square", "engine settings"),
    "weights": ("p", "pentagon", "other weights"),
    "other": ("v", "inverted triangle", "other"),
}


def has_bytes(content: PageContent) -> bool:
    """Tell whether an action besides noise floors has known bytes and R, so that the figure can be drawn."""
    return bool(_points(content, [name for name in content.actions if name not in content.facts.noise_floors]))


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
    """Return the values of the figure's caption: the Pareto front, kinds of actions, and decode-time policies."""
    front = undominated(content, choice) if len(choice.candidates) > 1 else []
    return {
        "front": listed(front),
        "kinds": "; ".join(f"{shape}, {words}" for _, shape, words in _kinds(content, choice)),
        "policies": listed([action for action in content.actions if action in content.facts.policies]),
    }


def _points(content: PageContent, actions: list[str]) -> dict[str, tuple[float, float]]:
    points = {}
    for action in actions:
        held, risk = content.facts.cache_bytes(action), content.estimates.get("mismatch", action).estimate
        if held and risk is not None:
            points[action] = held, risk
    return points


def _whole(content: PageContent) -> float | None:
    """Return the mean bytes of the full cache; None if they are unknown or the control has distances other than 0."""
    facts = content.facts
    moved = any(not control.zero for control in facts.controls[:1])
    return None if moved or facts.whole_cache is None else facts.cache_bytes(facts.whole_cache)


def _kind(content: PageContent, action: str) -> str:
    row = next(row for row in content.facts.actions if row["action"] == action)
    fewer = row["keep"] not in {"all", "unknown"}
    kinds = {
        "weights": row["weights"], "policy": row["policy"], "settings": row["settings"],
        "both": row["codec"] and fewer, "coded": row["codec"], "evicted": fewer,
    }  # fmt: skip
    return next((kind for kind, there in kinds.items() if there), "other")


def _kinds(content: PageContent, choice: Choice) -> list[tuple[str, str, str]]:
    there = {_kind(content, action) for action in _points(content, choice.candidates)}
    return [words for kind, words in _KINDS.items() if kind in there]


def bytes_figure(content: PageContent, choice: Choice) -> Figure:
    """Draw R of each action against its bytes, with interval and name, in front of noise floors and Pareto front.

    In SVG files the ids of all that shows an action begin with ``action-``, its place in ``content.actions``, and a
    dash. On a logarithmic scale of R the control, whose R is 0, stands at the lower end.
    """
    points, facts = _points(content, choice.candidates), content.facts
    figure = new_figure(HALF_WIDTH, 4.4 + 0.12 * max(0, len(points) - 8))
    axes = figure.add_subplot()
    axes.grid(visible=False)
    unit = _bytes_axis(axes, content, [held for held, _ in points.values()])
    floors = [name for name in facts.noise_floors if content.estimates.get("mismatch", name).estimate is not None]
    _risk_axis(axes, [_interval(content, name) for name in points], [_interval(content, name) for name in floors])
    bottom, right = axes.get_ylim()[0], axes.get_xlim()[1]
    bands = [_mark(content, name, right, bottom) for name in floors]
    for band in bands:
        if band.low < band.high:
            axes.axhspan(band.low, band.high, color=SHADE, alpha=0.07, linewidth=0, gid=f"{band.gid}-bar")
        else:
            axes.axhline(band.y, color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)), gid=f"{band.gid}-bar")
    # With weights of their own, actions with more bytes of cache may have fewer bytes in all: the front is no line.
    lone = facts.own_weights or len(choice.candidates) < 2
    best = [] if lone else [points[action] for action in reversed(undominated(content, choice))]
    corners = [*((held / unit, 100 * risk) for held, risk in best), (right, 0.0)]
    front = [step for (x, y), (end, _) in pairwise(corners) for step in ((x, y), (end, y))]
    axes.plot([x for x, _ in front], [y for _, y in front], color=QUIET, linewidth=0.9, zorder=2, gid="front")
    marks, styles = [], action_styles(content.actions)
    for action, (held, _) in points.items():
        # Of actions with the same bytes the one with the least R stands at its bytes, the others to either side.
        turn = [other for other in points if facts.times_bytes(action, other) == 1].index(action)
        mark = _mark(content, action, held / unit, bottom, _ASIDE * ((turn + 1) // 2) * (-1) ** turn)
        style: Any = {"color": styles[action].colour, "clip_on": False, "transform": moved_aside(axes, mark.aside)}
        fill = styles[action].colour if action in choice.recommended else PAPER
        axes.plot([mark.x] * 2, [mark.low, mark.high], linewidth=1.6, solid_capstyle="butt", zorder=3,
                  gid=f"{mark.gid}-bar", **style)  # fmt: skip
        axes.plot([mark.x], [mark.y], linestyle="none", marker=_KINDS[_kind(content, action)][0], markersize=7.5,
                  markerfacecolor=fill, markeredgewidth=1.6, zorder=4, gid=f"{mark.gid}-mark", **style)  # fmt: skip
        marks.append(mark)
    if facts.controls and _whole(content):
        control = facts.controls[0].action
        marks.append(Mark(f"{control}: R = 0" if bottom else control, 100.0, bottom, bottom, bottom))
        axes.plot([100], [bottom], linestyle="none", marker="X", markersize=8, color=INK, markeredgecolor=PAPER,
                  clip_on=False, zorder=2.5)  # fmt: skip
    handles = [legend_line(f" {words}", marker=marker, **_KEY) for marker, _, words in _kinds(content, choice)]
    if choice.recommended:
        handles.append(legend_line(" recommended", marker="o", **_KEY | {"markerfacecolor": QUIET}))
    figure.legend(handles=handles, loc="outside lower center", ncols=4 if len(handles) < 5 else 3, labelcolor=QUIET,
                  handlelength=1, handletextpad=0.2, columnspacing=1.6)  # fmt: skip
    name_marks(axes, marks, [front], bands)
    return figure


def _bytes_axis(axes: Axes, content: PageContent, held: list[float]) -> float:
    """Scale the axis of bytes, logarithmic if they differ much; return how many bytes one unit of the axis is."""
    whole, facts = _whole(content), content.facts
    least, largest = min(held), max(*held, whole or 0.0)
    scale, name = next((scale, name) for scale, name in _UNITS if largest >= scale or scale == 1)
    unit = whole / 100 if whole else float(scale)
    full = "the full prompt’s" if facts.policies else "the reference’s" if facts.engine else "the full one"
    share = f"{facts.cache} (% of {full}, {size(whole)} a document)" if whole else ""
    axes.set_xlabel(share or f"{facts.cache} ({name} a document, mean)")
    if least * _WIDE < largest:
        axes.set_xscale("log")
        axes.set_xlim(0.7 * least / unit, 1.3 * largest / unit)
        log_ticks(axes.xaxis)
    else:
        axes.set_xlim(0, 1.05 * largest / unit)
        round_ticks(axes.xaxis)
    return unit


def _risk_axis(axes: Axes, actions: list[_Ends], floors: list[_Ends]) -> None:
    """Scale the axis of R from 0, or logarithmic if the values differ much and no action's is 0."""
    lows, values, highs = zip(*actions, *floors, strict=True)
    positive = [value for value in values if value > 0]
    if all(value > 0 for _, value, _ in actions) and min(positive) * _WIDE < max(positive):
        least = max(min(end for end in (*lows, *values) if end > 0), min(positive) / 4)
        axes.set_yscale("log")
        axes.set_ylim(0.8 * least, 1.3 * max(highs))
        log_ticks(axes.yaxis)
        axes.set_ylabel("R (token): positions that differ (%, log scale)")
    else:
        axes.set_ylim(0, 1.08 * max(highs) or 1.0)
        percent_axis(axes, "R (token): positions that differ (%)")


def _interval(content: PageContent, name: str) -> _Ends:
    """Return, in percent, the lower end of the interval of an action's R, R itself, and the upper end."""
    row = content.estimates.get("mismatch", name)
    value, (below,), (above,) = 100 * (row.estimate or 0.0), *errors(row)
    return value - below, value, value + above


def _mark(content: PageContent, name: str, x: float, bottom: float, aside: float = 0.0) -> Mark:
    """Return an action's mark; its interval is cut off at the ``bottom`` of the axis."""
    low, value, high = (max(bottom, end) for end in _interval(content, name))
    return Mark(name, x, value, low, high, aside, f"action-{content.actions.index(name)}")


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
    shows = f"{'; '.join(_along(content, family, curve) for family, curve in curves.items())}."
    return Section("sweeps", "Sweeps", (_sweeps_table(content, members),), (drawing,), shows, values)


def _along(content: PageContent, family: str, curve: dict[str, float]) -> str:
    """Return the clause that states R of the sweep's members with the most and with the fewest bytes."""
    (least, low), *_, (most, high) = curve.items()
    ends = [
        f"{in_text(_reported(content, 'mismatch', member), Scale.PERCENT)} at {fixed(100 * share, 0)}% of the bytes"
        for member, share in ((most, high), (least, low))
    ]
    return f"R of {family} goes from {ends[0]} to {ends[1]}"


def sweeps_figure(content: PageContent) -> Figure:
    """Draw for each sweep R, and accuracy if answers are known, over the bytes as a share of the full cache."""
    names = ["mismatch", *(["accuracy"] if content.estimates.known("accuracy") else [])]
    figure = new_figure(WIDTH, 3.8)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    curves = _curves(content)
    styles = action_styles([*curves])
    labels = {"mismatch": "R (token): positions that differ (%)", "accuracy": "accuracy of Y (%)"}
    for axes, name in zip(panels, names, strict=True):
        ends = {}
        for family, curve in curves.items():
            points = [(100 * share, _reported(content, name, member)) for member, share in curve.items()]
            known = [(x, 100 * row.estimate) for x, row in points if row.estimate is not None]
            family_style = styles[family]
            style = {"marker": family_style.marker, "color": family_style.colour, "linestyle": family_style.dashes}
            if known:
                axes.plot(*zip(*known, strict=True), **style, linewidth=1.6, markersize=6)
                ends[family] = known[-1]
            limits = [
                (x, 100 * row.low, 100 * row.high)
                for x, row in points
                if row.has_interval and row.low is not None and row.high is not None
            ]
            if limits:
                axes.fill_between(*zip(*limits, strict=True), color=family_style.colour, alpha=0.17, linewidth=0)
        reference = content.estimates.get("accuracy_reference", content.baseline).estimate
        if name == "accuracy" and reference is not None:
            axes.axhline(100 * reference, color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
            ends["full cache"] = axes.get_xlim()[1], 100 * reference
        percent_axis(axes, labels[name])
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        round_ticks(axes.xaxis)
        axes.set_xlabel(f"{content.facts.cache} (% of the full one)")
        name_ends(axes, ends)
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
    shares = {member: content.facts.share_of_whole(member) or 0.0 for member in members}
    order = sorted(members, key=lambda member: (shares[member], member))
    cells = {
        (POOLED, member): Cell(size(content.facts.cache_bytes(member)), f"{fixed(100 * shares[member], 1)}% of full")
        for member in order
    }
    held_bytes = CellColumn(Column(content.facts.cache, "", "mean bytes of the stored prompt"), cells)
    known = [together for name, together in SIMULTANEOUS_OF.items() if content.estimates.known(together)]
    shown = columns_of(*(known or ["mismatch"]))
    note = "Fewest bytes first. Intervals hold for all members of sweeps together." if known else "Fewest bytes first."
    return action_table("sweeps", "Sweeps by bytes", content.estimates, order, [held_bytes, *shown], note=note)
