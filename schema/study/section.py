"""The base of a study file's sections: strict values, a meaning for every key, and an error in one line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from kvdrift.schema.errors import nearest

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
LEAST_ALPHA: Final = 1e-5
"""The least alpha: of the most bootstrap draws, five lie beyond each end of an interval at its level."""
MOST_ENDPOINTS: Final = 100_000
"""The most endpoints that share alpha: a hundred thousandth of the least alpha, 1e-10, is a level that the quantiles of
intervals resolve. 1 - 1e-17 is 1, whose intervals are infinite. All quantities of 256 actions are 20,000 endpoints."""
MOST_LISTED: Final = 256
"""The most sections of a kind, interim looks, or studies of one file; each becomes a row of every table on the page."""

MOST_SHOTS: Final = 1000
"""The most worked examples of a prompt, since HELMET's files of examples are named for 1,000 questions at most."""
MOST_SYMBOLS: Final = 64
"""The most tokens of drawn systems, since larger systems have too many pairs of histories from position 2 on."""

Documents = Annotated[int, Field(ge=2, le=MOST_DOCUMENTS)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Pairs = Annotated[int, Field(ge=1, le=MOST_EVENTS)]


class Section(BaseModel):
    """A section of a study file; unknown keys are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def meaning(
    text: str, unit: str | None = None, example: Any = None, *, needed: bool = False, default: Any = ...
) -> Any:
    """Return the pydantic field of a key, with the meaning that the reference, new files and errors show.

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


def explained(problems: list[Any], whole: type[BaseModel]) -> str:
    """Return one line about the problems that pydantic found in a study file, whose class is ``whole``."""
    # pydantic reports a misspelled key as missing, too; the user must correct the unknown key.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    location = problem["loc"]
    where = _place(location)
    if problem["type"] == "extra_forbidden":
        known = _section_at(location[:-1], whole).model_fields
        return f"{where}: unknown key; {nearest(str(location[-1]), known)}"
    if problem["type"] == "missing":
        section = _section_at(location[:-1], whole)
        unknown = set(problem["input"]) - set(section.model_fields)
        return missing(section, _place(location[:-1]), str(location[-1]), unknown)
    messages = [_wanted(p) for p in problems if _place(p["loc"]) == where]
    return f"{where} = {problem['input']!r}: should {' or '.join(dict.fromkeys(messages)).replace(' or be ', ' or ')}"


def _wanted(problem: Any) -> str:
    """Return what a value should be or have, taken from pydantic's message."""
    if problem["type"] == "string_pattern_mismatch":
        return f"be {PATTERNS[problem['ctx']['pattern']]}"
    of_type, should, wanted = problem["msg"].partition(" should ")
    return wanted.partition(" after validation")[0] if should else f"be {of_type}"


def missing(
    section: type[BaseModel], where: str, name: str, unknown: Iterable[str] = (), example: str | None = None
) -> str:
    """Return the error line about the missing key ``name`` of the section at ``where`` ("" is the whole file).

    The line shows ``example`` as a value, by default the example of the key's field. If one of the section's
    ``unknown`` keys is similar to ``name``, the line says instead that this key is misspelled.
    """
    place = f"{where}." if where else ""
    for key in unknown:
        if difflib.get_close_matches(key, [name]):
            return f"{place}{key}: unknown key; did you mean '{name}'?"
    field = section.model_fields[name]
    heading = f"[[{name}]]" if get_origin(field.annotation) is list else f"[{name}]"
    examples = field.examples if example is None else [example]
    right = f"it as in {name} = {json.dumps(examples[0])}" if examples else f"a section {heading}"
    return f"{place}{name}: missing; write {right} ({(field.description or '').removesuffix('.')})"


def _place(location: tuple[int | str, ...]) -> str:
    """Return a place as in ``actions[0].keep``, without pydantic's names of types."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in ("int", "float", "str", "bool") and not part.startswith(("literal", "constrained", "dict[")):
            text += f".{part}" if text else part
    return text


def _section_at(location: tuple[int | str, ...], whole: type[BaseModel]) -> type[BaseModel]:
    """Return the class of the section at a place of the file; of a list of sections, the class of its members."""
    if not location:
        return whole
    annotation: Any = whole.model_fields[str(location[0])].annotation
    section: type[BaseModel] = next(iter(get_args(annotation)), annotation)
    return section
