"""How many documents a worker gets at once, and after how many seconds it commits what it has generated.

A group of documents is one task, and its units are one commit. The cost of a commit does not depend on its number of
units, so the rate of all workers' commits is kept below the rate that a log can take. With more workers, each worker
commits less often. Each also commits less often if commits take long, for example because many workers race for a
version of a slow log.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kvdrift.flows.generate.local import NamedPart
from kvdrift.schema.location import is_local

_PER_COMMIT = 10.0  # the least seconds that a worker generates for each second that a commit takes

GUESS = 5.0  # seconds that a document takes, until one has been generated
_APART = 0.5  # the seconds of a group differ from their mean by so much of it at most


class Pace(NamedTuple):
    """How often workers commit."""

    least: float  # Seconds that a worker generates before it commits, at least
    rate: float  # Commits a second of all workers together, at most

    def seconds(self, workers: int, commit: float = 0.0) -> float:
        """Return how many seconds each of some workers generates before it commits, if a commit takes ``commit``."""
        return max(self.least, workers / self.rate, _PER_COMMIT * commit)


LOCAL, REMOTE = Pace(2.0, 10.0), Pace(10.0, 4.0)


class Group(NamedTuple):
    """Documents of one task, and the seconds after which the worker leaves the rest of them."""

    part: NamedPart
    seconds: float


class Groups:
    """The documents that wait for a worker; ``location`` is the store's absolute path or URL."""

    def __init__(self, work: NamedPart, location: str) -> None:
        self._waiting = deque(work)
        self._pace = LOCAL if is_local(location) else REMOTE
        self._documents, self._seconds, self._commit = 0, 0.0, 0.0

    def take(self, count: int, workers: int) -> Iterator[Group]:
        """Take some groups, or as many as there are.

        Groups shrink as fewer documents wait, so that all workers end at about the same time: one group for each worker
        is half of what waits (Hummel, Schonberg and Flynn, "Factoring", Communications of the ACM 35(8), 1992).
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
        """Add a group's seconds of generation and of its commit to what is measured; the next groups are sized by it.

        The last commits count most, since the load of a log changes.
        """
        self._documents += documents
        self._seconds += seconds
        self._commit += (commit - self._commit) / 4


def spread(mean: float) -> float:
    """Draw the seconds of a group, so that workers that begin together do not commit together."""
    return mean * random.uniform(1 - _APART, 1 + _APART)  # noqa: S311 - no event depends on it
