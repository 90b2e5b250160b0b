"""Ctrl-C within libraries that turn it into another error; DuckDB turns it into a RuntimeError."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noting_interrupts() -> Iterator[list[int]]:
    """Note each Ctrl-C within the block, and turn any later error into KeyboardInterrupt.

    Nothing is changed outside the main thread, or if the process ignores or handles the signal by itself.

    Yields:
        The numbers of the signals so far.
    """
    interrupts: list[int] = []

    def handler(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # signals have handlers only in the main thread
        yield interrupts
        return
    try:
        if before is not signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
        yield interrupts
    except Exception as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
