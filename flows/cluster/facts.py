"""What a worker of a cluster must have in common with the process that hands out work: the source, and the store."""

from __future__ import annotations

import functools
import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from log.store import Store
from schema.errors import InputError, KvdriftError, first_line
from schema.location import is_local

_PACKAGES = ("schema", "log", "generator", "transforms", "flows")  # what workers run
_OF_DASK = ("python", "dask", "distributed")  # what processes of a cluster speak to each other with


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker must match.

    Attributes:
        source: SHA-256 of the packages that it runs.
        threads: How many tasks it takes at once; None says that any number will do.
        store: What identifies the store that the process sees; None if no store was asked for, or none is seen.
        problem: Why it does not see the store.

    """

    source: str
    threads: int | None = 1
    store: str | None = None
    problem: str | None = None


def facts(location: str | None, threads: int | None = 1) -> WorkerFacts:
    """Return this process's facts, with those of the store at a location if there is one."""
    if location is None:
        return WorkerFacts(source_sha256(), threads)
    try:
        return WorkerFacts(source_sha256(), threads, Store.open(location).id)
    except KvdriftError as error:
        return WorkerFacts(source_sha256(), threads, problem=str(error))


def facts_there(location: str | None, dask_worker: Any) -> tuple[str, WorkerFacts]:
    """Return what error lines call this process's worker, which Dask adds, and its facts."""
    return worker_name(dask_worker.address), facts(location, dask_worker.state.nthreads)


def check_facts(worker: str, found: WorkerFacts, here: WorkerFacts, location: str | None) -> None:
    """Check the facts of a worker.

    Args:
        worker: What an error line calls it.
        found: Its facts.
        here: Those of the process that hands out the work.
        location: The store's.

    """
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
    """Check what a process of a cluster runs.

    Args:
        name: What an error line calls it.
        there: What it says of its ``source_sha256``.
        here: That of the process that hands out the work; None for this one's.

    """
    if there != (here or source_sha256()):
        raise InputError(
            f"{name}: runs another version of kvdrift; install there what is installed here, and start it again"
        )


def lacking(name: str, error: Exception) -> InputError:
    """Return the error of a process of a cluster that could not import what it was sent."""
    return InputError(f"{name}: lacks this kvdrift ({first_line(error)}); install there what is installed here")


def other_versions(found: Mapping[str, Any]) -> str | None:
    """Return a line about a process of a cluster whose Python or Dask is not this process's; None if there is none.

    Args:
        found: What Dask's client says of versions.

    """
    here = found["client"]["packages"]
    processes = {"the scheduler": found["scheduler"]} | {f"worker {name}": of for name, of in found["workers"].items()}
    for name, there in processes.items():
        packages = there["packages"]
        others = [f"{one} {packages.get(one)}, not {here[one]}" for one in _OF_DASK if packages.get(one) != here[one]]
        if others:
            return f"{name} has {', '.join(others)}; if the work fails, install there what is installed here"
    return None


def worker_name(address: str) -> str:
    """What error lines call the worker of this process."""
    return f"worker {address} on {socket.gethostname()}"


@functools.cache
def source_sha256() -> str:
    """SHA-256, in hexadecimal, of the source that workers run, read when a process first asks."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
