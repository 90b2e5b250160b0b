"""The section on systems with enumerated risk: both estimators against the exact risk, beside the paper's results.

The paper's systems (fig. "swrb-validation") are other draws of the same family: so its points are compared as a whole,
never one by one. The paper's points are shown if the model has their name (``binary-24``) and the horizon is the
paper's.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvdrift.report.printing.canvas import Axes, Figure, legend_line, library, new_figure
from kvdrift.report.printing.estimate_tables import estimate_cells
from kvdrift.report.printing.numbers import MISSING, count, fixed, significant
from kvdrift.report.printing.palette import ACTION_COLOURS, INK, QUIET
from kvdrift.report.printing.section import Drawing, Section
from kvdrift.report.printing.strokes import WIDTH, log_axis, published_handle, round_ticks
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import ReportedEstimates
from kvdrift.report.reading.facts import natural
from kvdrift.report.reading.systems import ESTIMATORS, System, Systems, read_systems
from kvdrift.schema.tables import PLAIN, SWRB
from kvdrift.stats.registry import Scale

_STYLES = {PLAIN: (ACTION_COLOURS[1], "s", "coupled pairs"), SWRB: (ACTION_COLOURS[0], "o", "SWRB")}

TEMPLATE = """
{% call figure("swrb_systems") %}<b>Systems of known risk.</b> Estimates of each system against its exact R; on the dashed line the error is 0.{% if tables.swrb_validation is defined %} The right panel has the variance of a coupled pair divided by the variance of an SWRB replicate, sorted, with its median as a dashed line.{% endif %}{% if published %} Open markers are the paper’s systems, which are other draws of the same family and are comparable only as a whole.{% endif %}{% endcall %}
{% if tables.swrb_validation is defined %}{{ table(tables.swrb_validation) }}{% endif %}
<details><summary>Every system</summary>
{{ table(tables.swrb_systems, False) }}
</details>
{% if tables.swrb_ratios is defined %}
<details><summary>Variance ratios by rank</summary>
{{ table(tables.swrb_ratios, False) }}
</details>
{% endif %}
"""  # noqa: E501


def section(content: PageContent) -> Section | None:
    """Make the section on systems of known risk; None without such systems."""
    systems = read_systems(content)
    if not systems.own:
        return None
    made = (validation_table(systems, content.estimates), systems_table(systems), ratios_table(systems))
    words = "Estimates against exact risks, and sorted variance ratios, of systems known by enumeration"
    drawing = Drawing("swrb_systems", words, partial(systems_figure, systems))
    values = {"published": bool(systems.published)}
    tables = tuple(table for table in made if table is not None)
    return Section("systems", "Systems of known risk", TEMPLATE, tables, (drawing,), values)


def validation_table(systems: Systems, estimates: ReportedEstimates) -> PrintedTable | None:
    """Make the table of variance ratios, evaluations, efficiency: measured, exact, the paper's; None without SWRB."""
    if not systems.ratios:
        return None
    both = [one.variances for one in systems.own if len(one.variances) == len(ESTIMATORS)]
    smaller = sum(one[SWRB] < one[PLAIN] for one in both)
    own, exact, theirs = systems.ratios, systems.exact_ratios, systems.published_ratios
    zero = f"of the {len(own)} systems where SWRB’s is not 0" if len(own) < len(both) else ""
    rows: list[tuple[Cell | str, ...]] = [
        ("systems with a smaller variance by SWRB", f"{smaller} of {len(both)}", _share(exact), _share(theirs))
    ]
    for name, of, key in (("least", min, "min"), ("median", statistics.median, "median"), ("greatest", max, "max")):
        enumerated, printed = of(exact) if exact else None, systems.printed.get(f"variance_ratio_{key}")
        values = (significant(value) for value in (of(own), enumerated, printed))
        rows.append((Cell(f"variance ratio, {name}", zero), *values))
    actions = sorted({system.action for system in systems.own}, key=natural)
    for action in actions:
        members = [system for system in systems.own if system.action == action]
        variance = _ratio_of_means(members, "plain_variance", "swrb_variance")
        cost = _ratio_of_means(members, "swrb_evaluations", "plain_evaluations")
        gain = variance / cost if variance is not None and cost else None
        for name, quantity, enumerated, key in (
            ("evaluations ratio", "evaluation_ratio", cost, "kernel_pair_evaluations_ratio"),
            ("efficiency: variance for evaluations, ratio of means", "efficiency", gain, "variance_cost_advantage"),
        ):
            label = Cell(name, f"of {action}" if len(actions) > 1 else "")
            measured = estimate_cells([estimates.get(quantity, action)], Scale.RATIO, {})[0]
            rows.append((label, measured, significant(enumerated), significant(systems.printed.get(key))))
    kept = [True, True, bool(exact), bool(systems.printed)]
    heads = (
        label_column("of all systems"),
        Column("this study"),
        Column("exact", "", "of these systems, by enumeration"),
        Column("published"),
    )
    lines = tuple(table_row(*itertools.compress(row, kept)) for row in rows)
    title = "Residual branching on systems of known risk"
    return PrintedTable("swrb_validation", title, tuple(itertools.compress(heads, kept)), lines)


