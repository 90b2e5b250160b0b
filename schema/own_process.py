"""Start further Python processes: a pool, the environment of a process, and the last line that a process wrote."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any

_NEW_OBJECTS = 10_000  # from one garbage collection to the next, as in kvdrift.program
_STARTING = threading.Lock()


class OwnProcesses(ProcessPoolExecutor):
    """A pool of at most ``count`` processes that end with this process, even if it is killed.

    The processes print nothing on the terminal and ignore its Ctrl-C. ``begin`` is called with ``arguments`` once in
    each process before its work. After ``times`` calls a process is replaced by a new one with fresh memory.
    """

    def __init__(
        self, count: int, begin: Callable[..., object] | None = None, *arguments: Any, times: int | None = None
    ) -> None:
        self._context = _Context()
        super().__init__(
            count, mp_context=self._context, initializer=_begin, initargs=(begin, arguments), max_tasks_per_child=times
        )

    def kill(self) -> None:
        """End the processes immediately; their unfinished work is lost.

        The pool's own thread is ended, too. If the interpreter ended while that thread closes its pipe, Python would
        print a traceback.
        """
        thread: object = self._executor_manager_thread  # ``shutdown`` forgets it; None before any work
        self.shutdown(wait=False, cancel_futures=True)
        for process in self._context.started:
            process.kill()
        if isinstance(thread, threading.Thread):
            thread.join()


class _Process(SpawnProcess):
    """A process that does not import the script that runs in this process.

    A user's script that calls ``kvdrift.run`` may lack the guard that keeps it from running again when imported.
    """

    def start(self) -> None:
        with _STARTING:
            script = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = script


class _Context(SpawnContext):
    """A multiprocessing context that starts processes which do not import the user's script, and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[_Process] = []

    def Process(self, *arguments: Any, **options: Any) -> _Process:  # type: ignore[override]  # noqa: N802 - of multiprocessing
        self.started.append(_Process(*arguments, **options))
        return self.started[-1]


def _begin(begin: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    if begin is not None:
        begin(*arguments)


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def own_environment() -> dict[str, str]:
    """Return the environment with which a new Python process finds the same modules as this process."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109 - '' in sys.path means the working folder
    return os.environ | {"PYTHONPATH": paths}


def last_words(stderr: str, exit_code: int | None) -> str:
    """Return the last line that a process wrote to standard error, or else its exit code."""
    return next(reversed(stderr.strip().splitlines()), f"ended with exit code {exit_code}")
