"""A second process that works beside this one.

A position of a small model takes the interpreter about as long as the processor, and so does a figure: two threads of
one process get little more done than one. The second process is given whole parts of the work, and ends with the
connection to it. What it does not finish, because it was killed, is done here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any, TypeVar

from flows.generation.named_work import Part, named
from schema.errors import KvdriftError
from schema.store.store import Unit
from schema.study import Study

Given = TypeVar("Given")
Made = TypeVar("Made")


class SecondProcess:
    """``flows.generation.served_process`` in a Python of its own, which begins with loading the study's model."""

    def __init__(self, study: Study) -> None:
        self._connection, theirs = Pipe()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109 - '' stands for it
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-m", "flows.generation.served_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us
            )
        self._connection.send((study, []))
        self._begun = 1  # what it was asked for and has not been listened to

    def generate(self, study: Study, part: Part) -> list[list[Unit]]:
        """Generate a part of the work there.

        Raises:
            KvdriftError: What it raised there.
            EOFError: The process has ended.
            OSError: The same.

        """
        units: list[list[Unit]] = self._ask((study, named(part)))
        return units

    def call(self, function: Callable[..., Made], *arguments: object) -> Made:
        """Call a function there; raises what ``generate`` does, and RuntimeError for all else that it raised there."""
        result: Made = self._ask(partial(function, *arguments))
        return result

    def begin(self, function: Callable[[], None]) -> None:
        """Have a function called there, and wait for it when the next thing is asked for."""
        try:
            self._connection.send(partial(function))
        except OSError:  # the next call will say so
            return
        self._begun += 1

    def close(self) -> None:
        """End the process; what it is doing is lost."""
        self._process.kill()
        self._process.wait()
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


def generate_beside(
    second: SecondProcess, study: Study, parts: Sequence[Part], here: Callable[[Study, Part], list[list[Unit]]]
) -> Generator[list[Unit], None, None]:
    """Generate parts of work here and in the second process, which is closed where that ends early.

    Args:
        second: The second process.
        study: The study.
        parts: Documents with their pending units.
        here: Generates a part in this process.

    Yields:
        The units of each document, in any order.

    Raises:
        KvdriftError: What either process raised.

    """
    for documents in work_beside(second, parts, partial(second.generate, study), partial(here, study)):
        yield from documents


def work_beside(
    second: SecondProcess, parts: Sequence[Given], there: Callable[[Given], Made], here: Callable[[Given], Made]
) -> Generator[Made, None, None]:
    """Do parts of some work here and in the second process, which is closed where that ends early.

    Args:
        second: The second process.
        parts: The parts.
        there: Has the second process do a part.
        here: Does a part in this process.

    Yields:
        What became of each part, in any order.

    Raises:
        KvdriftError: What either process raised.

    """
    waiting, made = deque(parts), SimpleQueue[Made | KvdriftError | None]()

    feeder, whole = threading.Thread(target=_feed, args=(there, waiting, made), daemon=True), False
    feeder.start()
    try:
        feeding = True
        while True:
            part = _next(waiting)
            if part is not None:
                yield here(part)
            elif not feeding:
                break
            for done in _arrived(made, wait=part is None) if feeding else ():
                if done is None:
                    feeding = False
                else:
                    yield done
        whole = True
    finally:
        waiting.clear()
        if not whole:
            second.close()  # the feeder waits for it
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


def _arrived(made: SimpleQueue[Made | KvdriftError | None], *, wait: bool) -> Iterator[Made | None]:
    """Yield what the other process has made, and None when no more comes; with ``wait``, until then."""
    while wait or not made.empty():
        answer = made.get()
        if isinstance(answer, KvdriftError):
            raise answer
        yield answer
        if answer is None:
            return


def _next(waiting: deque[Given]) -> Given | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None
