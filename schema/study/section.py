"""The base of all sections of a study file: strict values, and a meaning for every key."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_MEMBER: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/%:+-]*)*$"
PART: Final = r"^[1-9][0-9]{0,2}/[1-9][0-9]{0,2}$"
PATTERNS: Final = {
    _NAME: "letters, digits, . _ and -, of which the first is a letter or digit",
    _MEMBER: "letters, digits, . _ and -, of which the first is a letter or digit; after an @ a value of a sweep",
    PART: 'a number of as many parts, as in "1/2", up to 999',
}
"""The description of each pattern, for the error line about a text that does not match."""

Value = int | float | str | bool
"""The type of parameters and settings in a study file."""

Name = Annotated[str, Field(pattern=_NAME, max_length=80)]
ActionName = Annotated[str, Field(pattern=_MEMBER, max_length=80)]
Positive = Annotated[int, Field(ge=1)]

MOST_DOCUMENTS: Final = 100_000
"""The most documents of a study, since all prompts are in memory before the first is measured."""
MOST_TOKENS: Final = 2**20
"""The most tokens of a prompt, a horizon or a window, since no supported model reads more."""
MOST_EVENTS: Final = 2**24
"""The most events of one document and action, pairs times horizon: all are in memory at once, about 1 GB."""
MOST_DRAWS: Final = 1_000_000
"""The most bootstrap draws, since every draw of every quantity is in memory."""
MOST_LISTED: Final = 256
"""The most sections of a kind, looks, or studies of one file; each becomes a row of every table on the page."""

Documents = Annotated[int, Field(ge=2, le=MOST_DOCUMENTS)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Pairs = Annotated[int, Field(ge=1, le=MOST_EVENTS)]


class Section(BaseModel):
    """A section of a study file; unknown keys are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def meaning(
    text: str, unit: str | None = None, example: Any = None, *, needed: bool = False, default: Any = ...
) -> Any:
    """Return the field of a key, for the reference, the comments of new files, and errors about a missing key.

    A key without a default has an ``example``. ``needed`` says that transformers need the key, although it has a
    default for other models.
    """
    extra: JsonDict = {"unit": unit} if unit else {}
    if needed:
        extra["needed"] = True
    return Field(
        default,
        description=text,
        examples=None if example is None else [example],
        json_schema_extra=extra or None,
    )
