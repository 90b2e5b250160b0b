"""Workers that commit to one store, as threads of some processes. A thread has a store of its own.

No process has more than ``THREADS`` of them: delta-rs has 512 threads for the files of all tables of a process, and can
wait for itself if they are all at work.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import NamedTuple

from benchmarks.synthetic_study import ONE_DOCUMENT, document_row, drawn_units
from log.store import Store, Unit

THREADS = 200
DOCUMENTS = 2  # of a commit


class Worker(NamedTuple):
    """A simulated worker: the numbers of its commits, and the seconds that it sleeps before each."""

    numbers: range
    sleeps: Sequence[float]


def units_of(number: int) -> list[Unit]:
    """Draw the units of a commit."""
    documents = [document_row(1, number * DOCUMENTS + one) for one in range(DOCUMENTS)]
    return list(drawn_units(documents, ONE_DOCUMENT, 0))


def commit_all(location: str, workers: Sequence[Worker]) -> tuple[list[float], float]:
    """Have workers commit to a store; return the seconds of each commit, and the CPU seconds of all processes."""
    parts = [workers[first : first + THREADS] for first in range(0, len(workers), THREADS)]
    with ProcessPoolExecutor(len(parts), mp_context=multiprocessing.get_context("spawn")) as processes:
        done = [processes.submit(_commit_part, location, part) for part in parts]
        ended = [one.result() for one in done]
    return [seconds for waited, _ in ended for seconds in waited], sum(cpu for _, cpu in ended)


def _commit_part(location: str, workers: Sequence[Worker]) -> tuple[list[float], float]:
    """Have workers commit in threads of this process."""
    stores = [_opened(location) for _ in workers]
    given = [[units_of(number) for number in worker.numbers] for worker in workers]

    def work(at: int) -> list[float]:
        waited = list[float]()
        for sleep, units in zip(workers[at].sleeps, given[at], strict=True):
            time.sleep(sleep)
            begun = time.perf_counter()
            stores[at].append_units(units)
            waited.append(time.perf_counter() - begun)
        return waited

    with ThreadPoolExecutor(len(workers)) as threads:
        cpu = time.process_time()
        waited = [seconds for own in threads.map(work, range(len(workers))) for seconds in own]
        return waited, time.process_time() - cpu


def _opened(location: str) -> Store:
    """Open a store with its tables: a worker goes on from commit to commit."""
    store = Store.open(location)
    store.stored_units([])
    return store
