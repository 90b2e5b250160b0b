"""The prose about the code: docstrings in one style, and documents that name existing files."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from fixtures.house import PACKAGES, ROOT

from kvdrift.generator.transformer.files.local_folders import EMBEDDED_ID

ERRORS = re.compile(r"\b(KvdriftError|InputError|PlanError|OperationError|ControlError|DamagedStoreError)\b")
DOCUMENTS = (
    "README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
)  # fmt: skip


@functools.cache
def docstrings() -> list[tuple[str, str]]:
    """Return the place and name of each docstring's object, and the docstring."""
    return [
        (f"{path.relative_to(ROOT)}: {node.name}", text)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node))
    ]


def test_errors_stand_under_raises() -> None:
    """The errors that a function raises are listed under ``Raises:``, and not mentioned elsewhere."""
    wrong = [
        where
        for where, text in docstrings()
        if ERRORS.search(text.split("Raises:")[0]) and not where.startswith("schema/errors.py") and ": _" not in where
    ]
    assert wrong == []


def test_private_functions_list_no_errors() -> None:
    """``Raises:`` is for callers outside the module that decide by the error."""
    assert [where for where, text in docstrings() if ": _" in where and ": __" not in where and "Raises:" in text] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_that_documents_name_are_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for name in named_paths(text):
        assert list(ROOT.glob(name)), f"{document} names {name}"


def named_paths(text: str) -> set[str]:
    """Words in backquotes, and targets of links, that are paths of ours; words in capitals stand for any name."""
    words = re.findall(r"`([^`\s]+)`", text) + re.findall(r"\]\(([^):#]+)\)", text)
    ours = [
        word for word in words if re.match(rf"(?:{'|'.join(PACKAGES)}|tests|docs|studies|benchmarks|training)/", word)
    ]
    return {re.sub(r"\b[A-Z]{3,}\b", "*", word).rstrip("/") for word in ours if word != EMBEDDED_ID}


def test_paths_are_found_in_text() -> None:
    text = "`sql/views/NAME.sql`, [a](docs/x.md), `schema/` and `kvdrift run`"
    assert named_paths(text) == {"sql/views/*.sql", "docs/x.md", "schema"}
