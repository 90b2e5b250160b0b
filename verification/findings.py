"""What a verification says: checks with what they counted, the faults that they found, and notes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One thing that is not as it must be.

    Attributes:
        where: The table, the table and file, or the table and key.
        what: What is wrong, and what would be right.
        units: Numbers of the units whose rows in the table ``where`` are wrong; -1 stands for rows of none.

    """

    where: str
    what: str
    units: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Check:
    """One subject, looked at as a whole; sound where there are no faults.

    Notes tell what is not there yet, as in a store that is being written, and is no fault.
    """

    subject: str
    counted: str  # what was looked at
    holds: str  # what is true of all of it where it is sound
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = counted(len(self.faults), "fault") if self.faults else self.holds
        return f"{self.subject}: {self.counted}, {found}"


def counted(number: int, name: str) -> str:
    """``1 unit``, ``3,000 units``."""
    return f"{number:,} {name if number == 1 else f'{name}s'}"
