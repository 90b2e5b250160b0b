"""The import statements of a module, read from its text."""

from __future__ import annotations

import ast
import threading
from typing import Final

_PARSING: Final = threading.Lock()


def import_statements(text: str | bytes) -> list[ast.Import | ast.ImportFrom]:
    """Return all import statements of a module, anywhere in its text.

    Raises:
        SyntaxError: The text is not Python.
    """
    # Early releases of Python 3.11 count a tree's depth for all threads together: where two threads parse at once,
    # either can end in "SystemError: AST constructor recursion depth mismatch".
    with _PARSING:
        tree = ast.parse(text)
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
