"""Find places in a user's class that may depend on something that the identity does not cover.

The identity covers a part's source and parameters, and a study's prompts, seed and settings. A value from the
environment, a file, a clock, a module found at run time, the hash seed or a global random state may change between two
runs. Units of both runs would then be pooled as if they were equal. Source that only names such a thing may still be
right, so each place is a note and not an error.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any

from kvdrift.generator.identity import custom_texts, distributions_by_module
from kvdrift.schema.python_source import parsed

_NAMES = {
    "the environment": ("os.environ", "os.environb", "os.getenv", "os.getenvb"),
    "a file": (
        "open", "io.open", "os.open", "torch.load", "numpy.load", "numpy.loadtxt", "numpy.fromfile", "numpy.genfromtxt",
        "safetensors.torch.load_file", "safetensors.safe_open",
    ),
    "a module found at run time": ("importlib", "runpy", "__import__", "exec", "eval"),
    "Python's hash seed": ("hash",),
    "a clock": (
        "time", "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today",
    ),
    "a global random state": (
        "random", "secrets", "uuid.uuid1", "uuid.uuid4", "os.urandom", "numpy.random", "torch.manual_seed",
        "torch.seed", "torch.rand", "torch.randn", "torch.randint", "torch.randperm", "torch.rand_like",
        "torch.randn_like", "torch.randint_like", "torch.multinomial", "torch.bernoulli", "torch.normal",
    ),
}  # fmt: skip
_READS = {what: re.compile(rf"(?:{'|'.join(map(re.escape, names))})(?:\.|$)") for what, names in _NAMES.items()}
_BUILTINS = {"open", "hash", "exec", "eval", "__import__"}
_OF_PATHS = {"open", "read_text", "read_bytes"}  # methods
_SEEDED = ("random.Random", "numpy.random.default_rng", "numpy.random.Generator", "numpy.random.RandomState")


def source_notes(kind: type[Any]) -> list[str]:
    """Return a line for each place in a user's class that may use a value outside the identity; [] for kvdrift's."""
    texts = custom_texts(kind)
    known = sys.stdlib_module_names | {path.stem for path in texts} | set(distributions_by_module()) | {"kvdrift"}
    return [
        f"{path}, line {line}: {name} uses {what}, which is no part of the action's identity"
        for path, text in sorted(texts.items())
        for line, name, what in sorted({*_places(parsed(text)), *_late_imports(parsed(text), known)})
    ]


def _places(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the name and what it uses ("a clock") for each name that may use a value outside the identity."""
    meant = dict(_imported_names(tree))
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}  # of a longer dotted name
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute) or id(node) in parts:
            continue
        first, *others = ast.unparse(node).split(".")
        start = meant.get(first, first if first in _BUILTINS else "")
        name, call = ".".join([start, *others]), called.get(id(node))
        what = next((what for what, pattern in _READS.items() if pattern.match(name)), None)
        if what is not None and not (call is not None and _is_seeded(name, call)):
            yield node.lineno, name, what
        elif what is None and call is not None and others and others[-1] in _OF_PATHS:
            yield node.lineno, f"{others[-1]}()", "a file"


def _is_seeded(name: str, call: ast.Call) -> bool:
    """Return whether a random draw follows from a seed or a generator that the call names."""
    named = {word.arg for word in call.keywords}
    return "generator" in named or (name in _SEEDED and bool(call.args or named))


def _late_imports(tree: ast.Module, known: Collection[str]) -> Iterator[tuple[int, str, str]]:
    """Yield imports inside functions, in the form of ``_places``, except of modules with a ``known`` top-level name."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for node in (node for function in functions for node in ast.walk(function)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        else:
            continue
        for name in names:
            if name.partition(".")[0] not in known:
                yield node.lineno, f"import of {name}", "a module found at run time"


def _imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield imported names, each with the dotted name that it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
