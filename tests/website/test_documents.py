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
from website.pictures import PICTURES, write

QUANTITIES = (ROOT / "docs" / "quantities.md").read_text(encoding="utf-8")
READING = " ".join((ROOT / "docs" / "reading-the-report.md").read_text(encoding="utf-8").split())
PYTHON = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
FOLDER = ROOT / "docs" / "pictures"
NUMBERS = json.loads((FOLDER / "numbers.json").read_text(encoding="utf-8"))


def test_every_picture_is_there_with_words() -> None:
    shown = dict(re.findall(r"!\[(.{20,})\]\(pictures/(\w+)\.svg\)", QUANTITIES))
    assert sorted(shown.values()) == sorted(PICTURES)
    for name in PICTURES:
        text = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert "prefers-color-scheme: dark" in text
        assert set(re.findall(r"(?:fill|stroke): (#\w+)", text)) <= {"#000000"}, name  # other colours do not follow


def test_the_table_has_the_numbers() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", QUANTITIES, re.MULTILINE)
    assert len(rows) >= 20
    for name, *values in rows:
        for action, value in zip(("snapkv-half", "recent-half", "snapkv-128"), values, strict=True):
            number = NUMBERS[action].get(name)
            digits = 1 if name == "mean_entry" else 3
            assert value == ("" if number is None else f"{number:.{digits}f}".replace("-", "−")), f"{action}: {name}"


def test_the_sentences_have_the_numbers() -> None:
    text = " ".join(QUANTITIES.split())
    mine, other = NUMBERS["snapkv-half"], NUMBERS["recent-half"]
    percent = {action: {name: f"{100 * value:.1f}%" for name, value in NUMBERS[action].items()} for action in NUMBERS}
    a, b = percent["snapkv-half"], percent["recent-half"]
    for sentence in (
        f"R is {a['mismatch']}: {a['exposure']} of positions come after τ, and of these {a['mismatch_rate']}",
        f"it is {b['mismatch']}: {b['exposure']} come after it, and {b['mismatch_rate']} of these differ.",
        f"{a['divergence_probability']} of pairs diverge, on average at position {mine['mean_entry']:.1f}",
        f"{b['divergence_probability']} do, at position {other['mean_entry']:.1f}",
        f"differs on {100 * other['gap']:.1f} percentage points more",
        f"{100 * other['exposure_share']:.0f}% of that is exposure",
        f"F is {a['fixed_history_tv']} and the mean of δ {a['rollout_tv']}",
        f"−{-100 * mine['late_minus_early']:.1f} points for `snapkv-half`",
        f"−{-100 * other['late_minus_early']:.1f} for `recent-half`",
        f"{a['saturation']} of positions are saturated under `snapkv-half`, of {a['mismatch']}",
        f"`snapkv-half` loses {mine['lost_share']:.0%} of the right answers, `recent-half` {other['lost_share']:.0%}",
    ):
        assert sentence in text


@pytest.mark.slow
def test_the_quickstart_gives_these_numbers(quickstart: Path, tmp_path: Path) -> None:
    """To within .01: a processor that rounds otherwise draws otherwise in a pair or two of 864, or of fewer in a mean."""
    write(str(quickstart), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in FOLDER.iterdir()}
    drawn = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))
    for action, values in NUMBERS.items():
        for name, value in values.items():
            scale = 64 if name == "mean_entry" else 1
            assert drawn[action][name] == pytest.approx(value, abs=scale * 0.01), f"{action}: {name}"


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
