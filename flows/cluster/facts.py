"""The facts that a cluster's worker must share with the process that hands out work: the source, and the store."""

from __future__ import annotations

import functools
import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, KvdriftError, first_line
from kvdrift.schema.location import is_local

_PACKAGES = ("schema", "log", "generator", "transforms", "flows")  # the packages that workers run
_OF_DASK = ("python", "dask", "distributed")  # that processes of a cluster need in common


@dataclass(frozen=True)
class WorkerFacts:
    """The facts that a worker must match."""

    source: str  # SHA-256 of the packages that the process runs
    threads: int | None = 1  # How many tasks the process takes at once; None allows any number
    # The id of the store that the process sees; None if no store was asked for, or none is seen
    store: str | None = None
    problem: str | None = None  # Why the process does not see the store


def facts(location: str | None, threads: int | None = 1) -> WorkerFacts:
    """Return this process's facts, with those of the store at a location if there is one."""
    if location is None:
        return WorkerFacts(source_sha256(), threads)
    try:
        return WorkerFacts(source_sha256(), threads, Store.open(location).id)
    except KvdriftError as error:
        return WorkerFacts(source_sha256(), threads, problem=str(error))


def facts_there(location: str | None, dask_worker: Any) -> tuple[str, WorkerFacts]:
    """Return the name of this process's worker in error lines, and its facts; Dask passes the worker."""
    return worker_name(dask_worker.address), facts(location, dask_worker.state.nthreads)


def check_facts(worker: str, found: WorkerFacts, here: WorkerFacts, location: str | None) -> None:
    """Check the facts of a worker, named in error lines, by those of the process that hands out the work."""
    check_source(worker, found.source, here.source)
    if here.threads is not None and found.threads != here.threads:
        raise InputError(f"{worker}: has {found.threads} threads, and a model serves one: start it with --nthreads 1")
    if found.problem is not None:
        remedy = "put it where every machine has it at the same path, or behind a URL"
        if location is not None and not is_local(location):
            remedy = "start the worker with the credentials that are set here, its AWS_… variables"
        raise InputError(f"{worker}: does not see the store ({found.problem}); {remedy}")
    if found.store != here.store:
        raise InputError(
            f"{worker}: has another store at {location}; put the study's where every machine has it, or behind a URL"
        )


def check_source(name: str, there: str, here: str | None = None) -> None:
    """Check the ``source_sha256`` of a process, named in error lines, against this process's by default."""
    if there != (here or source_sha256()):
        raise InputError(
            f"{name}: runs another version of kvdrift; install there what is installed here, and start it again"
        )


def lacking(name: str, error: Exception) -> InputError:
    """Return the error of a cluster's process that cannot import the code that was sent."""
    return InputError(f"{name}: lacks this kvdrift ({first_line(error)}); install there what is installed here")


def other_versions(found: Mapping[str, Any]) -> str | None:
    """Return a line, or None, about a process of a cluster with another Python or Dask than this process."""
    here = found["client"]["packages"]
    processes = {"the scheduler": found["scheduler"]} | {f"worker {name}": of for name, of in found["workers"].items()}
    for name, there in processes.items():
        packages = there["packages"]
        others = [f"{one} {packages.get(one)}, not {here[one]}" for one in _OF_DASK if packages.get(one) != here[one]]
        if others:
            return f"{name} has {', '.join(others)}; if the work fails, install there what is installed here"
    return None


def has_dashboard(dask_scheduler: Any) -> bool:
    """Tell whether a scheduler serves Dask's dashboard, which needs bokeh; Dask passes the scheduler.

    A link to the dashboard is there in any case: the same server says how the scheduler is.
    """
    return bool(dask_scheduler.http_application.applications)


def worker_name(address: str) -> str:
    """Return the name of this process's worker in error lines."""
    return f"worker {address} on {socket.gethostname()}"


@functools.cache
def source_sha256() -> str:
    """Return the SHA-256, in hexadecimal, of the source that workers run; it is read once in a process."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
