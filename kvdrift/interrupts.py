"""How a call ends: exit codes of failures, and Ctrl-C in libraries that turn it into another error.

DuckDB, for example, turns Ctrl-C into a RuntimeError.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # the shell's code for a program that SIGINT ended


def failure_code(arguments: list[str]) -> int:
    """Return the exit code of a failure: 1, or 4 for ``gate``, whose 1 means "worse"."""
    return 4 if arguments[:1] == ["gate"] else 1


@contextmanager
def noting_interrupts() -> Iterator[list[int]]:
    """Note each Ctrl-C within the block, and turn any later error into KeyboardInterrupt.

    Nothing is changed outside the main thread, or if the process ignores or handles the signal by itself.

    Yields:
        A list that gets the number of the signal at each Ctrl-C.
    """
    interrupts: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()  # signals have handlers only there
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return

    def handler(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    try:
        yield interrupts
    except Exception as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
