"""Systems whose risk is known by enumeration: both estimators against it, beside the paper's (fig. "swrb-validation").

The paper's systems are draws of the same family, not these ones: its points are compared as a whole, never one by one.
They stand beside a study whose model has the paper's name of them (``binary-24``), at the paper's horizon.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from report.parts.branching import ratio_cell
from report.printing.blocks import Cell, Column, Table, label_column, text_cell
from report.printing.blocks import Row as Line
from report.printing.numbers import MISSING, count, fixed, significant
from report.reading.estimates import Estimates
from report.reading.facts import Facts, natural
from report.reading.published import is_model
from report.reading.source import Row, StudyRows
from schema.tables import PLAIN, SWRB

_STUDY, _HORIZON = "finite-state", 3  # the paper's, in the view ``published``
_ESTIMATORS = (PLAIN, SWRB)
_PAPERS_NAMES = {PLAIN: "naive_estimate", SWRB: "swrb_estimate"}


@dataclass(frozen=True)
class System:
    """One system under one action: exact risk; by estimator the mean, a replicate's variance, the mean's error.

    ``enumerated`` are its other exact values by name: variances and evaluations of one replicate among them.
    """

    action: str
    doc: str
    stratum: str
    exact: float
    estimates: dict[str, float]
    variances: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    variance_ratio: float | None = None
    enumerated: dict[str, float] = field(default_factory=dict)

    @property
    def exact_ratio(self) -> float | None:
        """The exact variance ratio; None where it is not known or SWRB's variance is 0."""
        plain, swrb = (self.enumerated.get(f"{estimator}_variance") for estimator in (PLAIN, SWRB))
        return plain / swrb if plain is not None and swrb else None


@dataclass(frozen=True)
class Systems:
    """A study's systems, none where its model is no finite-state system, and what the paper prints of its own."""

    own: list[System] = field(default_factory=list)
    published: list[System] = field(default_factory=list)
    published_ratios: list[float] = field(default_factory=list)
    printed: dict[str, float] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        """Variance ratios of the systems that have one, ascending."""
        return sorted(system.variance_ratio for system in self.own if system.variance_ratio is not None)

    @property
    def exact_ratios(self) -> list[float]:
        """The exact ones, ascending."""
        return sorted(ratio for ratio in (system.exact_ratio for system in self.own) if ratio is not None)


def read_systems(source: StudyRows, split: str, facts: Facts) -> Systems:
    """The systems of a split in natural order, and the paper's where they are of the same kind."""
    rows = [row for row in source.of("swrb", split=split) if row["exact_risk"] is not None]
    if not rows:
        return Systems()
    gains = {(row["action"], row["doc"]): row["variance_ratio"] for row in source.of("swrb_efficiency", split=split)}
    exact: dict[tuple[str, str], dict[str, float]] = {}
    for row in source.of("exact_values", x=None):
        exact.setdefault((row["action"], row["doc"]), {})[row["quantity"]] = row["value"]
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["action"], row["doc"]), []).append(row)
    own = [
        _system(action, doc, members, gains.get((action, doc)), exact.get((action, doc), {}))
        for (action, doc), members in sorted(found.items(), key=lambda item: tuple(map(natural, item[0])))
    ]
    return _with_published(own, source, facts)


def validation_table(systems: Systems, estimates: Estimates) -> Table | None:
    """Variance ratios, the evaluations ratio and the efficiency: measured, exact, the paper's; None without SWRB."""
    if not systems.ratios:
        return None
    both = [one.variances for one in systems.own if len(one.variances) == len(_ESTIMATORS)]
    smaller = sum(one[SWRB] < one[PLAIN] for one in both)
    own, exact, theirs = systems.ratios, systems.exact_ratios, systems.published_ratios
    zero = f"of the {len(own)} systems where SWRB’s is not 0" if len(own) < len(both) else ""
    count_of = "systems with a smaller variance by SWRB"
    rows = [(count_of, "", Cell(f"{smaller} of {len(both)}"), _share(exact), _share(theirs))]
    for name, of, key in (("least", min, "min"), ("median", statistics.median, "median"), ("greatest", max, "max")):
        enumerated, printed = of(exact) if exact else None, systems.printed.get(f"variance_ratio_{key}")
        measured = Cell(significant(of(own)))
        rows.append((f"variance ratio, {name}", zero, measured, significant(enumerated), significant(printed)))
    actions = sorted({system.action for system in systems.own}, key=natural)
    for action in actions:
        members = [system for system in systems.own if system.action == action]
        variance = _ratio_of_means(members, "plain_variance", "swrb_variance")
        cost = _ratio_of_means(members, "swrb_evaluations", "plain_evaluations")
        gain = variance / cost if variance is not None and cost else None
        for name, quantity, enumerated_value, key in (
            ("evaluations ratio", "evaluation_ratio", cost, "kernel_pair_evaluations_ratio"),
            ("efficiency: variance for evaluations, ratio of means", "efficiency", gain, "variance_cost_advantage"),
        ):
            beside = (significant(enumerated_value), significant(systems.printed.get(key)))
            of_action = f"of {action}" if len(actions) > 1 else ""
            rows.append((name, of_action, ratio_cell(estimates.get(quantity, action)), *beside))
    kept = [True, True, bool(exact), bool(systems.printed)]
    heads = (
        label_column("of all systems"),
        Column("this study"),
        Column("exact", "", "the same of these systems by enumeration"),
        Column("published"),
    )
    lines = [
        Line(tuple(itertools.compress((Cell(name, under, left=True), cell, Cell(enumerated), Cell(printed)), kept)))
        for name, under, cell, enumerated, printed in rows
    ]
    title = "Residual branching on systems of known risk"
    return Table("swrb_validation", title, tuple(itertools.compress(heads, kept)), tuple(lines))


