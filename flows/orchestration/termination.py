"""Let SIGTERM end a flow also if Python ignores the exception that Prefect's handler raises.

Python prints an exception that is raised in a weak reference's callback or in a finalizer, and goes on. A signal that
arrives there has no effect.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

_AGAIN = 1.0  # seconds


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Send SIGTERM again each second until it ends the block, once it has arrived.

    This does nothing outside of the main thread, which takes all signals, and if SIGTERM has no handler in Python.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    main, over = threading.get_ident(), threading.Event()
    arrived: SimpleQueue[int | None] = (
        SimpleQueue()
    )  # a handler may put into this queue wherever it interrupts the program

    def handle(number: int, frame: FrameType | None) -> None:
        arrived.put(number)
        handler(number, frame)

    def repeat() -> None:
        while arrived.get() and not over.wait(_AGAIN):
            signal.pthread_kill(main, signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
    threading.Thread(target=repeat, daemon=True, name="sigterm again").start()
    try:
        yield
    finally:
        over.set()
        arrived.put(None)
        signal.signal(signal.SIGTERM, handler)
