"""Every column of every view, evaluated by plain loops over raw events and documents, straight from the definitions.

Nothing here shares a formulation with the views: no joins, no cumulative sums, no lags stored beforehand. A path is a
list of laws and tokens by position, a moment is a function of one path, and M(g) is the explicit weighted sum over
documents. ``awkward_log`` makes the logs that the two are compared on.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime as dt
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

Row = dict[str, Any]
Functional = Callable[["Path"], float]

EOS = 0
POOLED = "pooled"


@dataclass
class Log:
    """Raw tables as rows; what a store holds before anything is derived, and what analysis adds."""

    events: list[Row] = field(default_factory=list)
    documents: list[Row] = field(default_factory=list)
    actions: list[Row] = field(default_factory=list)
    units: list[Row] = field(default_factory=list)
    studies: list[Row] = field(default_factory=list)
    plans: list[Row] = field(default_factory=list)
    results: list[Row] = field(default_factory=list)
    calibration: list[Row] = field(default_factory=list)
    exact_values: list[Row] = field(default_factory=list)


@dataclass
class Windows:
    """The windows of one study and model."""

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
        """H: the last position that is there."""
        return max(self.at)

    @property
    def complete(self) -> bool:
        """Positions 1..H are all there, once."""
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

    @property
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
        """Mismatch indicators at tau < t < e, up to H and over positions that are there."""
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


# ------------------------------------------------------------------------------------------ paths, windows, documents


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


def windows_of(log: Log, paths: list[Path]) -> dict[tuple[str, str], Windows]:
    longest: dict[tuple[str, str], int] = {}
    for path in paths:
        if path.complete:
            longest[path.study, path.model] = max(path.horizon, longest.get((path.study, path.model), 0))
    found = {}
    for key, h in longest.items():
        half, quarter, eighth = h // 2, h // 4, h // 8
        found[key] = Windows(
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
        found[row["study"], row["model"]] = Windows(
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

    def window(self, path: Path) -> Windows:
        """The windows of a path's study."""
        return self.windows[path.study, path.model]

    def by_document(self, paths: list[Path]) -> dict[tuple[str, ...], list[Path]]:
        """Paths by document and action."""
        found: dict[tuple[str, ...], list[Path]] = {}
        for path in paths:
            found.setdefault((path.study, path.model, path.doc, path.action), []).append(path)
        return found

    def pools(self) -> Iterator[tuple[Row, Pool, Windows]]:
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

    def pairs(self) -> Iterator[tuple[Row, Pool, Pool, Windows]]:
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
        """The pool over fewer documents, with the weights that those have."""
        return Pool(*self.arguments, docs=docs)

    def mean(self, g: Functional) -> float:
        """M(g)."""
        total = 0.0
        for doc, paths in self.members.items():
            total += self.weight[doc] * sum(g(path) for path in paths) / len(paths)
        return total

    def ratio(self, above: Functional, below: Functional) -> float | None:
        """M(above) / M(below); None where that is 0."""
        denominator = self.mean(below)
        return None if denominator == 0 else self.mean(above) / denominator


def mean_over(window: range, value: Callable[[int], float]) -> float | None:
    return math.fsum(value(t) for t in window) / len(window) if len(window) else None


