"""Groups of documents handed to workers, and handed to other workers if they fail.

Dask decides which worker takes a group, how often a group is tried whose worker is lost, and how a lost worker is
replaced.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed import Future, as_completed

from kvdrift.flows.cluster.connection import Cluster
from kvdrift.flows.cluster.groups import Group, Groups
from kvdrift.flows.cluster.worker import Assignment, Failure, Stored, generate_group
from kvdrift.flows.generate.failures import IN_A_ROW
from kvdrift.schema.errors import InputError, KvdriftError, NobodyLeftError, UnlikeUnitsError, is_disk_fault

_RETRIES = 1  # tries of a group with which Dask itself fails
_AHEAD = 2  # groups for each worker, so that the next one is there when a worker has done one
_LOOK_SECONDS = 2.0  # from one look at the number of workers to the next


@dataclass(frozen=True)
class _Attempt:
    """A group, and the addresses of the workers that failed at its documents."""

    group: Group
    failed: frozenset[str] = frozenset()

    def alone(self, failed: frozenset[str]) -> Iterator[_Attempt]:
        """Yield an attempt for each document."""
        for one in self.group.part:
            yield _Attempt(self.group._replace(part=[one]), failed)


class HandingOut:
    """Hands groups to a cluster's workers that declare the ``resources``.

    If a group fails, each of its documents is tried alone, by another worker if there is one. If a document fails
    twice, the others are still generated, unless several documents fail in a row.
    """

    def __init__(
        self, cluster: Cluster, assignment: Assignment, groups: Groups, resources: Mapping[str, float]
    ) -> None:
        self._cluster, self._groups, self._resources = cluster, groups, dict(resources)
        self._generate = partial(generate_group, assignment=assignment)
        self._done = as_completed(loop=cluster.client.loop)
        self._under_way = dict[str, tuple[Future, _Attempt]]()  # by the task's key
        self._workers, self._looked = 1, 0.0
        self._failed = list[KvdriftError]()
        self._in_a_row = 0

    def stored(self) -> Generator[Stored, None, None]:
        """Yield what workers have stored, until all documents are stored or have failed.

        Raises:
            InputError: A worker does not fit, or refuses a document.
            OperationError: A document failed, or the cluster is lost.
        """
        try:
            while self._hand_out():
                task = next(self._done)
                _, attempt = self._under_way.pop(task.key)
                done = self._result(task)
                if isinstance(done, Stored):
                    self._in_a_row = 0
                    self._groups.generated(len(done.documents), done.seconds, done.commit_seconds)
                    self._groups.give_back([one for one in attempt.group.part if one[0].doc not in done.documents])
                    yield done
                elif isinstance(done, Failure):
                    self._fail(attempt, done)
                else:  # the worker has declined
                    self._submit(attempt)
        finally:
            self._cluster.cancel([task for task, _ in self._under_way.values()])
        if self._failed:
            raise self._failed[0]

    def _hand_out(self) -> bool:
        """Submit groups until workers have enough of them; tell whether any are under way."""
        lacking = _AHEAD * self._count_workers() - len(self._under_way)
        for group in self._groups.take(max(lacking, 0), self._workers):
            self._submit(_Attempt(group))
        return bool(self._under_way)

    def _count_workers(self) -> int:
        if (now := time.monotonic()) >= self._looked + _LOOK_SECONDS:
            self._workers, self._looked = max(1, len(self._cluster.workers(self._resources))), now
        return self._workers

    def _submit(self, attempt: _Attempt) -> None:
        """Give a group to a worker that has not failed at it, or to any worker if all have failed at it.

        If that worker is busy, Dask may move the group to an idle worker that failed at it, which declines.
        """
        limits: dict[str, Any] = {"resources": self._resources} if self._resources else {}
        if attempt.failed:
            others = [address for address in self._cluster.workers(self._resources) if address not in attempt.failed]
            if others:
                limits |= {"declined_by": attempt.failed, "workers": others, "allow_other_workers": True}
        task = self._cluster.client.submit(self._generate, attempt.group, pure=False, retries=_RETRIES, **limits)
        self._under_way[task.key] = task, attempt
        self._done.add(task)

    def _result(self, task: Future) -> Stored | Failure | None:
        """Return what a worker answered; None if it declined."""
        try:
            done: Stored | Failure | InputError | None = self._cluster.result(task)
        except NobodyLeftError:
            raise
        except KvdriftError as error:  # workers ended, or Dask failed
            return Failure(None, error)
        if isinstance(done, InputError):
            raise done
        return done

    def _fail(self, attempt: _Attempt, failure: Failure) -> None:
        """Submit the documents of a group that failed, or give up a document that has failed before."""
        error, worker = failure.error, failure.worker
        if len(attempt.group.part) > 1 or (worker is not None and not attempt.failed):
            for one in attempt.alone(frozenset() if worker is None else frozenset({worker})):
                self._submit(one)
        else:
            self._failed.append(error)
            self._in_a_row += 1
            if self._in_a_row == IN_A_ROW or isinstance(error, UnlikeUnitsError) or is_disk_fault(error):
                raise error
