"""Progress of long work, told to a listener that is handed down with the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol


class Progress(Protocol):
    """A listener: something that shows how far the work is."""

    def begin(self, stage: str, total: int, unit: str) -> None:
        """A stage of ``total`` units starts; ``unit`` names what is counted, such as documents."""

    def advance(self, done: int) -> None:
        """``done`` more units of the current stage are finished."""

    def say(self, line: str) -> None:
        """One line worth keeping, such as a result."""


@dataclass(frozen=True)
class NamedProgress:
    """Tells a listener what is told of one of several studies, with the study's name in front.

    Attributes:
        listener: who is told.
        name: what stands before stages and lines.

    """

    listener: Progress
    name: str

    def begin(self, stage: str, total: int, unit: str) -> None:
        """A stage of the study starts."""
        self.listener.begin(f"{self.name}: {stage}", total, unit)

    def advance(self, done: int) -> None:
        """``done`` more units of the study's stage are finished."""
        self.listener.advance(done)

    def say(self, line: str) -> None:
        """One line on the study."""
        self.listener.say(f"{self.name}: {line}")


class _Silent:
    def begin(self, stage: str, total: int, unit: str) -> None:
        pass

    def advance(self, done: int) -> None:
        pass

    def say(self, line: str) -> None:
        pass


SILENT: Final[Progress] = _Silent()
"""The listener that shows nothing."""
