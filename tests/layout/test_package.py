"""What the distribution says of itself: packages, data files, and the libraries that it needs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from fixtures.house import PACKAGES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Imported where they are installed, and said in one line where they are not: extras, and what comes with CUDA.
OPTIONAL = {"accelerate", "dask", "distributed", "kvpress", "triton"}


def imported() -> set[str]:
    """Names of the libraries that the packages import, anywhere in their code."""
    names: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - set(PACKAGES) - OPTIONAL


def test_every_library_that_is_imported_is_declared() -> None:
    declared = {normal(re.split(r"[<>=\[ ]", requirement)[0]) for requirement in PROJECT["project"]["dependencies"]}
    found = packages_distributions()
    missing = {name for name in imported() if declared.isdisjoint(map(normal, found.get(name, [name])))}
    assert missing == set()


def test_every_pattern_of_data_files_finds_some() -> None:
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        for pattern in patterns:
            assert list((ROOT / package).glob(pattern)), f"{package}: {pattern}"


def test_training_and_tests_are_not_installed() -> None:
    included = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(included) == sorted(f"{package}*" for package in PACKAGES)


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
