"""The section on residual branching (SWRB) beside plain coupling: R by both, the cost of a replicate, and the gain.

Points are those of the views ``swrb_risk``, ``swrb_efficiency`` and ``swrb_windows``, intervals those of ``estimates``;
only a difference over its error is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvdrift.report.parts.depth import (
    ACROSS,
    by_depth,
    depth_table,
    edges,
    read_depths,
    selected_depths,
    window_lines,
    window_panels,
)
from kvdrift.report.printing.canvas import ActionStyle, Axes, Figure, action_styles, legend_line, new_figure
from kvdrift.report.printing.estimate_tables import CellColumn, EstimateColumn, action_table, action_tables, columns_of
from kvdrift.report.printing.numbers import MISSING, count, decimals_of, fixed, in_text
from kvdrift.report.printing.palette import INK, QUIET
from kvdrift.report.printing.section import Drawing, Section
from kvdrift.report.printing.strokes import WIDTH, action_legend, errors, log_axis
from kvdrift.report.printing.tables import Cell, Column, PrintedTable
from kvdrift.report.printing.wording import listed
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import Estimate, ReportedEstimates
from kvdrift.report.reading.source import ViewRow
from kvdrift.schema.study import POOLED
from kvdrift.schema.windows import Windows
from kvdrift.stats.registry import Scale

PAYS, LOSES, OPEN = "pays", "does not pay", "undecided"

_MASS = "swrb_divergence_probability"
_RISKS = (_MASS, "plain_mismatch", "swrb_mismatch", "swrb_occurrence", "swrb_occupation")
_GAINS = (_MASS, "variance_ratio", "evaluation_ratio", "second_ratio", "efficiency", "efficiency_in_seconds")
_COSTS = (
    _MASS, "plain_variance", "swrb_variance", "plain_evaluations", "swrb_evaluations", "plain_seconds", "swrb_seconds",
)  # fmt: skip
_PANELS = (
    ("efficiency", "a  By kernel-pair evaluations", "efficiency (log scale)"),
    ("efficiency_in_seconds", "b  By decoding time", ""),
)

TEMPLATE = """
<p>Survival-weighted residual branching (SWRB) is another estimator of the same R. A replicate walks a prefix that both continuations share, and at each position adds the probability that the pair diverges there; M is the sum. It starts one branch at a position drawn with these probabilities, and multiplies the mismatches of the branch by M. Pairs that agree to the end contribute 0 to R; SWRB accounts for such pairs by their probability, while plain coupling has to draw them.</p>
{% for sentence in pays %}
<p>{{ sentence }}</p>
{% endfor %}
<p class="how">The gain is large where divergence is rare and small where M is near 1, because each replicate pays for its scan and its branch.</p>
{{ table(tables.swrb_efficiency) }}
{% if figures.swrb_efficiency is defined %}
{% call figure("swrb_efficiency") %}<b>Where residual branching pays.</b> Above the line at 1, SWRB has a smaller Monte Carlo variance than coupled pairs for the same budget. Strong points pool the strata{% if content.estimates.have_intervals %}, with intervals{% endif %}; pale points are single strata.{% endcall %}
{% endif %}
{{ by_stratum("What residual branching gains in each stratum", tables.swrb_efficiency_by_stratum) -}}
<p class="how">The next table describes one replicate of each estimator: the variance of R within a document, the kernel pairs that it evaluates, and its decoding time.</p>
{{ table(tables.swrb_costs) }}
{{ table(tables.swrb_risk) }}
{% if figures.swrb_windows is defined %}
{% call figure("swrb_windows") %}<b>The same window by residual branching.</b> Bands are the interval of R that a window of depth L leaves, from SWRB’s branches and weights. Open markers are its ends from coupled pairs. Both estimate the same interval.{% endcall %}
<details><summary>The interval by depth, by residual branching</summary>
{{ table(tables.swrb_windows, False) }}
</details>
{% endif %}
"""  # noqa: E501


def section(content: PageContent) -> Section | None:
    """Make the section; None if no action was branched."""
    risks = {row["action"]: row for row in content.residual_risks}
    actions = [action for action in content.actions if action in risks]
    if not actions:
        return None
    estimates, strata = content.estimates, content.facts.strata
    windows = by_depth(content.pooled("swrb_windows"), actions)
    title = "What residual branching gains"
    of_windows = "Identified interval of R by depth, by residual branching"
    tables = (
        risk_table(estimates, {action: risks[action] for action in actions}),
        *action_tables("swrb_efficiency", title, content, _gain_columns(content, actions), actions=actions),
        action_table("swrb_costs", "One replicate of each estimator", estimates, actions, columns_of(*_COSTS)),
        depth_table(windows, content.windows, "swrb_windows", of_windows),
    )
    styles = {action: style for action, style in action_styles(content.actions).items() if action in actions}
    drawings = []
    if len(actions) * len(strata) > 1 and estimates.known("efficiency"):
        words = "Efficiency of residual branching by the share of pairs that diverge, by evaluations and by time"
        drawings.append(Drawing("swrb_efficiency", words, partial(gain_figure, estimates, styles, strata)))
    if windows and content.windows.horizon > 1:
        words = "Interval of R by depth of the branch window, from residual branching and from coupled pairs"
        coupled = read_depths(content).intervals
        draw = partial(windows_figure, windows, coupled, styles, content.windows)
        drawings.append(Drawing("swrb_windows", words, draw))
    pays = pay_sentences(estimates, actions)
    return Section("branching", "Residual branching", TEMPLATE, tables, tuple(drawings), {"pays": pays})


def verdict(efficiency: Estimate) -> str:
    """Return whether residual branching pays: its efficiency's interval is above 1, below 1, or includes 1."""
    if efficiency.low is None or efficiency.high is None:
        return OPEN
    return PAYS if efficiency.low > 1 else LOSES if efficiency.high < 1 else OPEN