def systems_table(systems: Systems) -> PrintedTable:
    """Make the table of exact and estimated risks, with each estimate's distance in its own standard errors."""
    listed = [("this study", one) for one in systems.own] + [("published", one) for one in systems.published]
    lines, records = [], []
    for group, one in listed:
        ratio = Cell(
            significant(one.variance_ratio),
            f"exactly {significant(one.exact_ratio)}" if one.exact_ratio is not None else "",
        )
        lines.append(
            table_row(
                f"{one.doc} · {one.action}" if one.action and one.action != one.doc else one.doc,
                fixed(100 * one.exact, 2),
                *(_estimate_cell(one, estimator) for estimator in ESTIMATORS),
                ratio,
                group=group if systems.published else "",
            )
        )
        records.append({
            "source": group, "action": one.action or None, "doc": one.doc, "exact_risk": one.exact,
            **{f"{estimator}_risk": one.estimates.get(estimator) for estimator in ESTIMATORS},
            **{f"{estimator}_variance": one.variances.get(estimator) for estimator in ESTIMATORS},
            "variance_ratio": one.variance_ratio, "exact_variance_ratio": one.exact_ratio,
        })  # fmt: skip
    mean = "mean of its replicates; under it the error in standard errors"
    columns = (
        label_column("system"),
        Column("exact R", "%", "by enumeration"),
        Column("R (coupled)", "%", mean),
        Column("R (SWRB)", "%", mean),
        Column("variance ratio", "×", "variance of a coupled pair / of an SWRB replicate"),
    )
    return PrintedTable("swrb_systems", "Every system", columns, tuple(lines), "", tuple(records))


def ratios_table(systems: Systems) -> PrintedTable | None:
    """Make the table of variance ratios by rank, beside the paper's of the same rank; None without SWRB."""
    if not systems.ratios:
        return None
    ranked = enumerate(itertools.zip_longest(systems.ratios, systems.published_ratios), 1)
    records = [{"rank": rank, "variance_ratio": own, "published": theirs} for rank, (own, theirs) in ranked]
    lines = [
        table_row(count(row["rank"]), significant(row["variance_ratio"]), significant(row["published"]))
        for row in records
    ]
    columns = (Column("rank"), Column("this study", "×"), Column("published", "×"))
    return PrintedTable("swrb_ratios", "Variance ratios by rank", columns, tuple(lines), "", tuple(records))


def _share(ratios: Sequence[float]) -> str:
    return f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"


def _ratio_of_means(systems: Sequence[System], above: str, below: str) -> float | None:
    """Return the ratio of the exact values' means: over a stratum's systems, then over strata, equally weighted."""
    if any(name not in system.enumerated for system in systems for name in (above, below)):
        return None
    means = []
    for name in (above, below):
        strata: dict[str, list[float]] = defaultdict(list)
        for system in systems:
            strata[system.stratum].append(system.enumerated[name])
        means.append(statistics.fmean(statistics.fmean(values) for values in strata.values()))
    return means[0] / means[1] if means[1] else None


