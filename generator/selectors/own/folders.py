"""Modules beside a study file, loaded under their own names and always as their text now is.

``sys.path`` is not touched, and no bytecode is read or written. Modules that one of them imports from the same folder
are loaded in the same way. If the text of any of them has changed since, all modules of the folder are loaded anew.
"""

from __future__ import annotations

import ast
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from kvdrift.generator.import_statements import import_statements
from kvdrift.schema.errors import InputError

_LOCK = threading.RLock()
_Texts = dict[str, tuple[Path, bytes]]  # by module: its file, and the text of it that was loaded


class _Loader(SourceFileLoader):
    """Compiles a file's text as it is, and keeps that text."""

    def __init__(self, texts: _Texts, name: str, path: str) -> None:
        super().__init__(name, path)
        self._texts = texts

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_data(self.path)
        self._texts[fullname] = (Path(self.path), text)
        code: CodeType = self.source_to_code(text, self.path)
        return code


class SourceFolder:
    """A folder with modules of one's own, and what is loaded of them.

    Args:
        path: The folder, absolute.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._texts: _Texts = {}
        self._modules: dict[str, ModuleType] = {}

    def file_of(self, module: str) -> Path | None:
        """Where a module, or the package that it is in, begins; None where the folder has none of its name."""
        spec = self._spec_in(str(self.path), module.partition(".")[0])
        return None if spec is None or spec.origin is None else Path(spec.origin)

    def holds(self, module: ModuleType | None) -> bool:
        """Whether a module was loaded from here."""
        return module is not None and self._modules.get(module.__name__) is module

    def check_free(self, module: str) -> None:
        """Check that a module which the folder has takes no other one's name."""
        name = module.partition(".")[0]
        other = sys.modules.get(name)
        own = any(folder.holds(other) for folder in _FOLDERS.values())
        if name in sys.stdlib_module_names or (other is not None and not own):
            where = getattr(other, "__file__", None) or "Python's own library"
            raise InputError(f"{self.file_of(module)}: the name '{name}' is taken by {where}; rename the file")

    def load(self, module: str) -> ModuleType:
        """Load a module that the folder has; whatever it raises comes through."""
        with _LOCK, self._present():
            return importlib.import_module(module)

    def texts_of(self, module: str) -> dict[str, bytes]:
        """The texts of a loaded module and of those that it imports from the folder, by module."""
        found: dict[str, bytes] = {}
        waiting = [module]
        while waiting:
            name = waiting.pop()
            if name in self._texts and name not in found:
                path, found[name] = self._texts[name]
                waiting += [name.rpartition(".")[0], *_imported(found[name], name, package=path.stem == "__init__")]
        return dict(sorted(found.items()))

    def find_spec(self, name: str, path: Sequence[str] | None = None, _: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module in the folder, as ``sys.meta_path`` asks for it; no module of Python's own library."""
        if path is None:
            if name in sys.stdlib_module_names:
                return None
            path = [str(self.path)]
        elif name.rpartition(".")[0] not in self._texts:  # its package lies elsewhere
            return None
        found = (self._spec_in(entry, name) for entry in path)
        return next((spec for spec in found if spec is not None), None)

    def _spec_in(self, entry: str, name: str) -> ModuleSpec | None:
        loader = partial(_Loader, self._texts)
        spec = FileFinder(entry, (loader, [".py"])).find_spec(name)  # type: ignore[arg-type]  # what makes a loader
        return spec if spec is not None and spec.loader is not None else None  # a folder without __init__.py is none

    @contextmanager
    def _present(self) -> Iterator[None]:
        """Make the folder's modules those that are imported; what fails to load leaves nothing behind."""
        withdraw_all()
        if all(path.is_file() and path.read_bytes() == text for path, text in self._texts.values()):
            sys.modules.update(self._modules)
        else:
            self._texts.clear()
            self._modules.clear()
        sys.meta_path.insert(0, self)
        try:
            yield
        except BaseException:
            self._collect()
            self.withdraw()
            self._texts.clear()
            self._modules.clear()
            raise
        finally:
            sys.meta_path.remove(self)
        self._collect()

    def _collect(self) -> None:
        self._modules = {name: sys.modules[name] for name in self._texts if name in sys.modules}

    def withdraw(self) -> None:
        """Take the folder's modules out of those that are imported."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


_FOLDERS: dict[Path, SourceFolder] = {}


def withdraw_all() -> None:
    """Take the modules of all folders out of those that are imported, so that none is met in place of another."""
    with _LOCK:
        for folder in _FOLDERS.values():
            folder.withdraw()


def source_folder(path: Path) -> SourceFolder:
    """The folder at an absolute path, one for a process."""
    with _LOCK:
        return _FOLDERS.setdefault(path, SourceFolder(path))


def is_held(module: ModuleType | None) -> bool:
    """Whether a module was loaded from a folder of the user's own code."""
    return any(folder.holds(module) for folder in _FOLDERS.values())


def _imported(text: bytes, name: str, *, package: bool) -> Iterator[str]:
    """Names of all modules that a module's text may import, wherever it does so."""
    for statement in import_statements(text):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        else:
            parts = name.split(".")
            base = parts[: len(parts) + package - statement.level] if statement.level else []
            origin = ".".join([*base, *([statement.module] if statement.module else [])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in statement.names)
