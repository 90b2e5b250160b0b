"""One check of a part of an action, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from generator.selectors.own.failures import failure_of
from schema.errors import KvdriftError, OperationError


class Tried(Protocol):
    """What checks try: a selector or codec, as a study names it."""

    @property
    def part(self) -> object:
        """The selector or codec."""


SomeTried = TypeVar("SomeTried", bound=Tried)


@dataclass(frozen=True)
class Check(Generic[SomeTried]):
    """One thing that every selector, or every codec, must hold.

    Attributes:
        name: A word or two.
        tried: What is tried, in a line.
        function: Tries it; returns what was found, or raises an error with what is wrong.
    """

    name: str
    tried: str
    function: Callable[[SomeTried], str]

    def __call__(self, subject: SomeTried) -> Finding:
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
    """Raise what is wrong, unless something holds.

    Raises:
        OperationError: It does not.
    """
    if not holds:
        raise OperationError(otherwise)


def other_values(value: Any) -> Iterator[Any]:
    """Values that a parameter might take beside its own; none for a text."""
    if isinstance(value, bool):
        yield not value
    elif value is None:
        yield 2
    elif isinstance(value, int | float):
        yield from (value + 2, value + 1, value - 1)
        if isinstance(value, float):
            yield from (value / 2, value + 0.125)
