"""Expand a list of temperatures in a study file into one study for each; they differ only in name and law."""

from __future__ import annotations

import re
from typing import Any, Final

from schema.errors import InputError
from schema.study.section import MOST_LISTED

_TRUNCATING: Final = ("top_p", "top_k")
_ONE_OF_SEVERAL: Final = re.compile(r"(.+)-t\d[\d.e-]*")


def of_each_law(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a study file's content once for each of its temperatures; unchanged if there is no list.

    The study NAME at temperature 0.7 is called ``NAME-t0.7``. Temperature 0 takes the most probable token, so its study
    gets no keys that truncate a law.

    Args:
        content: The file's content, which need not be valid.

    Raises:
        InputError: The list is empty, is too long, or has a temperature twice.
    """
    section = content.get("study")
    listed = section.get("temperature") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(listed, list):
        return [content]
    if not listed:
        raise InputError("study.temperature = []: has no temperature; write one, or several as in [0.0, 0.7, 1.0]")
    if len(listed) > MOST_LISTED:
        raise InputError(
            f"study.temperature: {len(listed):,} temperatures, each of which is a study; write at most {MOST_LISTED}"
        )
    for one in listed:
        if listed.count(one) > 1:
            raise InputError(f"study.temperature: {one} is given {listed.count(one)} times; give each temperature once")
    return [content | {"study": _section_of(section, temperature)} for temperature in listed]


def _section_of(section: dict[str, Any], temperature: Any) -> dict[str, Any]:
    """Return section ``[study]`` for one temperature; the schema refuses a temperature that is no number."""
    own = section | {"temperature": temperature}
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        return own
    if not temperature:
        own = {key: value for key, value in own.items() if key not in _TRUNCATING}
    name = section.get("name")
    return own | {"name": law_name(name, temperature)} if isinstance(name, str) else own


def law_name(study: str, temperature: float) -> str:
    """Return the name of the study at one of several temperatures, written as the shortest decimal number."""
    number = repr(float(temperature)).removesuffix(".0").replace("+", "")
    return f"{study}-t{number}"


def name_of_all(study: str) -> str | None:
    """Return the name in the file for a study named after one of several temperatures; None for other names."""
    found = _ONE_OF_SEVERAL.fullmatch(study)
    return found and found[1]