def _estimate_cell(one: System, estimator: str) -> Cell:
    value, error = one.estimates.get(estimator), one.errors.get(estimator)
    if value is None:
        return Cell(MISSING)
    apart = f"{fixed((value - one.exact) / error, 1)} std errors" if error else ""
    return Cell(fixed(100 * value, 2), apart)


def systems_figure(systems: Systems) -> Figure:
    """Draw estimates against exact risks (left) and sorted variance ratios (right); open markers are the paper's.

    Without replicates of residual branching there is only the left panel.
    """
    figure = new_figure(WIDTH, 4.1)
    grid = figure.subplots(1, 2 if systems.ratios else 1, squeeze=False)[0]
    _risks(grid[0], systems)
    if systems.ratios:
        _ratios(grid[1], systems)
    used = {estimator for one in (*systems.own, *systems.published) for estimator in one.estimates}
    handles = [
        legend_line(label, linestyle="none", marker=marker, color=colour, markersize=5.5)
        for estimator, (colour, marker, label) in _STYLES.items() if estimator in used
    ]  # fmt: skip
    if systems.published:
        handles.append(published_handle())
    dashed = "dashed: no error (a), median (b)" if systems.ratios else "dashed: no error"
    handles.append(legend_line(dashed, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3))))
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    return figure


def _risks(axes: Axes, systems: Systems) -> None:
    seen = [100 * value for one in (*systems.own, *systems.published) for value in (one.exact, *one.estimates.values())]
    top = 1.05 * max(seen) or 1.0  # for systems that never diverge
    axes.plot([0, top], [0, top], color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)))
    for estimator, (colour, marker, _) in _STYLES.items():
        for members, filled in ((systems.published, False), (systems.own, True)):
            known = [one for one in members if estimator in one.estimates]
            x, y = [100 * one.exact for one in known], [100 * one.estimates[estimator] for one in known]
            axes.plot(x, y, linestyle="none", marker=marker, **_filling(colour, filled=filled))
    for axis in (axes.xaxis, axes.yaxis):
        round_ticks(axis)
    axes.set(xlim=(0, top), ylim=(0, top), title="a  Estimates and exact risks")
    axes.set(xlabel="exact R (%)", ylabel="estimated R (%)")


def _filling(colour: str, *, filled: bool) -> dict[str, Any]:
    """Return the style of markers: ours are filled, the paper's are open, larger and behind."""
    return {"color": colour, "markersize": 4.5 if filled else 6.5, "markerfacecolor": colour if filled else "none",
            "markeredgewidth": 0.9, "zorder": 4 if filled else 3}  # fmt: skip


def _ratios(axes: Axes, systems: Systems) -> None:
    colour, marker, _ = _STYLES[SWRB]
    for ratios, filled in ((systems.published_ratios, False), (systems.ratios, True)):
        if not ratios:
            continue
        middle = statistics.median(ratios)
        axes.plot(range(1, len(ratios) + 1), ratios, marker=marker, linewidth=1.2 if filled else 0.7,
                  **_filling(colour, filled=filled))  # fmt: skip
        # Below a median at the right, above a median at the left: there the sorted points leave room.
        ink, dash = (INK, (0, (4, 3))) if filled else (QUIET, (0, (1.5, 2.5)))
        place, shift, align = (0.015, 3, ("left", "bottom")) if filled else (0.985, -3, ("right", "top"))
        axes.axhline(middle, color=ink, linewidth=1.0, linestyle=dash)
        axes.annotate(f"{'median' if filled else 'published median'} {significant(middle)}×", (place, middle),
                      (0, shift), xycoords=axes.get_yaxis_transform(), textcoords="offset points", fontsize=8,
                      ha=align[0], va=align[1], color=ink)  # fmt: skip
    log_axis(axes)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.xaxis.set_major_locator(library().ticker.MaxNLocator(nbins=6, integer=True))
    axes.set(title="b  Variance of a coupled pair over SWRB’s", xlabel="system, sorted")
    axes.set_ylabel("variance ratio (log scale)")
