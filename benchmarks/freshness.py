"""Measure how soon a committed event is in the views, while a study grows and ``kvdrift derive --watch`` runs.

    python -m benchmarks.freshness                              # 50 units a second for a minute; the peer too
    python -m benchmarks.freshness --seconds 20 --no-peer --json
    python -m benchmarks.freshness --commits 2400               # memory: one unit a commit, about 5 minutes

Processes work in parallel, as beside a real run: writers commit units at a stated rate; ``kvdrift derive --watch``
derives them; a reader opens the views of one ``Store`` anew a few times a second, and queries ``trajectories`` for its
units. The delay of a unit begins when its commit returns, and ends when a query of the reader has returned the unit.
The peer runs ``kvdrift derive`` again and again on another store; ratios compare delays.

With ``--commits`` memory is measured. One writer makes commits of one unit, the reader queries once a second, and there
is no peer. Memory is read when everything is derived: in a pause after the 100th commit and after the last commit.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measurement import BenchmarkRow, Measurement, benchmark_parser, mib, run
from benchmarks.synthetic_study import Sizes, document_row, drawn_units, new_study
from kvdrift.log.store import Store
from kvdrift.sql.catalog import open_views

EARLY_COMMITS = 100  # memory should not grow after these commits
REST = 24.0  # seconds of a pause; memory is read in its second half, since idle threads end after ten seconds
LEAD = 6.0  # seconds in which the derivation starts and the reader queries a store without units
PATIENCE = 120.0  # seconds that the reader waits for the first new unit
UNITS, WRITERS, QUERIES = 5, 2, 5.0  # units of a commit, processes that commit, queries of the reader per second
PEER = "derive again and again"
COMMAND = (sys.executable, "-m", "kvdrift", "derive")


@dataclass(frozen=True)
class Load:
    """How many units the writers commit, and how fast; and how often the reader queries."""

    commits: int  # of all writers together
    rate: float  # units per second of all writers together
    units: int = UNITS  # of a commit: those of one document, one for each action
    writers: int = WRITERS
    replicates: int = 8  # of a unit
    horizon: int = 32
    queries: float = QUERIES  # of the reader per second, at most
    rests: bool = False  # whether the writer, which is alone, pauses after the first commits

    @property
    def sizes(self) -> Sizes:
        """The sizes of the study, with one document for each commit."""
        return Sizes(1, self.commits, self.units, self.replicates, self.horizon)


@dataclass
class Seen:
    """The measurements of a run.

    The bytes of memory ``early`` and ``late`` are 0 if writers make no pause to measure them, or without ``--watch``.
    """

    delays: list[float] = field(default_factory=list)  # seconds of each unit, in the order of the documents
    writing: float = 0.0  # seconds from the first commit to the last
    early: int = 0  # median resident bytes of the derivation at rest, after 100 commits
    late: int = 0  # the same after all commits
    peak: int = 0  # the largest resident bytes that were seen
    beside: int = 0  # the largest resident bytes of the processes that the derivation starts
    cpu: dict[str, float] = field(default_factory=dict)  # seconds by kind of process


def memory_load(commits: int, rate: float, replicates: int, horizon: int) -> Load:
    """Return the load for measuring memory: commits of one unit."""
    return Load(commits, rate, 1, 1, replicates, horizon, 1.0, rests=True)


def write(location: str, load: Load, writer: int, begin: float) -> tuple[dict[str, float], float]:
    """Commit the units of every ``load.writers``-th document, beginning with number ``writer``, at the load's rate.

    ``begin`` is when commits begin. Returns the time of each document's commit, and the CPU seconds. Times are in
    seconds since 1970.
    """
    store, committed, cpu = Store.open(location), dict[str, float](), time.process_time()
    for number in range(writer, load.commits, load.writers):
        document = document_row(1, number)
        units = list(drawn_units([document], load.sizes, 0))
        time.sleep(max(0.0, begin + number * load.units / load.rate - time.time()))
        store.append_units(units)
        committed[document["doc"]] = time.time()
        if load.rests and number + 1 == EARLY_COMMITS:
            time.sleep(REST)
            begin += REST
    return committed, time.process_time() - cpu


def read(location: str, load: Load, begin: float) -> tuple[dict[str, float], float]:
    """Query the views of a store again and again, until they have all units, or no new ones for ``PATIENCE`` seconds.

    ``begin`` is when commits begin. Returns the time at which a query first had each document's units, and the CPU
    seconds of all queries but the first. Times are in seconds since 1970.
    """
    store, seen, cpu = Store.open(location), dict[str, float](), 0.0
    query = f"select doc from trajectories group by doc having count(distinct action) = {load.units}"  # noqa: S608
    last = begin  # when there was something new
    while len(seen) < load.commits and (begun := time.time()) < last + PATIENCE:
        with open_views(store) as views:
            rows = views.sql(query).fetchall()
        now = time.time()
        last = now if len(rows) > len(seen) else last
        for (doc,) in rows:
            seen.setdefault(doc, now)
        cpu = cpu or time.process_time()
        time.sleep(max(0.0, begun + 1 / load.queries - time.time()))
    return seen, time.process_time() - cpu


@contextlib.contextmanager
def watching(location: str) -> Iterator[psutil.Process | None]:
    """Run ``kvdrift derive --watch`` in another process during a block; yield the process."""
    watch = subprocess.Popen([*COMMAND, location, "--watch"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    try:
        yield psutil.Process(watch.pid)
        if watch.poll() is not None:
            raise SystemExit(f"kvdrift derive --watch ended with exit code {watch.returncode}")
    finally:
        watch.send_signal(signal.SIGINT)
        watch.wait()


@contextlib.contextmanager
def deriving_again(location: str) -> Iterator[psutil.Process | None]:
    """Run ``kvdrift derive`` again and again during a block; yield None, since there is no single process."""
    stop = threading.Event()

    def again() -> None:
        while not stop.is_set():
            subprocess.run([*COMMAND, location], capture_output=True, check=False)  # noqa: S603

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield None
    finally:
        stop.set()
        thread.join()


def observe(folder: Path, load: Load, *, watched: bool) -> Seen:
    """Run writers, reader and derivation, by ``--watch`` if ``watched``, on a new store; return the measurements."""
    location = str(folder / ("watched" if watched else "again"))
    new_study(location, load.sizes, 0, [document_row(1, number) for number in range(load.commits)])
    spawn = multiprocessing.get_context("spawn")
    observed = Seen()
    with (
        (watching if watched else deriving_again)(location) as process,
        ProcessPoolExecutor(load.writers + 1, mp_context=spawn) as pool,
    ):
        list(pool.map(abs, range(load.writers + 1)))  # the processes and their imports are there
        begin = time.time() + LEAD
        reading = pool.submit(read, location, load, begin)
        writing = [pool.submit(write, location, load, writer, begin) for writer in range(load.writers)]
        readings, end = list[tuple[float, int]](), 0.0
        before = 0.0 if process is None else sum(process.cpu_times()[:4])  # with processes that it started
        while process is not None and not (end and time.time() >= end):
            readings.append((time.time(), process.memory_info().rss))
            for child in process.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    observed.beside = max(observed.beside, child.memory_info().rss)
            if reading.done() and not end:
                end = time.time() + (REST if load.rests else 0.0)
            time.sleep(0.2)
        observed.cpu["watch"] = 0.0 if process is None else sum(process.cpu_times()[:4]) - before
        seen, observed.cpu["reader"] = reading.result()
        observed.cpu["writers"] = sum(cpu for _, cpu in (part.result() for part in writing))
        committed = {key: at for part in writing for key, at in part.result()[0].items()}
    if len(seen) < load.commits:
        raise SystemExit(f"{location}: {load.commits - len(seen)} of {load.commits} commits never came into the views")
    observed.writing = max(committed.values()) - begin
    if load.rests and watched:
        observed.early = at_rest(readings, sorted(committed.values())[EARLY_COMMITS - 1] + REST)
        observed.late, observed.peak = at_rest(readings, readings[-1][0]), max(now for _, now in readings)
    observed.delays = [max(0.0, seen[doc] - committed[doc]) for doc in sorted(committed) for _ in range(load.units)]
    return observed


def at_rest(readings: list[tuple[float, int]], end: float) -> int:
    """Return the median bytes of ``readings``, (time, bytes), in the second half of a pause that ended at ``end``."""
    return int(statistics.median(now for when, now in readings if end - REST / 2 <= when <= end))


def measure_all(options: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Measure ``derive --watch``, and the peer unless memory is measured or ``--no-peer`` is given."""
    load = Load(max(1, round(options.rate * options.seconds / UNITS)), options.rate)
    if options.commits:
        load = memory_load(options.commits, options.rate, load.replicates, load.horizon)
    live = observe(folder, load, watched=True)
    peer = None if options.no_peer or load.rests else observe(folder, load, watched=False)
    facts: dict[str, Any] = {"commits": load.commits, "units_per_commit": load.units, "writers": load.writers}
    if live.early:
        facts |= {
            f"mib_after_{EARLY_COMMITS}_commits": round(mib(live.early), 1),
            f"mib_after_{load.commits}_commits": round(mib(live.late), 1),
            "growth": round(live.late / live.early - 1, 4),
            "peak_mib": round(mib(live.peak), 1),
        }
    facts["peak_mib_of_upkeep"] = round(mib(live.beside), 1)
    facts["cpu_seconds"] = {kind: round(taken, 1) for kind, taken in live.cpu.items()}
    facts["seconds_of_writing"] = round(live.writing, 1)
    yield [*delay_rows("derive --watch", live, load, peer), *(delay_rows(PEER, peer, load) if peer else [])], facts


