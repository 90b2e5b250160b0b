"""The section on finite-state systems, whose exact quantities are known by enumeration, beside their estimates.

The paper's systems (fig. "swrb-validation") are other draws of the same family, so their points are compared as a
whole, never individually. They are shown if the model has their name (``binary-24``) and the horizon is the paper's.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvdrift.report.figures.canvas import ACTION_COLOURS, INK, QUIET, Axes, Figure, legend_line, library, new_figure
from kvdrift.report.figures.strokes import WIDTH, log_axis, published_handle, round_ticks
from kvdrift.report.printing.estimate_tables import estimate_cells
from kvdrift.report.printing.numbers import MISSING, count, fixed, listed, significant
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent, is_model
from kvdrift.report.reading.estimates import ReportedEstimates, ViewRow
from kvdrift.report.reading.facts import natural
from kvdrift.report.sections.section import Drawing, Section
from kvdrift.schema.tables import PLAIN, SWRB
from kvdrift.stats.registry import Scale

_STUDY, _HORIZON = "finite-state", 3  # the paper's study and horizon in the view ``published``
ESTIMATORS = (PLAIN, SWRB)
_PAPERS_NAMES = {PLAIN: "naive_estimate", SWRB: "swrb_estimate"}
_STYLES = {PLAIN: (ACTION_COLOURS[1], "s", "coupled pairs"), SWRB: (ACTION_COLOURS[0], "o", "SWRB")}


@dataclass(frozen=True)
class System:
    """One system under one action, or one of the paper's systems: its exact R, and measurements by estimator."""

    doc: str
    exact: float
    estimates: dict[str, float]
    action: str = ""
    stratum: str = ""
    variances: dict[str, float] = field(default_factory=dict)  # of one replicate
    errors: dict[str, float] = field(default_factory=dict)  # standard errors of the means of the replicates
    variance_ratio: float | None = None  # the variance of a coupled pair over that of an SWRB replicate
    # other exact values by name, such as variances and evaluations of one replicate
    enumerated: dict[str, float] = field(default_factory=dict)

    @property
    def exact_ratio(self) -> float | None:
        """The exact variance ratio; None if unknown or if SWRB's variance is 0."""
        plain, swrb = (self.enumerated.get(f"{estimator}_variance") for estimator in (PLAIN, SWRB))
        return plain / swrb if plain is not None and swrb else None


@dataclass(frozen=True)
class Systems:
    """A study's finite-state systems (none for other models), and the paper's printed systems."""

    measured: list[System] = field(default_factory=list)
    published: list[System] = field(default_factory=list)
    published_ratios: list[float] = field(default_factory=list)
    printed: dict[str, float] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        """Variance ratios of the systems that have one, ascending."""
        return sorted(system.variance_ratio for system in self.measured if system.variance_ratio is not None)

    @property
    def exact_ratios(self) -> list[float]:
        """Exact variance ratios of the systems that have one, ascending."""
        return sorted(ratio for ratio in (system.exact_ratio for system in self.measured) if ratio is not None)


def read_systems(content: PageContent) -> Systems:
    """Read the systems of the page's split in natural order, and the paper's systems if they are of the same kind."""
    source, split = content.source, content.split
    exact_values = source.of("exact_values", x=None)
    if not exact_values:
        return Systems()
    rows = [row for row in source.of("swrb", split=split) if row["exact_risk"] is not None]
    if not rows:
        return Systems()
    gains = {(row["action"], row["doc"]): row["variance_ratio"] for row in source.of("swrb_efficiency", split=split)}
    enumerated: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in exact_values:
        enumerated[row["action"], row["doc"]][row["quantity"]] = row["value"]
    by_system: dict[tuple[str, str], list[ViewRow]] = defaultdict(list)
    for row in rows:
        by_system[row["action"], row["doc"]].append(row)
    systems = []
    for (action, doc), members in sorted(by_system.items(), key=lambda item: tuple(map(natural, item[0]))):
        exact, stratum = members[0]["exact_risk"], members[0]["stratum"]
        estimates = {row["estimator"]: row["risk"] for row in members}
        variances = {row["estimator"]: row["risk_variance"] for row in members if row["risk_variance"] is not None}
        counts = {row["estimator"]: row["replicates"] for row in members}
        errors = {estimator: (variance / counts[estimator]) ** 0.5 for estimator, variance in variances.items()}
        ratio, others = gains.get((action, doc)), enumerated[action, doc]
        systems.append(System(doc, exact, estimates, action, stratum, variances, errors, ratio, others))
    return _with_published(systems, content)


def _with_published(systems: list[System], content: PageContent) -> Systems:
    if content.windows.horizon != _HORIZON:
        return Systems(systems)
    published_rows = content.source.views.rows("published", study=_STUDY).to_pylist()
    rows = [row for row in published_rows if is_model(content.facts.model, row["model"])]
    by_system: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["stratum"] is not None:
            by_system[row["stratum"]][row["quantity"]] = row["value"]
    published = [
        System(name, values["exact_risk"], {kind: values[_PAPERS_NAMES[kind]] for kind in ESTIMATORS})
        for name, values in sorted(by_system.items(), key=lambda item: natural(item[0]))
    ]
    ratios = sorted(row["value"] for row in rows if row["quantity"] == "variance_ratio_sorted")
    printed = {row["quantity"]: row["value"] for row in rows if row["stratum"] is None and row["x"] is None}
    return Systems(systems, published, ratios, printed)


