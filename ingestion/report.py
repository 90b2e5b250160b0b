"""The report of an ingestion: counts of new, known and refused units, and the errors found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """An error of one unit or of a whole file: the text as it stands at the first of ``count`` rows that have it.

    ``key`` has study, model, doc, action, replicate and t of that row, as far as they are known; it is empty for a
    whole file.
    """

    file: str
    kind: str
    text: str
    key: dict[str, Any] = field(default_factory=dict)
    count: int = 1

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in self.key.items())
        more = f" ({self.count} such rows)" if self.count > 1 else ""
        return f"{self.file}: {named}: {self.text}{more}" if named else self.text  # a text without key names the file


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
    """The result of an ingestion.

    Attributes:
        files: Number of files.
        unread: Number of files that could not be read, or not to the end.
        taken: Units and events that are new in the store. A unit with at least one new replicate counts here; its
            events count here or in ``present``.
        present: Units and events that the store had already, with equal content.
        kept_out: Units with an error, and their events.
        waiting: Replicates that lack positions, and those of their events that came with these files.
        horizons: H of each study and model of which units were new or equal, and where H comes from.
        findings: The errors.
        remarks: Lines about unusual values that are no errors.
    """

    files: int
    unread: int = 0
    taken: Tally = field(default_factory=Tally)
    present: Tally = field(default_factory=Tally)
    kept_out: Tally = field(default_factory=Tally)
    waiting: Tally = field(default_factory=Tally)
    horizons: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, later: IngestReport) -> None:
        """Add the counts of another file; keep only the first finding of all files, and no remarks."""
        self.files += later.files
        self.unread += later.unread
        for name in ("taken", "present", "kept_out"):
            tally: Tally = getattr(later, name)
            getattr(self, name).add(tally.units, tally.events)
        self.waiting = Tally(later.waiting.units, self.waiting.events + later.waiting.events)
        self.horizons = later.horizons | self.horizons
        self.findings = self.findings or later.findings[:1]
