"""Report the progress of long work to a listener that is passed along with the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol


class Progress(Protocol):
    """A listener that shows how far the work is."""

    def begin(self, stage: str, total: int, unit: str) -> None:
        """Start a stage of ``total`` units; ``unit`` names the things counted, such as documents."""

    def advance(self, done: int) -> None:
        """Count ``done`` more finished units of the current stage."""

    def say(self, line: str) -> None:
        """Show one line that should stay, such as a result."""


@dataclass(frozen=True)
class NamedProgress:
    """Passes the progress of one of several studies to a listener, with the study's name in front."""

    listener: Progress
    name: str

    def begin(self, stage: str, total: int, unit: str) -> None:
        """Start a stage of the study."""
        self.listener.begin(f"{self.name}: {stage}", total, unit)

    def advance(self, done: int) -> None:
        """Count ``done`` more finished units of the study's stage."""
        self.listener.advance(done)

    def say(self, line: str) -> None:
        """Show one line about the study."""
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
