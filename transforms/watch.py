"""The live form: whatever events become visible is derived soon after, in bounded micro-batches, in one process.

It calls what the pipeline's workers call, without a runner: runners that work offline pass nothing on before the end
of their input, so each micro-batch would pay for a whole pipeline.

A micro-batch of many units is put together first, and is derived at the cost of one. The small files that this leaves
are put together again as they become many, in a thread beside; whoever calls has larger ones put together elsewhere
(``transforms.compaction.gather``). So neither time nor memory grows with the units that have come, and views read few
files.
"""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from schema.store.compaction.packs import LIVE_ROWS
from schema.store.store import Store
from transforms.compaction import gather, put_together
from transforms.segments import DerivationReport, commit, derive_segment, pending

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MICRO_BATCH = 256  # segments per commit
BATCHES_PER_GATHERING = 16  # a micro-batch leaves one file
POLL_SECONDS = 0.1  # how soon a request to stop is seen


def watch(
    store_location: str | Path,
    interval_seconds: float,
    stop: Callable[[], bool],
    progress: Callable[[DerivationReport], None] | None = None,
    idle: Callable[[], None] | None = None,
) -> DerivationReport:
    """Derive new segments until asked to stop; safe beside writers, and beside a derivation in another process.

    Looks every ``interval_seconds`` for what is to do, and takes all that has come; it calls ``idle`` where nothing
    has. ``stop`` is asked between micro-batches and while waiting, ``progress`` gets the report of each micro-batch,
    failures included. The counts returned are over all of them.

    Raises:
        InputError: There is no store.
        OperationError: At the end, if segments could not be derived. Each is tried once, and the others go on.

    """
    begun = time.perf_counter()
    store = Store.open(store_location)
    total = DerivationReport.of([], store.version("events"), 0.0)
    seen = -1  # the events version after which nothing was left to do
    failed: set[str] = set()  # paths
    with ThreadPoolExecutor(1) as thread:
        gathering = _Gathering(store, thread)
        while not stop():
            looked = time.perf_counter()
            version = store.version("events")
            todo = [] if version == seen else [s for s in pending(store, version) if s.path not in failed]
            if not todo:
                seen, total = version, replace(total, events_version=version)
                if idle is not None:
                    idle()
                _wait(looked + interval_seconds, stop)
                continue
            batch = todo[:MICRO_BATCH]
            together, gone = put_together(store, batch)
            outcomes = [derive_segment(store, segment) for segment in (*together, *batch) if segment.path not in gone]
            failed |= {outcome.path for outcome in outcomes if outcome.error}
            commit(store, outcomes, version, covered=len(batch) == len(todo) and not failed)
            report = DerivationReport.of(outcomes, version, time.perf_counter() - looked)
            total = total.plus(report)
            gathering.batch_done()
            if progress is not None:
                progress(report)
            if len(batch) == len(todo):
                _wait(looked + interval_seconds, stop)
        gathering.end()
    total.check()
    return replace(total, seconds=time.perf_counter() - begun)


class _Gathering:
    """Puts small files together in a thread beside the derivation, which does not wait for it."""

    def __init__(self, store: Store, thread: Executor) -> None:
        self._store, self._thread = store, thread
        self._running: Future[None] | None = None
        self._batches = 0  # since it began

    def batch_done(self) -> None:
        """Count a micro-batch, and begin after some of them, unless it is still under way.

        Raises:
            InputError: What was begun before has failed.

        """
        self._batches += 1
        if self._batches >= BATCHES_PER_GATHERING and (self._running is None or self._running.done()):
            self.end()
            self._running, self._batches = self._thread.submit(gather, self._store, LIVE_ROWS), 0

    def end(self) -> None:
        """Wait for what is under way. Raises what ``batch_done`` does."""
        if self._running is not None:
            self._running.result()


def _wait(end: float, stop: Callable[[], bool]) -> None:
    while (left := end - time.perf_counter()) > 0 and not stop():
        time.sleep(min(POLL_SECONDS, left))
