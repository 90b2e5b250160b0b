"""The import statements of a module's text."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvdrift.generator import identity
from kvdrift.generator.import_statements import import_statements

TEXT = inspect.getsource(identity)


@pytest.fixture
def threads_that_alternate() -> Iterator[None]:
    """Threads take turns amid a parse, as they do in a process whose collections of garbage call Python code."""

    def collected(_phase: str, _info: dict[str, int]) -> None:
        sum(range(1000))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(collected)
    yield
    gc.callbacks.remove(collected)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("threads_that_alternate")
def test_threads_may_read_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(import_statements, [TEXT] * 60))
    assert {len(one) for one in found} == {len(import_statements(TEXT))}


def test_statements_are_found_wherever_they_stand() -> None:
    text = "import a\ndef f():\n    from .b import c\n    if f:\n        import d.e\n"
    assert [ast.unparse(one) for one in import_statements(text)] == ["import a", "from .b import c", "import d.e"]
    with pytest.raises(SyntaxError):
        import_statements("import")
