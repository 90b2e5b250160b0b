"""What a worker of a cluster runs: it generates documents, and appends their units to the store itself.

What it has loaded serves the tasks after, and goes when another model's come or the worker ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from distributed import get_worker

from flows.cluster.facts import WorkerFacts, check_facts, facts, worker_name
from flows.generate.local import LocalGenerator
from flows.generate.named_work import NamedPart, with_actions
from flows.generate.storing import store_units
from generator.actions import build_actions
from generator.generation.events import gpu_here
from generator.identity import ActionIdentity, GpuKinds, changes
from generator.transformer.decoder import is_device_lost
from log.store import Store
from schema.errors import InputError, KvdriftError, OperationError, first_line
from schema.study import ModelSection, Study

_DECLINED_SECONDS = 1.0  # which leaves the others time to come to the document


@dataclass(frozen=True)
class Assignment:
    """What the tasks of a stage have in common.

    Attributes:
        token: Tells it from all others.
        study: The study.
        location: The store's absolute path or URL.
        facts: Those of the process that hands out the work.
        gpus: What a worker's GPU must be one of, unless the study allows any.
        known: What makes the units of each study, action and revision that is generated, as the store has it.

    """

    token: str
    study: Study
    location: str
    facts: WorkerFacts
    gpus: GpuKinds
    known: Mapping[tuple[str, str, int], ActionIdentity]


@dataclass(frozen=True)
class Failure:
    """What came of work that failed.

    Attributes:
        worker: The worker's address.
        error: What is wrong.

    """

    worker: str
    error: OperationError


@dataclass
class _Kept:
    """What this process keeps between tasks."""

    local: LocalGenerator = field(default_factory=LocalGenerator)
    token: str | None = None  # of the assignment that was accepted last
    store: Store | None = None


_KEPT = _Kept()


def generate_document(
    part: NamedPart, assignment: Assignment, declined_by: Collection[str] = ()
) -> int | InputError | Failure | None:
    """Generate the units of a document and store them; runs on a worker.

    A worker whose GPU computes nothing more ends: Dask gives the document to another one, and starts a new one in its
    place.

    Args:
        part: The document, and its units.
        assignment: What the tasks of the stage have in common.
        declined_by: Addresses of the workers that failed with the document, while there are others.

    Returns:
        The number of new units. A mistake of the user's is returned and not raised, since Dask would try it again, and
        so is a failure, since Dask would try it again here. A worker that declines the document waits, and returns
        None.

    """
    address = get_worker().address
    if address in declined_by:
        time.sleep(_DECLINED_SECONDS)
        return None
    name = worker_name(address)
    try:
        store = _accepted(assignment, name)
        units = _KEPT.local.generate_part(assignment.study, with_actions(assignment.study, part))
        prompts = assignment.study.study.store_prompts
        return sum(store_units(store, own, assignment.known, prompts=prompts) for own in units)
    except InputError as error:
        return type(error)(_located(error, name))
    except KvdriftError as error:
        return Failure(address, OperationError(_located(error, name)))
    except Exception as error:  # noqa: BLE001 - raised again where it failed elsewhere too
        if is_device_lost(error):
            _end(f"{name}: the GPU computes nothing more: {first_line(error)}; this worker ends")
        line = f"{name}: generation failed: {type(error).__name__}: {first_line(error)}"
        return Failure(address, OperationError(line))


def model_weights(study: Study) -> str | KvdriftError | None:
    """Return the fingerprint of the weights that this worker has of a study's model, which is loaded if need be."""
    try:
        identity = _KEPT.local.identify(study, required=True)
        return identity(build_actions(study)[-1]).weights_sha256
    except KvdriftError as error:
        return type(error)(_located(error, worker_name(get_worker().address)))


def gpu_there(model: ModelSection) -> tuple[str, str | None]:
    """Return what error lines call this worker, and the GPU that a study's model computes on here."""
    return worker_name(get_worker().address), gpu_here(model)


def _end(reason: str) -> None:
    """End this process."""
    sys.stderr.write(f"kvdrift: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def _accepted(assignment: Assignment, name: str) -> Store:
    """Make sure that this worker generates what is asked for, and return the store; looks once at each assignment."""
    if _KEPT.token == assignment.token and _KEPT.store is not None:
        return _KEPT.store
    check_facts(name, facts(assignment.location, get_worker().state.nthreads), assignment.facts, assignment.location)
    assignment.gpus.check(name, gpu_here(assignment.study.model), assignment.study.model)
    actions = {action.name: action for action in build_actions(assignment.study)}
    asked = [(actions[action], stored) for (_, action, _), stored in assignment.known.items()]
    identity = _KEPT.local.identify(assignment.study, required=True)
    for action, stored in asked:
        present = identity(action)
        for column in changes(stored, present):
            raise InputError(
                f"{column} of action '{action.name}' is {_short(present, column)} there, and {_short(stored, column)} "
                "in the store; give the worker the files that the study was begun with"
            )
    held = _KEPT.local.model(assignment.study)
    if any(changes(stored, held.identity(action)) for action, stored in asked):
        _KEPT.local = LocalGenerator()  # the files have changed since it was loaded
    _KEPT.store, _KEPT.token = Store.open(assignment.location), assignment.token
    return _KEPT.store


def _short(identity: ActionIdentity, column: str) -> str:
    return str(identity.columns[column])[:12]


def _located(error: KvdriftError, name: str) -> str:
    return str(error) if str(error).startswith("worker ") else f"{name}: {error}"
