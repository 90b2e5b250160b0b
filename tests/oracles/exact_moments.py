"""Every additive moment of a trajectory as an array over enumerated or sampled pairs of paths.

Rows of the arrays are whole paths and columns are positions; the views join positions and lags instead.
Names are those of ``kvdrift.schema.moments``; profile moments carry their position, lag or depth after an "@", and
``branch@s,j`` is 1{tau = s} I_{s+j}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from oracles.exact_systems import REPLICATES, Sample

from kvdrift.generator.finite.paths import PairPaths, pair_paths
from kvdrift.generator.finite.system import FiniteSystem
from kvdrift.schema.windows import Windows

Array = NDArray[np.float64]
Functionals = dict[str, Array]  # [paths] each
NUDGE = 1e-30  # derivatives along the imaginary axis are free of cancellation


def functionals(paths: PairPaths, windows: Windows) -> Functionals:
    """Return all moments of every path; one over an empty window, which is null in the views, is left out."""
    return {**_whole(paths, windows), **_clocks(paths, windows), **_cohort(paths, windows), **_depths(paths)}


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
    for s in range(1, horizon + 1):
        for j in range(horizon - s + 1):
            found[f"branch@{s},{j}"] = ((tau == s) & mismatch[:, s + j - 1]).astype(np.float64)
    return found


def stored(distance: Array) -> Array:
    """Return values rounded to float32, as the store keeps them."""
    return distance.astype(np.float32).astype(np.float64)


def _both_ends(paths: PairPaths) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the smaller and the larger EOS position, e and e'; H + 1 if there is none."""
    positions = [(~ended).sum(axis=1) + 1 for ended in (paths.x_ended, paths.y_ended)]  # absorbing
    return np.minimum(*positions), np.maximum(*positions)


@dataclass(frozen=True)
class Group:
    """One document's moments under some actions: means, covariance of one replicate, and sample means.

    Entries follow ``names``, pairs of action and functional; ``centered`` holds every action's deviations [paths, own
    functionals] in the order of the actions, ``sampled`` the means over the drawn replicates.
    """

    names: list[tuple[str, str]]
    mean: Array
    covariance: Array
    centered: dict[str, Array]
    sampled: Array

    @cached_property
    def place(self) -> dict[tuple[str, str], int]:
        """Return the index of an action's functional."""
        return {name: number for number, name in enumerate(self.names)}


def document_moments(system: FiniteSystem, windows: Windows, samples: Mapping[str, Sample]) -> Group:
    """Return the exact moments of every action of a system, and the means of ``samples`` by action.

    The actions of a replicate share its reference continuation X and are independent given X.
    """
    names: list[tuple[str, str]] = []
    means, sampled = [], []
    centered: dict[str, Array] = {}
    within: dict[str, Array] = {}  # an action's own covariance
    given_x: dict[str, Array] = {}  # P(x) E[deviation | X = x], [V**H, functionals]
    mass = np.zeros(system.alphabet**system.horizon)
    for action, sample in samples.items():
        paths = pair_paths(system, action)
        found = functionals(paths, windows)
        values = np.column_stack(list(found.values()))
        mean = paths.probability @ values
        names += [(action, name) for name in found]
        means.append(mean)
        centered[action] = np.asfortranarray(values - mean)  # functionals are taken out one by one
        weighted = paths.probability[:, None] * centered[action]
        within[action] = centered[action].T @ weighted
        code = paths.x @ system.alphabet ** np.arange(system.horizon - 1, -1, -1)
        mass = np.bincount(code, weights=paths.probability, minlength=len(mass))
        given_x[action] = np.zeros((len(mass), len(mean)))
        np.add.at(given_x[action], code, weighted)
        drawn = functionals(_as_paths(sample), windows)
        sampled.append(np.column_stack(list(drawn.values())).mean(axis=0))
    per_x = np.divide(1.0, mass, out=np.zeros_like(mass), where=mass > 0.0)[:, None]
    covariance = np.block(
        [[within[a] if a == b else given_x[a].T @ (per_x * given_x[b]) for b in samples] for a in samples]
    )
    return Group(names, np.concatenate(means), covariance, centered, np.concatenate(sampled))


def _as_paths(sample: Sample) -> PairPaths:
    """Return replicates as paths of equal probability."""
    step = sample.steps
    return PairPaths(
        probability=np.full(REPLICATES, 1.0 / REPLICATES),
        x=step["x_token"].astype(np.int64),
        y=step["y_token"].astype(np.int64),
        delta=step["delta"].astype(np.float64),
        f=step["f"].astype(np.float64),
        x_ended=step["x_eos"],
        y_ended=step["y_eos"],
    )


@dataclass(frozen=True)
class Pool:
    """Documents pooled with their weights; all replicates are independent."""

    documents: Sequence[Group]
    weights: Sequence[float]

    @property
    def place(self) -> dict[tuple[str, str], int]:
        """Return the index of an action's functional, which is the same in every document."""
        return self.documents[0].place

    @cached_property
    def mean(self) -> Array:
        """Return the exact M(g)."""
        return self._weighted("mean")

    @cached_property
    def nudged(self) -> NDArray[np.complex128]:
        """Return [moments, moments]: row i is M(g) with ``NUDGE`` added to the i-th moment along the imaginary axis."""
        return self.mean + 1j * NUDGE * np.eye(len(self.mean))

    @cached_property
    def sampled(self) -> Array:
        """Return M(g) over the sampled replicates."""
        return self._weighted("sampled")

    @cached_property
    def covariance(self) -> Array:
        """Return the exact covariance of ``sampled``."""
        parts = [w**2 * group.covariance for w, group in zip(self.weights, self.documents, strict=True)]
        return np.asarray(np.sum(parts, axis=0) / REPLICATES)

    def largest(self, gradient: Array) -> Array:
        """Return how far one replicate can move gradient' M(g) at most; gradient [moments, columns]."""
        largest = np.zeros(gradient.shape[1])
        for weight, group in zip(self.weights, self.documents, strict=True):
            start, reach = 0, np.zeros(gradient.shape[1])
            for deviations in group.centered.values():
                own = gradient[start : start + deviations.shape[1]]
                start += deviations.shape[1]
                used = own.any(axis=1)  # a few of many, in most columns
                if used.any():
                    moved = own[used].T @ deviations.T[used]
                    reach += np.maximum(moved.max(axis=1), -moved.min(axis=1))
            largest = np.maximum(largest, weight * reach / REPLICATES)
        return largest

    def _weighted(self, name: str) -> Array:
        parts = [w * getattr(group, name) for w, group in zip(self.weights, self.documents, strict=True)]
        return np.asarray(np.sum(parts, axis=0))
