"""Measure what many workers cost the log of one store: how long commits take.

    python -m benchmarks.commits                           # 200 and 1,000 workers, in a folder
    python -m benchmarks.commits --workers 50 --at-once

A simulated worker is a thread with its own ``Store``. It sleeps as long as a worker of a cluster generates between two
commits (``kvdrift.flows.cluster.worker``), longer after a slow commit, and then commits the units of two
documents. With ``--at-once`` no worker sleeps. Afterwards the events of the store are compared with those that the
workers committed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.measurement import BenchmarkRow, Measurement, benchmark_parser, run
from benchmarks.synthetic_study import ONE_DOCUMENT, document_row, drawn_units
from kvdrift.flows.cluster.worker import LOCAL, Pace, spread
from kvdrift.log.store import Store, Unit

# delta-rs has 512 threads for all tables of a process. More workers than these in one process could block it for good.
THREADS = 200
DOCUMENTS = 2  # of a commit


def units_of(number: int) -> list[Unit]:
    """Draw the units of the commit with the given number: those of ``DOCUMENTS`` documents."""
    documents = [document_row(1, number * DOCUMENTS + place) for place in range(DOCUMENTS)]
    return list(drawn_units(documents, ONE_DOCUMENT, 0))


def _commit_part(location: str, numbers: Sequence[range], workers: int, pace: Pace | None) -> tuple[list[float], float]:
    """Have some of the ``workers`` commit in threads of this process; return each commit's seconds, and CPU seconds.

    ``numbers`` says which commits each makes, by their numbers in the whole run; without a ``pace`` none sleeps.
    """
    stores = [Store.open(location) for _ in numbers]
    for store in stores:
        store.stored_units([])  # opens the tables, which a worker does once
    drawn = [[units_of(number) for number in own] for own in numbers]

    def work(at: int) -> list[float]:
        waited = list[float]()
        for units in drawn[at]:
            if pace is not None:
                time.sleep(spread(pace.seconds(workers, waited[-1] if waited else 0.0)))
            begun = time.perf_counter()
            stores[at].append_units(units)
            waited.append(time.perf_counter() - begun)
        return waited

    with ThreadPoolExecutor(len(stores)) as threads:
        cpu = time.process_time()
        waited = [seconds for waits in threads.map(work, range(len(stores))) for seconds in waits]
        return waited, time.process_time() - cpu


@dataclass(frozen=True)
class Simulated:
    """The times of simulated workers' commits, and the rows that are wrong."""

    seconds: float  # from the beginning to the end of the workers' processes
    cpu_seconds: float  # of all workers
    waited: list[float]  # seconds that each commit took
    lost: int  # rows of events that the store lacks
    doubled: int  # rows of events that the store has too often


def simulate(location: str, workers: int, commits: int, *, at_once: bool = False) -> Simulated:
    """Measure workers that each make ``commits`` commits to a new local store.

    Before each commit a worker sleeps, as a cluster's worker would generate then; with ``at_once`` it does not.
    """
    Store.create(location)
    numbers = [range(first, first + commits) for first in range(0, workers * commits, commits)]
    parts = [numbers[at : at + THREADS] for at in range(0, workers, THREADS)]
    begun = time.perf_counter()
    with ProcessPoolExecutor(len(parts), mp_context=multiprocessing.get_context("spawn")) as processes:
        pace = None if at_once else LOCAL
        done = [processes.submit(_commit_part, location, part, workers, pace) for part in parts]
        ended = [future.result() for future in done]
    seconds = time.perf_counter() - begun
    committed = [unit for number in range(workers * commits) for unit in units_of(number)]
    waited = [one for all_waited, _ in ended for one in all_waited]
    return Simulated(seconds, sum(cpu for _, cpu in ended), waited, *compared(Store.open(location), committed))


def compared(store: Store, committed: list[Unit]) -> tuple[int, int]:
    """Return how many events of ``committed`` units the store lacks, and how many events it has besides these."""
    names = list(committed[0].events.column_names)
    rows = [
        {repr(row) for row in table.select(names).to_pylist()}
        for table in (pa.concat_tables(unit.events for unit in committed), store.read("events"))
    ]
    return len(rows[0] - rows[1]), store.row_count("events") - len(rows[0] & rows[1])


def measure_all(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Simulate each number of workers of ``--workers``; yield the row and the facts of each."""
    for workers in options.workers:
        simulated = simulate(str(folder / str(workers)), workers, options.commits, at_once=options.at_once)
        rate, waited = len(simulated.waited) / simulated.seconds, np.quantile(simulated.waited, [0.5, 0.99])
        yield (
            [BenchmarkRow(f"{workers:,} workers", simulated.seconds, simulated.cpu_seconds, None, rate)],
            {
                f"of_{workers}_workers": {
                    "seconds_of_a_commit_median": round(float(waited[0]), 3),
                    "seconds_of_a_commit_99_of_100": round(float(waited[1]), 3),
                    "share_of_time_in_commits": round(sum(simulated.waited) / (workers * simulated.seconds), 4),
                    "rows_lost": simulated.lost,
                    "rows_doubled": simulated.doubled,
                }
            },
        )


if __name__ == "__main__":
    parser = benchmark_parser("commits", "Commits of many workers to one log.")
    parser.add_argument("--workers", type=int, nargs="+", default=[200, 1_000], metavar="N")
    parser.add_argument("--commits", type=int, default=2, metavar="N", help="commits of each worker")
    parser.add_argument("--folder", type=Path, help="where the stores are written; a temporary folder by default")
    parser.add_argument("--at-once", action="store_true", help="no sleep before a commit")
    run(parser, "commits", measure_all)
