"""Parts of actions, made by the names and parameters of a study file."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from kvdrift.generator.selectors.own.classes import default_parameters, made
from kvdrift.generator.selectors.own.kinds import Kind, PartKind
from kvdrift.generator.selectors.own.names import own_class
from kvdrift.generator.selectors.parameters import Value, check_types
from kvdrift.generator.selectors.selector import Selector
from kvdrift.schema.errors import InputError, KvdriftError, failure_of


def build(
    part: PartKind[Kind], name: str, parameters: Mapping[str, Value], known: Mapping[str, type[Kind]],
    folder: Path | None, listed: Collection[str] = (),
) -> Kind:  # fmt: skip
    """Make one of a part.

    Args:
        part: The kind of what is made.
        name: One of ``known``, an entry point's name, or ``module:Class``.
        parameters: Those that differ from the defaults.
        known: The package's classes, by name.
        folder: Where a module is looked for before installed ones, if anywhere.
        listed: Further names, for the line about a name that nothing has.
    """
    if name in known:
        return _with_parameters(part, known[name], name, parameters)
    own = own_class(part, name, folder, [*known, *listed])
    try:
        return _with_parameters(part, own.kind, name, parameters)
    except InputError as error:
        raise InputError(f"{own.file}: {error}") from error.__cause__


def check_statistics(selector: Selector) -> None:
    """Check what a selector asks to be gathered over all queries of a prompt."""
    named = f"selector {type(selector).__name__}: statistics"
    try:
        asked: object = selector.statistics
    except KvdriftError:
        raise
    except Exception as error:
        raise InputError(f"{named}: {failure_of(error, selector)}") from error
    if not isinstance(asked, Iterable):
        raise InputError(f"{named}: should be a tuple, such as (MyStatistic(),), and not one {type(asked).__name__}")
    for one in asked:
        if isinstance(one, type):
            raise InputError(f"{named}: {one.__name__} is a class; name an object of it, as in ({one.__name__}(),)")
        if not callable(getattr(one, "update", None)):
            raise InputError(f"{named}: {type(one).__name__} has no method update(gathered, chunk); define it")
        try:
            hash(one)
        except TypeError as error:
            what = f"{type(one).__name__} is not hashable ({error})"
            raise InputError(f"{named}: {what}; write @dataclass(frozen=True) above it, with hashable fields") from None


def _with_parameters(part: PartKind[Kind], kind: type[Kind], name: str, parameters: Mapping[str, Value]) -> Kind:
    defaults = {**default_parameters(kind), **part.common}
    for parameter in parameters:
        if parameter not in defaults:
            raise InputError(_unknown(part, name, parameter, defaults))
    check_types(parameters, defaults)
    return made(kind, {key: value for key, value in parameters.items() if key not in part.common}, part)


def _unknown(part: PartKind[Kind], name: str, parameter: str, known: Collection[str]) -> str:
    if close := difflib.get_close_matches(parameter, known := sorted(known), n=1):
        return f"{parameter}: unknown key; did you mean '{close[0]}'?"
    line = f"{part.noun} '{name}' has no parameter '{parameter}'; it takes {', '.join(known) or 'none'}"
    return f"{line}, and stores all layers alike" if part.noun == "codec" and "layer" in parameter else line
