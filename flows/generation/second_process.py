"""A second process that generates beside this one.

A position of a small model takes the interpreter about as long as the processor: two threads of one process get little
more done than one. The second process is given whole parts of the work, and ends with the connection to it. What it
does not finish, because it was killed, is generated here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import Pipe
from queue import SimpleQueue

from flows.generation.named_work import Part, named
from schema.errors import KvdriftError
from schema.store.store import Unit
from schema.study import Study

GeneratePart = Callable[[Study, Part], list[list[Unit]]]

_Queue = SimpleQueue[list[list[Unit]] | KvdriftError | None]


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
        self._loading = True

    def generate(self, study: Study, part: Part) -> list[list[Unit]]:
        """Generate a part of the work there.

        Raises:
            KvdriftError: What it raised there.
            EOFError: The process has ended.
            OSError: The same.

        """
        if self._loading:
            self._answer()
            self._loading = False
        self._connection.send((study, named(part)))
        return self._answer()

    def close(self) -> None:
        """End the process; what it is doing is lost."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _answer(self) -> list[list[Unit]]:
        answer: KvdriftError | list[list[Unit]] = self._connection.recv()
        if isinstance(answer, KvdriftError):
            raise answer
        return answer


def generate_beside(
    second: SecondProcess, study: Study, parts: Sequence[Part], here: GeneratePart
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
    waiting, made = deque(parts), _Queue()

    feeder, whole = threading.Thread(target=_feed, args=(second, study, waiting, made), daemon=True), False
    feeder.start()
    try:
        feeding = True
        while True:
            part = _next(waiting)
            if part is not None:
                yield from here(study, part)
            elif not feeding:
                break
            for units in _arrived(made, wait=part is None) if feeding else ():
                if units is None:
                    feeding = False
                else:
                    yield from units
        whole = True
    finally:
        waiting.clear()
        if not whole:
            second.close()  # the feeder waits for it
        feeder.join()


def _feed(second: SecondProcess, study: Study, waiting: deque[Part], made: _Queue) -> None:
    """Have parts generated there until none waits, or the process ends: the part that it had waits again then."""
    while (part := _next(waiting)) is not None:
        try:
            made.put(second.generate(study, part))
        except KvdriftError as error:
            made.put(error)
            break
        except (EOFError, OSError):
            waiting.appendleft(part)
            break
    made.put(None)


def _arrived(made: _Queue, *, wait: bool) -> Iterator[list[list[Unit]] | None]:
    """Yield what the other process has made, and None when no more comes; with ``wait``, until then."""
    while wait or not made.empty():
        answer = made.get()
        if isinstance(answer, KvdriftError):
            raise answer
        yield answer
        if answer is None:
            return


def _next(waiting: deque[Part]) -> Part | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None
