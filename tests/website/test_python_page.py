"""``docs/python.md`` has every public name of the Python interface."""

from __future__ import annotations

import inspect
import re

from fixtures.house import ROOT

import kvdrift
from schema import errors
from sql.catalog import Views

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def shown(module: str) -> set[str]:
    """Return the names that the page uses from a module."""
    return set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", PAGE, re.MULTILINE))


def test_every_function_of_the_package_is_there() -> None:
    functions = {
        name for name, value in vars(kvdrift).items()
        if inspect.isfunction(value) and value.__module__ == "kvdrift" and not name.startswith("_")
    }  # fmt: skip
    assert {"open", "run"} <= functions
    assert shown("kvdrift") - {"interfaces"} == functions


def test_every_method_of_views_is_there() -> None:
    public = {name for name, value in vars(Views).items() if inspect.isfunction(value) and not name.startswith("_")}
    listed = re.search(r"::: sql.catalog.Views\n    options:\n      members: \[(.*)\]", PAGE)
    assert listed
    assert set(listed[1].split(", ")) == public


def test_every_error_is_there() -> None:
    classes = {
        name for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == "schema.errors"
    }  # fmt: skip
    assert shown("schema.errors") == classes
