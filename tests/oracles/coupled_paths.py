"""Coupled pairs of a log and their moments, by plain loops over positions.

A path is a list of laws and tokens by position, a moment is a function of one path, and M(g) is the explicit weighted
sum over documents: no joins, no cumulative sums, no lags stored beforehand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fixtures.awkward_logs import Log, Row

Functional = Callable[["Path"], float]
POOLED = "pooled"


@dataclass
class WindowRanges:
    """The windows of one study and model, as ranges."""

    horizon: int
    cohort_bound: int
    early: range
    late: range
    blocks: tuple[range, range, range]
    run: int
    threshold: float


@dataclass
class Path:
    """One coupled pair; ``at[t]`` is the event at position t."""

    study: str
    model: str
    doc: str
    action: str
    replicate: int
    at: dict[int, Row]
    repeated: bool
    document: Row = field(default_factory=dict)

    @property
    def horizon(self) -> int:
        """H, the last position."""
        return max(self.at)

    @property
    def unit(self) -> int | None:
        """The unit that all of its events are of; None if there is none."""
        (unit,) = {row["unit"] for row in self.at.values()}
        return unit if unit is None else int(unit)

    @property
    def complete(self) -> bool:
        """Tell whether each position 1..H is present exactly once."""
        return not self.repeated and all(t in self.at for t in range(1, self.horizon + 1))

    def mismatch(self, t: int) -> int:
        """I_t."""
        return 1 if self.at[t]["x_token"] != self.at[t]["y_token"] else 0

    def delta(self, t: int) -> float:
        """TV of the two laws, each on its own history."""
        return float(self.at[t]["delta"])

    def f(self, t: int) -> float:
        """TV of the two laws on the reference's history."""
        return float(self.at[t]["f"])

    def known(self) -> list[int]:
        """The positions whose KL is known: t <= min(H, e_X), unless the log does not have it."""
        return [t for t in sorted(self.at) if self.at[t].get("kl") is not None]

    def kl(self, t: int) -> float:
        """KL of the two laws on the reference's history."""
        return float(self.at[t]["kl"])

    def kl_own(self, t: int) -> float:
        """KL of the two laws, each on its own history."""
        return float(self.at[t]["kl_own"])

    @functools.cached_property
    def tau(self) -> int | None:
        """The first t with I_t = 1."""
        for t in sorted(self.at):
            if self.mismatch(t):
                return t
        return None

    def eos(self, side: str) -> int | None:
        """The first EOS position of side x or y."""
        for t in sorted(self.at):
            if self.at[t][f"{side}_eos"]:
                return t
        return None

    @property
    def first_eos(self) -> int:
        """The smaller EOS position e, none counting as H + 1."""
        return min(self.eos("x") or self.horizon + 1, self.eos("y") or self.horizon + 1)

    @property
    def last_eos(self) -> int:
        """The larger EOS position e', none counting as H + 1."""
        return max(self.eos("x") or self.horizon + 1, self.eos("y") or self.horizon + 1)

    def eos_set(self, t: int) -> int:
        """Which of S_0..S_3 holds t."""
        if t < self.first_eos:
            return 0
        if t == self.first_eos:
            return 1
        return 2 if t <= self.last_eos else 3

    def after_divergence(self) -> list[int]:
        """Return the mismatch indicators at tau < t < e, up to H, at the present positions."""
        tau = self.tau
        return [] if tau is None else [self.mismatch(t) for t in sorted(self.at) if tau < t < self.first_eos]

    @property
    def longest_agreement(self) -> int | None:
        """The longest run of agreements after divergence and before EOS."""
        if self.tau is None:
            return None
        longest = current = 0
        for mismatch in self.after_divergence():
            current = 0 if mismatch else current + 1
            longest = max(longest, current)
        return longest

    @property
    def mismatch_after_agreement(self) -> bool | None:
        """Whether some agreement after divergence is followed by a mismatch before EOS."""
        if self.tau is None:
            return None
        indicators = self.after_divergence()
        return any(
            indicators[i] == 0 and indicators[j] == 1
            for i in range(len(indicators))
            for j in range(i + 1, len(indicators))
        )

    def sum(self, value: Callable[[int], float]) -> float:
        """Sum over all positions."""
        return math.fsum(value(t) for t in self.at)


