"""Functions as tasks of the running Prefect flow: skipped stages, retries, and the end by SIGTERM."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from queue import SimpleQueue
from typing import Any

from kvdrift.schema.errors import ControlError, DamagedStoreError, InputError

DELAYS = (10.0, 60.0, 300.0)  # seconds before the second, third and fourth try of a stage
_FOR_GOOD = (InputError, ControlError, DamagedStoreError)
AGAIN = 0.1  # seconds, until the callback or finalizer is over


def as_task(function: Callable[..., Any], **options: Any) -> Any:
    """Return a function as a task of the running flow.

    Prefect's cache is off, since it would skip the second derivation of a flow; the store knows what is done.
    """
    from prefect import task  # noqa: PLC0415 - once the orchestration has set Prefect's environment
    from prefect.cache_policies import NO_CACHE  # noqa: PLC0415

    name = function.__name__.removeprefix("_")
    return task(name=name, cache_policy=NO_CACHE, persist_result=False, **options)(function)


def as_stage(function: Callable[..., object], idle: str, **options: Any) -> Any:
    """Return a stage as a task, which ends in a state "Skipped" with the reason ``idle`` if the stage did nothing.

    The state is Prefect's Completed under another name: for everything that waits, the task has succeeded.
    """
    from prefect.states import Completed  # noqa: PLC0415

    @wraps(function)
    def stage(*given: Any) -> object:
        done = function(*given)
        return done or Completed(name="Skipped", message=idle)

    return as_task(stage, **options)


def retried() -> dict[str, Any]:
    """Return the options of a task that is retried, unless a retry cannot help.

    A fault that a person must mend fails at once: a mistake in the study file, a control that is not 0, a damaged
    store.
    """
    return {"retries": len(DELAYS), "retry_delay_seconds": list(DELAYS), "retry_condition_fn": may_pass}


def may_pass(_task: Any, _task_run: Any, state: Any) -> bool:
    """Tell whether the error of a task may be gone when the task is tried again."""
    return not isinstance(state.data, _FOR_GOOD)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Send SIGTERM again if Python ignores the exception of Prefect's handler inside the block.

    The handler stays Prefect's, which tells a cancelled run by it. Outside of the main thread, which takes all signals,
    this does nothing.
    """
    from prefect.exceptions import TerminationSignal  # noqa: PLC0415 - imported where a study runs

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hook, main, over = sys.unraisablehook, threading.get_ident(), threading.Event()
    ignored: SimpleQueue[int | None] = SimpleQueue()  # signals; a hook may put into this queue wherever it is called

    def again(unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, TerminationSignal):
            ignored.put(signal.SIGTERM)
        else:
            hook(unraisable)

    def repeat() -> None:
        while ignored.get() and not over.wait(AGAIN):
            signal.pthread_kill(main, signal.SIGTERM)

    sys.unraisablehook = again
    threading.Thread(target=repeat, daemon=True, name="sigterm again").start()
    try:
        yield
    finally:
        over.set()
        ignored.put(None)
        sys.unraisablehook = hook
