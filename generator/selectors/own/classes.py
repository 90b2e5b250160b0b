"""What a class must be to serve as a selector, or as another part of an action, whoever wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from kvdrift.generator.selectors.own.kinds import Kind, PartKind
from kvdrift.generator.selectors.parameters import KINDS, Value
from kvdrift.schema.errors import InputError, KvdriftError, first_line


def checked_class(found: object, name: str, part: PartKind[Kind]) -> type[Kind]:
    """Check that what was found under a name is a class of a part.

    Raises:
        InputError: It is not; the line says what it should be.
    """
    if not isinstance(found, type):
        raise InputError(
            f"'{name}' is of type {type(found).__name__}; it should be a class derived from {part.base.__name__}"
        )
    if not issubclass(found, part.base):
        raise InputError(f"class {name} is no {part.base.__name__}; derive it from {part.derive}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise InputError(f"class {name} has no method {' or '.join(missing)}; define it")
    parameters: Any = vars(found).get("__dataclass_params__")
    if parameters is None or not parameters.frozen or not parameters.eq:
        raise InputError(f"class {name} is no frozen dataclass; write @dataclass(frozen=True) above it")
    for field in fields(found):
        _check_field(field, name, part)
    summary = getattr(found, "summary", None)
    if not isinstance(summary, str) or not summary or "\n" in summary:
        raise InputError(f'class {name} has no summary; write summary: ClassVar[str] = "{part.says}, in one line"')
    return found


def default_parameters(kind: type[Any]) -> dict[str, Any]:
    """The parameters that a study can set, with their defaults."""
    return {field.name: field.default for field in fields(kind)}


def made(kind: type[Kind], parameters: Mapping[str, Value], part: PartKind[Kind]) -> Kind:
    """Make one of a part, whose parameters are of the right names and types.

    Raises:
        InputError: Its class refuses a value, or fails; window or sinks are no numbers of positions; or what is
            recorded of it cannot be written as JSON.
    """
    call = f"{kind.__name__}({', '.join(f'{key}={value!r}' for key, value in parameters.items())})"
    try:
        one = kind(**parameters)
        promised = {count: getattr(one, count) for count in part.counts}
        json.dumps(part.recorded(one))
    except KvdriftError:
        raise
    except Exception as error:
        raise InputError(f"{call}: {type(error).__name__}: {first_line(error)}") from error
    for what, value in promised.items():
        if type(value) is not int or value < 0:
            raise InputError(f"{call}.{what} is {value!r}; it should be a number of positions, 0 or more")
    return one


def _check_field(field: Any, name: str, part: PartKind[Kind]) -> None:
    if (kind := part.class_variables.get(field.name)) is not None:
        raise InputError(f"{name}.{field.name} is a parameter now; annotate it as ClassVar[{kind}]")
    if field.name in part.keys:
        raise InputError(f"{name}.{field.name}: [[actions]] has a key of this name already; rename the parameter")
    if field.default is MISSING or not field.init:
        raise InputError(f"{name}.{field.name}: the field has no default; write {field.name}: TYPE = VALUE")
    if type(field.default) not in KINDS:
        raise InputError(
            f"{name}.{field.name}: the default {field.default!r} is no number, text, True, False or None, which are "
            "what a study file can set"
        )
