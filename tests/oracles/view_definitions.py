"""Every column of most views, evaluated from the definitions by plain loops over raw events and documents.

The other modules ``*_definitions`` have the other views. The views join derived tables; this formulation shares nothing
with them and reads whole paths (``coupled_paths``).
"""

from __future__ import annotations

import csv
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from typing import Any

from fixtures.awkward_logs import Row
from oracles.coupled_paths import (
    Analysis,
    Functional,
    Path,
    Pool,
    WindowRanges,
    capacity,
    cohort_sum,
    diverged,
    eos_gap,
    exposure,
    in_cohort,
    mean_over,
    minus,
    observed,
    occupation,
    share,
)

Functional2 = Callable[[Path, int], float]  # of a path and a position


def trajectories(analysis: Analysis) -> Iterator[Row]:
    for path in analysis.paths_of_all:
        tau = path.tau
        yield {
            **path_keys(path),
            "action_revision": 0,
            "unit": path.unit,
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


def steps(analysis: Analysis) -> list[Row]:
    return [
        {
            **path_keys(path),
            "action_revision": 0,
            "unit": path.unit,
            "t": t,
            "mismatch": path.mismatch(t),
            "lag": None if path.tau is None or t < path.tau else t - path.tau,
            "eos_set": path.eos_set(t),
            "delta": path.delta(t),
            "f": path.f(t),
            **{name: path.at[t].get(name) for name in ("kl", "kl_own", "top1")},
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
            "study": study, "model": model, "horizon": found.horizon, "cohort_bound": found.cohort_bound,
            "early_last": found.early.stop - 1, "late_first": found.late.start,
            "first_block_last": found.blocks[0].stop - 1, "second_block_last": found.blocks[1].stop - 1,
            "agreement_run": found.run, "saturation_threshold": found.threshold,
        }
        for (study, model), found in analysis.windows.items()
    ]  # fmt: skip


def controls(analysis: Analysis) -> Iterator[Row]:
    splits = {tuple(row[name] for name in ("study", "model", "doc")): row["split"] for row in analysis.log.documents}
    declared = {(row["study"], row["action"]) for row in analysis.log.actions if row["control"]}
    groups: dict[tuple[Any, ...], list[Path]] = {}
    for path in analysis.paths_of_all:
        if (path.study, path.action) in declared:
            split = splits.get((path.study, path.model, path.doc))
            groups.setdefault((path.study, path.model, split, path.action), []).append(path)
    for (study, model, split, action), paths in groups.items():
        moved = sorted(
            (path.doc, path.replicate)
            for path in paths
            if any(path.delta(t) or path.f(t) or path.mismatch(t) for t in path.at)
        )
        yield {
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
                    "horizon", "tau", "eos_x", "eos_y", "mismatches", "sum_delta", "sum_f", "exposure", "occupation",
                    "longest_agreement", "mismatch_after_agreement",
                )
            },
        }
        for path in analysis.paths
    ]  # fmt: skip


PATH = ("study", "model", "doc", "action", "replicate")


def scalar_moments(path: Path, windows: WindowRanges) -> dict[str, float | None]:
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
    entered = h if path.tau is None else path.tau
    moments["occupation_compensator"] = math.fsum(path.delta(t) for t in range(entered + 1, h + 1)) / h
    moments["exposure_compensator"] = math.fsum((h - t) * path.delta(t) for t in range(1, entered + 1)) / h
    ended = min(path.last_eos, h)
    moments["written"] = ended / h
    along_x, own = ([value(t) for t in path.known()] for value in (path.kl, path.kl_own))
    moments["kl_positions"] = float(len(along_x))
    for name, values in (("kl", along_x), ("kl_own", own)):
        finite = [value for value in values if value < math.inf]
        moments[f"{name}_sum"], moments[f"{name}_finite"] = math.fsum(finite), float(len(finite))
    moments["top1_agreements"] = float(sum(path.at[t]["top1"] for t in path.known()))
    moments["written_exposure"] = 0.0 if path.tau is None else (ended - path.tau) / h
    return moments


