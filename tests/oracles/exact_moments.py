"""Every additive moment of a trajectory as an array over enumerated pairs of paths, and its exact law.

Rows of the arrays are whole paths and columns are positions; the views join positions and lags instead.
Names are those of ``kvdrift.schema.moments``; profile moments carry their position, lag or depth after an "@".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from oracles.exact_comparison import Array, Law, law_of_values

from kvdrift.generator.finite.enumeration import PairPaths, pair_paths
from kvdrift.generator.finite.system import FiniteSystem
from kvdrift.schema.moments import NEVER, SCALAR_MOMENTS, Replicates
from kvdrift.schema.windows import Windows

Functionals = dict[str, Array]  # [paths] each


def functionals(paths: PairPaths, windows: Windows) -> Functionals:
    """Return all moments of every path; one over an empty window, which is null in the views, is left out."""
    own = {**_whole(paths, windows), **_clocks(paths, windows), **_cohort(paths, windows), **_depths(paths)}
    return _declared(paths, windows, own) | own


def _declared(paths: PairPaths, windows: Windows, own: Functionals) -> Functionals:
    """Return moments without a formulation here, by their declarations, which ``view_definitions`` holds against loops."""
    names = [name for name, moment in SCALAR_MOMENTS.items() if name not in own and not moment.nullable]
    if not names:
        return {}
    ends = [np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, NEVER) for ended in (paths.x_ended, paths.y_ended)]
    longest, recurs = _agreements(paths)
    h, tau, delta, f = windows.horizon, paths.entry, stored(paths.delta), stored(paths.f)
    replicates = Replicates(
        windows, paths.mismatch.sum(axis=1), delta.sum(axis=1), f.sum(axis=1), np.maximum(h - tau, 0),
        np.maximum(paths.mismatch.sum(axis=1) - 1, 0), np.where(tau > h, NEVER, tau), *ends, longest, recurs, delta, f,
        paths.mismatch, stored(paths.kl), stored(paths.kl_own), paths.top1,
    )  # fmt: skip
    return {name: SCALAR_MOMENTS[name].of(replicates).astype(np.float64) for name in names}


def _whole(paths: PairPaths, windows: Windows) -> Functionals:
    horizon, tau = windows.horizon, paths.entry
    t = np.arange(1, horizon + 1)
    diverged = tau <= horizon
    after = t > tau[:, None]
    delta, f, mismatch = stored(paths.delta), stored(paths.f), paths.mismatch
    first, last = _both_ends(paths)
    before, at, between = t < first[:, None], t == first[:, None], t <= last[:, None]
    sets = [before, at, between & ~before & ~at, ~between & ~before & ~at]
    prefix = windows.first_block_last
    return {
        "mismatch": mismatch.sum(axis=1) / horizon,
        "rollout_tv": delta.sum(axis=1) / horizon,
        "fixed_history_tv": f.sum(axis=1) / horizon,
        "diverged": diverged.astype(np.float64),
        "entry": np.where(diverged, tau, 0).astype(np.float64),
        "exposure": np.where(diverged, horizon - tau, 0) / horizon,
        "occupation": (mismatch & after).sum(axis=1) / horizon,
        "saturation": (delta > windows.saturation_threshold).sum(axis=1) / horizon,
        **{f"eos_gap_{r}": ((delta - f) * own).sum(axis=1) / horizon for r, own in enumerate(sets)},
        "prefix_mismatch": mismatch[:, :prefix].sum(axis=1) / horizon,
        "prefix_diverged": (tau <= prefix).astype(np.float64),
        "prefix_eos_x": paths.x_ended[:, :prefix].any(axis=1).astype(np.float64),
        "prefix_eos_y": paths.y_ended[:, :prefix].any(axis=1).astype(np.float64),
        "occupation_compensator": (delta * after).sum(axis=1) / horizon,
        "exposure_compensator": (delta * ~after * (horizon - t)).sum(axis=1) / horizon,
        "written": np.minimum(last, horizon) / horizon,
        "written_exposure": np.where(diverged, np.minimum(last, horizon) - tau, 0) / horizon,
        "evaluations": paths.evaluated.sum(axis=1).astype(np.float64),
    }


def _clocks(paths: PairPaths, windows: Windows) -> Functionals:
    found: Functionals = {}
    bounds = (0, windows.first_block_last, windows.second_block_last, windows.horizon)
    at_t = {"delta": stored(paths.delta), "f": stored(paths.f), "mismatch": paths.mismatch.astype(np.float64)}
    for name, values in at_t.items():
        found |= {f"{name}@{t}": values[:, t - 1] for t in range(1, windows.horizon + 1)}
        for block in (1, 2, 3):
            own = values[:, bounds[block - 1] : bounds[block]]
            if own.shape[1]:
                found[f"block_{block}_{name}"] = own.mean(axis=1)
    for t in range(1, windows.horizon + 1):
        found[f"first_mismatch@{t}"] = (paths.entry == t).astype(np.float64)
    return found


def _cohort(paths: PairPaths, windows: Windows) -> Functionals:
    horizon, bound, tau = windows.horizon, windows.cohort_bound, paths.entry
    member = tau <= bound
    row = np.arange(len(tau))
    first, _ = _both_ends(paths)
    delta, mismatch = stored(paths.delta), paths.mismatch
    at_lag, before = {}, {}
    found: Functionals = {"cohort": member.astype(np.float64)}
    for j in range(1, bound + 1):
        place = np.minimum(tau + j, horizon) - 1  # inside for every member
        at_lag[j] = np.where(member, delta[row, place], 0.0)
        before[j] = (member & (tau + j < first)).astype(np.float64)
        found[f"cohort_delta@{j}"] = at_lag[j]
        found[f"cohort_mismatch@{j}"] = (member & mismatch[row, place]).astype(np.float64)
        found[f"cohort_pre_eos@{j}"] = before[j]
    nothing = np.zeros(len(tau))
    for name, lags in (("early", range(1, windows.early_last + 1)), ("late", range(windows.late_first, bound + 1))):
        if len(lags):
            found[f"{name}_delta"] = sum((at_lag[j] for j in lags), nothing) / len(lags)
        found[f"{name}_pre_eos_steps"] = sum((before[j] for j in lags), nothing)
        found[f"{name}_pre_eos_delta"] = sum((before[j] * at_lag[j] for j in lags), nothing)
    longest, recurs = _agreements(paths)
    found["long_agreement"] = (member & (longest >= windows.agreement_run)).astype(np.float64)
    found["mismatch_after_agreement"] = (member & recurs).astype(np.float64)
    return found


def _agreements(paths: PairPaths) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the longest run of agreements at tau < t < e, and whether a mismatch follows an agreement there."""
    tau, (first, _) = paths.entry, _both_ends(paths)
    run = longest = np.zeros(len(tau), dtype=np.int64)
    agreed = recurs = np.zeros(len(tau), dtype=np.bool_)
    for t, apart in enumerate(paths.mismatch.T, start=1):
        inside = (tau < t) & (t < first)
        recurs = recurs | (inside & apart & agreed)
        agreed = agreed | (inside & ~apart)
        run = np.where(inside & ~apart, run + 1, 0)
        longest = np.maximum(longest, run)
    return longest, recurs