def all_paths(log: Log) -> list[Path]:
    found: dict[tuple[Any, ...], Path] = {}
    for event in log.events:
        if event["kind"] != "coupled":
            continue
        key = tuple(event[name] for name in ("study", "model", "doc", "action", "replicate"))
        if key not in found:
            found[key] = Path(*key, at={}, repeated=False)
        found[key].repeated |= event["t"] in found[key].at
        found[key].at[event["t"]] = event
    return list(found.values())


def windows_of(log: Log, paths: list[Path]) -> dict[tuple[str, str], WindowRanges]:
    longest: dict[tuple[str, str], int] = {}
    for path in paths:
        if path.complete:
            longest[path.study, path.model] = max(path.horizon, longest.get((path.study, path.model), 0))
    found = {}
    for key, h in longest.items():
        half, quarter, eighth = h // 2, h // 4, h // 8
        found[key] = WindowRanges(
            horizon=h,
            cohort_bound=half,
            early=range(1, eighth + 1),
            late=range(half - eighth + 1, half + 1),
            blocks=(range(1, quarter + 1), range(quarter + 1, half + 1), range(half + 1, h + 1)),
            run=16,
            threshold=0.99,
        )
    for row in log.studies:
        first, second = row["first_block_last"], row["second_block_last"]
        found[row["study"], row["model"]] = WindowRanges(
            horizon=row["horizon"],
            cohort_bound=row["cohort_bound"],
            early=range(1, row["early_last"] + 1),
            late=range(row["late_first"], row["cohort_bound"] + 1),
            blocks=(range(1, first + 1), range(first + 1, second + 1), range(second + 1, row["horizon"] + 1)),
            run=row["agreement_run"],
            threshold=row["saturation_threshold"],
        )
    return found


class Analysis:
    """The paths that enter, by study and model, with their documents; computed once per log."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.paths_of_all = all_paths(log)
        self.windows = windows_of(log, self.paths_of_all)
        self.paths: list[Path] = []
        for path in self.paths_of_all:
            for document in log.documents:
                if all(document[name] == getattr(path, name) for name in ("study", "model", "doc")):
                    path.document = document
            enters = path.complete and path.horizon == self.windows[path.study, path.model].horizon
            if enters and path.document:
                self.paths.append(path)

    def window(self, path: Path) -> WindowRanges:
        """The windows of a path's study."""
        return self.windows[path.study, path.model]

    def by_document(self, paths: list[Path]) -> dict[tuple[str, ...], list[Path]]:
        """Paths by document and action."""
        found: dict[tuple[str, ...], list[Path]] = {}
        for path in paths:
            found.setdefault((path.study, path.model, path.doc, path.action), []).append(path)
        return found

    def pools(self) -> Iterator[tuple[Row, Pool, WindowRanges]]:
        """Every (study, model, split, stratum or pooled, action) with its pool."""
        seen = []
        for path in self.paths:
            for stratum in (path.document["stratum"], POOLED):
                keys = (path.study, path.model, path.document["split"], stratum, path.action)
                if keys not in seen:
                    seen.append(keys)
        for keys in seen:
            pool = Pool(self, *keys)
            yield dict(zip(("study", "model", "split", "stratum", "action"), keys, strict=True)), pool, pool.windows

    def pairs(self) -> Iterator[tuple[Row, Pool, Pool, WindowRanges]]:
        """Every pair of different actions that share documents: the action's pool and the baseline's."""
        pools = list(self.pools())
        for keys, pool, windows in pools:
            for other_keys, other, _ in pools:
                same = all(keys[name] == other_keys[name] for name in ("study", "model", "split", "stratum"))
                shared = pool.docs & other.docs
                if same and keys["action"] != other_keys["action"] and shared:
                    own_pool, base_pool = pool.restricted(shared), other.restricted(shared)
                    named = {**keys, "baseline": other_keys["action"]}
                    yield named, own_pool, base_pool, windows