def pooled_scalars(pool: Pool, windows: WindowRanges) -> dict[str, float | None]:
    cache = {id(path): scalar_moments(path, windows) for path in pool.paths}
    found: dict[str, float | None] = {}
    for name in next(iter(cache.values())):
        if any(moments[name] is None for moments in cache.values()):
            found[name] = None
        else:
            found[name] = pool.mean(lambda path, name=name: cache[id(path)][name] or 0.0)
    return found


def moments(analysis: Analysis) -> Iterator[Row]:
    for paths in analysis.by_document(analysis.paths).values():
        each = [scalar_moments(path, analysis.window(path)) for path in paths]
        means = {
            name: None if each[0][name] is None else math.fsum(one[name] or 0.0 for one in each) / len(each)
            for name in each[0]
        }
        yield {**document_keys(paths[0]), "replicates": len(paths), **means}


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


def paired_moments(analysis: Analysis) -> Iterator[Row]:
    for keys, pool, _, found in analysis.pairs():
        named = {name: value for name, value in keys.items() if name != "baseline"}
        yield {**named, "partner": keys["baseline"], "documents": len(pool.docs), **pooled_scalars(pool, found)}


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


def texts(pool: Pool) -> dict[str, float]:
    """R and E over the positions up to the later EOS, and how many these are."""
    h = pool.windows.horizon
    ends = {id(path): min(path.last_eos, h) for path in pool.paths}
    long = pool.mean(lambda path: ends[id(path)] / h)
    differ = pool.mean(lambda path: sum(path.mismatch(t) for t in range(1, ends[id(path)] + 1)) / h)
    exposed = pool.mean(lambda path: 0.0 if path.tau is None else (ends[id(path)] - path.tau) / h)
    return {"written": long, "mismatch_written": differ / long, "exposure_written": exposed / long}


def decomposition(analysis: Analysis) -> list[Row]:
    return [
        {
            **keys,
            "documents": len(pool.docs),
            "trajectories": len(pool.paths),
            **risk(pool),
            **texts(pool),
            "rollout_tv": pool.mean(lambda path: path.sum(path.delta) / path.horizon),
            "fixed_history_tv": pool.mean(lambda path: path.sum(path.f) / path.horizon),
            "divergence_probability": pool.mean(diverged),
            "never_diverge": pool.mean(lambda path: float(path.tau is None)),
            "mean_entry": pool.ratio(lambda path: float(path.tau or 0), diverged),
        }
        for keys, pool, _ in analysis.pools()
    ]


def teacher_forced(analysis: Analysis) -> Iterator[Row]:
    for keys, pool, found in analysis.pools():

        def known(path: Path) -> float:
            return len(path.known())

        def finite(value: Functional2) -> Functional:
            return lambda path: sum(value(path, t) < math.inf for t in path.known())

        def total(value: Functional2) -> Functional:
            return lambda path: math.fsum(value(path, t) for t in path.known() if value(path, t) < math.inf)

        def infinite(value: Functional2) -> Functional:
            return lambda path: sum(value(path, t) == math.inf for t in path.known())

        yield {
            **keys,
            "documents": len(pool.docs),
            "trajectories": len(pool.paths),
            "fixed_history_tv": pool.mean(lambda path: path.sum(path.f) / path.horizon),
            "kl": pool.ratio(total(Path.kl_own), finite(Path.kl_own)),
            "kl_fixed_history": pool.ratio(total(Path.kl), finite(Path.kl)),
            "kl_fixed_history_p99": tail(pool),
            "top1_agreement": pool.ratio(lambda path: sum(path.at[t]["top1"] for t in path.known()), known),
            "kl_infinite": pool.ratio(infinite(Path.kl), known),
            "kl_own_infinite": pool.ratio(infinite(Path.kl_own), known),
            "kl_positions": pool.mean(known) / found.horizon,
        }