def _depths(paths: PairPaths) -> Functionals:
    mismatch, tau = paths.mismatch, paths.entry
    horizon = mismatch.shape[1]
    t = np.arange(1, horizon + 1)
    found: Functionals = {}
    for depth in range(1, horizon + 1):
        inside = (t >= tau[:, None]) & (t < tau[:, None] + depth)
        found[f"observed@{depth}"] = (mismatch & inside).sum(axis=1) / horizon
        found[f"capacity@{depth}"] = np.maximum(horizon - tau - depth + 1, 0) / horizon
    return found


def stored(distance: Array) -> Array:
    """Return values rounded to float32, as the store keeps them."""
    return distance.astype(np.float32).astype(np.float64)


def _both_ends(paths: PairPaths) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the smaller and the larger EOS position, e and e'; H + 1 if there is none."""
    positions = [(~ended).sum(axis=1) + 1 for ended in (paths.x_ended, paths.y_ended)]  # absorbing
    return np.minimum(*positions), np.maximum(*positions)


def moment_laws(system: FiniteSystem, action: str, windows: Windows) -> dict[str, Law]:
    """Return the law of each moment of one coupled replicate."""
    paths = pair_paths(system, action)
    return {name: law_of_values(values, paths.probability) for name, values in functionals(paths, windows).items()}
