"""The residual-branching tables and views, evaluated from the definitions by plain loops over raw events.

A branching is a scan and its branch by position, an estimate is a function of one branching, and means are explicit
weighted sums.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fixtures.awkward_logs import Row
from oracles.coupled_paths import POOLED, Analysis, occupation
from oracles.view_definitions import identified_interval, interval_row

NAMES = ("study", "model", "doc", "action", "replicate")


@dataclass
class Branching:
    """One SWRB replicate: the events of its scan and of its branch, in any order."""

    names: Row
    scan: list[Row] = field(default_factory=list)
    branch: list[Row] = field(default_factory=list)
    document: Row = field(default_factory=dict)

    @property
    def horizon(self) -> int:
        """H: the last position present."""
        return int(max(row["t"] for row in [*self.scan, *self.branch]))

    @property
    def scanned(self) -> int:
        """The last position of the scan."""
        return max((row["t"] for row in self.scan), default=0)

    @property
    def mass(self) -> float:
        """M."""
        return math.fsum(row["weight"] for row in self.scan)

    @property
    def start(self) -> int | None:
        """J."""
        return min((row["t"] for row in self.branch), default=None)

    @property
    def complete(self) -> bool:
        """Whether all positions of the scan, and of the branch if there is mass, occur once."""
        stopped = any(row["t"] == self.scanned and row["x_token"] == -1 for row in self.scan)
        positions, branched = (sorted(row["t"] for row in own) for own in (self.scan, self.branch))
        whole_scan = positions == list(range(1, self.scanned + 1)) and (self.scanned == self.horizon or stopped)
        wanted = list(range(self.start or 1, self.horizon + 1)) if self.mass > 0 else []
        return self.scanned > 0 and whole_scan and branched == wanted

    def mismatches(self, depth: int) -> int:
        """The sum of I_{J+j} over 0 <= j < L."""
        start = self.start or 0
        return sum(row["x_token"] != row["y_token"] for row in self.branch if row["t"] - start < depth)

    def observed(self, depth: int) -> float:
        """Z_L = (M/H) sum_{j < l_J} I_{J+j}."""
        return self.mass / self.horizon * self.mismatches(depth)

    def capacity(self, depth: int) -> float:
        """W_L = (1/H) sum_s w_s (H - s - L + 1)_+."""
        h = self.horizon
        return math.fsum(row["weight"] * max(0, h - row["t"] - depth + 1) for row in self.scan) / h

    @property
    def unit(self) -> int | None:
        """The unit that all of its events are of; None if there is none."""
        (unit,) = {row.get("unit") for row in [*self.scan, *self.branch]}
        return unit

    @property
    def risk(self) -> float:
        """Z^R = Z_H."""
        return self.observed(self.horizon)


def branchings_of(events: list[Row]) -> list[Branching]:
    """Return all SWRB replicates of a log, by key."""
    found: dict[tuple[Any, ...], Branching] = {}
    for event in events:
        if event["kind"] != "coupled":
            key = tuple(event[name] for name in NAMES)
            one = found.setdefault(key, Branching(dict(zip(NAMES, key, strict=True))))
            (one.scan if event["kind"] == "scan" else one.branch).append(event)
    return [found[key] for key in sorted(found)]


def branching_rows(events: list[Row]) -> list[Row]:
    """The rows of the table ``branchings``."""
    return [
        {
            **one.names, "action_revision": 0, "unit": one.unit, "horizon": one.horizon, "complete": one.complete, "scanned": one.scanned, "mass": one.mass,
            "branch": one.start, "mismatches": one.mismatches(one.horizon),
        }
        for one in branchings_of(events)
    ]  # fmt: skip


def branching_depth_rows(events: list[Row]) -> list[Row]:
    """The rows of the table ``branching_depths``."""
    return [
        {
            **one.names,
            "action_revision": 0,
            "unit": one.unit,
            "depth": depth,
            "observed": one.observed(depth),
            "capacity": one.capacity(depth),
        }
        for one in branchings_of(events)
        for depth in range(1, one.horizon + 1)
    ]


def entering(analysis: Analysis) -> list[Branching]:
    """The replicates that enter estimates, with their documents."""
    found = []
    for one in branchings_of(analysis.log.events):
        for row in analysis.log.documents:
            if all(row[name] == one.names[name] for name in ("study", "model", "doc")):
                one.document = row
        horizon = analysis.windows[one.names["study"], one.names["model"]].horizon
        if one.complete and one.document and one.horizon == horizon:
            found.append(one)
    return found


def branchings(analysis: Analysis) -> list[Row]:
    return branching_rows(analysis.log.events)


def branching_depths(analysis: Analysis) -> list[Row]:
    return branching_depth_rows(analysis.log.events)


def analyzed_branchings(analysis: Analysis) -> Iterator[Row]:
    whole = {tuple(row[name] for name in NAMES): row for row in branchings(analysis)}
    for one in entering(analysis):
        row = whole[tuple(one.names[name] for name in NAMES)]
        kept = {name: value for name, value in row.items() if name not in {"action_revision", "unit", "complete"}}
        yield kept | {name: one.document[name] for name in ("split", "stratum", "cluster")}


@dataclass
class Replicate:
    """The estimates of one replicate by both estimators."""

    risk: float
    occurrence: float
    occupation: float
    mass: float
    positions: int | None = None


Cell = tuple[str, str, str, str, str]  # study, model, doc, action, estimator


def cells(analysis: Analysis) -> dict[Cell, tuple[Row, list[Replicate]]]:
    """The document and the replicates of every document, action and estimator."""
    found: dict[Cell, tuple[Row, list[Replicate]]] = {}
    for path in analysis.paths:
        h, tau = path.horizon, path.tau
        positions = [t for t in path.at if t == 1 or not (path.at[t - 1]["x_eos"] and path.at[t - 1]["y_eos"])]
        entered = float(tau is not None)
        risk = sum(path.mismatch(t) for t in path.at) / h
        one = Replicate(risk, entered / h, occupation(path), entered, len(positions))
        key = (path.study, path.model, path.doc, path.action, "plain")
        found.setdefault(key, (path.document, []))[1].append(one)
    for branching in entering(analysis):
        occurrence = branching.mass / branching.horizon
        one = Replicate(branching.risk, occurrence, branching.risk - occurrence, branching.mass)
        study, model, doc, action = (str(branching.names[name]) for name in ("study", "model", "doc", "action"))
        key = (study, model, doc, action, "swrb")
        found.setdefault(key, (branching.document, []))[1].append(one)
    return found


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def per_replicate(units: list[Row], name: str) -> float | None:
    if not units or any(row[name] is None for row in units):
        return None
    return float(sum(row[name] for row in units) / sum(row["replicates"] for row in units))


def swrb(analysis: Analysis) -> Iterator[Row]:
    for key, (declared, replicates) in cells(analysis).items():
        names = dict(zip(("study", "model", "doc", "action", "estimator"), key, strict=True))
        units = [row for row in analysis.log.units if all(row[name] == names[name] for name in names)]
        exact = [
            row["value"]
            for row in analysis.log.exact_values
            if all(row[name] == names[name] for name in ("study", "model", "doc", "action"))
            and (row["quantity"], row["x"]) == ("mismatch", None)
        ]
        evaluations = per_replicate(units, "pair_evaluations")
        if evaluations is None and names["estimator"] == "plain":
            evaluations = mean([float(one.positions or 0) for one in replicates])
        risks = [one.risk for one in replicates]
        yield {
            **names,
            "split": declared["split"],
            "stratum": declared["stratum"],
            "replicates": len(replicates),
            "risk": mean(risks),
            "risk_variance": statistics.variance(risks) if len(risks) > 1 else None,
            "occurrence": mean([one.occurrence for one in replicates]),
            "occupation": mean([one.occupation for one in replicates]),
            "divergence_probability": mean([one.mass for one in replicates]),
            "exact_risk": exact[0] if exact else None,
            "evaluations": evaluations,
            "seconds": per_replicate(units, "decode_seconds"),
        }


def pooled_by_document(rows: list[Row]) -> Iterator[tuple[Row, list[tuple[float, Row]]]]:
    """Every stratum, and all of a split, of every action: its keys and the rows of its documents with their weights."""
    levels: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        for stratum in (row["stratum"], POOLED):
            key = (row["study"], row["model"], row["split"], stratum, row["action"])
            levels.setdefault(key, []).append(row)
    for key, members in levels.items():
        strata = [row["stratum"] for row in members]
        weighted = [(1 / (len(set(strata)) * strata.count(row["stratum"])), row) for row in members]
        yield dict(zip(("study", "model", "split", "stratum", "action"), key, strict=True)), weighted


def weighted_mean(weighted: list[tuple[float, Row]], name: str) -> float | None:
    if any(row[name] is None for _, row in weighted):
        return None
    return math.fsum(weight * row[name] for weight, row in weighted)


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None or below == 0 else above / below


def side_by_side(analysis: Analysis) -> list[Row]:
    """The SWRB rows of ``swrb``, with the plain row of the same document under ``plain``."""
    rows = [*swrb(analysis)]
    names = ("study", "model", "doc", "action")
    plain = {tuple(row[name] for name in names): row for row in rows if row["estimator"] == "plain"}
    return [
        row | {"plain": plain.get(tuple(row[name] for name in names))} for row in rows if row["estimator"] == "swrb"
    ]


def swrb_efficiency(analysis: Analysis) -> Iterator[Row]:
    documents = []
    for row in side_by_side(analysis):
        if row["plain"] and min(row["replicates"], row["plain"]["replicates"]) >= 2:
            named = {f"plain_{name}": row["plain"][name] for name in ("risk_variance", "evaluations", "seconds")}
            documents.append(row | named)
    keys = ("study", "model", "split", "stratum", "action")
    levels = [({name: row[name] for name in keys}, row["doc"], [(1.0, row)]) for row in documents]
    levels += [(named, None, weighted) for named, weighted in pooled_by_document(documents)]
    for named, doc, weighted in levels:
        variance = ratio(weighted_mean(weighted, "plain_risk_variance"), weighted_mean(weighted, "risk_variance"))
        evaluations, seconds = (
            ratio(weighted_mean(weighted, name), weighted_mean(weighted, f"plain_{name}"))
            for name in ("evaluations", "seconds")
        )
        yield {
            **named, "doc": doc, "documents": len(weighted), "variance_ratio": variance,
            "evaluation_ratio": evaluations, "second_ratio": seconds, "efficiency": ratio(variance, evaluations),
            "efficiency_in_seconds": ratio(variance, seconds),
        }  # fmt: skip


def swrb_risk(analysis: Analysis) -> Iterator[Row]:
    documents = []
    for row in side_by_side(analysis):
        plain, error = row["plain"], None
        if plain and row["risk_variance"] is not None and plain["risk_variance"] is not None:
            error = row["risk_variance"] / row["replicates"] + plain["risk_variance"] / plain["replicates"]
        documents.append(row | {"plain_risk": plain and plain["risk"], "error": error})
    for named, weighted in pooled_by_document(documents):
        known = all(row["error"] is not None for _, row in weighted)
        variance = math.fsum(weight**2 * row["error"] for weight, row in weighted) if known else None
        yield {
            **named,
            "documents": len(weighted),
            "replicates": sum(row["replicates"] for _, row in weighted),
            "mismatch": weighted_mean(weighted, "risk"),
            "occurrence": weighted_mean(weighted, "occurrence"),
            "occupation": weighted_mean(weighted, "occupation"),
            "divergence_probability": weighted_mean(weighted, "divergence_probability"),
            "plain_mismatch": weighted_mean(weighted, "plain_risk"),
            "monte_carlo_error": None if variance is None else math.sqrt(variance),
        }


def swrb_windows(analysis: Analysis) -> list[Row]:
    members: dict[tuple[str, ...], list[Branching]] = {}
    for one in entering(analysis):
        key = tuple(one.names[name] for name in ("study", "model", "doc", "action"))
        members.setdefault(key, []).append(one)
    documents = [
        {
            **dict(zip(("study", "model", "doc", "action"), key, strict=True)),
            "split": group[0].document["split"],
            "stratum": group[0].document["stratum"],
            "members": group,
        }
        for key, group in members.items()
    ]
    rows = []
    for named, weighted in pooled_by_document(documents):
        weights = [weight for weight, _ in weighted]
        h = weighted[0][1]["members"][0].horizon

        def pooled(g: Callable[[Branching], float], weighted: list[tuple[float, Row]] = weighted) -> float:
            return math.fsum(weight * mean([g(one) for one in row["members"]]) for weight, row in weighted)

        for depth in range(1, h + 1):
            below = pooled(lambda one, depth=depth: one.observed(depth))
            above = pooled(lambda one, depth=depth: one.capacity(depth))
            rows.append(
                named
                | {"depth": depth, "documents": len(weighted)}
                | interval_row(below, above, pooled(lambda one: one.risk), weights)
            )
    return rows


def depth_intervals(analysis: Analysis) -> list[Row]:
    return [
        {**row, "estimator": estimator}
        for estimator, rows in (("plain", identified_interval(analysis)), ("swrb", swrb_windows(analysis)))
        for row in rows
    ]


SWRB_EVALUATIONS: dict[str, Callable[[Analysis], Iterable[Row]]] = {
    function.__name__: function
    for function in (
        branchings, branching_depths, analyzed_branchings, swrb, swrb_efficiency, swrb_risk, swrb_windows,
        depth_intervals,
    )
}  # fmt: skip