def tail(pool: Pool) -> float | None:
    """The least KL along X that 99% of the known positions do not exceed, found by bisection.

    A quarter of an octave, as 2^(i/4)..2^((i+1)/4), has its positions spread evenly over the logarithm, and what is not
    above 2^-40 is spread evenly over 0..2^-40; 0 itself stays.
    """

    def come(x: float) -> float:
        """The share of positions up to x."""

        def part(value: float) -> float:
            if value in {0.0, math.inf}:
                return float(value <= x)
            if value <= 2**-40:
                return min(x * 2**40, 1.0)
            if x <= 0:
                return 0.0
            quarter = math.ceil(4 * math.log2(value)) - 1
            return min(max(4 * math.log2(x) - quarter, 0.0), 1.0)

        return (
            pool.ratio(lambda path: math.fsum(part(path.kl(t)) for t in path.known()), lambda path: len(path.known()))
            or 0.0
        )

    if come(2.0**10) < 0.99 - 1e-12:
        return None
    if come(0.0) >= 0.99 - 1e-12:
        return 0.0
    low, high = -80.0, 10.0  # of log2 x
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if come(2.0**middle) >= 0.99 - 1e-12 else (middle, high)
    return 2.0**high


def entry_median(analysis: Analysis) -> list[Row]:
    """The least x at which half of the mass has come, found by bisection; a pair's mass comes within 1/2 of its tau."""
    rows = []
    for keys, pool, windows in analysis.pools():

        def come(x: float, pool: Pool = pool) -> float:
            return pool.mean(lambda path: 0.0 if path.tau is None else min(max(x - path.tau + 0.5, 0.0), 1.0))

        low, high = 0.0, windows.horizon + 0.5
        reached = come(high) >= 0.5 - 1e-12
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if come(middle) >= 0.5 - 1e-12 else (middle, high)
        rows.append({**keys, "median_entry": min(high, windows.horizon) if reached else None})
    return rows


def contrasts(analysis: Analysis) -> Iterator[Row]:
    for keys, pool, baseline, _ in analysis.pairs():
        b, a = risk(pool), risk(baseline)
        gap = b["mismatch"] - a["mismatch"]
        terms = {
            "occurrence": b["occurrence"] - a["occurrence"],
            "exposure": (b["exposure"] - a["exposure"]) * 0.5 * (a["mismatch_rate"] + b["mismatch_rate"]),
            "rate": (b["mismatch_rate"] - a["mismatch_rate"]) * 0.5 * (a["exposure"] + b["exposure"]),
        }
        yield {
            **keys,
            "documents": len(pool.docs),
            "gap": gap,
            **{f"{name}_term": term for name, term in terms.items()},
            **{f"{name}_share": share(term, gap) for name, term in terms.items()},
            **{f"{name}_difference": value - texts(baseline)[name] for name, value in texts(pool).items()},
        }


def entry(analysis: Analysis) -> Iterator[Row]:
    for keys, pool, found in analysis.pools():
        for t in range(1, found.horizon + 1):
            p = pool.mean(lambda path, t=t: float(path.tau == t))
            survival = pool.mean(lambda path, t=t: float(path.tau is None or path.tau >= t))
            yield {
                **keys,
                "t": t,
                "p": p,
                "entry_cdf": pool.mean(lambda path, t=t: float(path.tau is not None and path.tau <= t)),
                "survival": survival,
                "hazard": None if survival == 0 else p / survival,
            }


def generation_clock(analysis: Analysis) -> list[Row]:
    return [
        {
            **keys,
            "t": t,
            "delta": pool.mean(lambda path, t=t: path.delta(t)),
            "f": pool.mean(lambda path, t=t: path.f(t)),
            "mismatch": pool.mean(lambda path, t=t: path.mismatch(t)),
        }
        for keys, pool, found in analysis.pools()
        for t in range(1, found.horizon + 1)
    ]


def block_mean(pool: Pool, block: range, value: Callable[[Path, int], float]) -> float | None:
    return mean_over(block, lambda t: pool.mean(lambda path: value(path, t)))


