"""Groups of documents, and the tasks of a cluster's worker, which generates a group and appends its units to the store.

A group of documents is one task, and its units are one commit. The cost of a commit does not depend on its number of
units, so the rate of all workers' commits is kept below the rate that a log can take. With more workers, each worker
commits less often. Each also commits less often if commits take long, for example because many workers compete
for the next version of a slow log.

A loaded model stays for later tasks, until a task needs another model or the worker ends.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distributed import get_worker

from kvdrift.flows.cluster.connection import WorkerFacts, check_facts, facts, worker_name
from kvdrift.flows.generate.local import LocalGenerator, NamedPart, with_actions
from kvdrift.flows.generate.storing import not_stored, store_units
from kvdrift.generator.actions import build_actions
from kvdrift.generator.generation import Work, together
from kvdrift.generator.generation.units import gpu_here
from kvdrift.generator.identity import ActionIdentity, GpuKinds, changes
from kvdrift.generator.transformer.decoder import is_device_lost
from kvdrift.generator.transformer.files.text_ends import text_ends
from kvdrift.log.store import Store, Unit
from kvdrift.schema.errors import InputError, KvdriftError, OperationError, first_line
from kvdrift.schema.location import is_local
from kvdrift.schema.study import ModelSection, Study

_PER_COMMIT = 10.0  # the least seconds that a worker generates for each second that a commit takes

GUESS = 5.0  # seconds of a document, before the first document has been generated
_APART = 0.5  # the largest difference of a group's seconds from their mean, as a share of the mean


class Pace(NamedTuple):
    """How often workers commit: each after ``least`` seconds or more, all together ``rate`` times a second or less."""

    least: float  # Seconds that a worker generates before it commits, at least
    rate: float  # Commits a second of all workers together, at most

    def seconds(self, workers: int, commit: float = 0.0) -> float:
        """Return how many seconds each of ``workers`` workers generates before it commits.

        ``commit`` is how many seconds a commit takes.
        """
        return max(self.least, workers / self.rate, _PER_COMMIT * commit)


LOCAL, REMOTE = Pace(2.0, 10.0), Pace(10.0, 4.0)


class Group(NamedTuple):
    """The documents of one task, and the seconds after which the worker begins no further document of the task.

    The workers at the addresses ``failed`` failed with the documents before, and decline them.
    """

    part: NamedPart
    seconds: float
    failed: frozenset[str] = frozenset()


class Groups:
    """The documents that wait for a worker; ``location`` is the store's absolute path or URL."""

    def __init__(self, work: NamedPart, location: str) -> None:
        self._waiting = deque(work)
        self._pace = LOCAL if is_local(location) else REMOTE
        self._documents, self._seconds, self._commit = 0, 0.0, 0.0

    def take(self, count: int, workers: int) -> Iterator[Group]:
        """Yield ``count`` groups for the present number of workers; fewer if no more documents wait.

        Groups shrink as fewer documents wait, so that all workers end at about the same time: one group for each worker
        takes half of the waiting documents in all (Hummel, Schonberg and Flynn, "Factoring", Communications of the ACM
        35(8), 1992).
        """
        mean = self._pace.seconds(workers, self._commit)
        of_a_document = self._seconds / self._documents if self._documents else GUESS
        for _ in range(count):
            if not self._waiting:
                return
            most = min(mean / max(of_a_document, 1e-9), len(self._waiting) / (2 * workers))
            part = [self._waiting.popleft() for _ in range(max(1, int(most)))]
            yield Group(part, spread(mean))

    def give_back(self, part: NamedPart) -> None:
        """Put documents at the front of the queue again."""
        self._waiting.extendleft(reversed(part))

    def generated(self, documents: int, seconds: float, commit: float) -> None:
        """Record a group's ``documents``, and the seconds of its generation and of its commit, to size the next groups.

        The latest commits count most, since the load of a log changes.
        """
        self._documents += documents
        self._seconds += seconds
        self._commit += (commit - self._commit) / 4


def spread(mean: float) -> float:
    """Draw a group's seconds at random around ``mean``, so that workers that begin together do not commit together."""
    return mean * random.uniform(1 - _APART, 1 + _APART)  # noqa: S311 - no event depends on it


_DECLINED_SECONDS = 1.0  # so that other workers have time to take the documents
_ROWS = 1 << 20  # events, some 60 MB in memory, from which on a group begins no further document


@dataclass(frozen=True)
class Assignment:
    """The input that all tasks of one stage of a run share; each task also gets a group."""

    token: str  # Distinguishes the assignment from all others
    study: Study  # The study
    location: str  # The store's absolute path or URL
    facts: WorkerFacts  # The facts of the process that hands out the work
    gpus: GpuKinds  # The GPU models that a worker may have, unless the study allows any
    # The stored identity of each study, action and revision that is generated
    known: Mapping[tuple[str, str, int], ActionIdentity]


@dataclass(frozen=True)
class Stored:
    """The success of a task on a worker."""

    # The names of the documents that are stored; all of the group, or those that its seconds were enough for
    documents: frozenset[str]
    units: int  # How many of their units are new
    seconds: float  # How long generation took
    commit_seconds: float  # How long the commit took


