"""Expressions of a study file that name a press or a cache: parsed, never evaluated.

An expression is a class with arguments, as in ``AdaKVPress(SnapKVPress(compression_ratio=0.5))``. Arguments are
literals, lists, and further expressions. A name without a module is a class of the library that the setting belongs to;
``module.Class`` is a class of a module beside the study file, or of an installed one.
"""

from __future__ import annotations

import ast
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.generator.identity import source_of
from kvdrift.generator.selectors.custom.loading import load_module, loaders_of
from kvdrift.generator.transformer.files.digests import file_sha256
from kvdrift.schema.errors import InputError, KvdriftError, failure_in, nearest
from kvdrift.schema.log_levels import raised_level

_UNCHANGING = ("builtins", "torch", "typing", "abc", "contextlib")  # what classes are derived from besides


@dataclass(frozen=True)
class Library:
    """The classes that expressions of a setting may name without a module.

    Attributes:
        setting: The setting, "press" or "cache".
        named: The library and its version, for error lines.
        base: The class that all named classes are derived from.
        classes: The classes by name.
    """

    setting: str
    named: str
    base: type[Any]
    classes: Mapping[str, type[Any]]


@dataclass(frozen=True)
class Call:
    """A class with arguments; an argument is a literal, a ``Call``, or a list of both."""

    kind: type[Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def calls(self) -> Iterator[Call]:
        """The call itself, and all calls among its arguments, at any depth."""
        yield self
        for value in (*self.arguments, *self.options.values()):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Call):
                    yield from item.calls

    def make(self, where: str, supplied: Mapping[str, Any]) -> Any:
        """Make the object; ``supplied`` has values for options of the class that the expression leaves out.

        Raises:
            InputError: The class refuses its arguments; the line begins with ``where``.
        """
        taken = inspect.signature(self.kind).parameters
        given = [*taken][: len(self.arguments)]
        left_out = {name: value for name, value in supplied.items() if name in taken and name not in given}
        arguments = [_made(argument, where) for argument in self.arguments]
        options = left_out | {name: _made(value, where) for name, value in self.options.items()}
        try:
            with raised_level("kvpress", logging.ERROR):  # some presses warn of what they are
                return self.kind(*arguments, **options)
        except KvdriftError:
            raise
        except Exception as error:
            raise InputError(f"{where}: {self.kind.__name__}: {failure_in(error, files_of(self.kind))}") from error

    @property
    def text(self) -> str:
        """The expression with every option of each class, the defaults included."""
        bound = inspect.signature(self.kind).bind_partial(*self.arguments, **self.options)
        bound.apply_defaults()
        options = ", ".join(f"{name}={_written(value)}" for name, value in bound.arguments.items())
        return f"{self.kind.__name__}({options})"


def parse(text: str, where: str, library: Library, folder: Path | None) -> Call:
    """Parse an expression; modules are looked for in ``folder``, and then among the installed ones.

    Raises:
        InputError: The text is no expression of classes and literals, or names a class or option that does not exist;
            the line begins with ``where`` and has the nearest name.
    """
    where = f"{where}: {library.setting} = '{text}'"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise InputError(f"{where}: {_right(library)}") from None
    if isinstance(tree, ast.Name | ast.Attribute):
        tree = ast.Call(tree, [], [])
    found = _value(tree, where, library, folder)
    if not isinstance(found, Call):
        raise InputError(f"{where}: {_right(library)}")
    return found


def code_of(kind: Any) -> dict[str, str]:
    """Return the code that defines a class or function: by file or module a SHA-256, by distribution a version.

    The bases of a class count, without those of Python and torch.
    """
    code = dict(source_of(kind))
    for base in getattr(kind, "__mro__", (kind,)):
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        counts = file is not None and base.__module__.partition(".")[0] not in _UNCHANGING
        if file is not None and counts and "site-packages" in Path(file).parts:
            code[base.__module__] = file_sha256(Path(file))
    return code


def files_of(kind: Any) -> list[str]:
    """Return the files of a user's module that defines a class or function, and of the modules loaded with it."""
    return [loader.path for loader in loaders_of(kind).values()] or [str(inspect.getsourcefile(kind))]


def _value(tree: ast.expr, where: str, library: Library, folder: Path | None) -> Any:
    """Return the value of a part of an expression: a literal, a ``Call`` or a list of these."""
    if isinstance(tree, ast.List | ast.Tuple):
        return [_value(item, where, library, folder) for item in tree.elts]
    if not isinstance(tree, ast.Call):
        try:
            return ast.literal_eval(tree)
        except (ValueError, TypeError, SyntaxError, RecursionError):
            raise InputError(f"{where}: '{ast.unparse(tree)}' is no literal; {_right(library)}") from None
    kind = _class(ast.unparse(tree.func), where, library, folder)
    arguments = tuple(_value(argument, where, library, folder) for argument in tree.args)
    options = {}
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise InputError(f"{where}: '**' is not taken; write each option as NAME=VALUE")
        options[keyword.arg] = _value(keyword.value, where, library, folder)
    taken = inspect.signature(kind).parameters
    for name in options:
        if name not in taken and not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
            raise InputError(f"{where}: {kind.__name__} has no option '{name}'; {nearest(name, taken)}")
    return Call(kind, arguments, options)


def _class(name: str, where: str, library: Library, folder: Path | None) -> type[Any]:
    """Return the class that ``name`` names: one of the library, or ``module.Class``."""
    module_name, _, class_name = name.rpartition(".")
    if not all(part.isidentifier() for part in name.split(".")):
        raise InputError(f"{where}: '{name}' is no name of a class; {_right(library)}")
    if not module_name:
        if name not in library.classes:
            raise InputError(f"{where}: {library.named} has no '{name}'; {nearest(name, library.classes)}")
        return library.classes[name]
    module = load_module(module_name, folder, where)
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not issubclass(found, library.base):
        there = [
            key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, library.base)
        ]
        hint = nearest(class_name, there) if there else f"derive one from {library.base.__name__}"
        raise InputError(f"{where}: {module.__file__} has no class '{class_name}' of {library.base.__name__}; {hint}")
    return found


def _right(library: Library) -> str:
    example = "SnapKVPress(compression_ratio=0.5)" if library.setting == "press" else "QuantizedCache(backend='quanto')"
    return f"write a class with literals, as in {example}, or module.Class(…) of your own"


def _made(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_made(item, where) for item in value]
    return value.make(where, {}) if isinstance(value, Call) else value


def _written(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return value.text if isinstance(value, Call) else repr(value)
