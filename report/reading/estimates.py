"""The views of a study, and its estimates by quantity; a point from a view replaces a missing estimate.

The report does not know how a view is computed or stored. Columns are read strictly: a view without a column of its
contract is a ``KeyError``, never a dash on the page.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Protocol

import pyarrow as pa

from kvdrift.schema.study import POOLED
from kvdrift.stats.bootstrap import EXPLORATORY, PRESPECIFIED, SEEN
from kvdrift.stats.ends import SKEWED
from kvdrift.stats.quantities import ALL_QUANTITIES, PAIR_QUANTITIES, SIMULTANEOUS_GAP
from kvdrift.stats.registry import Quantity

ViewRow = dict[str, Any]


class ViewSource(Protocol):
    """An object that returns the rows of a named view."""

    def rows(self, view: str, columns: Sequence[str] = (), /, **equal: object) -> pa.Table:
        """Return the rows of ``view`` whose columns equal the given values, sorted by the view's grain, its key.

        A list matches any of its values. The rows have the given ``columns``, by default all of the view's.
        """
        ...


def installed_versions() -> dict[str, str]:
    """Return the installed versions of the libraries that make the page's numbers and figures."""
    versions = {}
    for name in ("kvdrift", "duckdb", "matplotlib", "numpy", "pyarrow", "scipy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@dataclass(frozen=True)
class Provenance:
    """The page's facts about the store: its name, table versions, library versions, and incomplete replicates."""

    store: str = ""
    tables: Mapping[str, int] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=installed_versions)
    waiting: str = ""  # the study's replicates that lack positions, counted in words; empty if there are none


@dataclass(frozen=True)
class StudyRows:
    """The views of one study and one model."""

    views: ViewSource
    study: str
    model: str

    def of(self, view: str, **equal: object) -> list[ViewRow]:
        """Return the rows of ``view`` for this study and model whose columns equal the given values."""
        rows: list[ViewRow] = self.views.rows(view, study=self.study, model=self.model, **equal).to_pylist()
        return rows

    def columns_of(self, view: str, *columns: str, **equal: object) -> pa.Table:
        """Return the rows that ``of`` returns, with these ``columns`` alone, as an Arrow table.

        It is for callers who read very many rows.
        """
        return self.views.rows(view, columns, study=self.study, model=self.model, **equal)

    def of_study(self, view: str) -> list[ViewRow]:
        """Return this study's rows of a view that has no model column."""
        rows: list[ViewRow] = self.views.rows(view, study=self.study).to_pylist()
        return rows


FEW_CLUSTERS = 20  # intervals over fewer clusters are marked

_Series = tuple[str, str, str, str | None]


@dataclass(frozen=True)
class Estimate:
    """A number of the page with its interval and status, and the paper's number beside it; unknown parts are None."""

    stratum: str
    action: str
    baseline: str | None
    quantity: str
    x: int | None = None
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    draws: int | None = None
    documents: int | None = None
    family: str | None = None
    status: str | None = None
    interval: str | None = None
    clusters: int | None = None
    estimate_reduced: float | None = None
    low_reduced: float | None = None
    high_reduced: float | None = None
    published: float | None = None
    published_low: float | None = None
    published_high: float | None = None

    @property
    def has_interval(self) -> bool:
        """Whether both ends are known."""
        return self.low is not None and self.high is not None

    @property
    def standing(self) -> str:
        """``prespecified`` or ``seen`` if the plan named the estimate and its level is family-adjusted.

        It is ``seen`` if its outcomes were known when the plan named it. Every other estimate is ``exploratory``.
        """
        planned = self.family is not None and self.status in {PRESPECIFIED, SEEN}
        return str(self.status) if planned else EXPLORATORY

    @property
    def of_few_clusters(self) -> bool:
        """Whether the interval rests on too few clusters for its coverage to be sure."""
        return self.has_interval and self.clusters is not None and self.clusters < FEW_CLUSTERS

    @property
    def is_skewed(self) -> bool:
        """Whether a few documents decide the estimate: its interval may hold the truth less often than its level."""
        return self.interval == SKEWED

    @property
    def reduced(self) -> Estimate:
        """The variance-reduced estimate as a separate estimate."""
        return Estimate(
            self.stratum, self.action, self.baseline, self.quantity, self.x, self.estimate_reduced, self.low_reduced,
            self.high_reduced, self.level, self.draws, self.documents, self.family, self.status, self.interval,
            self.clusters,
        )  # fmt: skip

    def excludes_zero(self) -> bool:
        """Whether the interval excludes zero; false without an interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def as_row(self) -> ViewRow:
        """Return all fields by name, for a CSV file."""
        return {name: getattr(self, name) for name in ESTIMATE_COLUMNS}  # asdict would take 20 times as long

    def as_columns(self) -> ViewRow:
        """Return the estimate and its ends under the quantity's name, for a file with a line for each action."""
        return {self.quantity: self.estimate, f"{self.quantity}_low": self.low, f"{self.quantity}_high": self.high}


ESTIMATE_COLUMNS = tuple(Estimate.__dataclass_fields__)
_STORED = tuple(name for name in ESTIMATE_COLUMNS if not name.startswith("published"))


