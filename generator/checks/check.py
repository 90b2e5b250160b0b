"""One check of a part of an action, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from schema.errors import KvdriftError, OperationError, failure_of


class HasPart(Protocol):
    """The object that a check tries: ``generator.checks.tried``."""

    @property
    def part(self) -> object:
        """The selector, codec or policy."""


Subject = TypeVar("Subject", bound=HasPart)


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """A check that every selector, codec or policy must pass.

    Attributes:
        name: A word or two.
        tried: What the check tries, in one line.
        function: Tries the subject; returns a line about the result, or raises an error that says what is wrong.
    """

    name: str
    tried: str
    function: Callable[[Subject], str]

    def __call__(self, subject: Subject) -> Finding:
        """Run the check on a subject and return the finding; an exception of the part becomes a failed finding."""
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
    """Raise an error with ``otherwise`` unless ``holds``."""
    if not holds:
        raise OperationError(otherwise)
