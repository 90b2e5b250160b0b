"""Parts of actions, made by the names and parameters of a study file."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path

from generator.selectors.own.classes import default_parameters, made
from generator.selectors.own.families import Family, Kind
from generator.selectors.own.names import own_class
from generator.selectors.parameters import Value, check_types
from schema.errors import InputError


def build(
    family: Family[Kind], name: str, parameters: Mapping[str, Value], known: Mapping[str, type[Kind]],
    folder: Path | None, listed: Collection[str] = (),
) -> Kind:  # fmt: skip
    """Make one of a family.

    Args:
        family: What is made.
        name: One of ``known``, an entry point's name, or ``module:Class``.
        parameters: Those that differ from the defaults.
        known: The package's classes, by name.
        folder: Where a module is looked for before installed ones, if anywhere.
        listed: Further names, for the line about a name that nothing has.

    Raises:
        InputError: An unknown name or parameter, a value that is not taken, or a module or class that cannot be used.
    """
    if name in known:
        return _with_parameters(family, known[name], name, parameters)
    own = own_class(family, name, folder, [*known, *listed])
    try:
        return _with_parameters(family, own.kind, name, parameters)
    except InputError as error:
        raise InputError(f"{own.file}: {error}") from error.__cause__


def _with_parameters(family: Family[Kind], kind: type[Kind], name: str, parameters: Mapping[str, Value]) -> Kind:
    defaults = {**default_parameters(kind), **family.common}
    for parameter in parameters:
        if parameter not in defaults:
            raise InputError(_unknown(family, name, parameter, defaults))
    check_types(parameters, defaults)
    return made(kind, {key: value for key, value in parameters.items() if key not in family.common}, family)


def _unknown(family: Family[Kind], name: str, parameter: str, known: Collection[str]) -> str:
    if close := difflib.get_close_matches(parameter, known := sorted(known), n=1):
        return f"{parameter}: unknown key; did you mean '{close[0]}'?"
    return f"{family.noun} '{name}' has no parameter '{parameter}'; it takes {', '.join(known) or 'none'}"
