"""Say in one line what is wrong in a study file, from pydantic's problems: where, what, and what would be right."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from kvdrift.schema.errors import nearest
from kvdrift.schema.study.section import PATTERNS


def explained(problems: list[Any], whole: type[BaseModel]) -> str:
    """Return one line about pydantic's problems with a study file, whose model is ``whole``."""
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


def missing(section: type[BaseModel], where: str, name: str, unknown: Iterable[str] = ()) -> str:
    """Return the line about a missing key of a section at ``where``, which is empty for the whole file.

    If a given key in ``unknown`` is similar, the line says that it is misspelled.
    """
    place = f"{where}." if where else ""
    for key in unknown:
        if difflib.get_close_matches(key, [name]):
            return f"{place}{key}: unknown key; did you mean '{name}'?"
    field = section.model_fields[name]
    heading = f"[[{name}]]" if get_origin(field.annotation) is list else f"[{name}]"
    right = f"{name} = {json.dumps(field.examples[0])}, say" if field.examples else f"a section {heading}"
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
    """Return the section at a place; for a list of sections, the type of its members."""
    if not location:
        return whole
    annotation: Any = whole.model_fields[str(location[0])].annotation
    section: type[BaseModel] = next(iter(get_args(annotation)), annotation)
    return section