class ReportedEstimates:
    """Estimates by quantity. A missing estimate is returned without a number, so that the page shows a gap."""

    def __init__(self, rows: Iterable[Estimate]) -> None:
        self._series: dict[_Series, dict[int | None, Estimate]] = {}
        for row in rows:
            series = (row.quantity, row.stratum, row.action, row.baseline)
            self._series.setdefault(series, {})[row.x] = row
        self.stale: list[str] = []  # the actions whose stored estimates are older than their events
        # The number of pairs of actions whose intervals hold for all pairs together. This number is counted once,
        # since the verdict asks for it at each pair of actions.
        self.pairs = sum(quantity == SIMULTANEOUS_GAP for quantity, *_ in self._series) // 2

    def get(
        self, quantity: str, action: str, baseline: str | None = None, *, stratum: str = POOLED, x: int | None = None
    ) -> Estimate:
        """Return the estimate of a quantity; if it is missing, an estimate without a number."""
        estimate = self._series.get((quantity, stratum, action, baseline), {}).get(x)
        return estimate or Estimate(stratum, action, baseline, quantity, x)

    def profile(
        self, quantity: str, action: str, baseline: str | None = None, *, stratum: str = POOLED
    ) -> list[Estimate]:
        """Return the known estimates of a profile, in the order of their positions, lags or blocks."""
        series = self._series.get((quantity, stratum, action, baseline), {})
        return [series[x] for x in sorted(x for x in series if x is not None) if series[x].estimate is not None]

    def has(self, quantity: str, action: str, baseline: str | None = None) -> bool:
        """Tell whether there is a pooled estimate of a quantity, with or without a number."""
        return (quantity, POOLED, action, baseline) in self._series

    def all(self) -> list[Estimate]:
        """Return all estimates, in a fixed order."""
        return [
            self._series[series][x]
            for series in sorted(self._series, key=lambda key: (key[0], key[1] != POOLED, *key[1:3], key[3] or ""))
            for x in sorted(self._series[series], key=lambda x: -1 if x is None else x)
        ]

    def known(self, *quantities: str) -> bool:
        """Tell whether at least one of ``quantities`` has a number, under whatever action and in whatever stratum."""
        return any(row.estimate is not None for row in self.all() if row.quantity in quantities)

    @property
    def reduced(self) -> ReportedEstimates:
        """Return the variance-reduced estimates; estimates that have none are left out."""
        return ReportedEstimates(row.reduced for row in self.all() if row.estimate_reduced is not None)

    def add_published(self, rows: Iterable[ViewRow]) -> None:
        """Put the paper's numbers, which are rows of view ``published_comparison``, beside their estimates."""
        for row in rows:
            series = self._series.get((row["quantity"], row["stratum"], row["action"], row["baseline"]), {})
            if row["x"] in series:
                numbers = {name: row[name] for name in ("published", "published_low", "published_high")}
                series[row["x"]] = replace(series[row["x"]], **numbers)

    @property
    def have_published(self) -> bool:
        """Whether any estimate has a number of the paper beside it."""
        return any(row.published is not None for row in self.all())

    @property
    def have_intervals(self) -> bool:
        """Whether any estimate has an interval."""
        return any(row.has_interval for row in self.all())


def read_estimates(
    source: StudyRows, split: str, actions: list[str], *, planned: bool, branched: bool
) -> ReportedEstimates:
    """Read the estimates of a split; a quantity that lacks estimates of some action is read from its view.

    Unless the study is ``planned``, nothing counts as prespecified. Unless the study has units of residual branching
    (``branched``), the views of residual branching are not computed, since they have no rows.
    """
    wanted = set(actions)
    analyzed = ReportedEstimates(
        _from_stored(row, planned=planned)
        for row in source.of("estimates", split=split)
        if row["action"] in wanted and (row["baseline"] is None or row["baseline"] in wanted)
    )
    points: list[Estimate] = []
    by_view: dict[str, list[Quantity]] = defaultdict(list)
    for quantity in (ALL_QUANTITIES if branched else PAIR_QUANTITIES).values():
        if quantity.view is not None:
            by_view[quantity.view].append(quantity)
    for view, quantities in by_view.items():
        # The decomposition is always read: if its R differs from the stored R, the estimates are stale.
        if view == "decomposition" or not _covers(analyzed, quantities, actions):
            rows = [row for row in source.of(view, split=split) if row.get("doc") is None]  # of all documents
            points += [_from_view(row, quantity) for row in rows if row["action"] in wanted for quantity in quantities]
    merged = ReportedEstimates([*points, *analyzed.all()])
    merged.stale = _stale(points, analyzed)
    return merged


def _from_stored(row: ViewRow, *, planned: bool) -> Estimate:
    return Estimate(**({name: row[name] for name in _STORED} | ({} if planned else {"status": EXPLORATORY})))


def _from_view(row: ViewRow, quantity: Quantity) -> Estimate:
    baseline = row["baseline"] if quantity.kind == "contrast" else None
    x = row[quantity.axis] if quantity.axis else None
    value, documents = row[quantity.column], row.get("documents")  # profiles do not give a number of documents
    return Estimate(row["stratum"], row["action"], baseline, quantity.name, x, value, documents=documents)


def _covers(analyzed: ReportedEstimates, quantities: Sequence[Quantity], actions: list[str]) -> bool:
    """Tell whether every action has an estimate of every quantity; contrasts count only if all have one baseline."""
    baselines: list[str | None] = list(actions) if quantities[0].kind == "contrast" else [None]
    return any(
        all(
            analyzed.has(quantity.name, action, base) for quantity in quantities for action in actions if action != base
        )
        for base in baselines
    )


def _stale(points: list[Estimate], analyzed: ReportedEstimates) -> list[str]:
    """Return the actions whose stored R differs from the view's R, since events were added after the analysis."""
    stale = set()
    for point in points:
        if point.quantity != "mismatch" or point.stratum != POOLED or point.estimate is None:
            continue
        stored = analyzed.get("mismatch", point.action).estimate
        if stored is not None and not math.isclose(stored, point.estimate, rel_tol=1e-6, abs_tol=1e-9):
            stale.add(point.action)
    return sorted(stale)