def block_keys(found: WindowRanges) -> list[tuple[Row, range]]:
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


def block_gaps(pool: Pool, baseline: Pool, found: WindowRanges) -> list[float | None]:
    return [
        minus(block_mean(pool, block, Path.delta), block_mean(baseline, block, Path.delta)) for block in found.blocks
    ]


def generation_gap_change(analysis: Analysis) -> Iterator[Row]:
    for keys, pool, baseline, found in analysis.pairs():
        first, middle, last = block_gaps(pool, baseline, found)
        yield {
            **keys, "documents": len(pool.docs), "first_gap": first, "middle_gap": middle, "last_gap": last,
            "generation_gap_change": minus(last, first),
        }  # fmt: skip


def generation_gaps(analysis: Analysis) -> Iterator[Row]:
    for keys, pool, baseline, found in analysis.pairs():
        gaps = block_gaps(pool, baseline, found)
        for (named, _), gap in zip(block_keys(found), gaps, strict=True):
            change = {"documents": len(pool.docs), "gap": gap, "generation_gap_change": minus(gaps[2], gaps[0])}
            yield {**keys, **named, **change}


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
            lags: range, value: Callable[[Path, int], float], *, pre_eos: bool, found: WindowRanges = found
        ) -> Functional:
            return lambda one: cohort_sum(one, found, lags, lambda t: value(one, t), pre_eos=pre_eos)

        fraction = pool.mean(lambda path, found=found: float(in_cohort(path, found)))
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

        def among_members(
            holds: Callable[[Path], bool], pool: Pool = pool, found: WindowRanges = found
        ) -> float | None:
            return pool.ratio(
                lambda path: float(in_cohort(path, found) and holds(path)), lambda path: float(in_cohort(path, found))
            )

        rows.append(
            {
                **keys,
                "long_agreement": among_members(lambda path, found=found: (path.longest_agreement or 0) >= found.run),
                "mismatch_after_agreement": among_members(lambda path: bool(path.mismatch_after_agreement)),
            }
        )
    return rows


def saturation(analysis: Analysis) -> list[Row]:
    return [
        {
            **keys,
            "saturation": pool.mean(
                lambda path, found=found: path.sum(lambda t: float(path.delta(t) > found.threshold)) / path.horizon
            ),
        }
        for keys, pool, found in analysis.pools()
    ]


def eos_partition(analysis: Analysis) -> list[Row]:
    return [
        {**keys, "eos_set": r, "gap": pool.mean(lambda path, r=r: eos_gap(path, r))}
        for keys, pool, _ in analysis.pools()
        for r in range(4)
    ]


