"""The cost of many workers on the log of one store: commits, races lost for a version, and waits.

    python -m benchmarks.commits                           # 200 and 1,000 workers, in a folder
    python -m benchmarks.commits --workers 200 --where s3  # moto's S3 server on this machine

A simulated worker is a thread with a store of its own, by ``benchmarks.simulated_workers``. It sleeps as long as a
worker of a cluster generates between two commits, by ``flows.cluster.groups``, and then commits the units of two
documents. With ``--at-once`` no worker sleeps. Afterwards the store's events are compared with what workers gave it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from benchmarks.lost_races import lost_races_here, lost_races_there
from benchmarks.measurement import BenchmarkRow, benchmark_parser, show
from benchmarks.s3_server import s3_server
from benchmarks.simulated_workers import Worker, commit_all, units_of
from flows.cluster.groups import LOCAL, REMOTE, spread
from log.store import Store, Unit
from schema.location import is_local
from schema.tables import EVENTS

TABLES = ("events", "units")  # that a commit of units makes a version of


@dataclass(frozen=True)
class Simulated:
    """The result of simulated workers.

    Attributes:
        commits: Groups of units, each of which is a version of two tables.
        lost_races: For versions of both tables.
        seconds: From the beginning to the end of the workers' processes.
        cpu_seconds: Of all workers.
        waited: Seconds that each group's commit took.
        lost: Rows of events that the store lacks.
        doubled: Rows of events that the store has too often.

    """

    commits: int
    lost_races: int
    seconds: float
    cpu_seconds: float
    waited: list[float]
    lost: int
    doubled: int

    @property
    def retries(self) -> float:
        """Lost races for each version of a table."""
        return self.lost_races / (len(TABLES) * self.commits)


def simulate(
    location: str, workers: int, commits: int, races: AbstractContextManager[Any], *, at_once: bool = False
) -> Simulated:
    """Let simulated workers commit groups of units to a new store's log.

    Args:
        location: The location of the new store.
        workers: The number of workers.
        commits: The number of groups of each worker.
        races: Counts lost races.
        at_once: Whether workers commit without any sleep.

    """
    Store.create(location)
    mean = 0.0 if at_once else (LOCAL if is_local(location) else REMOTE).seconds(workers)
    working = [
        Worker(range(first, first + commits), [spread(mean) for _ in range(commits)])
        for first in range(0, workers * commits, commits)
    ]
    with races as lost_races:
        begun = time.perf_counter()
        waited, cpu_seconds = commit_all(location, working)
        seconds, races_lost = time.perf_counter() - begun, lost_races()
    given = [unit for number in range(workers * commits) for unit in units_of(number)]
    lost, doubled = compared(Store.open(location), given)
    return Simulated(workers * commits, races_lost, seconds, cpu_seconds, waited, lost, doubled)


def compared(store: Store, given: list[Unit]) -> tuple[int, int]:
    """Return how many given rows of events the store lacks, and how many rows it has besides."""
    names = list(given[0].events.column_names)
    key = [(name, "ascending") for name in EVENTS.key if name in names]
    rows = [
        {repr(row) for row in table.select(names).sort_by(key).to_pylist()}
        for table in (pa.concat_tables(unit.events for unit in given), store.read("events"))
    ]
    return len(rows[0] - rows[1]), store.row_count("events") - len(rows[0] & rows[1])


@contextmanager
def place(where: str) -> Iterator[tuple[str, Any]]:
    """Yield a place for stores, and a counter of lost races of a store there."""
    if where == "s3":
        with s3_server() as server, patch.dict(os.environ, server.environment):
            yield server.url, lambda _: lost_races_there(server)
    else:
        with tempfile.TemporaryDirectory(dir=where or None) as folder:
            yield folder, lambda location: lost_races_here(location, TABLES)


def main() -> None:
    """Simulate workers, and print the cost."""
    parser = benchmark_parser("commits", "Commits of many workers to one log.")
    parser.add_argument("--workers", type=int, nargs="+", default=[200, 1_000], metavar="N")
    parser.add_argument("--commits", type=int, default=2, metavar="N", help="of each worker")
    parser.add_argument("--where", default="", help="a folder, or s3; a temporary folder by default")
    parser.add_argument("--at-once", action="store_true", help="no sleep before a commit")
    options = parser.parse_args()
    rows, facts = list[BenchmarkRow](), dict[str, Any]()
    for workers in options.workers:
        with place(options.where) as (folder, races):
            location = f"{folder}/store" if "://" in folder else str(Path(folder, "store"))
            found = simulate(location, workers, options.commits, races(location), at_once=options.at_once)
        rows.append(
            BenchmarkRow(f"{workers:,} workers", found.seconds, found.cpu_seconds, None, found.commits / found.seconds)
        )
        waited = np.quantile(found.waited, [0.5, 0.99])
        facts[f"of_{workers}_workers"] = {
            "lost_races_a_commit": round(found.retries, 3),
            "seconds_of_a_commit_median": round(float(waited[0]), 3),
            "seconds_of_a_commit_99_of_100": round(float(waited[1]), 3),
            "share_of_time_in_commits": round(sum(found.waited) / (workers * found.seconds), 4),
            "rows_lost": found.lost,
            "rows_doubled": found.doubled,
        }
    show("commits", rows, "commits", facts, as_json=options.json)


if __name__ == "__main__":
    main()