def minus(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left - right


def share(part: float, whole: float) -> float | None:
    return None if abs(whole) < 1e-12 else part / whole


# --------------------------------------------------------------------------------------------------- moments of a path


def diverged(path: Path) -> float:
    return 0.0 if path.tau is None else 1.0


def exposure(path: Path) -> float:
    return 0.0 if path.tau is None else (path.horizon - path.tau) / path.horizon


def occupation(path: Path) -> float:
    tau = path.tau
    if tau is None:
        return 0.0
    return sum(path.mismatch(t) for t in range(tau + 1, path.horizon + 1)) / path.horizon


def in_cohort(path: Path, windows: Windows) -> bool:
    return path.tau is not None and path.tau <= windows.cohort_bound


def cohort_sum(path: Path, windows: Windows, lags: range, value: Callable[[int], float], *, pre_eos: bool) -> float:
    if not in_cohort(path, windows):
        return 0.0
    tau = path.tau or 0
    return math.fsum(value(tau + j) for j in lags if not pre_eos or tau + j < path.first_eos)


def eos_gap(path: Path, eos_set: int) -> float:
    positions = [t for t in path.at if path.eos_set(t) == eos_set]
    return math.fsum(path.delta(t) - path.f(t) for t in positions) / path.horizon


def scalar_moments(path: Path, windows: Windows) -> dict[str, float | None]:
    h = path.horizon
    member = in_cohort(path, windows)
    early, late = windows.early, windows.late

    def window_mean(lags: range) -> float | None:
        return cohort_sum(path, windows, lags, path.delta, pre_eos=False) / len(lags) if len(lags) else None

    moments: dict[str, float | None] = {
        "mismatch": path.sum(path.mismatch) / h,
        "rollout_tv": path.sum(path.delta) / h,
        "fixed_history_tv": path.sum(path.f) / h,
        "diverged": diverged(path),
        "entry": float(path.tau or 0),
        "exposure": exposure(path),
        "occupation": occupation(path),
        "saturation": sum(1 for t in path.at if path.delta(t) > windows.threshold) / h,
        "cohort": float(member),
        "early_delta": window_mean(early),
        "late_delta": window_mean(late),
        "early_pre_eos_steps": cohort_sum(path, windows, early, lambda _: 1.0, pre_eos=True),
        "early_pre_eos_delta": cohort_sum(path, windows, early, path.delta, pre_eos=True),
        "late_pre_eos_steps": cohort_sum(path, windows, late, lambda _: 1.0, pre_eos=True),
        "late_pre_eos_delta": cohort_sum(path, windows, late, path.delta, pre_eos=True),
        "long_agreement": float(member and (path.longest_agreement or 0) >= windows.run),
        "mismatch_after_agreement": float(member and bool(path.mismatch_after_agreement)),
    }
    for eos_set in range(4):
        moments[f"eos_gap_{eos_set}"] = eos_gap(path, eos_set)
    for number, block in enumerate(windows.blocks, start=1):
        moments[f"block_{number}_delta"] = mean_over(block, path.delta)
        moments[f"block_{number}_f"] = mean_over(block, path.f)
        moments[f"block_{number}_mismatch"] = mean_over(block, path.mismatch)
    observed_positions = windows.blocks[0]
    moments["prefix_mismatch"] = sum(path.mismatch(t) for t in observed_positions) / h
    moments["prefix_diverged"] = float(any(path.mismatch(t) for t in observed_positions))
    for side in ("x", "y"):
        moments[f"prefix_eos_{side}"] = float(any(path.at[t][f"{side}_eos"] for t in observed_positions))
    return moments


def pooled_scalars(pool: Pool, windows: Windows) -> dict[str, float | None]:
    cache = {id(path): scalar_moments(path, windows) for path in pool.paths}
    found: dict[str, float | None] = {}
    for name in next(iter(cache.values())):
        if any(moments[name] is None for moments in cache.values()):
            found[name] = None
        else:
            found[name] = pool.mean(lambda path, name=name: cache[id(path)][name] or 0.0)  # type: ignore[misc]
    return found


# ------------------------------------------------------------------------------------- the derived tables, and views


def trajectories(analysis: Analysis) -> list[Row]:
    rows = []
    for path in analysis.paths_of_all:
        tau = path.tau
        rows.append(
            {
                **path_keys(path),
                "tau": tau,
                "eos_x": path.eos("x"),
                "eos_y": path.eos("y"),
                "horizon": path.horizon,
                "complete": path.complete,
                "mismatches": sum(path.mismatch(t) for t in path.at),
                "sum_delta": path.sum(path.delta),
                "sum_f": path.sum(path.f),
                "exposure": 0 if tau is None else path.horizon - tau,
                "occupation": 0 if tau is None else sum(path.mismatch(t) for t in path.at if t > tau),
                "longest_agreement": path.longest_agreement,
                "mismatch_after_agreement": path.mismatch_after_agreement,
            }
        )
    return rows


def steps(analysis: Analysis) -> list[Row]:
    return [
        {
            **path_keys(path),
            "t": t,
            "mismatch": path.mismatch(t),
            "lag": None if path.tau is None or t < path.tau else t - path.tau,
            "eos_set": path.eos_set(t),
            "delta": path.delta(t),
            "f": path.f(t),
        }
        for path in analysis.paths_of_all
        for t in path.at
    ]


def path_keys(path: Path) -> Row:
    return {name: getattr(path, name) for name in ("study", "model", "doc", "action", "replicate")}


def document_keys(path: Path) -> Row:
    keys = {name: getattr(path, name) for name in ("study", "model", "doc", "action")}
    return keys | {name: path.document[name] for name in ("split", "stratum", "cluster")}


def windows(analysis: Analysis) -> list[Row]:
    return [
        {
            "study": study,
            "model": model,
            "horizon": found.horizon,
            "cohort_bound": found.cohort_bound,
            "early_last": found.early.stop - 1,
            "late_first": found.late.start,
            "first_block_last": found.blocks[0].stop - 1,
            "second_block_last": found.blocks[1].stop - 1,
            "agreement_run": found.run,
            "saturation_threshold": found.threshold,
        }
        for (study, model), found in analysis.windows.items()
    ]


def controls(analysis: Analysis) -> list[Row]:
    splits = {tuple(row[name] for name in ("study", "model", "doc")): row["split"] for row in analysis.log.documents}
    declared = {(row["study"], row["action"]) for row in analysis.log.actions if row["control"]}
    groups: dict[tuple[Any, ...], list[Path]] = {}
    for path in analysis.paths_of_all:
        if (path.study, path.action) in declared:
            split = splits.get((path.study, path.model, path.doc))
            groups.setdefault((path.study, path.model, split, path.action), []).append(path)
    rows = []
    for (study, model, split, action), paths in groups.items():
        moved = sorted(
            (path.doc, path.replicate)
            for path in paths
            if any(path.delta(t) or path.f(t) or path.mismatch(t) for t in path.at)
        )
        rows.append(
            {
                "study": study,
                "model": model,
                "split": split,
                "action": action,
                "documents": len({path.doc for path in paths}),
                "pairs": len(paths),
                "moved_pairs": len(moved),
                "first_moved_doc": moved[0][0] if moved else None,
                "first_moved_replicate": moved[0][1] if moved else None,
                "largest_sum_delta": max(path.sum(path.delta) for path in paths),
                "largest_sum_f": max(path.sum(path.f) for path in paths),
            }
        )
    return rows


def analyzed_trajectories(analysis: Analysis) -> list[Row]:
    derived = {tuple(row[name] for name in PATH): row for row in trajectories(analysis)}
    return [
        {
            **document_keys(path),
            "replicate": path.replicate,
            "first_eos": path.first_eos,
            "last_eos": path.last_eos,
            "in_cohort": in_cohort(path, analysis.window(path)),
            **{
                name: derived[tuple(path_keys(path).values())][name]
                for name in (
                    "horizon",
                    "tau",
                    "eos_x",
                    "eos_y",
                    "mismatches",
                    "sum_delta",
                    "sum_f",
                    "exposure",
                    "occupation",
                    "longest_agreement",
                    "mismatch_after_agreement",
                )
            },
        }
        for path in analysis.paths
    ]


PATH = ("study", "model", "doc", "action", "replicate")


def trajectory_moments(analysis: Analysis) -> list[Row]:
    return [
        {**document_keys(path), "replicate": path.replicate, **scalar_moments(path, analysis.window(path))}
        for path in analysis.paths
    ]


def moments(analysis: Analysis) -> list[Row]:
    rows = []
    for paths in analysis.by_document(analysis.paths).values():
        each = [scalar_moments(path, analysis.window(path)) for path in paths]
        means = {
            name: None if each[0][name] is None else math.fsum(one[name] or 0.0 for one in each) / len(each)
            for name in each[0]
        }
        rows.append({**document_keys(paths[0]), "replicates": len(paths), **means})
    return rows


def stratum_moments(analysis: Analysis) -> list[Row]:
    return [
        {
            **keys,
            "documents": len(pool.docs),
            "trajectories": len(pool.paths),
            "cohort_documents": len({path.doc for path in pool.paths if in_cohort(path, found)}),
            "cohort_paths": sum(in_cohort(path, found) for path in pool.paths),
            **pooled_scalars(pool, found),
        }
        for keys, pool, found in analysis.pools()
    ]


def paired_moments(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, _, found in analysis.pairs():
        named = {name: value for name, value in keys.items() if name != "baseline"}
        rows.append({**named, "partner": keys["baseline"], "documents": len(pool.docs), **pooled_scalars(pool, found)})
    return rows


def position_moments(analysis: Analysis) -> list[Row]:
    rows = []
    for paths in analysis.by_document(analysis.paths).values():
        count = len(paths)
        rows += [
            {
                **document_keys(paths[0]),
                "t": t,
                "replicates": count,
                "delta": math.fsum(path.delta(t) for path in paths) / count,
                "f": math.fsum(path.f(t) for path in paths) / count,
                "mismatch": sum(path.mismatch(t) for path in paths) / count,
                "first_mismatch": sum(path.tau == t for path in paths) / count,
            }
            for t in range(1, paths[0].horizon + 1)
        ]
    return rows


def lag_moments(analysis: Analysis) -> list[Row]:
    rows = []
    for paths in analysis.by_document(analysis.paths).values():
        found, count = analysis.window(paths[0]), len(paths)
        members = [(path, path.tau or 0) for path in paths if in_cohort(path, found)]
        rows += [
            {
                **document_keys(paths[0]),
                "lag": j,
                "replicates": count,
                "cohort_paths": len(members),
                "cohort": len(members) / count,
                "cohort_delta": math.fsum(path.delta(tau + j) for path, tau in members) / count,
                "cohort_mismatch": sum(path.mismatch(tau + j) for path, tau in members) / count,
                "cohort_pre_eos": sum(tau + j < path.first_eos for path, tau in members) / count,
            }
            for j in range(1, found.cohort_bound + 1)
        ]
    return rows


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


def depth_moments(analysis: Analysis) -> list[Row]:
    return [
        {
            **document_keys(paths[0]),
            "depth": depth,
            "replicates": len(paths),
            "observed": math.fsum(observed(path, depth) for path in paths) / len(paths),
            "capacity": math.fsum(capacity(path, depth) for path in paths) / len(paths),
        }
        for paths in analysis.by_document(analysis.paths).values()
        for depth in range(1, paths[0].horizon + 1)
    ]


def risk(pool: Pool) -> dict[str, float]:
    """R, O, E and C of a pool."""
    h = pool.windows.horizon
    e, pi = pool.mean(exposure), pool.mean(occupation)
    return {
        "mismatch": pool.mean(lambda path: path.sum(path.mismatch) / h),
        "occurrence": pool.mean(diverged) / h,
        "exposure": e,
        "occupation": pi,
        "mismatch_rate": 0.0 if e == 0 else pi / e,
    }


def decomposition(analysis: Analysis) -> list[Row]:
    return [
        {
            **keys,
            "documents": len(pool.docs),
            "trajectories": len(pool.paths),
            **risk(pool),
            "rollout_tv": pool.mean(lambda path: path.sum(path.delta) / path.horizon),
            "fixed_history_tv": pool.mean(lambda path: path.sum(path.f) / path.horizon),
            "divergence_probability": pool.mean(diverged),
            "mean_entry": pool.ratio(lambda path: float(path.tau or 0), diverged),
        }
        for keys, pool, _ in analysis.pools()
    ]


def contrasts(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, baseline, _ in analysis.pairs():
        b, a = risk(pool), risk(baseline)
        gap = b["mismatch"] - a["mismatch"]
        terms = {
            "occurrence": b["occurrence"] - a["occurrence"],
            "exposure": (b["exposure"] - a["exposure"]) * 0.5 * (a["mismatch_rate"] + b["mismatch_rate"]),
            "rate": (b["mismatch_rate"] - a["mismatch_rate"]) * 0.5 * (a["exposure"] + b["exposure"]),
        }
        rows.append(
            {
                **keys,
                "documents": len(pool.docs),
                "gap": gap,
                **{f"{name}_term": term for name, term in terms.items()},
                **{f"{name}_share": share(term, gap) for name, term in terms.items()},
            }
        )
    return rows


def entry(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, found in analysis.pools():
        for t in range(1, found.horizon + 1):
            p = pool.mean(lambda path, t=t: float(path.tau == t))  # type: ignore[misc]
            survival = pool.mean(lambda path, t=t: float(path.tau is None or path.tau >= t))  # type: ignore[misc]
            rows.append(
                {
                    **keys,
                    "t": t,
                    "p": p,
                    "entry_cdf": pool.mean(lambda path, t=t: float(path.tau is not None and path.tau <= t)),  # type: ignore[misc]
                    "survival": survival,
                    "hazard": None if survival == 0 else p / survival,
                }
            )
    return rows


def generation_clock(analysis: Analysis) -> list[Row]:
    return [
        {
            **keys,
            "t": t,
            "delta": pool.mean(lambda path, t=t: path.delta(t)),  # type: ignore[misc]
            "f": pool.mean(lambda path, t=t: path.f(t)),  # type: ignore[misc]
            "mismatch": pool.mean(lambda path, t=t: path.mismatch(t)),  # type: ignore[misc]
        }
        for keys, pool, found in analysis.pools()
        for t in range(1, found.horizon + 1)
    ]


def block_mean(pool: Pool, block: range, value: Callable[[Path, int], float]) -> float | None:
    return mean_over(block, lambda t: pool.mean(lambda path: value(path, t)))


def block_keys(found: Windows) -> list[tuple[Row, range]]:
    return [
        ({"block": number, "block_first": block.start, "block_last": block.stop - 1}, block)
        for number, block in enumerate(found.blocks, start=1)
    ]


def generation_blocks(analysis: Analysis) -> list[Row]:
    return [
        {
            **keys,
            **named,
            "delta": block_mean(pool, block, Path.delta),
            "f": block_mean(pool, block, Path.f),
            "mismatch": block_mean(pool, block, Path.mismatch),
        }
        for keys, pool, found in analysis.pools()
        for named, block in block_keys(found)
    ]


def block_gaps(pool: Pool, baseline: Pool, found: Windows) -> list[float | None]:
    return [
        minus(block_mean(pool, block, Path.delta), block_mean(baseline, block, Path.delta)) for block in found.blocks
    ]


def generation_gap_change(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, baseline, found in analysis.pairs():
        first, middle, last = block_gaps(pool, baseline, found)
        rows.append(
            {
                **keys,
                "documents": len(pool.docs),
                "first_gap": first,
                "middle_gap": middle,
                "last_gap": last,
                "generation_gap_change": minus(last, first),
            }
        )
    return rows


def generation_gaps(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, baseline, found in analysis.pairs():
        gaps = block_gaps(pool, baseline, found)
        for (named, _), gap in zip(block_keys(found), gaps, strict=True):
            change = {"documents": len(pool.docs), "gap": gap, "generation_gap_change": minus(gaps[2], gaps[0])}
            rows.append({**keys, **named, **change})
    return rows


def branch_clock(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, found in analysis.pools():
        members = [path for path in pool.paths if in_cohort(path, found)]

        def conditional(value: Callable[[Path, int], float], j: int, pool: Pool = pool) -> float | None:
            def inside(member: Path) -> float:
                return value(member, (member.tau or 0) + j) if in_cohort(member, pool.windows) else 0.0

            return pool.ratio(inside, lambda member: float(in_cohort(member, pool.windows)))

        rows += [
            {
                **keys,
                "lag": j,
                "delta": conditional(Path.delta, j),
                "mismatch": conditional(Path.mismatch, j),
                "pre_eos_fraction": conditional(lambda path, t: float(t < path.first_eos), j),
                "documents": len({path.doc for path in members}),
                "paths": len(members),
            }
            for j in range(1, found.cohort_bound + 1)
        ]
    return rows


def branch_windows(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, found in analysis.pools():
        members = [path for path in pool.paths if in_cohort(path, found)]

        def total(
            lags: range, value: Callable[[Path, int], float], *, pre_eos: bool, found: Windows = found
        ) -> Functional:
            return lambda one: cohort_sum(one, found, lags, lambda t: value(one, t), pre_eos=pre_eos)

        fraction = pool.mean(lambda path, found=found: float(in_cohort(path, found)))  # type: ignore[misc]
        row: Row = {
            **keys,
            "cohort_fraction": fraction,
            "documents": len({path.doc for path in members}),
            "paths": len(members),
        }
        for name, lags in (("early", found.early), ("late", found.late)):
            open_window = len(lags) > 0 and fraction > 0
            everything = pool.mean(total(lags, Path.delta, pre_eos=False))
            steps_before = total(lags, lambda *_: 1.0, pre_eos=True)
            row[name] = everything / len(lags) / fraction if open_window else None
            row[f"{name}_pre_eos"] = pool.ratio(total(lags, Path.delta, pre_eos=True), steps_before)
            row[f"{name}_pre_eos_fraction"] = pool.mean(steps_before) / (len(lags) * fraction) if open_window else None
        row["late_minus_early"] = minus(row["late"], row["early"])
        row["late_minus_early_pre_eos"] = minus(row["late_pre_eos"], row["early_pre_eos"])
        rows.append(row)
    return rows


def local_agreement(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, found in analysis.pools():

        def among_members(holds: Callable[[Path], bool], pool: Pool = pool, found: Windows = found) -> float | None:
            return pool.ratio(
                lambda path: float(in_cohort(path, found) and holds(path)), lambda path: float(in_cohort(path, found))
            )

        rows.append(
            {
                **keys,
                "long_agreement": among_members(
                    lambda path, found=found: (path.longest_agreement or 0) >= found.run  # type: ignore[misc]
                ),
                "mismatch_after_agreement": among_members(lambda path: bool(path.mismatch_after_agreement)),
            }
        )
    return rows


def saturation(analysis: Analysis) -> list[Row]:
    return [
        {
            **keys,
            "saturation": pool.mean(
                lambda path, found=found: path.sum(lambda t: float(path.delta(t) > found.threshold)) / path.horizon  # type: ignore[misc]
            ),
        }
        for keys, pool, found in analysis.pools()
    ]


def eos_partition(analysis: Analysis) -> list[Row]:
    return [
        {**keys, "eos_set": r, "gap": pool.mean(lambda path, r=r: eos_gap(path, r))}  # type: ignore[misc]
        for keys, pool, _ in analysis.pools()
        for r in range(4)
    ]


def eos_contrasts(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, baseline, _ in analysis.pairs():
        change = [
            pool.mean(lambda path, r=r: eos_gap(path, r)) - baseline.mean(lambda path, r=r: eos_gap(path, r))  # type: ignore[misc]
            for r in range(4)
        ]

        def history(path: Path) -> float:
            return path.sum(lambda t: path.delta(t) - path.f(t)) / path.horizon

        history_gap = pool.mean(history) - baseline.mean(history)
        rows.append(
            {
                **keys,
                "documents": len(pool.docs),
                "history_gap": history_gap,
                "pre_eos": change[0],
                "eos_related": sum(change[1:]),
                "eos_share": share(sum(change[1:]), history_gap),
            }
        )
    return rows


def branch_profile(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, found in analysis.pools():
        for s in range(1, found.horizon + 1):
            p = pool.mean(lambda path, s=s: float(path.tau == s))  # type: ignore[misc]
            if p == 0:
                continue
            rows += [
                {
                    **keys,
                    "s": s,
                    "j": j,
                    "p": p,
                    "rho": pool.mean(lambda path, s=s, j=j: path.mismatch(s + j) if path.tau == s else 0.0) / p,  # type: ignore[misc]
                }
                for j in range(found.horizon - s + 1)
            ]
    return rows


def finite_window(pool: Pool, depth: int) -> tuple[float, float]:
    """R_L and B_L by their definition over starting positions s, from p_s and rho_{s,j}."""
    h = pool.windows.horizon
    below = above = 0.0
    for s in range(1, h + 1):
        for j in range(min(depth, h - s + 1)):
            below += pool.mean(lambda path, s=s, j=j: path.mismatch(s + j) if path.tau == s else 0.0) / h  # type: ignore[misc]
        above += pool.mean(lambda path, s=s: float(path.tau == s)) * max(0, h - s - depth + 1) / h  # type: ignore[misc]
    return below, above


def identified_interval(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, found in analysis.pools():
        whole, _ = finite_window(pool, found.horizon)
        epsilon = math.sqrt(math.log(4 / 0.05) * math.fsum(w * w for w in pool.weight.values()) / 2)
        for depth in range(1, found.horizon + 1):
            below, above = finite_window(pool, depth)
            rows.append(
                {
                    **keys,
                    "depth": depth,
                    "documents": len(pool.docs),
                    "observed": below,
                    "capacity": above,
                    "lower": below,
                    "upper": below + above,
                    "midpoint": below + above / 2,
                    "half_width": above / 2,
                    "realized_tail": whole - below,
                    "enclosure_low": max(0.0, below - epsilon),
                    "enclosure_high": min(1.0, below + above + epsilon),
                    "level": 0.95,
                }
            )
    return rows


def action_ordering(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, baseline, found in analysis.pairs():
        for depth in range(1, found.horizon + 1):
            low, width = (pool.mean(lambda path, depth=depth, g=g: g(path, depth)) for g in (observed, capacity))  # type: ignore[misc]
            base, base_width = (
                baseline.mean(lambda path, depth=depth, g=g: g(path, depth))  # type: ignore[misc]
                for g in (observed, capacity)
            )
            rows.append(
                {
                    **keys,
                    "depth": depth,
                    "documents": len(pool.docs),
                    "contrast_low": low - (base + base_width),
                    "contrast_high": low + width - base,
                    "ordered": low + width < base or base + base_width < low,
                }
            )
    return rows


def newest(rows: list[Row], names: tuple[str, ...]) -> list[Row]:
    """Of the rows that agree in ``names`` the one from the newest events."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        if key not in found or found[key]["events_version"] < row["events_version"]:
            found[key] = row
    return list(found.values())


def estimates(analysis: Analysis) -> list[Row]:
    names = ("study", "model", "split", "stratum", "action", "baseline", "quantity", "x")
    return newest(analysis.log.results, names)


def calibration(analysis: Analysis) -> list[Row]:
    names = ("study", "model", "action", "baseline", "observation", "candidate")
    return newest(analysis.log.calibration, names)


def plan(analysis: Analysis) -> list[Row]:
    rows = []
    for row in analysis.log.plans:
        kept = {name: row[name] for name in ("study", "model", "plan_sha256", "frozen_at", "events_version")}
        rows += [{**kept, "key": key, "value": value} for key, value in leaves(json.loads(row["plan"]), "")]
    return rows


def leaves(value: Any, path: str) -> Iterator[tuple[str, str | None]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    else:
        yield path, value if value is None or isinstance(value, str) else json.dumps(value)


def stored(table: str) -> Callable[[Analysis], list[Row]]:
    return lambda analysis: list(getattr(analysis.log, table))


def published(_: Analysis) -> list[Row]:
    numbers = {"value", "low", "high", "level"}
    text = (resources.files("sql") / "published.csv").read_text("utf-8")
    return [
        {name: (float(cell) if name in numbers else cell) if cell else None for name, cell in row.items()}
        for row in csv.DictReader(text.splitlines())
    ]


EVALUATIONS: dict[str, Callable[[Analysis], list[Row]]] = {
    **{
        table: stored(table)
        for table in ("events", "documents", "actions", "units", "studies", "plans", "results", "exact_values")
    },
    **{
        function.__name__: function
        for function in (
            published,
            trajectories,
            steps,
            windows,
            controls,
            analyzed_trajectories,
            trajectory_moments,
            moments,
            stratum_moments,
            paired_moments,
            position_moments,
            lag_moments,
            depth_moments,
            decomposition,
            contrasts,
            entry,
            generation_clock,
            generation_blocks,
            generation_gaps,
            generation_gap_change,
            branch_clock,
            branch_windows,
            local_agreement,
            saturation,
            eos_partition,
            eos_contrasts,
            branch_profile,
            identified_interval,
            action_ordering,
            estimates,
            calibration,
            plan,
        )
    },
}


# --------------------------------------------------------------------------------------------------------------- logs


@dataclass
class Plan:
    """How one study of an awkward log looks."""

    study: str
    model: str
    horizon: int
    strata: dict[str, int]
    actions: tuple[str, ...] = ("full", "snapkv", "recent")
    replicates: int = 3
    splits: tuple[str, ...] = ("evaluation",)
    declared: bool = False
    diverges: bool = True
    agreement: float = 0.5
    damaged: bool = False
    absorbing: bool = True  # false as in no generator of ours: distances go on after EOS, and S_3 has a gap
    missing: float = 0.2


LOGS: dict[str, tuple[Plan, ...]] = {
    "several studies": (
        Plan(
            "a",
            "m1",
            8,
            {"R-4K": 3, "H-8K": 1, "R-8K": 2},
            splits=("development", "evaluation"),
            damaged=True,
            absorbing=False,
        ),
        Plan("a", "m2", 7, {"R-4K": 2, "H-8K": 1}, replicates=2, declared=True),
        Plan("b", "m1", 9, {"only": 3}, replicates=1),
    ),
    "long agreements": (Plan("long", "m", 40, {"x": 2, "y": 1}, actions=("one", "two"), agreement=0.96, missing=0.0),),
    "horizon 1": (Plan("h1", "m", 1, {"x": 2, "y": 1}, replicates=2), Plan("h2", "m", 2, {"x": 2}, replicates=2)),
    "horizon 3": (Plan("h3", "m", 3, {"x": 1, "y": 2}, replicates=2), Plan("h4", "m", 4, {"x": 2}, replicates=2)),
    "no divergence": (Plan("calm", "m", 8, {"x": 2, "y": 1}, replicates=1, diverges=False),),
    "one document": (Plan("one", "m", 16, {"x": 1}, actions=("snapkv",), replicates=1, declared=True, missing=0.0),),
    "one document each": (Plan("apart", "m", 8, {"x": 2, "y": 2}, actions=("left", "right"), missing=-1.0),),
    "empty": (),
}


def awkward_log(name: str) -> Log:
    """The log of one name of LOGS: the same in every run."""
    chance = random.Random(name)  # noqa: S311 - test data
    log = Log()
    for study in LOGS[name]:
        _add_study(log, study, chance)
    if log.documents:
        _add_analysis_rows(log)
    return log


def _add_study(log: Log, plan: Plan, chance: random.Random) -> None:
    names = {"study": plan.study, "model": plan.model}
    if plan.declared:
        log.studies.append(declared_study(names, plan.horizon))
    if all(row["study"] != plan.study for row in log.actions):
        log.actions += [declared_action(plan.study, action) for action in plan.actions]
    for split in plan.splits:
        for stratum, count in plan.strata.items():
            for index in range(count):
                doc = f"{stratum}/{split}/{index}"
                log.documents.append(document(names, doc, split, stratum))
                for position, action in enumerate(plan.actions):
                    # A negative rate splits the documents: no two actions share one.
                    apart = plan.missing < 0 and (index + position) % 2 == 1
                    if not apart and chance.random() >= plan.missing:
                        _add_document_events(log, plan, {**names, "doc": doc, "action": action}, chance)
    if plan.damaged:
        _damage(log, plan, chance)


def _add_document_events(log: Log, plan: Plan, names: Row, chance: random.Random) -> None:
    for replicate in range(plan.replicates + chance.randrange(2) * (plan.replicates > 1)):
        log.events += coupled_pair({**names, "replicate": replicate}, plan, chance)


def coupled_pair(names: Row, plan: Plan, chance: random.Random) -> list[Row]:
    """Events of one pair: divergence at 1, 2, H, in between or never; EOS on no side, one side or both."""
    h = plan.horizon
    still = names["action"] == "full" or not plan.diverges
    tau = h + 1 if still else chance.choice([1, 2, h, h + 1, *(chance.randint(1, h) for _ in range(6))])
    planned_x, planned_y = (chance.choice([h + 1, h + 1, chance.randint(1, h), h]) for _ in range(2))
    x_over = y_over = False
    rows = []
    for t in range(1, h + 1):
        over = plan.absorbing and x_over and y_over
        x = EOS if x_over or t == planned_x else chance.randint(1, 4)
        if y_over:
            y = EOS
        elif t < tau:
            y = x
        elif t == tau:
            y = chance.choice([token for token in (1, 2, 3, 4, EOS) if token != x])
        elif t == planned_y:
            y = EOS
        else:
            y = x if x != EOS and chance.random() < plan.agreement else chance.randint(1, 4)
        delta = 0.0 if still or over else chance.choice([0.0, 1.0, 0.996, 0.5, chance.random(), chance.random()])
        f = 0.0 if still or (plan.absorbing and x_over) else chance.choice([0.0, delta, chance.random()])
        x_over, y_over = x_over or x == EOS, y_over or y == EOS
        single = {"delta": as_float32(delta), "f": as_float32(f), "kind": "coupled", "weight": None}
        rows.append({**names, "t": t, "x_token": x, "y_token": y, **single, "x_eos": x_over, "y_eos": y_over})
    return rows


def as_float32(value: float) -> float:
    """The nearest float32, as the store keeps it."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _damage(log: Log, plan: Plan, chance: random.Random) -> None:
    """Trajectories that must not enter: cut short, with a hole, too long with one, of a document nobody declared."""
    doc = next(row["doc"] for row in log.documents if row["study"] == plan.study and row["model"] == plan.model)
    names = {"study": plan.study, "model": plan.model, "doc": doc, "action": "snapkv"}
    short = coupled_pair({**names, "replicate": 90}, plan, chance)[:-2]
    hole = coupled_pair({**names, "replicate": 91}, plan, chance)
    del hole[plan.horizon // 2]
    longer = coupled_pair({**names, "replicate": 92}, dataclasses.replace(plan, horizon=plan.horizon + 3), chance)
    del longer[plan.horizon]
    stranger = coupled_pair({**names, "doc": "undeclared", "replicate": 0}, plan, chance)
    log.events += short + hole + longer + stranger


def document(names: Row, doc: str, split: str, stratum: str) -> Row:
    return {
        **names,
        "doc": doc,
        "split": split,
        "stratum": stratum,
        "cluster": doc,
        "task": None,
        "source": "test",
        "prompt_tokens": 100,
        "prompt_sha256": None,
        "answers": ["a", "b"],
    }


def declared_action(study: str, action: str) -> Row:
    """A row of ``actions``. Besides ``full``, ``snapkv`` is called a control, which moves."""
    return {
        **dict.fromkeys(("window", "kernel", "pooling", "head_reduction", "sinks", "parameters")),
        "study": study,
        "action": action,
        "selector": action,
        "keep": "1/2",
        "position_mode": "absolute",
        "control": action in {"full", "snapkv"},
        "prespecified": True,
    }


def declared_study(names: Row, horizon: int) -> Row:
    """A study with windows of its own, where the horizon has room for them."""
    return {
        **names,
        "horizon": horizon,
        "seed": 7,
        "cohort_bound": 3,
        "early_last": 2,
        "late_first": 2,
        "first_block_last": 2,
        "second_block_last": 5,
        "agreement_run": 2,
        "saturation_threshold": 0.5,
        "study_sha256": "0" * 64,
        "revision": None,
    }


def _add_analysis_rows(log: Log) -> None:
    first = log.documents[0]
    names = {"study": first["study"], "model": first["model"]}
    log.plans.append(
        {
            **names,
            "plan_sha256": "1" * 64,
            "frozen_at": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
            "events_version": 1,
            "plan": json.dumps({"replicates": 8, "primary": ["saturation", "gap"], "alpha": 0.05, "none": None}),
        }
    )
    for version in (1, 3, 2):
        for baseline, x in ((None, None), ("snapkv", None), (None, 4)):
            log.results.append(
                {
                    **names,
                    "split": "evaluation",
                    "stratum": POOLED,
                    "action": "recent",
                    "baseline": baseline,
                    "quantity": "mismatch",
                    "x": x,
                    "estimate": version / 10,
                    "low": None,
                    "high": 0.5,
                    "level": 0.95,
                    "draws": 100,
                    "documents": 3,
                    "family": None,
                    "status": "exploratory",
                    "events_version": version,
                    "plan_sha256": None,
                }
            )
    for version in (2, 4, 3):
        for action, decision, low in (
            ("recent", "equivalent", -0.01),
            ("full", "unresolved", -0.5),
            ("full2", None, None),
        ):
            for candidate in ("flat", "ridge"):
                log.calibration.append(
                    {
                        **names,
                        "action": action,
                        "baseline": "snapkv",
                        "observation": "positions",
                        "candidate": candidate,
                        "selected": candidate == "ridge" and decision is not None,
                        "cross_validated_mse": None if decision is None else 0.01,
                        "documents": 3,
                        "gap": 0.25,
                        "predicted_gap": None if decision is None else 0.25 - version / 1000,
                        "error": None if decision is None else version / 1000,
                        "low": low,
                        "high": None if low is None else 0.02,
                        "level": 0.9875,
                        "margin": 0.02,
                        "decision": decision,
                        "mae": None if decision is None else 0.1,
                        "rmse": None if decision is None else 0.2,
                        "draws": 100,
                        "status": "exploratory",
                        "events_version": version,
                        "plan_sha256": None,
                    }
                )