def delay_rows(name: str, seen: Seen, load: Load, peer: Seen | None = None) -> list[BenchmarkRow]:
    """Return rows of the median, 95th percentile and maximum of delays; a ratio is the peer's delay / the row's."""
    rate, rows = load.commits * load.units / seen.writing, list[BenchmarkRow]()
    for label, share in (("p50", 50), ("p95", 95), ("max", 100)):
        delay = float(np.percentile(seen.delays, share))
        ratio = float(np.percentile(peer.delays, share)) / delay if peer and delay else None
        rows.append(BenchmarkRow(f"{name}, {label}", delay, rate=rate, peer=PEER if ratio else None, ratio=ratio))
    return rows


def many_commits(text: str) -> int:
    """Read the text of ``--commits``, a number above ``EARLY_COMMITS``."""
    if int(text) <= EARLY_COMMITS:
        raise argparse.ArgumentTypeError(f"{text}: give more than {EARLY_COMMITS}")
    return int(text)


if __name__ == "__main__":
    parser = benchmark_parser("freshness", "How soon committed events are in the views, and what watching takes.")
    parser.add_argument("--commits", type=many_commits, metavar="N", help="memory: this many commits of one unit each")
    parser.add_argument("--rate", type=float, default=50.0, metavar="N", help="units per second; 50 by default")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="how long units are committed")
    parser.add_argument("--no-peer", action="store_true", help="leave out the peer")
    parser.add_argument("--folder", type=Path, help="where the stores are written; a temporary folder by default")
    run(parser, "units", measure_all)
