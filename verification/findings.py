"""The results of a verification: checks with counts, faults and notes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        where: The table, the table and file, or the table and key.
        what: What is wrong, and what would be right.
        units: Numbers of the units whose rows in the table ``where`` are wrong; -1 means rows without a unit.

    """

    where: str
    what: str
    units: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Verified:
    """The result of verifying one subject, which is sound if there are no faults.

    Notes name things that are still missing, as in a store that is being written; a note is no fault.
    """

    subject: str
    looked_at: str
    holds: str  # what is true of all of it if it is sound
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = number_of(len(self.faults), "fault") if self.faults else self.holds
        return f"{self.subject}: {self.looked_at}, {found}"


def number_of(number: int, name: str) -> str:
    """Return a number with its noun: ``1 unit``, ``3,000 units``."""
    return f"{number:,} {name if number == 1 else f'{name}s'}"
