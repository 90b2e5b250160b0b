"""Let SIGTERM end a flow also if Python ignores the exception that Prefect's handler raises.

An exception that is raised in a weak reference's callback or in a finalizer goes to ``sys.unraisablehook``, and the
program goes on. A signal that arrives there has no effect.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

_AGAIN = 0.1  # seconds, until the callback or finalizer is over


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
        while ignored.get() and not over.wait(_AGAIN):
            signal.pthread_kill(main, signal.SIGTERM)

    sys.unraisablehook = again
    threading.Thread(target=repeat, daemon=True, name="sigterm again").start()
    try:
        yield
    finally:
        over.set()
        ignored.put(None)
        sys.unraisablehook = hook
