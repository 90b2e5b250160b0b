"""Finite-state systems whose exact quantities are known by enumeration, beside their estimates."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.facts import natural
from kvdrift.report.reading.published import is_model
from kvdrift.report.reading.source import ViewRow
from kvdrift.schema.tables import PLAIN, SWRB

_STUDY, _HORIZON = "finite-state", 3  # the paper's study and horizon in the view ``published``
ESTIMATORS = (PLAIN, SWRB)
_PAPERS_NAMES = {PLAIN: "naive_estimate", SWRB: "swrb_estimate"}


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
    """A study's finite-state systems, none for other models, and the paper's printed systems."""

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
        """Exact variance ratios of the systems that have one, ascending."""
        return sorted(ratio for ratio in (system.exact_ratio for system in self.own) if ratio is not None)


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
    found: dict[tuple[str, str], list[ViewRow]] = defaultdict(list)
    for row in rows:
        found[row["action"], row["doc"]].append(row)
    own = []
    for (action, doc), members in sorted(found.items(), key=lambda item: tuple(map(natural, item[0]))):
        exact, stratum = members[0]["exact_risk"], members[0]["stratum"]
        estimates = {row["estimator"]: row["risk"] for row in members}
        variances = {row["estimator"]: row["risk_variance"] for row in members if row["risk_variance"] is not None}
        counts = {row["estimator"]: row["replicates"] for row in members}
        errors = {estimator: (variance / counts[estimator]) ** 0.5 for estimator, variance in variances.items()}
        ratio, others = gains.get((action, doc)), enumerated[action, doc]
        own.append(System(doc, exact, estimates, action, stratum, variances, errors, ratio, others))
    return _with_published(own, content)


def _with_published(own: list[System], content: PageContent) -> Systems:
    if content.windows.horizon != _HORIZON:
        return Systems(own)
    found = content.source.views.rows("published", study=_STUDY).to_pylist()
    rows = [row for row in found if is_model(content.facts.model, row["model"])]
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
    return Systems(own, published, ratios, printed)
