"""Measure how soon a committed event is in the views, while a study grows and ``kvdrift derive --watch`` runs.

    python -m benchmarks.freshness                              # 50 units a second for a minute
    python -m benchmarks.freshness --seconds 20 --json
    python -m benchmarks.freshness --commits 2400               # memory: one unit a commit, about 2 minutes

A thread commits units at a stated rate, ``kvdrift derive --watch`` derives them in another process, and the views of
one ``Store`` are opened anew a few times a second and queried for the units. The delay of a unit begins when its commit
returns, and ends when a query has returned the unit.

With ``--commits`` memory is measured. Commits have one unit, and the views are queried once a second. Memory is read
when everything is derived: in a pause after the 100th commit and after the last commit.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.measurement import BenchmarkRow, Measurement, benchmark_parser, mib, run
from benchmarks.synthetic_study import Sizes, document_row, drawn_units, new_study
from kvdrift.log.store import Store
from kvdrift.sql.catalog import open_views

EARLY_COMMITS = 100  # memory should not grow after these commits
REST = 24.0  # seconds of a pause; memory is read in its second half, since idle threads end after ten seconds
LEAD = 6.0  # seconds in which the derivation starts
PATIENCE = 120.0  # seconds that a query waits for new units


@dataclass(frozen=True)
class Load:
    """How many commits are made, and how fast; each has the units of one document, one for each action."""

    commits: int
    rate: float  # units per second
    units: int = 5  # of a commit
    queries: float = 5.0  # per second, at most
    rests: bool = False  # whether commits pause after the first, and the process is watched after the last

    @property
    def sizes(self) -> Sizes:
        """The sizes of the study, with one document for each commit."""
        return Sizes(1, self.commits, self.units, replicates=8, horizon=32)


@dataclass(frozen=True)
class Seen:
    """The measurements of a run: the seconds of each document, and bytes of memory, which are 0 without pauses."""

    delays: list[float]
    early: int  # median resident bytes of the derivation at rest, after 100 commits
    late: int  # the same after all commits


def memory_load(commits: int, rate: float) -> Load:
    """Return the load for measuring memory: commits of one unit."""
    return Load(commits, rate, 1, 1.0, rests=True)


def write(location: str, load: Load, begin: float) -> dict[str, float]:
    """Commit the units of all documents at the load's rate from ``begin`` on; return the time of each commit.

    Times are in seconds since 1970.
    """
    store, committed = Store.open(location), dict[str, float]()
    for number in range(load.commits):
        document = document_row(1, number)
        units = list(drawn_units([document], load.sizes, 0))
        time.sleep(max(0.0, begin + number * load.units / load.rate - time.time()))
        store.append_units(units)
        committed[document["doc"]] = time.time()
        if load.rests and number + 1 == EARLY_COMMITS:
            time.sleep(REST)
            begin += REST
    return committed


@contextlib.contextmanager
def watching(location: str) -> Iterator[psutil.Process]:
    """Run ``kvdrift derive --watch`` in another process during a block; yield the process."""
    command = [sys.executable, "-m", "kvdrift", "derive", location, "--watch"]
    watch = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    try:
        yield psutil.Process(watch.pid)
        if watch.poll() is not None:
            raise SystemExit(f"kvdrift derive --watch ended with exit code {watch.returncode}")
    finally:
        watch.send_signal(signal.SIGINT)
        watch.wait()


def observe(folder: Path, load: Load) -> Seen:
    """Commit to a new store while it is derived, and query its views until they have all units."""
    location = str(folder / "watched")
    store = new_study(location, load.sizes, 0, [document_row(1, number) for number in range(load.commits)])
    query = f"select doc from trajectories group by doc having count(distinct action) = {load.units}"  # noqa: S608
    seen, memory = dict[str, float](), list[tuple[float, int]]()
    with watching(location) as process, ThreadPoolExecutor(1) as thread:
        last = begin = time.time() + LEAD
        writing = thread.submit(write, location, load, begin)
        while len(seen) < load.commits and (now := time.time()) < last + PATIENCE:
            with open_views(store) as views:
                new = {doc for (doc,) in views.sql(query).fetchall()} - seen.keys()
            seen |= dict.fromkeys(new, time.time())
            last = time.time() if new else last
            memory.append((now, process.memory_info().rss))
            time.sleep(max(0.0, now + 1 / load.queries - time.time()))
        committed = writing.result()
        if lacking := load.commits - len(seen):
            raise SystemExit(f"{location}: {lacking} of {load.commits} commits never came into the views")
        delays = [max(0.0, seen[doc] - at) for doc, at in committed.items()]
        if not load.rests:
            return Seen(delays, 0, 0)
        end = time.time() + REST
        while time.time() < end:
            memory.append((time.time(), process.memory_info().rss))
            time.sleep(0.2)
    rested = sorted(committed.values())[EARLY_COMMITS - 1] + REST
    return Seen(delays, at_rest(memory, rested), at_rest(memory, memory[-1][0]))


def at_rest(readings: list[tuple[float, int]], end: float) -> int:
    """Return the median bytes of ``readings``, (time, bytes), in the second half of a pause that ended at ``end``."""
    return int(statistics.median(now for when, now in readings if end - REST / 2 <= when <= end))


def measure_all(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Measure delays, or with ``--commits`` memory too."""
    load = Load(max(1, round(options.rate * options.seconds / Load.units)), options.rate)
    if options.commits:
        load = memory_load(options.commits, options.rate)
    seen = observe(folder, load)
    facts: dict[str, float] = {"commits": load.commits, "units_per_commit": load.units}
    if load.rests:
        facts |= {f"mib_after_{EARLY_COMMITS}_commits": mib(seen.early), "mib_after_all_commits": mib(seen.late)}
    yield (
        [
            BenchmarkRow(f"{share}% of units are in the views after", float(np.percentile(seen.delays, share)))
            for share in (50, 95, 100)
        ],
        facts,
    )


if __name__ == "__main__":
    parser = benchmark_parser("freshness", "How soon committed events are in the views, and what watching takes.")
    parser.add_argument("--commits", type=int, metavar="N", help="memory: this many commits, above 100, of a unit each")
    parser.add_argument("--rate", type=float, default=50.0, metavar="N", help="units per second; 50 by default")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="how long units are committed")
    run(parser, "units", measure_all)
