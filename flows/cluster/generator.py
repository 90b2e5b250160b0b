"""Generation on a cluster: a document is a task, and the worker that takes it stores its units.

Dask decides which worker takes a task, how often a task is tried, and how a lost worker is replaced. This process
waits, counts, and at the end checks that the store has the units that workers reported.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flows.cluster.connection import Cluster
from flows.cluster.facts import facts
from flows.generate.local import LocalGenerator
from flows.generate.named_work import NamedPart, named
from flows.generate.storing import Identities, stored_gpus, studies_of
from generator.actions import Action
from generator.generation import Work
from generator.identity import ActionIdentity, GpuKinds, ModelIdentity
from generator.transformer.files.fingerprints import model_identity
from generator.transformer.files.local_folders import model_location
from generator.transformer.other_weights.named import identities
from log.store import Store
from schema.errors import InputError, KvdriftError, NobodyLeftError, OperationError, first_line
from schema.study import FINITE_STATE, Study

if TYPE_CHECKING:
    from distributed import Future

_RETRIES = 1  # tries of a document with which Dask itself fails


@dataclass(frozen=True)
class _Attempt:
    """A part of the work, and the addresses of the workers that failed at the part."""

    part: NamedPart
    failed: frozenset[str] = frozenset()


class ClusterGenerator:
    """Generates the units of studies on a cluster.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._weights: dict[tuple[str, str | None], str | None] = {}  # of models elsewhere

    def check(self, studies: Sequence[tuple[Study, GpuKinds]]) -> None:
        """Check that the cluster answers, and that its workers can generate; no store is needed.

        Args:
            studies: The studies to generate, each with the kinds of GPU that made its units so far.

        Raises:
            InputError: A worker cannot generate; the line says what the worker needs.
            OperationError: No scheduler answers.

        """
        self._cluster.check()
        for study, made_on in studies:
            self._gpus(study, made_on)

    def __call__(self, store: Store, study: Study, work: Work, known: Identities) -> Generator[int, None, None]:
        """Generate a study's work, and yield each document's number of new units as it is stored."""
        from distributed import as_completed  # noqa: PLC0415 - a run without a cluster needs none

        from flows.cluster.worker import Assignment, Failure, generate_document  # noqa: PLC0415 - it imports Dask

        self._cluster.check(store)
        asked = {(unit.study(study.name), unit.action.name, unit.revision) for _, units in work for unit in units}
        token = uuid.uuid4().hex
        made_on = (stored_gpus(store, name, study.model.id) for name in studies_of(study, work))
        gpus = self._gpus(study, GpuKinds.together(made_on))
        own = {key: known[key] for key in asked}
        assignment = Assignment(token, study, store.location, facts(store.location), gpus, own)
        client, generate = self._cluster.client, partial(generate_document, assignment=assignment)
        given = [named([one]) for one in work]
        tasks = client.map(generate, given, key=f"generate-{token}", pure=False, retries=_RETRIES)
        attempts = {task.key: _Attempt(part) for task, part in zip(tasks, given, strict=True)}
        under_way = as_completed(tasks, loop=client.loop)
        try:
            for task in under_way:
                done = self._answer(task)
                if isinstance(done, InputError):
                    raise done
                if isinstance(done, int):
                    yield done
                    continue
                attempt = attempts[task.key]
                if isinstance(done, Failure):
                    if attempt.failed:
                        raise done.error
                    attempt = replace(attempt, failed=frozenset({done.worker}))
                tasks.append(self._elsewhere(generate, attempt))
                attempts[tasks[-1].key] = attempt
                under_way.add(tasks[-1])
        finally:
            self._cluster.cancel(tasks)
        check_stored(store, study, work)

    def identify(self, study: Study, *, required: bool) -> Callable[[Action], ActionIdentity]:
        """Return the identity of the study's actions, from this machine's files or, if these lack, from a worker's.

        Raises:
            InputError: A file cannot be read, or a worker cannot load the model.
            OperationError: No scheduler answers, and an identity that is unknown on this machine is ``required``.

        """
        local = LocalGenerator()
        if study.model.kind == FINITE_STATE:
            return local.identify(study, required=required)
        files = model_identity(model_location(study.model), study.model.revision)
        if required and files.weights_sha256 is None:
            files = ModelIdentity(self._weights_of(study), files.tokenizer_sha256)
        return identities(study, files)

    def _gpus(self, study: Study, made_on: GpuKinds) -> GpuKinds:
        """Return the GPU models that workers must have: those of the present units, or else the first worker's."""
        if study.model.device == "cpu" and study.model.device_map is None:
            return made_on
        from flows.cluster.worker import gpu_there  # noqa: PLC0415 - it imports Dask

        for who, gpu in sorted(self._cluster.client.run(gpu_there, study.model, on_error="ignore").values()):
            made_on.check(who, gpu, study.model)
            made_on = made_on if made_on.names else GpuKinds.at(who, gpu)
        return made_on

    def _weights_of(self, study: Study) -> str | None:
        from flows.cluster.worker import model_weights  # noqa: PLC0415 - it imports Dask

        key = (study.model.id, study.model.revision)
        if key not in self._weights:
            found = self._answer(self._cluster.client.submit(model_weights, study, pure=False))
            if isinstance(found, KvdriftError):
                raise found
            self._weights[key] = found
        return self._weights[key]

    def _elsewhere(self, generate: Callable[..., Any], attempt: _Attempt) -> Future:
        """Give work to a worker that has not failed at it, or to any worker if all have failed at it.

        If that worker is busy, Dask may move the work to an idle worker that failed at it, which declines.
        """
        client = self._cluster.client
        others = [address for address in client.scheduler_info()["workers"] if address not in attempt.failed]
        limits: dict[str, Any] = (
            {"declined_by": attempt.failed, "workers": others, "allow_other_workers": True} if others else {}
        )
        return client.submit(generate, attempt.part, pure=False, retries=_RETRIES, **limits)

    def _answer(self, task: Any) -> Any:
        """Return the result of a task."""
        from distributed.scheduler import KilledWorker  # noqa: PLC0415

        try:
            return task.result()
        except KvdriftError:
            raise
        except CancelledError:
            raise self._cluster.lost() from None
        except KilledWorker as error:
            ended = f"{error.allowed_failures + 1} workers ended while they had the same document"
            left = self._cluster.client.scheduler_info()["workers"]
            raise (OperationError if left else NobodyLeftError)(
                f"cluster {self._cluster.name}: {ended}, the last one {error.last_worker.address}; "
                "is its memory enough, and its --memory-limit 0? What ended them is in their standard error"
            ) from None
        except Exception as error:
            raise OperationError(
                f"cluster {self._cluster.name}: {type(error).__name__}: {first_line(error)}"
            ) from error


def check_stored(store: Store, study: Study, work: Work) -> None:
    """Check that the store has the units that workers were to store."""
    names = ("doc", "action", "action_revision", "estimator", "first_replicate", "replicates")
    found = set()
    for one in studies_of(study, work):
        units = store.units(one, study.model.id, names)
        found |= set(zip([one] * len(units), *(units[name].to_pylist() for name in names), strict=True))
    lost = [
        (document.doc, unit.action.name)
        for document, pending in work
        for unit in pending
        if (unit.study(study.name), document.doc, unit.action.name, unit.revision, unit.estimator, unit.first,
            unit.count) not in found
    ]  # fmt: skip
    if lost:
        raise OperationError(
            f"{store.location}: {len(lost)} units that workers have stored do not show here, the first of document "
            f"'{lost[0][0]}', action '{lost[0][1]}'; run the same command again to go on"
        )