def eos_contrasts(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, baseline, _ in analysis.pairs():
        change = [
            pool.mean(lambda path, r=r: eos_gap(path, r)) - baseline.mean(lambda path, r=r: eos_gap(path, r))
            for r in range(4)
        ]

        def history(path: Path) -> float:
            return path.sum(lambda t: path.delta(t) - path.f(t)) / path.horizon

        history_gap = pool.mean(history) - baseline.mean(history)
        rows.append(
            {
                **keys, "documents": len(pool.docs), "history_gap": history_gap, "pre_eos": change[0],
                "eos_related": sum(change[1:]), "eos_share": share(sum(change[1:]), history_gap),
            }
        )  # fmt: skip
    return rows


def branch_profile(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, found in analysis.pools():
        for s in range(1, found.horizon + 1):
            p = pool.mean(lambda path, s=s: float(path.tau == s))
            if p == 0:
                continue
            rows += [
                {
                    **keys,
                    "s": s,
                    "j": j,
                    "p": p,
                    "rho": pool.mean(lambda path, s=s, j=j: path.mismatch(s + j) if path.tau == s else 0.0) / p,
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
            below += pool.mean(lambda path, s=s, j=j: path.mismatch(s + j) if path.tau == s else 0.0) / h
        above += pool.mean(lambda path, s=s: float(path.tau == s)) * max(0, h - s - depth + 1) / h
    return below, above


def interval_row(below: float, above: float, whole: float, weights: list[float]) -> Row:
    """Return the row of intervals for R_L = ``below``, B_L = ``above`` and R = ``whole``, with w_d of the documents."""
    epsilon = math.sqrt(math.log(4 / 0.05) * math.fsum(weight**2 for weight in weights) / 2)
    return {
        "observed": below, "capacity": above, "lower": below, "upper": below + above, "midpoint": below + above / 2,
        "half_width": above / 2, "realized_tail": whole - below, "enclosure_low": max(0.0, below - epsilon),
        "enclosure_high": min(1.0, below + above + epsilon), "level": 0.95,
    }  # fmt: skip


@functools.lru_cache(maxsize=1)  # depth_intervals has these rows too
def identified_interval(analysis: Analysis) -> list[Row]:
    rows = []
    for keys, pool, found in analysis.pools():
        whole, _ = finite_window(pool, found.horizon)
        for depth in range(1, found.horizon + 1):
            below, above = finite_window(pool, depth)
            rows.append(
                keys
                | {"depth": depth, "documents": len(pool.docs)}
                | interval_row(below, above, whole, list(pool.weight.values()))
            )
    return rows


def action_ordering(analysis: Analysis) -> Iterator[Row]:
    for keys, pool, baseline, found in analysis.pairs():
        for depth in range(1, found.horizon + 1):
            low, width = (pool.mean(lambda path, depth=depth, g=g: g(path, depth)) for g in (observed, capacity))
            base, base_width = (
                baseline.mean(lambda path, depth=depth, g=g: g(path, depth)) for g in (observed, capacity)
            )
            yield {
                **keys, "depth": depth, "documents": len(pool.docs), "contrast_low": low - (base + base_width),
                "contrast_high": low + width - base, "ordered": low + width < base or base + base_width < low,
            }  # fmt: skip


def newest(rows: list[Row], names: tuple[str, ...]) -> list[Row]:
    """Return, among rows that agree in ``names``, the row from the newest events."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        if key not in found or found[key]["events_version"] < row["events_version"]:
            found[key] = row
    return list(found.values())


def later_plans(analysis: Analysis, row: Row) -> list[Row]:
    """The later revisions of the plan that a row belongs to; none if it belongs to none."""
    own = [one for one in analysis.log.plans if (one["study"], one["model"]) == (row["study"], row["model"])]
    revisions = [one["plan_revision"] for one in own if one["plan_sha256"] == row["plan_sha256"]]
    return [one for one in own if revisions and one["plan_revision"] > revisions[0]]


def under_newest_plan(analysis: Analysis, rows: list[Row]) -> list[Row]:
    return [row for row in rows if not later_plans(analysis, row) and not is_of_earlier_documents(analysis, row)]


def documents_revision(analysis: Analysis, row: Row) -> int:
    """The newest revision of the documents of a row's study."""
    own = [one for one in analysis.log.documents if (one["study"], one["model"]) == (row["study"], row["model"])]
    return max((one["document_revision"] for one in own), default=0)


def is_of_earlier_documents(analysis: Analysis, row: Row) -> bool:
    """Whether a row was estimated from documents that were revised since."""
    return "documents_revision" in row and row["documents_revision"] < documents_revision(analysis, row)


def superseded_documents(analysis: Analysis) -> list[Row]:
    names = ("study", "model", "doc", "document_revision")
    rows = [{name: row[name] for name in names} for row in analysis.log.documents]
    return [
        row
        for row in rows
        if any(
            one == row | {"document_revision": one["document_revision"]}
            and one["document_revision"] > row["document_revision"]
            for one in rows
        )
    ]


def superseded_analyses(analysis: Analysis) -> list[Row]:
    studies = {(row["study"], row["model"]): documents_revision(analysis, row) for row in analysis.log.documents}
    return [
        {"study": study, "model": model, "documents_revision": revision}
        for (study, model), newest_one in studies.items() for revision in range(newest_one)
    ]  # fmt: skip


def results(analysis: Analysis) -> list[Row]:
    return under_newest_plan(analysis, analysis.log.results)


def looks(analysis: Analysis) -> list[Row]:
    return under_newest_plan(analysis, analysis.log.looks)


def sequence(analysis: Analysis) -> list[Row]:
    left_out = {"action_revision", "baseline_revision", "documents_revision"}
    kept = ({name: row[name] for name in row if name not in left_out} for row in looks(analysis))
    return [{**row, "split": "evaluation"} for row in kept]


def superseded_plans(analysis: Analysis) -> list[Row]:
    names = ("study", "model", "plan_sha256", "plan_revision")
    return [{name: row[name] for name in names} for row in analysis.log.plans if later_plans(analysis, row)]


def estimates(analysis: Analysis) -> list[Row]:
    names = ("study", "model", "split", "stratum", "action", "baseline", "quantity", "x")
    rows = newest(results(analysis), names)
    left_out = {"action_revision", "baseline_revision", "inputs_sha256", "documents_revision"}
    return [{name: row[name] for name in row if name not in left_out} for row in rows]


def calibration(analysis: Analysis) -> list[Row]:
    names = ("study", "model", "action", "baseline", "observation", "candidate")
    return newest(under_newest_plan(analysis, analysis.log.calibration), names)


def plan(analysis: Analysis) -> list[Row]:
    rows = []
    for row in under_newest_plan(analysis, analysis.log.plans):
        kept = {name: row[name] for name in row if name != "plan"}
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


def superseded(_: Analysis) -> list[Row]:
    """Return no rows: these logs have one revision; tests/sql/test_revisions.py has logs with several."""
    return []


_OF_ACTION = ("selector", "keep", "parameters", "codec", "codec_parameters", "policy", "policy_parameters")


def revisions(analysis: Analysis) -> list[Row]:
    identity = ("weights_sha256", "tokenizer_sha256", "selector_sha256", "numerics", "eos_tokens")
    rows: dict[tuple[str, str, str], Row] = {}
    for unit in analysis.log.units:
        names = {name: unit[name] for name in ("study", "model", "action")}
        fresh = names | {"action_revision": 0, "current": True, "units": 0} | dict.fromkeys(identity)
        row = rows.setdefault(tuple(names.values()), fresh | dict.fromkeys(_OF_ACTION))
        row["units"] += 1
        for action in analysis.log.actions:
            if (action["study"], action["action"]) == (row["study"], row["action"]):
                row |= {name: action[name] for name in _OF_ACTION}
    return list(rows.values())


def published(_: Analysis) -> list[Row]:
    numbers = {"value", "low", "high", "level"}
    text = (resources.files("kvdrift.sql") / "published.csv").read_text("utf-8")
    return [
        {name: (float(cell) if name in numbers else cell) if cell else None for name, cell in row.items()}
        for row in csv.DictReader(text.splitlines())
    ]


EVALUATIONS: dict[str, Callable[[Analysis], Iterable[Row]]] = {
    **{
        table: stored(table)
        for table in ("events", "documents", "actions", "units", "studies", "plans", "exact_values",
                      "identities", "tokens")
    },
    **{
        function.__name__: function
        for function in (
            published, superseded, superseded_plans, superseded_documents, superseded_analyses, revisions, results, trajectories, steps, windows, controls, analyzed_trajectories, moments,
            stratum_moments, paired_moments, position_moments, lag_moments, depth_moments, decomposition, contrasts,
            entry, entry_median, teacher_forced, generation_clock, generation_blocks, generation_gaps, generation_gap_change, branch_clock,
            branch_windows, local_agreement, saturation, eos_partition, eos_contrasts, branch_profile,
            identified_interval, action_ordering, looks, sequence, estimates, calibration, plan,
        )
    },
}  # fmt: skip
