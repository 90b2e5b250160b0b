"""Load modules with custom classes: from a folder beside a study file, or from installed packages.

A module of a folder has the name of its file, and is compiled from the present text of the file. ``sys.path`` is not
touched, and no bytecode is read or written. Modules that it imports from the folder are loaded in the same way. If the
file of any loaded module of the folder has changed, all modules of the folder are loaded anew.
"""

from __future__ import annotations

import importlib
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from kvdrift.schema.errors import InputError, first_line

_LOCK = threading.RLock()
_INSTALLED: dict[str, bytes] = {}  # the texts of installed modules' files when each was first loaded here


class SourceLoader(SourceFileLoader):
    """Compiles the present text of a file, and keeps it as ``text``."""

    text: bytes = b""

    def get_code(self, _fullname: str) -> CodeType:
        """Compile the present text of the file; bytecode is not used."""
        self.text = self.get_data(self.path)
        code: CodeType = self.source_to_code(self.text, self.path)
        return code

    @property
    def is_current(self) -> bool:
        """Whether the file still has the text that was compiled."""
        path = Path(self.path)
        return path.is_file() and path.read_bytes() == self.text


class _Folder:
    """A folder with custom modules, and their finder, which is on ``sys.meta_path`` while one of them is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loaders: dict[str, SourceLoader] = {}
        self._modules: dict[str, ModuleType] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, _: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module in the folder; None for Python's own modules and those of packages elsewhere."""
        package = sys.modules.get(name.rpartition(".")[0])
        if name in sys.stdlib_module_names or (path is not None and _loader(package) is None):
            return None
        return _spec_in(path or [str(self.path)], name)

    def file_of(self, name: str) -> Path | None:
        """Return the file of a module, or of the package that it is in; None if the folder has none."""
        spec = _spec_in([str(self.path)], name.partition(".")[0])
        return None if spec is None or spec.origin is None else Path(spec.origin)

    def load(self, name: str) -> ModuleType:
        """Load a module; an exception in its code passes through, and the failed module leaves ``sys.modules``."""
        with _LOCK:
            _withdraw()
            if all(loader.is_current for loader in self._loaders.values()):
                sys.modules.update(self._modules)
            sys.meta_path.insert(0, self)
            try:
                module = importlib.import_module(name)
            except BaseException:
                _withdraw()
                raise
            finally:
                sys.meta_path.remove(self)
                self._modules = _custom_modules()
                self._loaders = {name: _loader(one) for name, one in self._modules.items()}  # type: ignore[misc]
            for one in self._modules.values():
                for value in vars(one).values():
                    if isinstance(value, type | FunctionType) and value.__module__ == one.__name__:
                        _LOADERS.setdefault(value, self._loaders)
            return module


_FOLDERS: dict[Path, _Folder] = {}
_LOADERS: WeakKeyDictionary[type[Any] | FunctionType, Mapping[str, SourceLoader]] = WeakKeyDictionary()


def loaders_of(kind: type[Any] | FunctionType) -> Mapping[str, SourceLoader]:
    """Return, by name, the loaders of all modules loaded together with a class or function of a folder; else {}."""
    return _LOADERS.get(kind, {})


def _spec_in(folders: Sequence[str], name: str) -> ModuleSpec | None:
    specs = (FileFinder(folder, (SourceLoader, [".py"])).find_spec(name) for folder in folders)
    return next((spec for spec in specs if spec is not None and spec.loader is not None), None)


def _loader(module: object) -> SourceLoader | None:
    loader = vars(module).get("__loader__") if isinstance(module, ModuleType) else None
    return loader if isinstance(loader, SourceLoader) else None


def _custom_modules() -> dict[str, ModuleType]:
    """Return, by name, the modules in ``sys.modules`` that were loaded from a folder with custom modules."""
    return {name: module for name, module in [*sys.modules.items()] if _loader(module) is not None}


def _withdraw() -> None:
    """Remove the modules of all folders from ``sys.modules``: another folder can have modules of the same names."""
    for name in _custom_modules():
        del sys.modules[name]


def load_module(name: str, folder: Path | None, where: str) -> ModuleType:
    """Load a module from ``folder`` if it is there, else from installed packages; ``where`` names it in errors."""
    with _LOCK:
        source = None if folder is None else _FOLDERS.setdefault(folder.absolute(), _Folder(folder.absolute()))
    beside = None if source is None else source.file_of(name)
    top = name.partition(".")[0]
    other = None if _loader(sys.modules.get(top)) is not None else sys.modules.get(top)
    taken_by = getattr(other, "__file__", None)
    # A module that other code has imported from the same file must not be loaded a second time.
    if source is None or beside is None or (taken_by is not None and Path(taken_by) == beside):
        return _installed(name, source, where)
    if other is not None or top in sys.stdlib_module_names:
        raise InputError(f"{beside}: the name '{top}' is taken by {taken_by or 'a part of Python'}; rename the file")
    try:
        return source.load(name)
    except (Exception, SystemExit) as error:
        if missing := _missing(error, name):
            raise InputError(f"{where}: {source.path} has no module '{missing}'") from None
        raise InputError(_import_failure(error, where, source.path)) from error


def _installed(name: str, source: _Folder | None, where: str) -> ModuleType:
    with _LOCK:
        _withdraw()
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if missing := _missing(error, name):
            place = f", and {source.path} has no {missing.replace('.', '/')}.py" if source is not None else ""
            place = place or " where this process runs; install it there"
            raise InputError(f"{where}: no module '{missing}' is installed{place}") from None
        raise InputError(_import_failure(error, where, None)) from error
    file = Path(getattr(module, "__file__", None) or "")
    text = file.read_bytes() if file.is_file() else b""
    if _INSTALLED.setdefault(name, text) != text:
        raise InputError(f"{file}: has changed since this process loaded it; start the process anew")
    return module


def _missing(error: BaseException, name: str) -> str | None:
    """Return the missing module if it is ``name`` or a package around it; None if ``error`` has another cause."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return missing if missing and f"{name}.".startswith(f"{missing}.") else None


def _import_failure(error: BaseException, where: str, folder: Path | None) -> str:
    """Return an error line for an exception in an import, with its innermost place in the folder or module."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    inside = [
        frame
        for frame in frames
        if (frame.name == "<module>" if folder is None else _is_within(Path(frame.filename), folder))
    ]
    place = f"{inside[-1].filename}, line {inside[-1].lineno}" if inside else f"{where}: cannot be imported"
    return f"{place}: {type(error).__name__}: {first_line(error)}"


def _is_within(file: Path, folder: Path) -> bool:
    return file.is_relative_to(folder) and "site-packages" not in file.relative_to(folder).parts