def systems_table(systems: Systems) -> Table:
    """Exact and estimated risks of every system, each estimate's distance in its own standard errors."""
    groups = [("this study", systems.own), ("published", systems.published)]
    lines = [
        Line(
            (
                text_cell(f"{one.doc} · {one.action}" if one.action and one.action != one.doc else one.doc),
                Cell(fixed(100 * one.exact, 2)),
                *(_estimate_cell(one, estimator) for estimator in _ESTIMATORS),
                Cell(significant(one.variance_ratio), _exactly(one)),
            ),
            group if systems.published else "",
        )
        for group, members in groups
        for one in members
    ]
    columns = (
        label_column("system"),
        Column("exact R", "%", "by enumeration"),
        Column("R (coupled)", "%", "mean of its replicates; under it the error in standard errors"),
        Column("R (SWRB)", "%", "mean of its replicates; under it the error in standard errors"),
        Column("variance ratio", "×", "variance of a coupled pair / of an SWRB replicate; of the published, see ranks"),
    )
    records = [
        {
            "source": group,
            "action": one.action or None,
            "doc": one.doc,
            "exact_risk": one.exact,
            **{f"{estimator}_risk": one.estimates.get(estimator) for estimator in _ESTIMATORS},
            **{f"{estimator}_variance": one.variances.get(estimator) for estimator in _ESTIMATORS},
            "variance_ratio": one.variance_ratio,
            "exact_variance_ratio": one.exact_ratio,
        }
        for group, members in groups
        for one in members
    ]
    return Table("swrb_systems", "Every system", columns, tuple(lines), "", tuple(records))


def ratios_table(systems: Systems) -> Table | None:
    """Variance ratios by rank, beside the paper's of the same rank; None without SWRB."""
    if not systems.ratios:
        return None
    own, theirs = systems.ratios, systems.published_ratios
    ranks = range(max(len(own), len(theirs)))
    records = [
        {
            "rank": rank + 1,
            "variance_ratio": own[rank] if rank < len(own) else None,
            "published": theirs[rank] if rank < len(theirs) else None,
        }
        for rank in ranks
    ]
    lines = [
        Line((
            Cell(count(row["rank"])), Cell(significant(row["variance_ratio"])), Cell(significant(row["published"])),
        ))
        for row in records
    ]  # fmt: skip
    columns = (Column("rank"), Column("this study", "×"), Column("published", "×"))
    return Table("swrb_ratios", "Variance ratios by rank", columns, tuple(lines), "", tuple(records))


def _system(action: str, doc: str, members: list[Row], ratio: float | None, exact: dict[str, float]) -> System:
    known = [row for row in members if row["risk_variance"] is not None]
    return System(
        action,
        doc,
        members[0]["stratum"],
        members[0]["exact_risk"],
        {row["estimator"]: row["risk"] for row in members},
        {row["estimator"]: row["risk_variance"] for row in known},
        {row["estimator"]: (row["risk_variance"] / row["replicates"]) ** 0.5 for row in known},
        ratio,
        exact,
    )


def _with_published(own: list[System], source: StudyRows, facts: Facts) -> Systems:
    rows = [
        row
        for row in source.views.rows("published").to_pylist()
        if row["study"] == _STUDY and is_model(facts.model, row["model"]) and facts.windows.horizon == _HORIZON
    ]
    by_system: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["stratum"] is not None:
            by_system.setdefault(row["stratum"], {})[row["quantity"]] = row["value"]
    published = [
        System("", name, "", values["exact_risk"], {kind: values[_PAPERS_NAMES[kind]] for kind in _ESTIMATORS})
        for name, values in sorted(by_system.items(), key=lambda item: natural(item[0]))
    ]
    ratios = sorted(row["value"] for row in rows if row["quantity"] == "variance_ratio_sorted")
    printed = {row["quantity"]: row["value"] for row in rows if row["stratum"] is None and row["x"] is None}
    return Systems(own, published, ratios, printed)


def _share(ratios: Sequence[float]) -> str:
    return f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"


def _ratio_of_means(systems: Sequence[System], above: str, below: str) -> float | None:
    """Ratio of exact values' means: systems of a stratum with equal weight, then strata with equal weight."""
    if any(name not in system.enumerated for system in systems for name in (above, below)):
        return None
    means = []
    for name in (above, below):
        strata: dict[str, list[float]] = {}
        for system in systems:
            strata.setdefault(system.stratum, []).append(system.enumerated[name])
        means.append(statistics.fmean(statistics.fmean(values) for values in strata.values()))
    return means[0] / means[1] if means[1] else None


def _exactly(one: System) -> str:
    return "" if one.exact_ratio is None else f"exactly {significant(one.exact_ratio)}"


def _estimate_cell(one: System, estimator: str) -> Cell:
    value, error = one.estimates.get(estimator), one.errors.get(estimator)
    if value is None:
        return Cell(MISSING)
    apart = f"{fixed((value - one.exact) / error, 1)} errors" if error else ""
    return Cell(fixed(100 * value, 2), apart)
