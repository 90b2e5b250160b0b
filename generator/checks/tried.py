"""The base of subjects of checks: a selector, codec or policy, as a study names it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from generator.actions import Action
from generator.checks.check import require
from generator.identity import parts_sha256
from generator.selectors.parameters import Value
from log.store import Unit
from schema.errors import InputError, KvdriftError

Part = TypeVar("Part")

FIRST, ALONE = "first", "alone"
"""The names of two prompts of equal length, which no other check uses."""


@dataclass(frozen=True, eq=False)
class Tried(ABC, Generic[Part]):
    """A part of an action, to be checked.

    Args:
        name: The part's name in a study file.
        parameters: Parameters that differ from the defaults.
        folder: A folder in which modules are found before installed modules, if any.
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
