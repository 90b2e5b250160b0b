"""The live form: whatever events become visible is derived soon after, in bounded micro-batches, in one process.

It calls what the pipeline's workers call, without a runner: runners that work offline pass nothing on before the end
of their input, so each micro-batch would pay for a whole pipeline.

A micro-batch of many units is put together first, and is derived at the cost of one. The small files that this leaves
are put together again as they become many, in a process beside (``transforms.gathering``); whoever calls has larger
ones put together elsewhere (``transforms.compaction.gather``). So neither time nor memory grows with the units that
have come, and views read few files.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from log.store import Store
from transforms.compaction import put_together
from transforms.gathering import Gathering
from transforms.segments import DerivationReport, commit, derive_segment, pending

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MICRO_BATCH = 256  # segments per commit
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
        OperationError: Files cannot be put together; or at the end, if segments could not be derived. Each is tried
            once, and the others go on.

    """
    begun = time.perf_counter()
    store = Store.open(store_location)
    total = DerivationReport.of([], store.version("events"), 0.0)
    seen = -1  # the events version after which nothing was left to do
    failed: set[str] = set()  # paths
    with Gathering(store.location) as gathering:
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
    total.check()
    return replace(total, seconds=time.perf_counter() - begun)


def _wait(end: float, stop: Callable[[], bool]) -> None:
    while (left := end - time.perf_counter()) > 0 and not stop():
        time.sleep(min(POLL_SECONDS, left))
