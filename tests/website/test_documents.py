"""The documents have what the program has: pictures and numbers, parts of the page, and names of the Python interface."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from fixtures.house import ROOT

import kvdrift
from kvdrift.report.page import PARTS
from kvdrift.schema import errors
from kvdrift.sql.catalog import Views
from website import numbers
from website.pictures import PICTURES, write

QUANTITIES = (ROOT / "docs" / "quantities.md").read_text(encoding="utf-8")
READING = " ".join((ROOT / "docs" / "reading-the-report.md").read_text(encoding="utf-8").split())
PYTHON = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
FOLDER = ROOT / "docs" / "pictures"
NUMBERS = json.loads(numbers.NUMBERS.read_text(encoding="utf-8"))


def test_every_picture_is_there_with_words() -> None:
    shown = dict(re.findall(r"!\[(.{20,})\]\(pictures/(\w+)\.svg\)", QUANTITIES))
    assert sorted(shown.values()) == sorted(PICTURES)
    for name in PICTURES:
        text = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert "prefers-color-scheme: dark" in text
        assert set(re.findall(r"(?:fill|stroke): (#\w+)", text)) <= {"#000000"}, name  # other colours do not follow


@pytest.mark.parametrize("page", numbers.PAGES)
def test_a_page_has_the_numbers_of_its_studies(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for study, texts in numbers.PAGES[page].items():
        assert numbers.filled(text, texts, NUMBERS[study]) == text


def test_numbers_are_put_where_their_text_stands() -> None:
    texts = ["R is {a mismatch .1%}: of these {a late points} points", "| {a mismatch interval} | {a gap .3f} |"]
    row = {"mismatch": 0.25, "mismatch_low": 0.2, "mismatch_high": 0.312, "late": -0.0124}
    page = "Here R is 1%: of\nthese 3 points.\n\n| 3.0 [1, 2] | 0.1 |\n"
    expected = "Here R is 25.0%: of\nthese −1.2 points.\n\n| 25.0 [20, 31] |  |\n"
    assert numbers.filled(page, texts, {"a": row}) == expected
    assert numbers.filled(expected, texts, {"a": row}) == expected
    with pytest.raises(ValueError, match="0 texts like 'R is not"):
        numbers.filled(page, ["R is not {a mismatch .1%}"], {"a": row})


@pytest.mark.slow
def test_the_quickstart_gives_these_numbers(quickstart: Path, tmp_path: Path) -> None:
    """To within .01: a processor that rounds otherwise draws otherwise in a pair or two of 864, or of fewer in a mean."""
    write(str(quickstart), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in FOLDER.iterdir()}
    with kvdrift.open(quickstart) as views:
        rows = numbers.read(views)
    for action, values in NUMBERS["quickstart"].items():
        for name, value in values.items():
            scale = 64 if name == "mean_entry" else 1
            assert rows[action][name] == pytest.approx(value, abs=scale * 0.01), f"{action}: {name}"


def test_every_question_of_the_page_is_explained_in_its_part() -> None:
    place = 0
    for part in PARTS:
        for word in (f"## {part.title}" if part.title else "", *(f"**{question}**" for _, question in part.sections)):
            if word not in {"", "****"}:
                assert READING.find(word, place) >= 0, word
                place = READING.find(word, place)


def shown(module: str) -> set[str]:
    """Return the names that the page uses from a module."""
    return set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", PYTHON, re.MULTILINE))


def test_every_function_of_the_package_is_there() -> None:
    functions = {
        name for name, value in vars(kvdrift).items()
        if inspect.isfunction(value) and value.__module__ == "kvdrift" and not name.startswith("_")
    }  # fmt: skip
    assert {"open", "run"} <= functions
    assert shown("kvdrift") - {"interfaces"} == functions


def test_every_method_of_views_is_there() -> None:
    public = {name for name, value in vars(Views).items() if inspect.isfunction(value) and not name.startswith("_")}
    listed = re.search(r"::: kvdrift.sql.catalog.Views\n    options:\n      members: \[(.*)\]", PYTHON)
    assert listed
    assert set(listed[1].split(", ")) == public


def test_every_error_is_there() -> None:
    classes = {
        name for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == "kvdrift.schema.errors"
    }  # fmt: skip
    assert shown("kvdrift.schema.errors") == classes
