"""The live derivation: derive new events soon after they become visible, in bounded micro-batches, in one process.

This module calls the same functions as the pipeline's workers, without a runner. Offline runners pass on nothing before
the end of their input, so that each micro-batch would need a pipeline of its own.

The units of a micro-batch are derived together. Small files are merged in a separate process as they become many
(``kvdrift.transforms.compaction``); the caller has larger files merged elsewhere (``Store.gather``). So time and memory
do not grow with the number of units, and views read few files.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdrift.log.store import Store
from kvdrift.transforms.compaction import Gathering
from kvdrift.transforms.segments import DerivationReport, commit, derive_segment, pending

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BATCH_EVENTS = 1 << 18  # most events of a micro-batch, which is one commit to each table
POLL_SECONDS = 0.1  # how soon a request to stop is seen


def watch(
    store_location: str | Path,
    interval_seconds: float,
    stop: Callable[[], bool],
    progress: Callable[[DerivationReport], None] | None = None,
    idle: Callable[[], None] | None = None,
    *,
    compacts: bool = True,
) -> DerivationReport:
    """Derive new units until ``stop`` returns true; safe beside writers, and beside a derivation in another process.

    Every ``interval_seconds`` all new units are derived; if there are none, ``idle`` is called. ``stop`` is called
    between micro-batches and while waiting. ``progress`` gets the report of each micro-batch, failures included. The
    returned report counts all micro-batches. Small files are not merged if ``compacts`` is False.
    """
    begun = time.perf_counter()
    store = Store.open(store_location)
    total = DerivationReport.of([], store.version("events"), 0.0)
    seen = -1  # the events version after which nothing was left to do
    failed: set[int] = set()  # units
    with Gathering(store.location) if compacts else nullcontext() as gathering:
        while not stop():
            looked = time.perf_counter()
            version = store.version("events")
            work = None if version == seen else pending(store, BATCH_EVENTS)
            todo = (
                [] if work is None else [segment for segment in work.segments if not failed.issuperset(segment.units)]
            )
            if work is None or not todo:
                if work is not None:
                    # If the version may have units that ``units`` does not list yet, it is checked again.
                    seen = work.events_version if work.whole else -1
                    total = replace(total, events_version=work.events_version)
                if idle is not None:
                    idle()
                _wait(looked + interval_seconds, stop)
                continue
            outcome = derive_segment(store, todo[0])
            if outcome.errors:
                derived = {number for _, file in outcome.files for number in file.units}
                failed |= set(todo[0].units) - derived
            covered = work.whole and len(todo) == 1 and not failed
            commit(store, [outcome], work.events_version, covered=covered)
            report = DerivationReport.of([outcome], work.events_version, time.perf_counter() - looked)
            total = total.plus(report)
            if gathering is not None:
                gathering.batch_done()
            if progress is not None:
                progress(report)
            if len(todo) == 1:
                _wait(looked + interval_seconds, stop)
    total.check()
    return replace(total, seconds=time.perf_counter() - begun)


def _wait(end: float, stop: Callable[[], bool]) -> None:
    while (left := end - time.perf_counter()) > 0 and not stop():
        time.sleep(min(POLL_SECONDS, left))
