"""Python source as a tree: what its hash follows, and the names of what it imports."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvdrift.schema import errors
from kvdrift.schema.python_source import imported_modules, syntax_sha256

TEXT = '''"""A module."""

import math
from dataclasses import dataclass

SIZE = 3
"""How many."""


@dataclass(frozen=True)
class Mean:
    """A mean."""

    names: tuple[str, ...] = ("a", "b")

    def of(self, values, /, *, power: float = 1.0) -> float:
        """Return it."""
        total = 0.0  # so far
        for value in values:
            total += value**power if value is not None else SIZE
        match total:
            case 0.0 | -0.0:
                return 0.0
        return math.fsum([total]) / len(values) if (count := len(values)) else f"{count!r:>{SIZE}} and {total:}"
'''


def sha(*changes: tuple[str, str]) -> str:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return syntax_sha256(text.encode())


@pytest.mark.parametrize(
    "change",
    [
        ("Return it.", "Return the mean of values.\n\n        More about it."), ('    """A mean."""\n\n', ""),
        ('"""How many."""\n', ""), ("  # so far", ""), ("total = 0.0", "total = 0.0  # type: float"),
        ("\n\n\n", "\n"), ("        for", "\n\n        for"), ('("a", "b")', "(\n        'a',\n        'b',\n    )"),
        ("= 3", "= (3)"), ("\n", "\r\n"), ('"a"', 'u"a"'), ("0.0:", "0.00:"),
    ],
)  # fmt: skip
def test_prose_and_form_change_nothing(change: tuple[str, str]) -> None:
    assert sha(change) == sha()


@pytest.mark.parametrize(
    "change",
    [
        ("total", "whole"), ("SIZE = 3", "SIZE = 4"), ("SIZE = 3", "SIZE = 3.0"), ('"a"', 'b"a"'), ('("a", "b")', '["a", "b"]'),
        ("float = 1.0", "int = 1.0"), ("frozen=True", "frozen=1"), ("/, *, ", "*, "), ("not None", "None"),
        ("0.0 | -0.0", "-0.0 | 0.0"), (">{SIZE}", "<{SIZE}"), ("!r", "!s"), ("from dataclasses", "from .dataclasses"),
    ],
)  # fmt: skip
def test_code_changes_the_hash(change: tuple[str, str]) -> None:
    assert sha(change) != sha()


def test_the_hash_is_that_of_every_version_of_python() -> None:
    """Computed under 3.11.7, 3.12.1 and 3.13.0."""
    assert sha() == "48f391fc3d6831e1b6c31f05dc12232c2cc24251872030ea752bc79bd279a5d3"


def test_trees_may_be_deep() -> None:
    assert syntax_sha256(b"a = " + b" + ".join([b"1"] * 900)) != syntax_sha256(b"a = " + b" + ".join([b"1"] * 901))


def test_imports_are_named_in_full_wherever_they_stand() -> None:
    text = b"import a\ndef f():\n    from .b import c\n    if f:\n        import d.e\nfrom .. import g\n"
    names = ["a", "x", "x.g", "d.e", "x.y.b", "x.y.b.c"]
    assert sorted(imported_modules(text, "x.y.z", package=False)) == sorted(names)
    assert "x.y.z.b.c" in [*imported_modules(text, "x.y.z", package=True)]
    with pytest.raises(SyntaxError):
        [*imported_modules(b"import", "x", package=False)]


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
    texts = [f"a{number} = 1\n{inspect.getsource(errors)}".encode() for number in range(25)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: len([*imported_modules(text, "x", package=False)]), texts))
    assert len({*found}) == 1