def pay_sentences(estimates: ReportedEstimates, actions: Sequence[str]) -> list[str]:
    """Say for which actions residual branching pays, by kernel-pair evaluations and by decoding time."""
    by_verdict: dict[str, list[str]] = {PAYS: [], LOSES: [], OPEN: []}
    for action in actions:
        by_verdict[verdict(estimates.get("efficiency", action))].append(_named(estimates, action))
    sentences = []
    if by_verdict[PAYS]:
        means = (
            "for the same number of kernel-pair evaluations it divides the Monte Carlo variance of R by the efficiency"
        )
        sentences.append(f"Residual branching pays for {listed(by_verdict[PAYS])}: {means}.")
    if by_verdict[LOSES]:
        subject = "It" if sentences else "Residual branching"
        means = "for the same number of evaluations, coupled pairs have the smaller variance"
        sentences.append(f"{subject} does not pay for {listed(by_verdict[LOSES])}: {means}.")
    if by_verdict[OPEN]:
        sentences.append(f"Undecided for {listed(by_verdict[OPEN])}: no interval of the efficiency excludes 1.")
    return [*sentences, _in_time(estimates, actions)]


def risk_table(estimates: ReportedEstimates, risks: Mapping[str, ViewRow]) -> PrintedTable:
    """Make the table of R by both estimators on the same documents, and their difference in Monte Carlo errors."""

    def cells(name: str, unit: str, meaning: str, cell: Callable[[ViewRow], Cell]) -> CellColumn:
        return CellColumn(Column(name, unit, meaning), {(POOLED, action): cell(row) for action, row in risks.items()})

    apart = "the difference over its standard error; values within ±2 are expected by chance"
    columns: list[EstimateColumn | CellColumn] = [
        cells("documents", "", "documents with SWRB replicates", lambda row: Cell(count(row["documents"]))),
        cells("replicates", "", "SWRB replicates on all of them", lambda row: Cell(count(row["replicates"]))),
        *columns_of(*_RISKS),
        cells("difference", "pp", "R (SWRB) − R (coupled), with its standard error given the documents",
              lambda row: _difference(row)[0]),
        cells("in std errors", "", apart, lambda row: _difference(row)[1]),
    ]  # fmt: skip
    note = "Both columns of R estimate the same number on the same documents."
    title, records = "R by coupled pairs and by residual branching", tuple(risks.values())
    return action_table("swrb_risk", title, estimates, list(risks), columns, note=note, records=records)


def _gain_columns(content: PageContent, actions: Sequence[str]) -> list[EstimateColumn | CellColumn]:
    verdicts = {
        (stratum, action): Cell(verdict(content.estimates.get("efficiency", action, stratum=stratum)))
        for stratum in (POOLED, *content.facts.strata) for action in actions
    }  # fmt: skip
    meaning = "by evaluations: pays where the interval of the efficiency is above 1, does not pay where it is below 1"
    return [*columns_of(*_GAINS), CellColumn(Column("verdict", "", meaning), verdicts)]


