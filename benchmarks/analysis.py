"""Time every view and every interval of a derived store, against the project's targets and scipy's bootstrap.

    python -m benchmarks.analysis                     # the paper's size, 7.1 M events: three to four minutes
    python -m benchmarks.analysis --store FOLDER      # a derived store
    python -m benchmarks.analysis --documents 4 --replicates 8 --horizon 32 --draws 1000 --json

Each part runs in a separate process. The peer of intervals is ``scipy.stats.bootstrap`` (vectorized, percentile, as
many resamples) on the same document moments: three quantities, in each stratum and pooled over strata. scipy draws anew
for each interval. Ratios compare with scipy's mean time per interval, over the strata and the pooled row.

Targets: all views and all intervals in 20 s and 2 GiB on two cores, no view over derived tables above 1 s, and
intervals at 100 times scipy's rate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

import kvdrift
from benchmarks.measurement import BenchmarkRow, Measurement, benchmark_parser, measure, mib, run
from benchmarks.synthetic_study import Sizes, write_study
from kvdrift.flows.estimate.estimation import Analysis, estimate_part, parts_of, subjects_of
from kvdrift.flows.estimate.moments import document_moments
from kvdrift.log.store import Store
from kvdrift.sql.catalog import MOMENT_VIEWS, open_views, view_texts
from kvdrift.sql.contracts import contract
from kvdrift.stats.bootstrap import Request
from kvdrift.stats.moments import DocumentMoments
from kvdrift.stats.quantities import QUANTITIES
from kvdrift.stats.reduction import CONTROLS, REDUCED

LARGE = ("events", "steps")  # one row per event: scanned here
SECONDS, MEMORY_MIB, VIEW_SECONDS, RATIO = 20.0, 2048.0, 1.0, 100.0
TIMES = 5  # repetitions of each view


def each_view(location: str, times: int) -> dict[str, float]:
    """Read each view ``times`` times, computing it anew; return the seconds of each view's fastest read, by name."""
    with kvdrift.open(location) as views:  # as `kvdrift sql` does
        rounds = [{name: _seconds(views.table, _query(name)) for name in sorted(view_texts())} for _ in range(times)]
    return {name: min(seconds[name] for seconds in rounds) for name in rounds[0]}


def all_views(location: str) -> None:
    """Open a store's views, keep the moment views as tables in memory, and fetch every view."""
    with open_views(Store.open(location), kept=MOMENT_VIEWS) as views:
        for name in view_texts():
            views.table(_query(name))


def moments_of(location: str) -> DocumentMoments:
    """Read the moments of the evaluation documents of the store's first study."""
    with open_views(Store.open(location), kept=MOMENT_VIEWS) as views:
        study = views.rows("studies").to_pylist()[0]
        return document_moments(views, study["study"], study["model"], "evaluation")


def intervals(moments: DocumentMoments, draws: int, threads: int) -> int:
    """Estimate all quantities from document moments; return their number, not counting variance-reduced ones."""
    analysis = Analysis("", "", "evaluation", 0, ((tuple(QUANTITIES), draws),), Request(), None)
    coefficients = {action: np.full((len(CONTROLS), len(REDUCED)), 0.1) for action in moments.actions}
    parts = parts_of(analysis, moments, subjects_of(moments), coefficients)
    if threads == 1:
        return sum(len(estimates) for estimates in map(estimate_part, parts))
    with ThreadPoolExecutor(threads) as pool:
        return sum(len(estimates) for estimates in pool.map(estimate_part, parts))


def scipy_in_strata(moments: DocumentMoments, draws: int) -> int:
    """Compute intervals of three quantities in every stratum by scipy; return the number of intervals."""
    for stratum in moments.stratum_names:
        rows = moments.strata == stratum
        for statistic, columns in _cases(moments):
            data = tuple(column[rows] for column in columns)
            scipy.stats.bootstrap(
                data, statistic, paired=True, vectorized=True, n_resamples=draws, method="percentile", rng=1
            )
    return 3 * len(moments.stratum_names)


def scipy_pooled(moments: DocumentMoments, draws: int) -> int:
    """Compute intervals of three quantities, pooled over strata with equal weight, by scipy; return their number."""
    documents = [np.flatnonzero(moments.strata == stratum) for stratum in moments.stratum_names]
    for statistic, (first, other) in _cases(moments):

        def pooled(*samples: Any, axis: int, of: Any = statistic, first: Any = first, other: Any = other) -> Any:
            means = [np.mean([column[rows].mean(axis=axis) for rows in samples], axis=0) for column in (first, other)]
            return of(*(mean[..., None] for mean in means), axis=-1)

        scipy.stats.bootstrap(documents, pooled, vectorized=True, n_resamples=draws, method="percentile", rng=1)
    return 3


