"""``[[actions]]``: an eviction policy and how much it keeps."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict
from pydantic.json_schema import SkipJsonSchema

from schema.errors import InputError
from schema.retention import Retention
from schema.study.mistakes import missing
from schema.study.model import FINITE_STATE
from schema.study.section import Name, Section, meaning

CONTROL_ACTION = "full"
CONTROL_REPLICATES = 2


class ActionSection(Section):
    """``[[actions]]``: a selector, its parameters and its retention; of a finite-state system the name alone.

    Every further key is a parameter of the selector, which says what it takes: ``generator.selectors.build_selector``.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int | float | str | bool]

    name: Annotated[Name, meaning("The action's name, in queries and on the page.", example="snapkv-half")]
    selector: Annotated[
        str,
        meaning(
            "The policy that chooses what is kept: one of `kvdrift list selectors`, or `module:Class` of your own.",
            example="snapkv",
            needed=True,
        ),
    ] = FINITE_STATE
    keep: Annotated[
        int | str | SkipJsonSchema[float],  # a float is refused by Retention, which says what to write instead
        meaning(
            'How many of a prompt\'s n entries each head keeps: a number, an exact share such as "1/2" or "90%", or '
            '"all".',
            "entries",
            example="1/2",
            needed=True,
        ),
    ] = "all"

    @property
    def retention(self) -> Retention:
        """The parsed retention rule."""
        return Retention.parse(self.keep)

    @property
    def parameters(self) -> dict[str, int | float | str | bool]:
        """The selector parameters that the study sets; a parameter that it does not set keeps its default."""
        return dict(self.__pydantic_extra__)

    def check_kind(self, where: str, *, finite: bool) -> None:
        """Check that the action has the keys that its kind of model needs; a finite-state one's has a name alone.

        Raises:
            InputError: A key is missing or must not be there.

        """
        given = self.model_fields_set - {"name"}
        if finite and given:
            raise InputError(f"{where}.{min(given)}: unknown key; a finite-state system's actions are laws")
        for name in () if finite else ("selector", "keep"):
            if name not in given:
                raise InputError(missing(type(self), where, name, self.parameters))