@dataclass(frozen=True)
class Failure:
    """The failure of a task on a worker; nothing of its group was stored."""

    worker: str | None  # The worker's address; None if workers ended, or Dask failed
    error: KvdriftError  # The error that the task raised


@dataclass
class Kept:
    """The state that this process keeps between tasks."""

    local: LocalGenerator = field(default_factory=LocalGenerator)
    token: str | None = None  # the token of the last accepted assignment
    store: Store | None = None


KEPT = Kept()


def generate_group(group: Group, assignment: Assignment) -> Stored | Failure | InputError | None:
    """Generate documents until the group's seconds are over, and store their units by one commit; runs on a worker.

    A worker ends if its GPU fails for good: Dask gives the documents to another worker, and replaces the worker.

    Returns:
        What was stored; a failure; the user's mistake, if this worker cannot generate for the study; or None, after a
        wait, if this worker declines the documents. Errors are returned and not raised, since Dask would repeat a task
        that raises, even on this worker.
    """
    address = get_worker().address
    if address in group.failed:
        time.sleep(_DECLINED_SECONDS)
        return None
    name, fits = worker_name(address), False
    try:
        store = _accepted(assignment, name)
        work = with_actions(assignment.study, group.part)
        fits = True
        return _generated(store, assignment, work, group.seconds)
    except InputError as error:
        located = type(error)(_located(error, name))
        return Failure(address, located) if fits else located
    except Exception as error:  # noqa: BLE001 - raised again if it fails elsewhere too
        return _failed(error, address, name)


def _generated(store: Store, assignment: Assignment, work: Work, seconds: float) -> Stored:
    """Generate the units that the store lacks, for about ``seconds``, and store them; return what is stored."""
    study, local = assignment.study, KEPT.local
    lacking = not_stored(store, study, work)
    done = {document.doc for document, _ in work} - {document.doc for document, _ in lacking}
    begun, units = time.monotonic(), list[Unit]()
    for part in together(local.model(study).pairs_at_once, lacking):
        units += itertools.chain(*local.generate_part(study, part))
        done |= {document.doc for document, _ in part}
        if time.monotonic() - begun >= seconds or sum(unit.events.num_rows for unit in units) >= _ROWS:
            break
    generated = time.monotonic()
    new = store_units(store, units, assignment.known, prompts=study.study.store_prompts) if units else 0
    return Stored(frozenset(done), new, generated - begun, time.monotonic() - generated)


def _failed(error: Exception, address: str, name: str) -> Failure:
    """Return a task's error as a failure; end this process if the error says that its GPU computes nothing more."""
    if isinstance(error, KvdriftError):
        return Failure(address, OperationError(_located(error, name)))
    if is_device_lost(error):
        _end(f"{name}: the GPU computes nothing more: {first_line(error)}; this worker ends")
    line = f"{name}: generation failed: {type(error).__name__}: {first_line(error)}"
    return Failure(address, OperationError(line))


def model_there(study: Study) -> tuple[str | None, tuple[int, ...]] | KvdriftError:
    """Return the fingerprint of the weights that this worker has for a study's model, and the tokens that end a text.

    The model is loaded if necessary. An error is returned, not raised, and names this worker.
    """
    try:
        identity = KEPT.local.identify(study, required=True)
        return identity(build_actions(study)[-1]).weights_sha256, text_ends(study).tokens
    except KvdriftError as error:
        return type(error)(_located(error, worker_name(get_worker().address)))


def gpu_there(model: ModelSection, dask_worker: Any) -> tuple[str, str | None]:
    """Return this worker's name in messages, and the GPU that a model uses here, if any; Dask passes the worker."""
    return worker_name(dask_worker.address), gpu_here(model)


def _end(reason: str) -> None:
    sys.stderr.write(f"kvdrift: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def _accepted(assignment: Assignment, name: str) -> Store:
    """Check, once for each assignment, that this worker can generate the assignment's units; return the store."""
    if KEPT.token == assignment.token and KEPT.store is not None:
        return KEPT.store
    check_facts(name, facts(assignment.location, get_worker().state.nthreads), assignment.facts, assignment.location)
    assignment.gpus.check(name, gpu_here(assignment.study.model), assignment.study.model)
    actions = {action.name: action for action in build_actions(assignment.study)}
    required = [(actions[action], stored) for (_, action, _), stored in assignment.known.items()]
    identity = KEPT.local.identify(assignment.study, required=True)
    for action, stored in required:
        present = identity(action)
        for column in changes(stored, present):
            there, here = (str(identified.columns[column])[:12] for identified in (present, stored))
            raise InputError(
                f"{column} of action '{action.name}' is {there} on this worker, but {here} in the store; give the "
                "worker the files with which the study was begun"
            )
    held = KEPT.local.model(assignment.study)
    if any(changes(stored, held.identity(action)) for action, stored in required):
        KEPT.local = LocalGenerator()  # files of the model have changed since the model was loaded
    KEPT.store, KEPT.token = Store.open(assignment.location), assignment.token
    return KEPT.store


def _located(error: KvdriftError, name: str) -> str:
    return str(error) if str(error).startswith("worker ") else f"{name}: {error}"
