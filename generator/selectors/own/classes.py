"""What a class must be to serve as a selector, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from generator.selectors.parameters import KINDS, Value
from generator.selectors.selector import Selector
from schema.errors import InputError, KvdriftError, first_line

_CLASS_VARIABLES = ("summary", "paper", "head_reduction")
_KEYS = ("name", "selector", "keep")  # of [[actions]], which are no parameters


def checked_class(found: object, name: str) -> type[Selector]:
    """Check that what was found under a name is a selector class.

    Raises:
        InputError: It is not; the line says what it should be.
    """
    if not isinstance(found, type):
        raise InputError(f"'{name}' is of type {type(found).__name__}; it should be a class derived from Selector")
    if not issubclass(found, Selector):
        raise InputError(
            f"class {name} is no Selector; derive it from ScoringSelector or Selector of generator.selectors.selector"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise InputError(f"class {name} has no method {' or '.join(missing)}; define it")
    parameters: Any = vars(found).get("__dataclass_params__")
    if parameters is None or not parameters.frozen or not parameters.eq:
        raise InputError(f"class {name} is no frozen dataclass; write @dataclass(frozen=True) above it")
    for field in fields(found):  # type: ignore[arg-type]  # it is a dataclass
        _check_field(field, name)
    summary = getattr(found, "summary", None)
    if not isinstance(summary, str) or not summary or "\n" in summary:
        raise InputError(f'class {name} has no summary; write summary: ClassVar[str] = "what it keeps, in one line"')
    return found


def made(kind: type[Selector], parameters: Mapping[str, Value]) -> Selector:
    """Make a selector, whose parameters are of the right names and types.

    Raises:
        InputError: Its class refuses a value, or fails; or window or sinks are no numbers of positions.
    """
    call = f"{kind.__name__}({', '.join(f'{key}={value!r}' for key, value in parameters.items())})"
    try:
        selector = kind(**parameters)
        promised = {"window": selector.window, "sinks": selector.sinks}
    except KvdriftError:
        raise
    except Exception as error:
        raise InputError(f"{call}: {type(error).__name__}: {first_line(error)}") from error
    for what, value in promised.items():
        if type(value) is not int or value < 0:
            raise InputError(f"{call}.{what} is {value!r}; it should be a number of positions, 0 or more")
    return selector


def _check_field(field: Any, name: str) -> None:
    if field.name in _CLASS_VARIABLES:
        kind = "str" if field.name == "summary" else "str | None"
        raise InputError(f"{name}.{field.name} is a parameter now; annotate it as ClassVar[{kind}]")
    if field.name in _KEYS:
        raise InputError(f"{name}.{field.name}: [[actions]] has a key of this name already; rename the parameter")
    if field.default is MISSING or not field.init:
        raise InputError(f"{name}.{field.name}: the field has no default; write {field.name}: TYPE = VALUE")
    if type(field.default) not in KINDS:
        raise InputError(
            f"{name}.{field.name}: the default {field.default!r} is no number, text, True, False or None, which are "
            "what a study file can set"
        )