def section(content: PageContent) -> Section | None:
    """Make the section on systems of known risk; None without such systems."""
    systems = read_systems(content)
    if not systems.measured:
        return None
    made = (validation_table(systems, content.estimates), systems_table(systems))
    words = "Estimates against exact risks, and sorted variance ratios, of systems known by enumeration"
    drawing = Drawing("swrb_systems", words, partial(systems_figure, systems))
    values = {"published": bool(systems.published)}
    tables = tuple(table for table in made if table is not None)
    return Section("systems", "Systems of known risk", tables, (drawing,), _near_exact(systems), values)


def _near_exact(systems: Systems) -> str:
    clauses = []
    for estimator, (_, _, name) in _STYLES.items():
        known = [system for system in systems.measured if system.errors.get(estimator)]
        near = [abs(system.estimates[estimator] - system.exact) <= 2 * system.errors[estimator] for system in known]
        if known:
            clauses.append(f"{count(sum(near))} of {count(len(known))} by {name}")
    return f"Within two standard errors of the exact R are {listed(clauses)}." if clauses else ""


def validation_table(systems: Systems, estimates: ReportedEstimates) -> PrintedTable | None:
    """Make the table of variance ratios, evaluations, efficiency: measured, exact, the paper's; None without SWRB."""
    if not systems.ratios:
        return None
    both = [system.variances for system in systems.measured if len(system.variances) == len(ESTIMATORS)]
    smaller = sum(variances[SWRB] < variances[PLAIN] for variances in both)
    ratios, exact, theirs = systems.ratios, systems.exact_ratios, systems.published_ratios
    zero = f"of the {len(ratios)} systems whose SWRB variance is not 0" if len(ratios) < len(both) else ""
    rows: list[tuple[Cell | str, ...]] = [
        ("systems with a smaller variance by SWRB", f"{smaller} of {len(both)}", _share(exact), _share(theirs))
    ]
    for name, of, key in (("least", min, "min"), ("median", statistics.median, "median"), ("greatest", max, "max")):
        enumerated, printed = of(exact) if exact else None, systems.printed.get(f"variance_ratio_{key}")
        values = (significant(value) for value in (of(ratios), enumerated, printed))
        rows.append((Cell(f"variance ratio, {name}", zero), *values))
    actions = sorted({system.action for system in systems.measured}, key=natural)
    for action in actions:
        members = [system for system in systems.measured if system.action == action]
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
    groups = {"this study": systems.measured, "published": systems.published}
    lines, records = [], []
    for group, system in ((group, system) for group, members in groups.items() for system in members):
        ratio = Cell(
            significant(system.variance_ratio),
            f"exactly {significant(system.exact_ratio)}" if system.exact_ratio is not None else "",
        )
        lines.append(
            table_row(
                f"{system.doc} · {system.action}" if system.action and system.action != system.doc else system.doc,
                fixed(100 * system.exact, 2),
                *(_estimate_cell(system, estimator) for estimator in ESTIMATORS),
                ratio,
                group=group if systems.published else "",
            )
        )
        records.append({
            "source": group, "action": system.action or None, "doc": system.doc, "exact_risk": system.exact,
            **{f"{estimator}_risk": system.estimates.get(estimator) for estimator in ESTIMATORS},
            **{f"{estimator}_variance": system.variances.get(estimator) for estimator in ESTIMATORS},
            "variance_ratio": system.variance_ratio, "exact_variance_ratio": system.exact_ratio,
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


def _share(ratios: Sequence[float]) -> str:
    return f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"


def _ratio_of_means(systems: Sequence[System], above: str, below: str) -> float | None:
    """Return the mean of the exact value ``above``, divided by that of ``below``; None if unknown.

    A mean is over the systems of each stratum, then over strata, which weigh equally.
    """
    if any(name not in system.enumerated for system in systems for name in (above, below)):
        return None
    means = []
    for name in (above, below):
        strata: dict[str, list[float]] = defaultdict(list)
        for system in systems:
            strata[system.stratum].append(system.enumerated[name])
        means.append(statistics.fmean(statistics.fmean(values) for values in strata.values()))
    return means[0] / means[1] if means[1] else None


def _estimate_cell(system: System, estimator: str) -> Cell:
    value, error = system.estimates.get(estimator), system.errors.get(estimator)
    if value is None:
        return Cell(MISSING)
    apart = f"{fixed((value - system.exact) / error, 1)} std errors" if error else ""
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
    used = {estimator for system in (*systems.measured, *systems.published) for estimator in system.estimates}
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
    seen = [
        100 * value
        for system in (*systems.measured, *systems.published)
        for value in (system.exact, *system.estimates.values())
    ]
    top = 1.05 * max(seen) or 1.0  # for systems that never diverge
    axes.plot([0, top], [0, top], color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)))
    for estimator, (colour, marker, _) in _STYLES.items():
        for members, filled in ((systems.published, False), (systems.measured, True)):
            known = [system for system in members if estimator in system.estimates]
            x, y = [100 * system.exact for system in known], [100 * system.estimates[estimator] for system in known]
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
    axes.axhline(1, color=INK, linewidth=0.8)
    log_axis(axes)
    axes.xaxis.set_major_locator(library().ticker.MaxNLocator(nbins=6, integer=True))
    axes.set(title="b  Variance of a coupled pair over SWRB’s", xlabel="system, sorted")
    axes.set_ylabel("variance ratio (log scale)")
