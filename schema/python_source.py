"""Python source as a syntax tree: a hash that comments and docstrings do not change, and the imported modules."""

from __future__ import annotations

import ast
import hashlib
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

_PARSING: Final = threading.Lock()
_IGNORED: Final = {"ctx", "kind", "type_comment", "type_ignores"}
"""Fields that the hash leaves out: ``ctx``, which a node's place decides; ``kind``, the u before a string; comments."""


@lru_cache(maxsize=256)
def parsed(text: bytes) -> ast.Module:
    """Return the syntax tree of a module's text.

    Raises:
        SyntaxError: The text is not Python.
    """
    # Early releases of Python 3.11 count a tree's depth for all threads together: where two threads parse at once,
    # either can end in "SystemError: AST constructor recursion depth mismatch".
    with _PARSING:
        return ast.parse(text)


@lru_cache(maxsize=256)
def syntax_sha256(text: bytes) -> str:
    """Return the SHA-256, in hexadecimal, of a module's syntax tree without prose.

    Comments, formatting, docstrings and all other statements that are only a string do not count. Names, constants and
    annotations do. Fields without a value do not count either, so that the hash stays the same under later versions of
    Python, which add fields.

    Raises:
        SyntaxError: The text is not Python.
    """
    digest, waiting = hashlib.sha256(), list[Any]([parsed(text)])
    while waiting:  # without recursion: a sum of a thousand terms is a thousand nodes deep
        part = waiting.pop()
        if isinstance(part, ast.AST):
            fields = _fields(part)
            digest.update(f"{type(part).__name__}({' '.join(fields)})\n".encode())
            waiting += fields.values()
        elif isinstance(part, list):
            counted = [child for child in part if not _is_prose(child)]
            digest.update(f"{len(counted)}\n".encode())
            waiting += counted
        else:
            digest.update(f"{type(part).__name__} {part!r}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _fields(node: ast.AST) -> dict[str, Any]:
    """Return the fields of a node that enter the hash: those that have a value and are not in ``_IGNORED``."""
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.JoinedStr):  # Python 3.12.1 adds an empty text to some f-strings
        fields["values"] = [part for part in node.values if getattr(part, "value", None) != ""]
    return {name: value for name, value in fields.items() if value not in (None, []) and name not in _IGNORED}


def _is_prose(part: Any) -> bool:
    """Tell whether a node is a statement that is only a string, such as a docstring."""
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)


def imported_modules(text: bytes, name: str, *, package: bool) -> Iterator[str]:
    """Yield the full names of all modules that a module may import, anywhere in its text.

    ``name`` is the module's own name, and ``package`` says whether the module is a package. In ``from a import b``,
    ``b`` may be a module, too, so both ``a`` and ``a.b`` are yielded.
    """
    parts = name.split(".")
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) + package - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield origin
            yield from (f"{origin}.{alias.name}".lstrip(".") for alias in node.names)
