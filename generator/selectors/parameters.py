"""Checks of the parameters of selectors, codecs and policies, as a study file gives them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kvdrift.schema.errors import InputError

Value = int | float | str | bool

KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    type(None): ((int, float), "a number"),
}
"""By the type of a parameter's default: the types that it takes, and their name."""


def check_types(
    parameters: Mapping[str, Value], defaults: Mapping[str, object],
    choices: Mapping[str, tuple[int | str, ...]] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Refuse parameters that do not have the types of their defaults; a parameter whose default is None is a number.

    A parameter with ``choices`` must have one of these values.
    """
    for name, value in parameters.items():
        if name in choices:
            if not any(type(value) is type(choice) and value == choice for choice in choices[name]):
                *others, last = (f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices[name])
                raise InputError(f"{name} = {value!r}: should be {', '.join(others)} or {last}")
            continue
        if isinstance(defaults[name], tuple):  # numbers of layers: the class that has them checks them
            continue
        kinds, wanted = KINDS[type(defaults[name])]
        if not isinstance(value, kinds) or isinstance(value, bool) != (bool in kinds):
            raise InputError(f"{name} = {value!r}: should be {wanted}")


def at_least(bound: int, **parameters: float) -> None:
    """Refuse parameters below ``bound``."""
    for name, value in parameters.items():
        if not value >= bound:
            raise InputError(f"{name} = {value}: should be at least {bound}")


def unknown(parameter: str, part: str, known: Iterable[str]) -> str:
    """Return the error line about a parameter that ``part``, such as "selector 'h2o'", lacks; it names known ones."""
    if close := difflib.get_close_matches(parameter, known := sorted(known), n=1):
        return f"{parameter}: unknown key; did you mean '{close[0]}'?"
    return f"{part} has no parameter '{parameter}'; it takes {', '.join(known) or 'none'}"
