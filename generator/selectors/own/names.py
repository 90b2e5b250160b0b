"""Names of classes that are not the package's: ``module:Class``, and entry points of installed distributions."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic
from weakref import WeakKeyDictionary

from kvdrift.generator.selectors.own.classes import checked_class
from kvdrift.generator.selectors.own.folders import SourceFolder, source_folder, withdraw_all
from kvdrift.generator.selectors.own.kinds import Kind, PartKind
from kvdrift.schema.errors import InputError, first_line, nearest


@dataclass(frozen=True)
class OwnClass(Generic[Kind]):
    """A class that is not the package's, and the file that it was found in."""

    kind: type[Kind]
    file: str


_TEXTS: WeakKeyDictionary[type[Any], dict[str, bytes]] = WeakKeyDictionary()
_INSTALLED: dict[str, bytes] = {}  # of installed modules: their file's text when one was first asked for


def entry_point_names(part: PartKind[Kind]) -> list[str]:
    """The names of all entry points of a kind's group, sorted."""
    return sorted(entry_points(group=part.group).names)


def entry_point(part: PartKind[Kind], name: str) -> EntryPoint:
    """The entry point of a name.

    Raises:
        InputError: Two distributions use the name for different classes.
    """
    point, *others = entry_points(group=part.group, name=name)
    for other in others:
        if other.value != point.value:
            raise InputError(
                f"{part.noun} '{name}': is an entry point of {distribution_of(point)} and of "
                f"{distribution_of(other)}; uninstall one of them, or write {point.value} or {other.value}"
            )
    return point


def distribution_of(point: EntryPoint) -> str:
    """The name and version of the distribution that has an entry point."""
    return "an unnamed distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def own_class(part: PartKind[Kind], name: str, folder: Path | None, known: Collection[str]) -> OwnClass[Kind]:
    """Find a class that is not the package's.

    Args:
        part: The kind that it should be of.
        name: An entry point's name, or ``module:Class``.
        folder: Where a module is looked for before installed ones; None where there are installed ones alone.
        known: The names of the package's own.

    Raises:
        InputError: There is no such class, it cannot be imported, or it is not of this kind.
    """
    names = entry_point_names(part)
    if name in names:
        point = entry_point(part, name)
        value, folder = point.value, None
        where = f"{part.noun} '{name}', {value} of {distribution_of(point)}"
    elif ":" in name:
        value, where = name, f"{part.noun} '{name}'"
    else:
        listed = [*known, *names, "MODULE:CLASS"]
        raise InputError(f"unknown {part.noun} '{name}'; {nearest(name, listed)}")
    module_name, _, class_name = value.partition(":")
    file_name = module_name.endswith(".py")
    if file_name or not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        right = f"{Path(module_name).stem}:{class_name}" if file_name else "module:Class"
        raise InputError(f"{where}: is no name of a module and a class in it; write {right}")
    module, texts = _module(module_name, folder, where)
    file = getattr(module, "__file__", None) or module_name
    if not hasattr(module, class_name):
        classes = [key for key, value in vars(module).items() if _is_whole(value, part)]
        hint = nearest(class_name, classes) if classes else f"it has no class derived from {part.base.__name__}"
        raise InputError(f"{file}: has no class '{class_name}'; {hint}")
    try:
        kind = checked_class(getattr(module, class_name), class_name, part)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    _TEXTS[kind] = texts
    return OwnClass(kind, file)


def source_texts(kind: type[Any]) -> dict[str, bytes]:
    """The texts that a class of one's own was loaded from, by module; {} for a class of the package.

    They are those of its module, and of the modules that this one imports from the same folder.
    """
    return dict(_TEXTS.get(kind, {}))


def share_texts(kind: type[Any], owner: type[Any]) -> None:
    """Let a class of the modules that another one was loaded with have that one's texts: it is made by it."""
    if kind.__module__ in (texts := source_texts(owner)):
        _TEXTS.setdefault(kind, texts)


def _module(name: str, folder: Path | None, where: str) -> tuple[ModuleType, dict[str, bytes]]:
    """Load a module from the folder or, if it has none of the name, from what is installed."""
    source = None if folder is None else source_folder(folder.absolute())
    beside = None if source is None else source.file_of(name)
    if source is not None and beside is not None and not _is_loaded_otherwise(source, name):
        source.check_free(name)
        try:
            return source.load(name), source.texts_of(name)
        except (Exception, SystemExit) as error:
            if missing := _missing(error, name):
                raise InputError(f"{where}: {source.path} has no module '{missing}'") from None
            raise InputError(_import_failure(error, where, source.path)) from error
    return load_installed(name, where, source)


def _is_loaded_otherwise(source: SourceFolder, name: str) -> bool:
    """Whether the folder's module was imported from its very file by somebody else, and must not be there twice."""
    loaded = sys.modules.get(name.partition(".")[0])
    file = getattr(loaded, "__file__", None)
    return loaded is not None and file is not None and not source.holds(loaded) and Path(file) == source.file_of(name)


def load_installed(name: str, where: str, source: SourceFolder | None = None) -> tuple[ModuleType, dict[str, bytes]]:
    """Import a module that is installed, and return it with the text of its file, by its name.

    Args:
        name: The module's name, with dots if it is in a package.
        where: What asks for the module, as error lines begin.
        source: The folder in which the module was not found; None if no folder was looked in.
    """
    withdraw_all()
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if missing := _missing(error, name):
            problem = f"no module '{missing}' is installed"
            if source is not None:
                problem += f", and {source.path} has no {missing.replace('.', '/')}.py"
            else:
                problem += " where this process runs; install it there"
            raise InputError(f"{where}: {problem}") from None
        raise InputError(_import_failure(error, where, None)) from error
    file = Path(getattr(module, "__file__", None) or "")
    text = file.read_bytes() if file.is_file() else b""
    if _INSTALLED.setdefault(name, text) != text:
        raise InputError(f"{file}: has changed since this process loaded it; start the process anew")
    return module, {name: text}


def _is_whole(value: object, part: PartKind[Kind]) -> bool:
    return isinstance(value, type) and issubclass(value, part.base) and not getattr(value, "__abstractmethods__", ())


def _missing(error: BaseException, name: str) -> str | None:
    """The module, or package that it is in, that was not found; None for any other error, also one of its imports."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return missing if missing and f"{name}.".startswith(f"{missing}.") else None


def _import_failure(error: BaseException, where: str, folder: Path | None) -> str:
    """The line for an exception while a module is imported, with its place: the innermost in the folder or a module."""
    said = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    if folder is None:
        inside = [frame for frame in frames if frame.name == "<module>"]
    else:
        inside = [frame for frame in frames if _is_within(Path(frame.filename), folder)]
    if not inside:
        return f"{where}: cannot be imported: {said}"
    return f"{inside[-1].filename}, line {inside[-1].lineno}: {said}"


def _is_within(file: Path, folder: Path) -> bool:
    return file.is_relative_to(folder) and "site-packages" not in file.relative_to(folder).parts
