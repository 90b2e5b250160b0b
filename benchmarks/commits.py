"""Measure what many workers cost the log of one store: how long commits take, and how often they are tried again.

    python -m benchmarks.commits                           # 200 and 1,000 workers, in a folder
    python -m benchmarks.commits --workers 50 --at-once

A simulated worker is a thread with its own ``Store``. It sleeps as long as a worker of a cluster generates between two
commits (``kvdrift.flows.cluster.worker``), longer after a slow commit, and then commits the units of two
documents. With ``--at-once`` no worker sleeps. Afterwards the events of the store are compared with those that the
workers committed.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.measurement import BenchmarkRow, Measurement, benchmark_parser, run
from benchmarks.synthetic_study import ONE_DOCUMENT, document_row, drawn_units
from kvdrift.flows.cluster.worker import LOCAL, Pace, spread
from kvdrift.log.store import Store, Unit
from kvdrift.schema.tables import EVENTS

_CREATED = 0x100  # IN_CREATE of inotify(7)
_HEADER = struct.Struct("iIII")  # watch, mask, cookie, length of the name

TABLES = ("events", "units")  # a commit of units makes a version of both
# delta-rs has 512 threads for all tables of a process. More workers than these in one process could block it for good.
THREADS = 200
DOCUMENTS = 2  # of a commit


class Workers(NamedTuple):
    """Some of the simulated workers; ``together`` is the number of all workers.

    ``numbers`` says which commits each worker makes, by their numbers in the whole run. Workers sleep between commits
    as ``pace`` says; if it is None, they never sleep.
    """

    numbers: Sequence[range]
    together: int
    pace: Pace | None

    def sleep(self, commit: float) -> None:
        """Sleep before a worker's next commit; ``commit`` is how many seconds its last one took."""
        if self.pace is not None:
            time.sleep(spread(self.pace.seconds(self.together, commit)))


def units_of(number: int) -> list[Unit]:
    """Draw the units of the commit with the given number: those of ``DOCUMENTS`` documents."""
    documents = [document_row(1, number * DOCUMENTS + place) for place in range(DOCUMENTS)]
    return list(drawn_units(documents, ONE_DOCUMENT, 0))


def commit_all(location: str, workers: Workers) -> tuple[list[float], float]:
    """Have workers commit to a store; return the seconds of each commit, and the CPU seconds of all processes."""
    numbers = workers.numbers
    parts = [workers._replace(numbers=numbers[at : at + THREADS]) for at in range(0, len(numbers), THREADS)]
    with ProcessPoolExecutor(len(parts), mp_context=multiprocessing.get_context("spawn")) as processes:
        done = [processes.submit(_commit_part, location, part) for part in parts]
        ended = [future.result() for future in done]
    return [seconds for waited, _ in ended for seconds in waited], sum(cpu for _, cpu in ended)


def _commit_part(location: str, workers: Workers) -> tuple[list[float], float]:
    """Have workers commit in threads of this process; return the seconds of each commit, and the CPU seconds."""
    stores = [Store.open(location) for _ in workers.numbers]
    for store in stores:
        store.stored_units([])  # opens the tables, which a worker does once
    drawn = [[units_of(number) for number in numbers] for numbers in workers.numbers]

    def work(at: int) -> list[float]:
        waited = list[float]()
        for units in drawn[at]:
            workers.sleep(waited[-1] if waited else 0.0)
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
    """The times of simulated workers' commits, the races for a version that they lost, and the rows that are wrong."""

    commits: int  # groups of units; each is a version of both tables
    lost_races: int  # for versions of both tables
    seconds: float  # from the beginning to the end of the workers' processes
    cpu_seconds: float  # of all workers
    waited: list[float]  # seconds that each group's commit took
    lost: int  # rows of events that the store lacks
    doubled: int  # rows of events that the store has too often

    @property
    def retries(self) -> float:
        """Lost races per version of a table: how often a commit of a table was tried again, on average."""
        return self.lost_races / (len(TABLES) * self.commits)


def simulate(location: str, workers: int, commits: int, *, at_once: bool = False) -> Simulated:
    """Measure workers that each make ``commits`` commits to a new local store.

    Before each commit a worker sleeps, as a cluster's worker would generate then; with ``at_once`` it does not.
    """
    Store.create(location)
    pace = None if at_once else LOCAL
    numbers = [range(first, first + commits) for first in range(0, workers * commits, commits)]
    with lost_races_here(location) as lost_races:
        begun = time.perf_counter()
        waited, cpu_seconds = commit_all(location, Workers(numbers, workers, pace))
        seconds, races_lost = time.perf_counter() - begun, lost_races()
    committed = [unit for number in range(workers * commits) for unit in units_of(number)]
    lost, doubled = compared(Store.open(location), committed)
    return Simulated(workers * commits, races_lost, seconds, cpu_seconds, waited, lost, doubled)


def compared(store: Store, committed: list[Unit]) -> tuple[int, int]:
    """Return how many events of ``committed`` units the store lacks, and how many events it has besides these."""
    names = list(committed[0].events.column_names)
    key = [(name, "ascending") for name in EVENTS.key if name in names]
    rows = [
        {repr(row) for row in table.select(names).sort_by(key).to_pylist()}
        for table in (pa.concat_tables(unit.events for unit in committed), store.read("events"))
    ]
    return len(rows[0] - rows[1]), store.row_count("events") - len(rows[0] & rows[1])


@contextmanager
def lost_races_here(location: str) -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many races for versions of a local store's tables were lost so far.

    delta-rs writes the file of a version under a name with ``#``, and then links the version's name to it, which fails
    if that name exists. So lost races are the files that were written but got no name of a version.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init()
    for table in TABLES:
        if libc.inotify_add_watch(watch, os.fsencode(Path(location, table, "_delta_log")), _CREATED) < 0:
            raise OSError(ctypes.get_errno(), f"{location}: inotify cannot watch it for new files")
    tried = made = 0
    reading, over = threading.Lock(), threading.Event()

    def read() -> None:
        nonlocal tried, made
        with reading:
            while select.select([watch], [], [], 0)[0]:
                for name in _names(os.read(watch, 1 << 16)):
                    tried += ".json#" in name
                    made += name.endswith(".json")

    def go_on() -> None:
        while not over.wait(0.05):  # before the kernel's queue of 16,384 names is full
            read()

    def count() -> int:
        read()
        return tried - made

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join()
        os.close(watch)


def _names(data: bytes) -> Iterator[str]:
    """Read the names of created files out of inotify's events."""
    at = 0
    while at < len(data):
        watch, _, _, length = _HEADER.unpack_from(data, at)
        if watch < 0:
            raise OSError("inotify lost names of new files, so lost races cannot be counted; use fewer --workers")
        at += _HEADER.size + length
        yield data[at - length : at].rstrip(b"\0").decode()


def measure_all(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Simulate each number of workers of ``--workers``; yield the row and the facts of each."""
    for workers in options.workers:
        simulated = simulate(str(folder / str(workers)), workers, options.commits, at_once=options.at_once)
        rate, waited = simulated.commits / simulated.seconds, np.quantile(simulated.waited, [0.5, 0.99])
        yield (
            [BenchmarkRow(f"{workers:,} workers", simulated.seconds, simulated.cpu_seconds, None, rate)],
            {
                f"of_{workers}_workers": {
                    "lost_races_a_commit": round(simulated.retries, 3),
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
