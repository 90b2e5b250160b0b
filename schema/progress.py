"""Progress of long work, reported to whoever listens; nobody by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Progress(Protocol):
    """A listener. ``unit`` is what is counted, such as documents."""

    def begin(self, stage: str, total: int, unit: str) -> None:
        """A stage of ``total`` units starts."""

    def advance(self, done: int) -> None:
        """``done`` more units of the current stage are finished."""

    def say(self, line: str) -> None:
        """One line worth keeping: a result, or what was found done already."""


class _Silent:
    def begin(self, stage: str, total: int, unit: str) -> None:
        pass

    def advance(self, done: int) -> None:
        pass

    def say(self, line: str) -> None:
        pass


_listener: ContextVar[Progress] = ContextVar("kvdrift_progress", default=_Silent())  # noqa: B039 - it has no state


def progress() -> Progress:
    """The current listener."""
    return _listener.get()


@contextmanager
def listening(listener: Progress) -> Iterator[None]:
    """Report to ``listener`` inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