def _cases(moments: DocumentMoments) -> list[tuple[Any, tuple[Any, Any]]]:
    """Return three quantities, each as a statistic and its two columns of document moments.

    They are mismatch rate and mean entry of the last action, and its gap in R to the first action.
    """
    scalars, last = moments.scalars, len(moments.actions) - 1
    return [
        (_ratio, (scalars["occupation"][:, last], scalars["exposure"][:, last])),
        (_ratio, (scalars["entry"][:, last], scalars["diverged"][:, last])),
        (_difference, (scalars["mismatch"][:, last], scalars["mismatch"][:, 0])),
    ]


def measure_analysis(location: str, draws: int) -> Measurement:
    """Measure a store's views, moments and intervals, and scipy's intervals; return rows, and facts with targets."""
    least = measure(each_view, location, TIMES).value
    views = measure(all_views, location)
    moments = measure(moments_of, location)
    sequence = measure(intervals, moments.value, draws, 1)
    two_threads = measure(intervals, moments.value, draws, 2)
    strata = measure(scipy_in_strata, moments.value, draws)
    pooled = measure(scipy_pooled, moments.value, draws)
    of_stratum, of_pooled = (part.seconds / part.value for part in (strata, pooled))
    count = len(moments.value.stratum_names)
    of_row = (count * of_stratum + of_pooled) / (count + 1)

    rows = [BenchmarkRow(f"view {name}", seconds) for name, seconds in least.items()]
    rows.append(views.row("all views, moments kept", None, "nothing kept", sum(least.values()) / views.seconds))
    rows.append(moments.row("document moments"))
    for name, measured in (("intervals in sequence", sequence), ("intervals by two threads", two_threads)):
        rate = measured.value / measured.seconds
        rows.append(measured.row(name, rate, "scipy", rate * of_row))
    rows.append(strata.row("scipy in strata", 1 / of_stratum))
    rows.append(pooled.row("scipy pooled", 1 / of_pooled))

    total = views.seconds + moments.seconds + sequence.seconds
    peak = mib(max(views.peak_bytes, moments.peak_bytes, sequence.peak_bytes))
    slowest = max((name for name in least if name not in LARGE), key=least.__getitem__)
    rate = two_threads.value / two_threads.seconds
    facts = {
        "intervals": sequence.value,
        "draws": draws,
        "views_and_intervals_seconds": f"{total:.1f} (target {SECONDS:.0f})",
        "peak_memory_mib": f"{peak:.0f} (target {MEMORY_MIB:.0f})",
        "slowest_view": f"{slowest}, {least[slowest]:.2f} s (target {VIEW_SECONDS:.0f})",
        "two_threads_against_scipy": (
            f"{rate * of_pooled:.0f} times its rate pooled (target {RATIO:.0f}), "
            f"{rate * of_stratum:.0f} in strata, {rate * of_row:.0f} in the rows' mixture"
        ),
    }
    return rows, facts


def _query(view: str) -> str:
    columns = "count(columns(*))" if view in LARGE else "*"
    return f"select {columns} from {contract(view).relation}"  # noqa: S608 - a view's name


def _seconds(function: Any, *arguments: Any) -> float:
    begun = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begun


def _ratio(top: Any, bottom: Any, axis: int) -> Any:
    return np.mean(top, axis=axis) / np.mean(bottom, axis=axis)


def _difference(first: Any, other: Any, axis: int) -> Any:
    return np.mean(first, axis=axis) - np.mean(other, axis=axis)


def measure_all(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Measure the store of ``--store``; else a synthetic store of the requested sizes."""
    sizes = Sizes(**{name: getattr(options, name) for name in asdict(Sizes())})
    store = options.store or write_study(f"{folder}/store", sizes).location
    yield measure_analysis(store, options.draws)


if __name__ == "__main__":
    parser = benchmark_parser("analysis", "Measure every view and every interval, against scipy's bootstrap.")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{value} by default")
    parser.add_argument("--store", metavar="DIR", help="a derived store to use instead of a synthetic store")
    parser.add_argument("--draws", type=int, default=10_000, metavar="N", help="bootstrap draws; 10,000 by default")
    run(parser, "intervals", measure_all)
