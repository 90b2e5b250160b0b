"""Generation on a cluster: a group of documents is a task, and the worker that takes it stores its units.

This process waits, counts, and at the end checks that the store has the units that workers reported. Dask decides which
worker takes a group, how a lost worker is replaced, and how often the group of a lost worker is tried again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from distributed import Future, as_completed

from kvdrift.flows.cluster.connection import Cluster, facts, resources_of, who_has_which
from kvdrift.flows.cluster.worker import (
    Assignment,
    Failure,
    Group,
    Groups,
    Stored,
    generate_group,
    gpu_there,
    model_there,
)
from kvdrift.flows.generate.local import LocalGenerator, named
from kvdrift.flows.generate.storing import IN_A_ROW, Identities, not_stored, stored_gpus, studies_of
from kvdrift.generator.actions import Action
from kvdrift.generator.generation import Work
from kvdrift.generator.identity import ActionIdentity, GpuKinds
from kvdrift.generator.transformer.files.text_ends import model_files
from kvdrift.generator.transformer.other_weights.named import identities
from kvdrift.log.store import Store
from kvdrift.schema.errors import (
    InputError,
    KvdriftError,
    NobodyLeftError,
    OperationError,
    UnlikeUnitsError,
    is_disk_fault,
)
from kvdrift.schema.study import FINITE_STATE, Study

_RETRIES = 1  # further tries of a group if Dask itself fails
_AHEAD = 2  # groups for each worker, so that the next group is there when a worker has finished a group
_COUNT_SECONDS = 2.0  # from one count of the workers to the next


class HandingOut:
    """Hands groups to a cluster's workers that declare the ``resources``.

    If a group fails, each of its documents is tried alone, by another worker if there is any. If a document fails
    again, the remaining documents are still generated, unless several documents fail in a row.
    """

    def __init__(
        self, cluster: Cluster, assignment: Assignment, groups: Groups, resources: Mapping[str, float]
    ) -> None:
        self.cluster, self._groups, self._resources = cluster, groups, dict(resources)
        self._generate = partial(generate_group, assignment=assignment)
        self._done = as_completed(loop=cluster.client.loop)
        self._under_way = dict[str, tuple[Future, Group]]()  # by the task's key
        self._workers, self._counted = 1, 0.0
        self._failed = list[KvdriftError]()
        self._in_a_row = 0

    def stored(self) -> Generator[Stored, None, None]:
        """Yield the success of each group that a worker stored, until all documents are stored or have failed.

        Raises:
            InputError: A worker cannot generate for the study, or refuses a document.
            OperationError: A document failed, or the cluster is lost.
        """
        try:
            while self._hand_out():
                task = next(self._done)
                _, group = self._under_way.pop(task.key)
                done = self._result(task)
                if isinstance(done, Stored):
                    self._in_a_row = 0
                    self._groups.generated(len(done.documents), done.seconds, done.commit_seconds)
                    self._groups.give_back([item for item in group.part if item[0].doc not in done.documents])
                    yield done
                elif isinstance(done, Failure):
                    self._fail(group, done)
                else:  # the worker has declined
                    self._submit(group)
        finally:
            self.cluster.cancel([task for task, _ in self._under_way.values()])
        if self._failed:
            raise self._failed[0]

    def _hand_out(self) -> bool:
        """Submit groups until there are ``_AHEAD`` for each worker; return whether any group is under way."""
        lacking = _AHEAD * self._count_workers() - len(self._under_way)
        for group in self._groups.take(max(lacking, 0), self._workers):
            self._submit(group)
        return bool(self._under_way)

    def _count_workers(self) -> int:
        if (now := time.monotonic()) >= self._counted + _COUNT_SECONDS:
            self._workers, self._counted = max(1, len(self.cluster.workers(self._resources))), now
        return self._workers

    def _submit(self, group: Group) -> None:
        """Give a group to a worker that has not failed at it, or to any worker if all have failed at it.

        If that worker is busy, Dask may move the group to an idle worker that failed at it; the idle one declines.
        """
        limits: dict[str, Any] = {"resources": self._resources} if self._resources else {}
        others = set(self.cluster.workers(self._resources)) - group.failed if group.failed else set()
        if others:
            limits |= {"workers": [*others], "allow_other_workers": True}
        sent = group if others else group._replace(failed=frozenset())
        task = self.cluster.client.submit(self._generate, sent, pure=False, retries=_RETRIES, **limits)
        self._under_way[task.key] = task, group
        self._done.add(task)

    def _result(self, task: Future) -> Stored | Failure | None:
        """Return the answer of the worker that took a task; None if the worker declined the task."""
        try:
            done: Stored | Failure | InputError | None = self.cluster.result(task)
        except NobodyLeftError:
            raise
        except KvdriftError as error:  # workers ended, or Dask failed
            return Failure(None, error)
        if isinstance(done, InputError):
            raise done
        return done

    def _fail(self, group: Group, failure: Failure) -> None:
        """Submit each document of a group that failed as a group of its own; give up a document that failed before."""
        error, worker = failure.error, failure.worker
        if len(group.part) > 1 or (worker is not None and not group.failed):
            failed = frozenset() if worker is None else frozenset({worker})
            for document in group.part:
                self._submit(group._replace(part=[document], failed=failed))
        else:
            self._failed.append(error)
            self._in_a_row += 1
            if self._in_a_row == IN_A_ROW or isinstance(error, UnlikeUnitsError) or is_disk_fault(error):
                raise error


class ClusterGenerator:
    """Generates the units of studies on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        # By study and model, if only workers have the model: its weights' fingerprint, and the tokens that end a text.
        self._models: dict[tuple[str, str], tuple[str | None, tuple[int, ...]]] = {}

    def check(self, studies: Sequence[tuple[Study, GpuKinds]]) -> None:
        """Check that the cluster answers, and that its workers can generate; no store is needed.

        Each study comes with the kinds of GPU that made its units so far.

        Raises:
            InputError: A worker cannot generate; the line says what the worker needs.
            OperationError: No scheduler answers.
        """
        self.cluster.check(resources=resources_of(study.model for study, _ in studies))
        for study, made_on in studies:
            self._gpus(study, made_on)

    def __call__(
        self, store: Store, study: Study, work: Work, known: Identities
    ) -> Generator[tuple[int, int], None, None]:
        """Generate a study's work; for each group that is stored, yield its number of documents and of new units.

        Errors are those of ``HandingOut.stored``.
        """
        resources = resources_of([study.model])
        self.cluster.check(store, resources)
        keys = {(unit.study(study.name), unit.action.name, unit.revision) for _, units in work for unit in units}
        made_on = (stored_gpus(store, name, study.model.id) for name in studies_of(study, work))
        gpus = self._gpus(study, GpuKinds.together(made_on))
        required_identities = {key: known[key] for key in keys}
        assignment = Assignment(
            uuid.uuid4().hex, study, store.location, facts(store.location), gpus, required_identities
        )
        handing_out = HandingOut(self.cluster, assignment, Groups(named(work), store.location), resources)
        with closing(handing_out.stored()) as groups:
            for stored in groups:
                yield len(stored.documents), stored.units
        check_stored(store, study, work)

    def identify(self, study: Study, *, required: bool) -> Callable[[Action], ActionIdentity]:
        """Return the function that returns an action's identity.

        The identity is read from files of this machine. If the model's weights are not on this machine and the whole
        identity is ``required``, a worker reads them.

        Raises:
            InputError: A file cannot be read, or a worker cannot load the model.
            OperationError: No scheduler answers, and an identity that is unknown on this machine is ``required``.
        """
        local = LocalGenerator()
        if study.model.kind == FINITE_STATE:
            return local.identify(study, required=required)
        files = model_files(study)
        if required and files.weights_sha256 is None:
            weights, ends = self._model_of(study)
            files = replace(files, weights_sha256=weights, eos_tokens=ends)
        return identities(study, files)

    def _gpus(self, study: Study, made_on: GpuKinds) -> GpuKinds:
        """Return the GPU models that workers must have: those that made the stored units, else the first worker's."""
        if not (resources := resources_of([study.model])):
            return made_on
        workers = self.cluster.workers(resources)
        worker_gpus = sorted(self.cluster.ask(gpu_there, study.model, workers=workers))
        for who, gpu in worker_gpus:
            made_on.check(who, gpu, study.model)
            made_on = made_on if made_on.names else GpuKinds.at(who, gpu)
        self.cluster.say(who_has_which(worker_gpus, len(self.cluster.workers()) - len(workers)))
        return made_on

    def _model_of(self, study: Study) -> tuple[str | None, tuple[int, ...]]:
        key = (study.name, study.model.id)
        if key not in self._models:
            resources = resources_of([study.model]) or None
            task = self.cluster.client.submit(model_there, study, pure=False, resources=resources)
            answer = self.cluster.result(task)
            if isinstance(answer, KvdriftError):
                raise answer
            self._models[key] = answer
        return self._models[key]


def check_stored(store: Store, study: Study, work: Work) -> None:
    """Check that the store has the units that workers were to store."""
    lost = [(document.doc, unit.action.name) for document, units in not_stored(store, study, work) for unit in units]
    if lost:
        raise OperationError(
            f"{store.location}: lacks {len(lost)} units that workers reported as stored, the first of document "
            f"'{lost[0][0]}', action '{lost[0][1]}'; run the same command again to go on"
        )