class Pool:
    """The documents of one action in one stratum, or in all of a split: M(g) = sum_d w_d mean_k g."""

    def __init__(
        self,
        analysis: Analysis,
        study: str,
        model: str,
        split: str,
        stratum: str,
        action: str,
        docs: set[str] | None = None,
    ) -> None:
        self.arguments = (analysis, study, model, split, stratum, action)
        self.windows = analysis.windows[study, model]
        self.paths = [
            path
            for path in analysis.paths
            if (path.study, path.model, path.action) == (study, model, action)
            and path.document["split"] == split
            and (stratum in (POOLED, path.document["stratum"]))
            and (docs is None or path.doc in docs)
        ]
        self.members: dict[str, list[Path]] = {}
        strata: dict[str, set[str]] = {}
        for path in self.paths:
            self.members.setdefault(path.doc, []).append(path)
            strata.setdefault(path.document["stratum"], set()).add(path.doc)
        self.weight = {
            doc: 1 / (len(strata) * len(strata[paths[0].document["stratum"]])) for doc, paths in self.members.items()
        }

    @property
    def docs(self) -> set[str]:
        """The documents of the pool."""
        return set(self.members)

    def restricted(self, docs: set[str]) -> Pool:
        """Return the pool over fewer documents, with the weights of these."""
        return Pool(*self.arguments, docs=docs)

    def mean(self, g: Functional) -> float:
        """M(g)."""
        total = 0.0
        for doc, paths in self.members.items():
            total += self.weight[doc] * sum(g(path) for path in paths) / len(paths)
        return total

    def ratio(self, above: Functional, below: Functional) -> float | None:
        """Return M(above) / M(below); None if the denominator is 0."""
        denominator = self.mean(below)
        return None if denominator == 0 else self.mean(above) / denominator


def mean_over(window: range, value: Callable[[int], float]) -> float | None:
    return math.fsum(value(t) for t in window) / len(window) if len(window) else None


def minus(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left - right


def share(part: float, whole: float) -> float | None:
    return None if abs(whole) < 1e-12 else part / whole


def diverged(path: Path) -> float:
    return 0.0 if path.tau is None else 1.0


def exposure(path: Path) -> float:
    return 0.0 if path.tau is None else (path.horizon - path.tau) / path.horizon


def occupation(path: Path) -> float:
    tau = path.tau
    if tau is None:
        return 0.0
    return sum(path.mismatch(t) for t in range(tau + 1, path.horizon + 1)) / path.horizon


def in_cohort(path: Path, windows: WindowRanges) -> bool:
    return path.tau is not None and path.tau <= windows.cohort_bound


def cohort_sum(
    path: Path, windows: WindowRanges, lags: range, value: Callable[[int], float], *, pre_eos: bool
) -> float:
    if not in_cohort(path, windows):
        return 0.0
    tau = path.tau or 0
    return math.fsum(value(tau + j) for j in lags if not pre_eos or tau + j < path.first_eos)


def eos_gap(path: Path, eos_set: int) -> float:
    positions = [t for t in path.at if path.eos_set(t) == eos_set]
    return math.fsum(path.delta(t) - path.f(t) for t in positions) / path.horizon


def observed(path: Path, depth: int) -> float:
    """Z_L of a plain coupled replicate."""
    tau, h = path.tau, path.horizon
    if tau is None:
        return 0.0
    return sum(path.mismatch(tau + j) for j in range(min(depth, h - tau + 1))) / h


def capacity(path: Path, depth: int) -> float:
    """W_L of a plain coupled replicate."""
    tau, h = path.tau, path.horizon
    return 0.0 if tau is None else max(0, h - tau - depth + 1) / h
