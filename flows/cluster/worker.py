"""The tasks of a cluster's worker, which generates groups of documents and appends their units to the store itself.

A loaded model stays for later tasks, until a task needs another model or the worker ends.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import get_worker

from kvdrift.flows.cluster.facts import WorkerFacts, check_facts, facts, worker_name
from kvdrift.flows.cluster.groups import Group
from kvdrift.flows.generate.local import LocalGenerator, with_actions
from kvdrift.flows.generate.storing import not_stored, store_units
from kvdrift.generator.actions import build_actions
from kvdrift.generator.generation import Work, together
from kvdrift.generator.generation.units import gpu_here
from kvdrift.generator.identity import ActionIdentity, GpuKinds, changes
from kvdrift.generator.transformer.decoder import is_device_lost
from kvdrift.generator.transformer.files.text_ends import text_ends
from kvdrift.log.store import Store, Unit
from kvdrift.schema.errors import InputError, KvdriftError, OperationError, first_line
from kvdrift.schema.study import ModelSection, Study

_DECLINED_SECONDS = 1.0  # so that other workers have time to take the documents
_ROWS = 1 << 20  # events of one commit, some 60 MB in memory; no more documents are begun then


@dataclass(frozen=True)
class Assignment:
    """The common input of a stage's tasks."""

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


def generate_group(
    group: Group, assignment: Assignment, declined_by: Collection[str] = ()
) -> Stored | Failure | InputError | None:
    """Generate documents until the group's seconds are over, and store their units by one commit; runs on a worker.

    A worker whose GPU fails for good ends: Dask gives the documents to another worker, and replaces the worker. The
    workers in ``declined_by`` failed with the documents, while there are others.

    Returns:
        What was stored; a failure; the user's mistake, if this worker does not fit; or None, after a wait, if this
        worker declines the documents. Errors are returned and not raised, since Dask would try a raised error again,
        a failure even on this worker.
    """
    address = get_worker().address
    if address in declined_by:
        time.sleep(_DECLINED_SECONDS)
        return None
    name = worker_name(address)
    try:
        store = _accepted(assignment, name)
        work = with_actions(assignment.study, group.part)
    except InputError as error:
        return type(error)(_located(error, name))
    except Exception as error:  # noqa: BLE001 - raised again if it fails elsewhere too
        return _failed(error, address, name)
    try:
        return _generated(store, assignment, work, group.seconds)
    except InputError as error:
        return Failure(address, type(error)(_located(error, name)))
    except Exception as error:  # noqa: BLE001 - raised again if it fails elsewhere too
        return _failed(error, address, name)


def _generated(store: Store, assignment: Assignment, work: Work, seconds: float) -> Stored:
    """Generate what the store lacks of some work; another worker may have stored the units, and ended."""
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
    """Return the failure that an error means; end this process if its GPU computes nothing more."""
    if isinstance(error, KvdriftError):
        return Failure(address, OperationError(_located(error, name)))
    if is_device_lost(error):
        _end(f"{name}: the GPU computes nothing more: {first_line(error)}; this worker ends")
    line = f"{name}: generation failed: {type(error).__name__}: {first_line(error)}"
    return Failure(address, OperationError(line))


def model_there(study: Study) -> tuple[str | None, tuple[int, ...]] | KvdriftError:
    """Return the fingerprint of this worker's weights of a study's model, and the tokens that end a text.

    The model is loaded if necessary.
    """
    try:
        identity = KEPT.local.identify(study, required=True)
        return identity(build_actions(study)[-1]).weights_sha256, text_ends(study).tokens
    except KvdriftError as error:
        return type(error)(_located(error, worker_name(get_worker().address)))


def gpu_there(model: ModelSection, dask_worker: Any) -> tuple[str, str | None]:
    """Return this worker's name in error lines, and the GPU of a study's model here; Dask passes the worker."""
    return worker_name(dask_worker.address), gpu_here(model)


def _end(reason: str) -> None:
    """End this process."""
    sys.stderr.write(f"kvdrift: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def _accepted(assignment: Assignment, name: str) -> Store:
    """Check, once for each assignment, that this worker can generate what is asked for; return the store."""
    if KEPT.token == assignment.token and KEPT.store is not None:
        return KEPT.store
    check_facts(name, facts(assignment.location, get_worker().state.nthreads), assignment.facts, assignment.location)
    assignment.gpus.check(name, gpu_here(assignment.study.model), assignment.study.model)
    actions = {action.name: action for action in build_actions(assignment.study)}
    asked = [(actions[action], stored) for (_, action, _), stored in assignment.known.items()]
    identity = KEPT.local.identify(assignment.study, required=True)
    for action, stored in asked:
        present = identity(action)
        for column in changes(stored, present):
            raise InputError(
                f"{column} of action '{action.name}' is {_short(present, column)} there, and {_short(stored, column)} "
                "in the store; give the worker the files that the study was begun with"
            )
    held = KEPT.local.model(assignment.study)
    if any(changes(stored, held.identity(action)) for action, stored in asked):
        KEPT.local = LocalGenerator()  # files of the model have changed since the model was loaded
    KEPT.store, KEPT.token = Store.open(assignment.location), assignment.token
    return KEPT.store


def _short(identity: ActionIdentity, column: str) -> str:
    return str(identity.columns[column])[:12]


def _located(error: KvdriftError, name: str) -> str:
    return str(error) if str(error).startswith("worker ") else f"{name}: {error}"
