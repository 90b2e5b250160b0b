"""Make selectors, codecs and policies by the names and parameters of a study file, and check custom classes.

A name is that of a part of kvdrift, that of an entry point of an installed distribution, or ``module:Class``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvdrift.generator.selectors.custom.loading import load_module
from kvdrift.generator.selectors.parameters import KINDS, Value, check_types, unknown
from kvdrift.generator.selectors.selector import Selector
from kvdrift.schema.errors import InputError, KvdriftError, failure_of, first_line, nearest

Part = TypeVar("Part")


@dataclass(frozen=True)
class PartKind(Generic[Part]):
    """A kind of parts: selectors, codecs or policies."""

    noun: str
    plural: str
    base: type[Any]  # from which all parts of the kind are derived
    known: Mapping[str, type[Part]]  # the package's classes, by name
    derive: str  # the class to derive a part from, and its module, for error lines
    says: str  # the content of a part's summary, for error lines
    keys: tuple[str, ...] = ("name",)  # of an action in a study file; no parameter may have such a name
    counts: tuple[str, ...] = ()  # properties that must be numbers of positions or entries
    common: Mapping[str, object] = field(default_factory=dict)  # parameters of every part besides its fields
    forms: tuple[str, ...] = ()  # further forms of names, for the line about an unknown name

    @property
    def group(self) -> str:
        """The group of entry points by which installed distributions add parts of this kind."""
        return f"kvdrift.{self.plural}"

    @property
    def entry_points(self) -> list[str]:
        """The names of all entry points of the group, sorted."""
        return sorted(entry_points(group=self.group).names)

    def entry_point(self, name: str) -> tuple[str, str]:
        """Return an entry point's ``module:Class`` and distribution; entry points of one name must name one class."""
        point, *others = entry_points(group=self.group, name=name)
        for other in others:
            if other.value != point.value:
                raise InputError(
                    f"{self.noun} '{name}': is an entry point of {_distribution(point)} and of {_distribution(other)}; "
                    f"uninstall one of them, or write {point.value} or {other.value}"
                )
        return point.value, _distribution(point)

    def find(self, name: str, folder: Path | None = None) -> tuple[type[Part], str]:
        """Return the custom class that an entry point's name or ``module:Class`` names, and the class's file.

        A module is looked for in ``folder``, if any, and then among installed modules.
        """
        names = self.entry_points
        if name in names:
            value, distribution = self.entry_point(name)
            folder, where = None, f"{self.noun} '{name}', {value} of {distribution}"
        elif ":" in name:
            value, where = name, f"{self.noun} '{name}'"
        else:
            listed = [*self.known, *self.forms, *names, "MODULE:CLASS"]
            raise InputError(f"unknown {self.noun} '{name}'; {nearest(name, listed)}")
        module_name, _, class_name = value.partition(":")
        is_file = module_name.endswith(".py")
        if is_file or not all(word.isidentifier() for word in [*module_name.split("."), class_name]):
            right = f"{Path(module_name).stem}:{class_name}" if is_file else "module:Class"
            raise InputError(f"{where}: is no name of a module and a class in it; write {right}")
        module = load_module(module_name, folder, where)
        file = getattr(module, "__file__", None) or module_name
        if not hasattr(module, class_name):
            there = [key for key, value in vars(module).items() if _is_whole(value, self.base)]
            hint = nearest(class_name, there) if there else f"it has no class derived from {self.base.__name__}"
            raise InputError(f"{file}: has no class '{class_name}'; {hint}")
        found = getattr(module, class_name)
        try:
            self._check_class(found, class_name)
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        return found, file

    def build(self, name: str, parameters: Mapping[str, Value], folder: Path | None = None) -> Part:
        """Make the part ``name``, kvdrift's or a custom one; ``parameters`` are those that differ from the defaults."""
        if name in self.known:
            return self._made(self.known[name], name, parameters)
        kind, file = self.find(name, folder)
        try:
            return self._made(kind, name, parameters)
        except InputError as error:
            raise InputError(f"{file}: {error}") from error.__cause__

    def _made(self, kind: type[Part], name: str, parameters: Mapping[str, Value]) -> Part:
        """Make a part, and check its parameters and some of its properties.

        Parameters must be writable as JSON; the properties that ``counts`` names must be whole numbers, 0 or more.
        """
        defaults = {**default_parameters(kind), **self.common}
        for parameter in parameters:
            if parameter not in defaults:
                raise InputError(unknown(parameter, f"{self.noun} '{name}'", defaults))
        check_types(parameters, defaults, getattr(kind, "choices", {}))
        own = {key: value for key, value in parameters.items() if key not in self.common}
        call = f"{kind.__name__}({', '.join(f'{key}={value!r}' for key, value in own.items())})"
        try:
            part: Any = kind(**own)
            counts = {count: getattr(part, count) for count in self.counts}
            json.dumps(part.identity()["parameters"] if isinstance(part, Selector) else part.parameters)
        except KvdriftError:
            raise
        except Exception as error:
            raise InputError(f"{call}: {type(error).__name__}: {first_line(error)}") from error
        for count, value in counts.items():
            if type(value) is not int or value < 0:
                raise InputError(f"{call}.{count} is {value!r}; it should be a number of positions, 0 or more")
        return part  # type: ignore[no-any-return]

    def _check_class(self, found: object, name: str) -> None:
        """Check that an object found in a module is a class from which parts of this kind can be made."""
        if not isinstance(found, type):
            kind, base = type(found).__name__, self.base.__name__
            raise InputError(f"'{name}' is of type {kind}; it should be a class derived from {base}")
        if not issubclass(found, self.base):
            raise InputError(f"class {name} is no {self.base.__name__}; derive it from {self.derive}")
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise InputError(f"class {name} has no method {' or '.join(missing)}; define it")
        options: Any = vars(found).get("__dataclass_params__")
        if options is None or not options.frozen or not options.eq:
            raise InputError(f"class {name} is no frozen dataclass; write @dataclass(frozen=True) above it")
        for one in fields(found):
            self._check_field(one, name)
        summary = getattr(found, "summary", None)
        if not isinstance(summary, str) or not summary or "\n" in summary:
            right = f'summary: ClassVar[str] = "{self.says}, in one line"'
            raise InputError(f"class {name} has no summary; write {right}")

    def _check_field(self, parameter: Field[Any], name: str) -> None:
        where, annotation = f"{name}.{parameter.name}", str(self.base.__annotations__.get(parameter.name))
        if annotation.startswith("ClassVar"):
            raise InputError(
                f"{where} would be a parameter that study files set; write {parameter.name}: {annotation} = …"
            )
        if parameter.name in self.keys or parameter.name in self.common:
            raise InputError(f"{where}: [[actions]] has a key of this name already; rename the parameter")
        if parameter.default is MISSING or not parameter.init:
            raise InputError(f"{where}: the field has no default; write {parameter.name}: TYPE = VALUE")
        if type(parameter.default) not in KINDS:
            raise InputError(
                f"{where}: the default {parameter.default!r} is no number, text, True, False or None, which are what a "
                "study file can set"
            )


