"""What the sections of a study file have in common: strict values, and a meaning for every key."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_MEMBER: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/%:+-]*)*$"
PART: Final = r"^[1-9][0-9]{0,2}/[1-9][0-9]{0,2}$"
PATTERNS: Final = {
    _NAME: "letters, digits, . _ and -, of which the first is a letter or digit",
    _MEMBER: "letters, digits, . _ and -, of which the first is a letter or digit; after an @ a value of a sweep",
    PART: 'a number of as many parts, as in "1/2", up to 999',
}
"""What a text that does not match should be, by pattern."""

Value = int | float | str | bool
"""What a study file can set a parameter or a setting to."""

Name = Annotated[str, Field(pattern=_NAME, max_length=80)]
ActionName = Annotated[str, Field(pattern=_MEMBER, max_length=80)]
Positive = Annotated[int, Field(ge=1)]

MOST_DOCUMENTS: Final = 100_000
"""Of a study: all prompts are made, and are in memory, before the first one is measured."""
MOST_TOKENS: Final = 2**20
"""Of a prompt, a horizon or a window: no supported model reads more."""
MOST_EVENTS: Final = 2**24
"""Pairs times horizon: the events of one document and action are in memory together, about 1 GB of them."""
MOST_DRAWS: Final = 1_000_000
"""Of the bootstrap: each one is in memory with every quantity."""
MOST_LISTED: Final = 256
"""Sections of a kind, looks, and studies of one file: each one is a row of every table, and a section of the page."""

Documents = Annotated[int, Field(ge=2, le=MOST_DOCUMENTS)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Pairs = Annotated[int, Field(ge=1, le=MOST_EVENTS)]


class Section(BaseModel):
    """A section of a study file: keys that it does not have are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def meaning(text: str, unit: str | None = None, example: Any = None, *, needed: bool = False) -> Any:
    """Return what is said of a key, in the reference, in the comments of new files, and where the key is missing.

    Args:
        text: what the key means.
        unit: the unit of its value, where that has one.
        example: a value, for a key that has no default.
        needed: whether transformers need the key, though it has a default for others.

    """
    return Field(
        description=text,
        examples=None if example is None else [example],
        json_schema_extra={**({"unit": unit} if unit else {}), **({"needed": True} if needed else {})} or None,
    )


def values_of(section: Section, later: Collection[str]) -> dict[str, Any]:
    """Return a section's values without ``later`` keys at their default, which must not change older hashes."""
    defaults = {name: type(section).model_fields[name].default for name in later}
    values = section.model_dump()
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}
