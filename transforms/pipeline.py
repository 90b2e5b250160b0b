"""The Beam pipeline: events segments -> files of the derived tables -> one commit per table and bounded batch.

No arithmetic here, and nothing that a particular runner has to add: elements are groups of segments, one map derives
a group and writes its files, one leaf writes a small record per group. The driver counts the records and commits.
Whatever dies on the way, files without a commit are invisible and the next run replaces them.

Beam is imported only when there is something to derive.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from schema.errors import InputError, OperationError
from schema.store.store import Store
from transforms.records import read_records, record_folder, write_record
from transforms.segments import DerivationReport, Outcome, Segment, commit, derive_segment, failure, pending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

DEFAULT_RUNNER = "FnApiRunner"
BATCH = 2048  # segments per pipeline run and commit: bounds memory, and what a kill can cost
GROUP = 16  # segments per element: a segment of 1,000 events takes less time than handing an element around

Group = tuple[int, tuple[Segment, ...]]
Late = Any  # a type or module of Beam's, not known before Beam is imported


def run_derivation(
    store_location: str | Path,
    runner: str = DEFAULT_RUNNER,
    options: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> DerivationReport:
    """Derive every segment of the store's current events version that is not derived yet.

    Args:
        store_location: folder or URL of an existing store.
        runner: a Beam runner's name: ``FnApiRunner`` (in this process), ``DaskRunner``, ``FlinkRunner`` or another.
        options: command-line options for Beam and its runner, such as ``--dask_client_address=tcp://host:8786``.
        progress: called with (segments done, segments to do) after each commit.

    Returns:
        Counts of what this run derived; ``segments`` is 0 when nothing was to do.

    Raises:
        InputError: no store there, an unknown runner, or one whose packages are missing.
        OperationError: segments could not be read or derived (all others are committed), the runner failed, or it
            brought back other segments than it was given.

    """
    begun = time.perf_counter()
    store = Store.open(store_location)
    version = store.version("events")
    todo = pending(store, version)
    events = trajectories = branchings = done = 0
    failures: list[str] = []
    for start in range(0, len(todo), BATCH):
        batch = todo[start : start + BATCH]
        outcomes = _run_batch(store.location, batch, runner, options)
        failures += [outcome.error for outcome in outcomes if outcome.error]
        lost = {segment.path for segment in batch} ^ {outcome.path for outcome in outcomes}
        last = start + BATCH >= len(todo)
        commit(store, outcomes, version, covered=last and not failures and not lost)
        if lost or len(outcomes) != len(batch):
            raise OperationError(
                f"{runner} was given {len(batch)} segments and brought back {len(outcomes)}; run the derivation again"
            )
        derived = [outcome for outcome in outcomes if not outcome.error]
        events += sum(outcome.events for outcome in derived)
        trajectories += sum(outcome.trajectories for outcome in derived)
        branchings += sum(outcome.branchings for outcome in derived)
        done += len(derived)
        if progress is not None:
            progress(min(start + BATCH, len(todo)), len(todo))
    if failures:
        raise failure(failures, len(todo))
    return DerivationReport(done, events, trajectories, branchings, version, time.perf_counter() - begun)


def derive_groups(groups: Late, location: str, folder: str) -> Late:
    """Build the whole graph, with a single leaf.

    Args:
        groups: PCollection of (number, segments); a number or a segment may come more than once, in any order.
        location: absolute path or URL of the store, as workers see it.
        folder: where each group's record goes, see ``transforms.records``.

    Returns:
        PCollection with the number of segments of each group recorded.

    """
    beam = _beam()
    return groups | "Derive" >> beam.Map(derive_group, location) | "Record" >> beam.Map(write_record, folder)


def derive_group(group: Group, location: str) -> tuple[int, tuple[Outcome, ...]]:
    """Derive one element's segments in the store at ``location``; runs on a worker."""
    number, segments = group
    store = _worker_store(location)
    return number, tuple(derive_segment(store, segment) for segment in segments)


@functools.lru_cache(maxsize=1)
def _worker_store(location: str) -> Store:
    return Store.open(location)


def _run_batch(location: str, batch: Sequence[Segment], runner: str, options: Sequence[str]) -> list[Outcome]:
    groups: list[Group] = [
        (start // GROUP, tuple(batch[start : start + GROUP])) for start in range(0, len(batch), GROUP)
    ]
    with _quiet_beam(), record_folder(location) as folder:
        beam = _beam()
        flags = _beam("options.pipeline_options").PipelineOptions(list(options))  # without a list, sys.argv
        pipeline = beam.Pipeline(runner=_beam_runner(runner), options=flags)
        derive_groups(pipeline | "Segments" >> beam.Create(groups), location, folder)
        try:
            _run_to_the_end(pipeline)
        except Exception as error:  # a runner raises whatever its workers and its own machinery raise
            # Beam appends the stage it was in to the message of whatever was raised; the first line says enough.
            line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise OperationError(f"{runner} failed: {line}") from error
        return read_records(folder)


def _run_to_the_end(pipeline: Late) -> None:
    result = pipeline.run()
    try:
        state = str(result.wait_until_finish())
    finally:
        client = getattr(result, "client", None)
        if client is not None:  # the Dask runner leaves its client, and a cluster of its own, running
            client.close()
    if state != "DONE":
        raise RuntimeError(f"it ended as {state}")


def _beam(module: str = "") -> Late:
    """Import a module of Beam: half a second that a run with nothing to do need not spend."""
    return importlib.import_module(f"apache_beam.{module}" if module else "apache_beam")


def _beam_runner(name: str) -> Late:
    """Make the runner of that name: one known to Beam, or Dask's, which Beam does not list."""
    if name.lower() in {"dask", "daskrunner"}:
        if importlib.util.find_spec("distributed") is None:
            raise InputError("DaskRunner needs dask: pip install dask distributed")
        return _beam("runners.dask.dask_runner").DaskRunner()
    if name.lower() in {"direct", "directrunner"}:
        raise InputError(
            "DirectRunner downloads another runner before it starts; use FnApiRunner, which runs here as is"
        )
    try:
        return _beam("runners.runner").create_runner(name)
    except (ValueError, ImportError, AttributeError) as error:
        line = next(iter(str(error).splitlines()), "not found")
        raise InputError(f"runner '{name}': {line}") from error


@contextmanager
def _quiet_beam() -> Iterator[None]:
    """Keep Beam out of the process's logging: it sets up the root logger and warns about what we do not use.

    Errors reach the caller as exceptions; Beam would print each as a wall of tracebacks first.
    """
    root, ours = logging.getLogger(), logging.getLogger("apache_beam")
    handlers, root_level, level, disabled = root.handlers[:], root.level, ours.level, root.manager.disable
    guard = logging.NullHandler()  # Beam's basicConfig leaves a root that has a handler alone
    root.addHandler(guard)
    ours.setLevel(logging.CRITICAL + 1)
    try:
        logging.disable(max(disabled, logging.WARNING))
        _beam()  # warns on the root logger itself
        logging.disable(disabled)
        yield
    finally:
        logging.disable(disabled)
        ours.setLevel(level)
        root.setLevel(root_level)
        root.handlers[:] = handlers
