"""Moments of units by plain loops over the replicates of each unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from fixtures.awkward_logs import Row
from oracles.coupled_paths import Analysis, Path, WindowRanges, capacity, in_cohort, observed
from oracles.view_definitions import document_keys, scalar_moments, windows


def unit_moments(analysis: Analysis) -> list[Row]:
    """Return one row for each unit."""
    return [
        summed(analysis, [path for path in paths if path.unit == unit], unit or 0)
        for paths in analysis.by_document(analysis.paths).values()
        for unit in {path.unit for path in paths}
    ]


def profiles(analysis: Analysis) -> Iterator[Row]:
    """One row for each document and action, over all its units."""
    for paths in analysis.by_document(analysis.paths).values():
        row = summed(analysis, paths, 0)
        sums = {name: value for name, value in row.items() if name.startswith(("position_", "lag_", "bin_", "depth_"))}
        members = {"cohort_paths": int(row["scalar_cohort"])}
        windows_of = {name: row[name] for name in ("horizon", "cohort_bound", "replicates")}
        yield document_keys(paths[0]) | windows_of | members | sums


def summed(analysis: Analysis, paths: list[Path], unit: int) -> Row:
    """The row of some replicates of a document."""
    first, found = paths[0], analysis.window(paths[0])
    (own,) = (row for row in windows(analysis) if (row["study"], row["model"]) == (first.study, first.model))
    each = [scalar_moments(path, found) for path in paths]
    scalars = {
        f"scalar_{name}": None if value is None else math.fsum(one[name] or 0.0 for one in each)
        for name, value in each[0].items()
    }
    positions = range(1, found.horizon + 1)
    members = [path for path in paths if in_cohort(path, found)]
    return own | {
        **{name: getattr(first, name) for name in ("doc", "action")},
        "action_revision": 0,
        "unit": unit,
        "replicates": len(paths),
        **scalars,
        "position_delta": profile(paths, positions, Path.delta),
        "position_f": profile(paths, positions, Path.f),
        "position_mismatch": profile(paths, positions, Path.mismatch),
        "position_first_mismatch": profile(paths, positions, lambda path, t: path.tau == t),
        "lag_cohort_delta": of_lags(members, found, Path.delta),
        "lag_cohort_mismatch": of_lags(members, found, Path.mismatch),
        "lag_cohort_pre_eos": of_lags(members, found, lambda path, t: t < path.first_eos),
        "bin_kl": binned(paths),
        "depth_observed": [found.horizon * value for value in profile(paths, positions, observed)],
        "depth_capacity": [found.horizon * value for value in profile(paths, positions, capacity)],
    }


def binned(paths: list[Path]) -> list[float]:
    """How many positions have KL along X in each bin: 0; up to 2^-40; 200 quarters of octaves up to 2^10; above."""
    edges = [0.0, *(2.0 ** (quarter / 4) for quarter in range(-160, 41)), math.inf]
    counts = [0.0] * len(edges)
    for path in paths:
        for t in path.known():
            counts[next(place for place, edge in enumerate(edges) if path.kl(t) <= edge)] += 1
    return counts


def profile(paths: list[Path], places: range, value: Callable[[Path, int], float]) -> list[float]:
    """The sum over replicates at each place."""
    return [math.fsum(value(path, place) for path in paths) for place in places]


def of_lags(members: list[Path], found: WindowRanges, value: Callable[[Path, int], float]) -> list[float]:
    """The sum over members of the cohort at each lag 1..T."""
    return profile(members, range(1, found.cohort_bound + 1), lambda path, lag: value(path, (path.tau or 0) + lag))


UNIT_MOMENT_EVALUATIONS: dict[str, Callable[[Analysis], Iterable[Row]]] = {
    "unit_moments": unit_moments,
    "profiles": profiles,
}