def _difference(row: ViewRow) -> tuple[Cell, Cell]:
    if row["plain_mismatch"] is None:
        return Cell(MISSING), Cell(MISSING)
    difference, error = row["mismatch"] - row["plain_mismatch"], row["monte_carlo_error"]
    places = decimals_of([difference], 100.0)
    if not error:  # the error is unknown or 0
        return Cell(fixed(100 * difference, places)), Cell(MISSING)
    return Cell(fixed(100 * difference, places), f"± {fixed(100 * error, places)}"), Cell(fixed(difference / error, 1))


def _in_time(estimates: ReportedEstimates, actions: Sequence[str]) -> str:
    entries = [estimates.get("efficiency_in_seconds", action) for action in actions]
    known = {entry.action: entry for entry in entries if entry.estimate is not None}
    if not known:
        return "Decoding times are not recorded, so its effect on time is not known."
    parts = []
    for found in (PAYS, LOSES, OPEN):
        own = [
            f"{action} ({in_text(entry, Scale.RATIO)})" for action, entry in known.items() if verdict(entry) == found
        ]
        if own:
            parts.append(f"{'is undecided' if found == OPEN else found} for {listed(own)}")
    return f"By measured decoding time, it {'; it '.join(parts)}."


def _named(estimates: ReportedEstimates, action: str) -> str:
    mass = estimates.get(_MASS, action).estimate
    diverge = "" if mass is None else f"; {fixed(100 * mass, 1)}% of pairs diverge"
    return f"{action} (efficiency {in_text(estimates.get('efficiency', action), Scale.RATIO)}{diverge})"


def gain_figure(estimates: ReportedEstimates, styles: Mapping[str, ActionStyle], strata: Sequence[str]) -> Figure:
    """Draw efficiency against the share of pairs that diverge: pooled with intervals, single strata pale."""
    figure = new_figure(WIDTH, 3.7)
    known = [panel for panel in _PANELS if estimates.known(panel[0])]
    grid = figure.subplots(1, len(known), sharey=True, squeeze=False)[0]
    for axes, (quantity, title, label) in zip(grid, known, strict=True):
        for action, style in styles.items():
            for stratum in (*strata, POOLED):
                _gain(axes, estimates, quantity, action, stratum, style)
        log_axis(axes)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set(xlim=(-3, 103), title=title, xlabel="mean M: pairs that diverge (%)", ylabel=label)
    action_legend(figure, dict(styles), marker=True)
    return figure


def windows_figure(
    intervals: Mapping[str, list[ViewRow]],
    coupled: Mapping[str, list[ViewRow]],
    styles: Mapping[str, ActionStyle],
    windows: Windows,
) -> Figure:
    """Draw the interval of each action's R by depth from residual branching; open markers are coupled pairs'."""
    lines = window_lines(len(styles))
    figure = new_figure(WIDTH, 0.5 + 2.5 * lines)
    grid = figure.subplots(lines, ACROSS, squeeze=False)
    window_panels(grid, intervals, styles, windows)
    wanted = set(selected_depths(windows))
    for axes, (action, style) in zip(grid.flat, styles.items(), strict=False):
        rows = [row for row in coupled.get(action, []) if row["depth"] in wanted]
        for end in ("lower", "upper"):
            axes.plot([row["depth"] for row in rows], [100 * row[end] for row in rows], linestyle="none",
                      marker=style.marker, markersize=6, markerfacecolor="none", markeredgecolor=style.colour,
                      markeredgewidth=1.1, clip_on=False, zorder=4)  # fmt: skip
    coupled_too = legend_line(
        "both, coupled pairs", linestyle="none", marker="o", markerfacecolor="none", markeredgecolor=QUIET
    )
    figure.legend(handles=[*edges(", SWRB"), coupled_too], loc="outside upper left", ncols=3)
    return figure


def _gain(
    axes: Axes, estimates: ReportedEstimates, quantity: str, action: str, stratum: str, style: ActionStyle
) -> None:
    mass, gain = (estimates.get(name, action, stratum=stratum) for name in (_MASS, quantity))
    if mass.estimate is None or gain.estimate is None or gain.estimate <= 0:
        return
    x, y = 100 * mass.estimate, gain.estimate
    if stratum == POOLED:
        axes.errorbar([x], [y], xerr=errors(mass), yerr=errors(gain, 1.0), fmt=style.marker,
                      color=style.colour, markersize=6.5, linewidth=1.2, capsize=2.5, zorder=4)  # fmt: skip
    else:
        axes.plot([x], [y], linestyle="none", marker=style.marker, color=style.colour, markersize=4, alpha=0.4)
