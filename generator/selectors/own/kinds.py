"""Kinds of classes of one's own: selectors, and what else an action is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from kvdrift.generator.selectors.selector import Selector

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class PartKind(Generic[Kind]):
    """A kind of classes that may be one's own.

    Attributes:
        noun: What one of them is called.
        plural: What several of them are called.
        base: What all of them are derived from.
        derive: What to derive one from, and of which module, for error lines.
        says: What its summary says.
        class_variables: What is no parameter, each with its annotation.
        keys: Names that no parameter may have, since they are keys beside the parameters.
        recorded: The parameters of one of them, as the table of actions has them.
        counts: Properties that must be numbers of positions or entries.
        common: Parameters that each of them takes beside its own, with their defaults; they are not its fields.
    """

    noun: str
    plural: str
    base: type[Any]
    derive: str
    says: str
    class_variables: Mapping[str, str]
    keys: tuple[str, ...]
    recorded: Callable[[Any], object]
    counts: tuple[str, ...] = ()
    common: Mapping[str, object] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The entry-point group whose names stand beside those of the package."""
        return f"kvdrift.{self.plural}"


SELECTOR_KIND: PartKind[Selector] = PartKind(
    noun="selector",
    plural="selectors",
    base=Selector,
    derive="ScoringSelector or Selector of kvdrift.generator.selectors.selector",
    says="what it keeps",
    class_variables=MappingProxyType(
        {
            "summary": "str",
            "paper": "str | None",
            "head_reduction": "str | None",
            "applies_softcap": "bool",
        }
    ),
    keys=("name", "selector", "keep", "codec"),
    recorded=lambda selector: selector.identity()["parameters"],
    counts=("window", "sinks"),
)
