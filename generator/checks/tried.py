"""A check and its outcome; and what is checked: a selector, codec or policy, as a study names it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kvdrift.generator.actions import Action
from kvdrift.generator.identity import parts_sha256
from kvdrift.generator.selectors.parameters import Value
from kvdrift.log.store import Unit
from kvdrift.schema.errors import InputError, KvdriftError, OperationError, failure_of

Part = TypeVar("Part")

FIRST, ALONE = "first", "alone"
"""The names of two prompts of equal length, which no other check uses."""


class HasPart(Protocol):
    """The object that a check tries: ``kvdrift.generator.checks.tried``."""

    @property
    def part(self) -> object:
        """The selector, codec or policy."""


Subject = TypeVar("Subject", bound=HasPart)


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """A check that every selector, codec or policy must pass: its name, and what it tries, in one line.

    ``function`` tries the subject; it returns a line about the result, or raises an error that says what is wrong.
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


@dataclass(frozen=True, eq=False)
class Tried(ABC, Generic[Part]):
    """A part of an action, to be checked, by its name in a study file and parameters that differ from the defaults.

    Modules are found in ``folder``, if any, before installed modules.
    """

    name: str
    parameters: Mapping[str, Value] = field(default_factory=dict)
    folder: Path | None = None
    part: Part = field(init=False)
    found_elsewhere: list[Any] = field(init=False, default_factory=list)  # by ``elsewhere``
    _units: list[Unit] = field(init=False, default_factory=list)

    kind: ClassVar[str]  # as ``kvdrift check --kind`` says it
    decides: ClassVar[str]  # what it decides, in the plural

    def __post_init__(self) -> None:
        try:
            action = self.action()
        except InputError as error:  # the action is the checks' own, and nobody knows its name
            raise InputError(str(error).removeprefix("action 'own': ")) from error.__cause__
        object.__setattr__(self, "part", self.part_of(action))

    @staticmethod
    @abstractmethod
    def part_of(action: Action) -> Part:
        """Return the action's part that is checked."""

    @abstractmethod
    def action(self, name: str = "own", **changes: Any) -> Action:
        """Return an action with the part, with some of its parameters changed."""

    @abstractmethod
    def generate(self) -> list[Unit]:
        """Generate units that several checks use."""

    @abstractmethod
    def decided(self) -> dict[str, str]:
        """Return digests of the part's decisions on the prompts of other checks, by what was tried."""

    @abstractmethod
    def decided_of(self, prompt: str) -> str:
        """Return a digest of the part's decision on a prompt of this name; all such prompts have equal length."""

    def generated(self) -> list[Unit]:
        """Return the units of ``generate``, which is called once."""
        if not self._units:
            self._units.extend(self.generate())
        return self._units

    def changed(self, name: str, value: Any) -> Action | None:
        """Return the action with another value of a parameter; None if no value is accepted. Texts are not guessed."""
        for other in _other_values(value):
            try:
                return self.action(**{name: other})
            except KvdriftError:
                continue
        return None


def identity_found(tried: Tried[Any]) -> str:
    """Check that a part and each of its parameters belong to the identity; return the result's line."""
    rows, hashes, changed = set(), set(), []
    for name, value in [("", None), *tried.part.parameters.items()]:
        action = tried.changed(name, value) if name else tried.action()
        if action is None:
            continue
        rows.add(json.dumps(action.row("study", prespecified=True)))
        hashes.add(parts_sha256(action.parts))
        changed.append(name)
        alike = min(len(rows), len(hashes)) < len(changed)
        require(not alike, f"{name} is no part of the identity: two values have one row or one hash")
    require(parts_sha256(tried.action().parts[:1]) not in hashes, "the class is no part of the identity")
    return ", ".join(changed[1:]) or "no parameter"


def _other_values(value: Any) -> Iterator[Any]:
    """Yield values that a parameter might take besides its own; none for a text."""
    if isinstance(value, bool):
        yield not value
    elif value is None:
        yield 2
    elif isinstance(value, int | float):
        yield from (value + 2, value + 1, value - 1)
        if isinstance(value, float):
            yield from (value / 2, value + 0.125)


def first_token_found(tried: Tried[Any]) -> str:
    """Check that all generated units, including the control, have equal first tokens; return the line to print."""
    firsts = [[row for row in unit.events.to_pylist() if row["t"] == 1] for unit in tried.generated()]
    tokens = {tuple(row[side] for row in rows) for rows in firsts for side in ("x_token", "y_token")}
    require(len(tokens) == 1, "the first tokens are not the control's")
    moved = {row[name] for rows in firsts for row in rows for name in ("delta", "f")} - {0.0}
    require(not moved, "delta or f is not 0 at t = 1")
    return "delta = f = 0 at t = 1, and the control's token"


def require_unmoved(unit: Unit, name: str) -> None:
    """Raise an error unless delta and f of a unit are 0 in every event."""
    moved = sum(row["delta"] != 0 or row["f"] != 0 for row in unit.events.to_pylist())
    require(moved == 0, f"{name}: delta or f is not 0 in {moved} of {unit.events.num_rows} events")
