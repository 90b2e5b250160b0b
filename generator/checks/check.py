"""One check of a part of an action, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from schema.errors import KvdriftError, OperationError, failure_of


class HasPart(Protocol):
    """What checks try: ``generator.checks.tried``."""

    @property
    def part(self) -> object:
        """The selector, codec or policy."""


Subject = TypeVar("Subject", bound=HasPart)


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """One thing that every selector, codec or policy must hold.

    Attributes:
        name: A word or two.
        tried: What is tried, in a line.
        function: Tries it; returns what was found, or raises an error with what is wrong.
    """

    name: str
    tried: str
    function: Callable[[Subject], str]

    def __call__(self, subject: Subject) -> Finding:
        """Try it; whatever the part raises is what was found."""
        try:
            return Finding(holds=True, found=self.function(subject))
        except KvdriftError as error:
            return Finding(holds=False, found=str(error))
        except Exception as error:  # noqa: BLE001 - whatever the part's code raises
            return Finding(holds=False, found=failure_of(error, subject.part))


@dataclass(frozen=True)
class Finding:
    """The outcome of a check."""

    holds: bool
    found: str


def require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - as assert takes it
    """Raise what is wrong, unless something holds."""
    if not holds:
        raise OperationError(otherwise)
