"""Two processes that work beside this one.

A position of a small model takes the interpreter about as long as the processor, and so does a figure: two threads of
one process get little more done than one. One process loads the model and forks another one, while this one gets ready
for all else. They are given whole parts of the work, and end with the connections to them. What they do not finish,
because they were killed, is done here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from flows.generate.named_work import Part, named
from log.store import Unit
from schema.errors import KvdriftError
from schema.own_process import own_environment
from schema.study import Study

Given = TypeVar("Given")
Made = TypeVar("Made")


class SideProcess:
    """One of the processes, at the other end of a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._begun = 0  # what it was asked for and has not been listened to

    def generate(self, study: Study, part: Part) -> list[list[Unit]]:
        """Generate a part of the work there.

        Raises:
            KvdriftError: What it raised there.

        """
        units: list[list[Unit]] = self._ask((study, named(part)))
        return units

    def pairs_at_once(self, study: Study) -> int:
        """Load a study's model there; return its ``pairs_at_once``. Raises what ``generate`` does."""
        pairs: int = self._ask((study,))
        return pairs

    def call(self, function: Callable[..., Made], *arguments: object) -> Made:
        """Call a function there; raises what ``generate`` does, and RuntimeError for all else that it raised there."""
        result: Made = self._ask(partial(function, *arguments))
        return result

    def begin(self, what: Callable[[], object] | tuple[Study]) -> None:
        """Have a function called there, or a study's model loaded; the next thing that is asked for waits for it."""
        try:
            self._connection.send(what)
        except OSError:  # the next call will say so
            return
        self._begun += 1

    def close(self) -> None:
        """Close the connection, with which the process ends."""
        self._connection.close()

    def _ask(self, what: object) -> Any:
        while self._begun:
            self._begun -= 1
            self._answer()
        self._connection.send(what)
        return self._answer()

    def _answer(self) -> Any:
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


class SideProcesses:
    """``flows.generate.served_process`` in a Python of its own and in a fork of it, which both have a study's model.

    Attributes:
        all: The processes.

    """

    def __init__(self, study: Study) -> None:
        connections = [Pipe() for _ in range(2)]
        self.all = [SideProcess(ours) for ours, _ in connections]
        with connections[0][1] as one, connections[1][1] as other:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-m", "flows.generate.served_process", str(one.fileno()), str(other.fileno())],
                pass_fds=[one.fileno(), other.fileno()],
                env=own_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us
            )
        self.all[0].begin((study,))  # before it forks

    def close(self) -> None:
        """End both; what they are doing is lost."""
        if self._process.returncode is None:  # its number is no other process's before it was waited for
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for side in self.all:
            side.close()


def work_beside(
    sides: SideProcesses,
    parts: Sequence[Given],
    there: Callable[[SideProcess, Given], Made],
    here: Callable[[Given], Made],
) -> Generator[Made, None, None]:
    """Have parts of some work done in the side processes, which are closed where that ends early.

    Args:
        sides: The processes.
        parts: The parts.
        there: Has a side process do a part.
        here: Does a part that no side process is left for.

    Yields:
        What became of each part, in any order.

    """
    waiting, made = deque(parts), SimpleQueue[Made | KvdriftError | None]()
    feeders = [
        threading.Thread(target=_feed, args=(partial(there, side), waiting, made), daemon=True) for side in sides.all
    ]
    for feeder in feeders:
        feeder.start()
    working, whole = len(feeders), False
    try:
        while working:
            done = made.get()
            if isinstance(done, KvdriftError):
                raise done
            if done is None:
                working -= 1
            else:
                yield done
        yield from map(here, waiting)
        whole = True
    finally:
        waiting.clear()
        if not whole:
            sides.close()  # the feeders wait for them
        for feeder in feeders:
            feeder.join()


def _feed(there: Callable[[Given], Made], waiting: deque[Given], made: SimpleQueue[Made | KvdriftError | None]) -> None:
    """Have parts done there until none waits, or one is not done there: that one waits again then."""
    while (part := _next(waiting)) is not None:
        try:
            made.put(there(part))
        except KvdriftError as error:
            made.put(error)
            break
        except Exception:  # noqa: BLE001 - the process has ended, or what it cannot do is tried here, and said
            waiting.appendleft(part)
            break
    made.put(None)


def _next(waiting: deque[Given]) -> Given | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None