def default_parameters(kind: type[Any]) -> dict[str, Any]:
    """Return the parameters that a study can set, with their defaults; those of all scoring selectors come last."""
    return {one.name: one.default for one in sorted(fields(kind), key=lambda one: one.kw_only is True)}


def is_custom(part: object) -> bool:
    """Return whether a part's class is not one of the package's."""
    return type(part).__module__.partition(".")[0] != __name__.partition(".")[0]


def property_of(part: object, kind: str, name: str) -> object:
    """Return property ``name`` of a part; an exception in its code becomes one error line that begins with ``kind``."""
    try:
        return getattr(part, name)
    except KvdriftError:
        raise
    except Exception as error:
        raise InputError(f"{kind} {type(part).__name__}: {name}: {failure_of(error, part)}") from error


def check_statistics(selector: Selector) -> None:
    """Check that the statistics of a selector are hashable objects with a method ``update``."""
    requested = property_of(selector, "selector", "statistics")
    where = f"selector {type(selector).__name__}: statistics"
    if not isinstance(requested, Iterable):
        kind = type(requested).__name__
        raise InputError(f"{where}: should be a tuple, such as (MyStatistic(),), and not one {kind}")
    for one in requested:
        if isinstance(one, type):
            raise InputError(f"{where}: {one.__name__} is a class; name an object of it, as in ({one.__name__}(),)")
        if not callable(getattr(one, "update", None)):
            raise InputError(f"{where}: {type(one).__name__} has no method update(gathered, chunk); define it")
        try:
            hash(one)
        except TypeError as error:
            what = f"{type(one).__name__} is not hashable ({error})"
            raise InputError(f"{where}: {what}; write @dataclass(frozen=True) above it, with hashable fields") from None


def _distribution(point: EntryPoint) -> str:
    return "an unnamed distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _is_whole(value: object, base: type[Any]) -> bool:
    return isinstance(value, type) and issubclass(value, base) and not getattr(value, "__abstractmethods__", ())
