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
from types import FrameType

_AGAIN = 0.1  # seconds, until the callback or finalizer is over


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Send SIGTERM again if Python ignores the exception of its handler inside the block.

    This does nothing outside of the main thread, which takes all signals, and if SIGTERM has no handler in Python.
    """
    handler, hook = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    main, over = threading.get_ident(), threading.Event()
    ignored: SimpleQueue[int | None] = SimpleQueue()  # signals; a hook may put into this queue wherever it is called
    raised: list[BaseException] = []

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    def again(unraisable: sys.UnraisableHookArgs) -> None:
        if any(unraisable.exc_value is error for error in raised):
            ignored.put(signal.SIGTERM)
        else:
            hook(unraisable)

    def repeat() -> None:
        while ignored.get() and not over.wait(_AGAIN):
            signal.pthread_kill(main, signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
    sys.unraisablehook = again
    threading.Thread(target=repeat, daemon=True, name="sigterm again").start()
    try:
        yield
    finally:
        over.set()
        ignored.put(None)
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, handler)
