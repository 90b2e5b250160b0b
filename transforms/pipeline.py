"""The Beam pipeline: from segments of events to files of derived tables, and one commit for each table and batch.

This module has no arithmetic. Elements are groups of segments: one segment for runners with workers of their own, two
for the runner in this process, which takes one element at a time. One map derives the segments of a group in threads
and writes their files; a last step writes a small record of the result. The driver counts the records and commits. If
a process dies on the way, its files have no commit and stay invisible.

Records go through the store, since every worker and the driver reach it: one JSON file for each group, in a folder of
the run beside the tables. A record is named by its group's number, so a group that a runner tries twice leaves one
record. On a local disk the folder is a temporary one, which is swept up later if the driver's process is killed.

A batch of at most two segments is derived in this process without Beam, unless another runner or an option is given.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.fs

from kvdrift.log.delta.parquet_files import StoredFile
from kvdrift.log.store import DerivedFile, Store
from kvdrift.schema.errors import InputError, OperationError, first_line, installing
from kvdrift.schema.location import filesystem_of, is_local, join
from kvdrift.schema.locking import sweep, temporary_folder
from kvdrift.schema.log_levels import raised_level
from kvdrift.transforms.segments import (
    SEGMENT_ROWS,
    DerivationReport,
    Segment,
    SegmentOutcome,
    commit,
    derive_segment,
    pending,
)

DEFAULT_RUNNER = "FnApiRunner"
SEGMENTS_PER_RUN = 64  # per pipeline run and commit: bounds what a kill can cost
_AT_ONCE = 2  # segments in one process, in threads: most of the time Arrow works or the disk syncs
_DASK_OPTIONS = ("--dask_partition_size=1",)  # one group in a Dask task; Beam's default is 128
_IMPORTING = Lock()  # for disabling logging: of two threads at once, one would restore the other's disabled level

Group = tuple[int, Sequence[Segment]]
Late = Any  # a type or module of Beam's, not known before Beam is imported


def run_derivation(
    store_location: str | Path,
    runner: str = DEFAULT_RUNNER,
    options: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> DerivationReport:
    """Derive every unit of the store's current events version that is not derived yet.

    ``runner`` is a Beam runner's name: ``FnApiRunner`` (in this process), ``DaskRunner``, ``FlinkRunner`` or another.
    ``options`` are command-line options for Beam and the runner, such as ``--dask_client_address=tcp://host:8786``.
    ``progress`` is called with (units done, units to do) after each commit.

    Raises:
        InputError: The runner is unknown, or a package that it needs is not installed.
        OperationError: Units could not be read or derived (all others are committed), the runner failed, or it returned
            other segments than its input.
    """
    begun = time.perf_counter()
    store = Store.open(store_location)
    store.reconcile()  # rows of units tell which units to derive
    work = pending(store, SEGMENT_ROWS)
    version, todo = work.events_version, work.segments
    units, done = sum(len(segment.units) for segment in todo), 0
    total = DerivationReport.of([], version, 0.0)
    for start in range(0, len(todo), SEGMENTS_PER_RUN):
        batch = todo[start : start + SEGMENTS_PER_RUN]
        outcomes = _run_batch(store.location, batch, runner, options)
        total = total.plus(DerivationReport.of(outcomes, version, 0.0))
        lost = {segment.units[0] for segment in batch} ^ {outcome.segment for outcome in outcomes}
        last = start + SEGMENTS_PER_RUN >= len(todo)
        commit(store, outcomes, version, covered=work.whole and last and not total.failures and not lost)
        if lost or len(outcomes) != len(batch):
            raise OperationError(
                f"{runner} was given {len(batch)} segments and returned {len(outcomes)}; run the derivation again"
            )
        done += sum(len(segment.units) for segment in batch)
        if progress is not None:
            progress(done, units)
    total.check()
    return replace(total, seconds=time.perf_counter() - begun)


def derive_group(group: Group, location: str) -> tuple[int, Sequence[SegmentOutcome]]:
    """Derive the segments of a group in the store at ``location``; runs on a worker."""
    number, segments = group
    return number, _in_threads(location, segments)


def _in_threads(location: str, segments: Sequence[Segment]) -> list[SegmentOutcome]:
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as threads:
        return [*threads.map(functools.partial(derive_segment, _worker_store(location)), segments)]


@functools.lru_cache(maxsize=1)
def _worker_store(location: str) -> Store:
    return Store.open(location)


def _run_batch(location: str, batch: Sequence[Segment], runner: str, options: Sequence[str]) -> list[SegmentOutcome]:
    if len(batch) <= _AT_ONCE and runner == DEFAULT_RUNNER and not options:  # Beam would take longer than the work
        return _in_threads(location, batch)
    with _quiet_beam(), record_folder(location) as folder:
        beam = _beam()
        preset = _DASK_OPTIONS if _is_dask(runner) else ()
        flags = _beam("options.pipeline_options").PipelineOptions([*preset, *options])  # without a list, sys.argv
        pipeline = beam.Pipeline(runner=_beam_runner(runner), options=flags)
        size = _AT_ONCE if runner == DEFAULT_RUNNER else 1
        groups = enumerate(batch[at : at + size] for at in range(0, len(batch), size))
        derived = pipeline | "Groups" >> beam.Create([*groups]) | "Derive" >> beam.Map(derive_group, location)
        _ = derived | "Record" >> beam.Map(write_record, folder)
        try:
            _run_to_the_end(pipeline)
        except Exception as error:  # a runner raises any error of its workers and of its own machinery
            # Beam appends its stage to the message of an error; the first line says enough.
            raise OperationError(f"{runner} failed: {first_line(error)}") from error
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
        raise RuntimeError(f"the pipeline ended in state {state}")


def _beam(module: str = "") -> Late:
    """Import a module of Beam when it is first needed, since importing Beam takes half a second."""
    return importlib.import_module(f"apache_beam.{module}" if module else "apache_beam")


def _is_dask(runner: str) -> bool:
    return runner.lower() in {"dask", "daskrunner"}


def _beam_runner(name: str) -> Late:
    """Return the runner of a name: a runner that Beam lists, or Dask's runner, which Beam does not list."""
    if _is_dask(name):
        if importlib.util.find_spec("distributed") is None:
            raise InputError(f"DaskRunner needs Dask: {installing('distributed')}")
        return _beam("runners.dask.dask_runner").DaskRunner()
    if name.lower() in {"direct", "directrunner"}:
        raise InputError(
            "DirectRunner downloads another runner before it starts; use FnApiRunner, which runs here as is"
        )
    try:
        return _beam("runners.runner").create_runner(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise InputError(f"runner '{name}': {first_line(error)}") from error


@contextmanager
def _quiet_beam() -> Iterator[None]:
    """Keep Beam from configuring this process's logging, and from warning about features that kvdrift does not use.

    Errors reach the caller as exceptions; without this, Beam would also print a traceback for each.
    """
    root = logging.getLogger()
    handlers, root_level = root.handlers[:], root.level
    guard = logging.NullHandler()  # Beam's basicConfig leaves a root that has a handler alone
    root.addHandler(guard)
    try:
        with _IMPORTING:
            disabled = root.manager.disable
            logging.disable(max(disabled, logging.WARNING))
            try:
                _beam()  # warns on the root logger itself
            finally:
                logging.disable(disabled)
        with raised_level("apache_beam", logging.CRITICAL + 1):
            yield
    finally:
        root.setLevel(root_level)
        root.handlers[:] = handlers


@contextmanager
def record_folder(location: str) -> Iterator[str]:
    """Make a folder (path or URL) for one run's records in a store, and remove it after the block."""
    if is_local(location):
        sweep(Path(location))
        with temporary_folder(Path(location)) as made:
            yield str(made)
        return
    folder = join(location, f".derive-{uuid.uuid4().hex}")
    filesystem, path = filesystem_of(folder)
    filesystem.create_dir(path)
    try:
        yield folder
    finally:
        filesystem.delete_dir(path)


def write_record(group: tuple[int, Sequence[SegmentOutcome]], folder: str) -> int:
    """Write one group's (number, outcomes) into the folder as one file; return the number of outcomes."""
    number, outcomes = group
    filesystem, root = filesystem_of(folder)
    aside = f"{root}/{number}.{uuid.uuid4().hex}.part"
    with filesystem.open_output_stream(aside) as sink:
        sink.write(json.dumps([asdict(outcome) for outcome in outcomes]).encode())
    filesystem.move(aside, f"{root}/{number}.json")
    return len(outcomes)


def read_records(folder: str) -> list[SegmentOutcome]:
    """Return all outcomes recorded in the folder, in the order of group numbers."""
    filesystem, root = filesystem_of(folder)
    infos = filesystem.get_file_info(pa.fs.FileSelector(root))
    records = sorted((info for info in infos if info.extension == "json"), key=lambda info: int(info.base_name[:-5]))
    outcomes: list[SegmentOutcome] = []
    for info in records:
        with filesystem.open_input_stream(info.path) as source:
            outcomes += [_outcome(**values) for values in json.loads(source.read())]
    return outcomes


def _outcome(files: list[Any], errors: list[str], **values: Any) -> SegmentOutcome:
    derived = [(table, DerivedFile(StoredFile(**file["file"]), tuple(file["units"]))) for table, file in files]
    return SegmentOutcome(files=tuple(derived), errors=tuple(errors), **values)
