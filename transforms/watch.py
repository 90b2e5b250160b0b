"""The live form: whatever events become visible is derived soon after, in bounded micro-batches, in one process.

It calls what the pipeline's workers call, without a runner: runners that work offline pass nothing on before the end
of their input, so each micro-batch would pay for a whole pipeline.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from schema.store.store import Store
from transforms.segments import DerivationReport, commit, derive_segment, failure, pending

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
) -> DerivationReport:
    """Derive new segments until asked to stop; safe beside writers, and beside a derivation running elsewhere.

    Args:
        store_location: folder or URL of an existing store.
        interval_seconds: how long to wait when nothing is to do, in seconds.
        stop: asked between micro-batches and while waiting; true ends the watch after the batch at hand.
        progress: called with each micro-batch's own report, failures included.

    Returns:
        The counts over all micro-batches.

    Raises:
        InputError: no store there.
        OperationError: at the end, if segments could not be derived. Each is tried once; the others go on.

    """
    begun = time.perf_counter()
    store = Store.open(store_location)
    failed: dict[str, str] = {}  # by path, one line each
    version = store.version("events")
    seen = -1  # the events version after which nothing was left to do
    segments = events = trajectories = branchings = 0
    while not stop():
        version = store.version("events")
        todo = [] if version == seen else [s for s in pending(store, version) if s.path not in failed]
        if not todo:
            seen = version
            _wait(interval_seconds, stop)
            continue
        batch_begun = time.perf_counter()
        batch = todo[:MICRO_BATCH]
        outcomes = [derive_segment(store, segment) for segment in batch]
        errors = {outcome.path: outcome.error for outcome in outcomes if outcome.error}
        failed |= errors
        commit(store, outcomes, version, covered=len(batch) == len(todo) and not failed)
        report = DerivationReport(
            segments=len(batch) - len(errors),
            events=sum(outcome.events for outcome in outcomes),
            trajectories=sum(outcome.trajectories for outcome in outcomes),
            branchings=sum(outcome.branchings for outcome in outcomes),
            events_version=version,
            seconds=time.perf_counter() - batch_begun,
            failures=tuple(errors.values()),
        )
        segments += report.segments
        events += report.events
        trajectories += report.trajectories
        branchings += report.branchings
        if progress is not None:
            progress(report)
    if failed:
        raise failure(list(failed.values()), segments + len(failed))
    return DerivationReport(segments, events, trajectories, branchings, version, time.perf_counter() - begun)


def _wait(seconds: float, stop: Callable[[], bool]) -> None:
    end = time.perf_counter() + seconds
    while not stop() and (left := end - time.perf_counter()) > 0:
        time.sleep(min(POLL_SECONDS, left))
