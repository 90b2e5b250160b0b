"""What an ingestion says: what is new in the store, and what was not taken and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """What is wrong with one unit or with a whole file.

    Attributes:
        file: The file.
        kind: A short name of the kind of error.
        text: What is wrong, at the first row that has the error.
        key: Study, model, doc, action, replicate and t of that row, as far as they are known; empty for a whole file.
        count: How many rows have the error.

    """

    file: str
    kind: str
    text: str
    key: dict[str, Any] = field(default_factory=dict)
    count: int = 1

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in self.key.items())
        more = f" ({self.count} such rows)" if self.count > 1 else ""
        return f"{self.file}: {named}: {self.text}{more}" if named else self.text  # which names the file itself


@dataclass
class Tally:
    """A count of units and of their events."""

    units: int = 0
    events: int = 0

    def add(self, units: int, events: int) -> None:
        """Count more units and events."""
        self.units += units
        self.events += events


@dataclass
class IngestReport:
    """What an ingestion did.

    Attributes:
        files: Number of files.
        unread: Number of files that could not be read, or not to the end.
        taken: What is new in the store. A unit with some new replicates counts here; its events are counted apart.
        present: What the store had already, with equal content.
        kept_out: What has errors.
        waiting: Replicates that lack positions, and the new ones of their events.
        findings: The errors.
        remarks: Lines about what is unusual but no error.

    """

    files: int
    unread: int = 0
    taken: Tally = field(default_factory=Tally)
    present: Tally = field(default_factory=Tally)
    kept_out: Tally = field(default_factory=Tally)
    waiting: Tally = field(default_factory=Tally)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, later: IngestReport) -> None:
        """Count what became of another file; of findings the first one stays, and remarks do not."""
        self.files += later.files
        self.unread += later.unread
        for name in ("taken", "present", "kept_out"):
            tally: Tally = getattr(later, name)
            getattr(self, name).add(tally.units, tally.events)
        self.waiting = Tally(later.waiting.units, self.waiting.events + later.waiting.events)
        self.findings = self.findings or later.findings[:1]
