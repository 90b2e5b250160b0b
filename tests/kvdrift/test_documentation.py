"""Compare the commands and options that documents name with the application."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from generator.actions import build_action
from generator.selectors import SELECTORS
from kvdrift.command import app
from kvdrift.reference import reference
from schema.study.actions import ActionSection

ROOT = Path(__file__).parents[2]
GROUP: Any = typer.main.get_command(app)
OPTIONS = {
    name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name, command in GROUP.commands.items()
}
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_reference_is_that_of_the_application() -> None:
    """``make docs`` writes it."""
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == reference()


def test_the_guide_lists_every_command() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    table = guide.partition("## Commands")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `kvdrift ([a-z]+)", table, re.MULTILINE)
    assert sorted(listed) == sorted(OPTIONS)
    assert len(listed) == len(set(listed))


def test_every_command_is_in_the_file_of_its_name() -> None:
    files = {path.stem for path in (ROOT / "kvdrift" / "commands").rglob("*.py")} - {"__init__"}
    assert files == set(OPTIONS)


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_documents_name_no_command_or_option_that_is_not_there(text: Path) -> None:
    for command, rest in re.findall(r"(?<!from )kvdrift ([a-z]+)\b([^\n`|]*(?:\\\n[^\n`|]*)*)", code_of(text)):
        if command not in OPTIONS:
            assert rest.strip() == "" or not rest.startswith(" "), f"kvdrift {command}{rest}"
            continue
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest):
            assert option in OPTIONS[command] | {"--help", "--debug"}, f"kvdrift {command}: {option}"


def test_options_of_the_contract_are_there() -> None:
    """The options that the design promises to scripts exist."""
    assert {"--store", "--limit", "--dry-run", "--endpoint"} <= OPTIONS["run"]
    assert {"--format", "-o"} <= OPTIONS["sql"]
    assert "--watch" in OPTIONS["derive"]


def test_every_selector_has_its_section() -> None:
    """With its paper, and the parameters that a study can set."""
    text = (ROOT / "docs" / "selectors.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    for name, selector in SELECTORS.items():
        assert name in sections
        if selector.paper is not None:
            assert selector.paper.rpartition(":")[2] in sections[name]
        inherited = {field.name for base in selector.__bases__ if is_dataclass(base) for field in fields(base)}
        for field in fields(selector):  # type: ignore[arg-type]  # a dataclass
            if field.name not in inherited:
                assert f"`{field.name}`" in sections[name], f"{name}: {field.name}"
                if isinstance(field.default, int) and field.default:
                    assert f"`{field.name}` ({field.default})" in " ".join(sections[name].split())


def test_actions_of_the_guide_can_be_made() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(encoding="utf-8"), re.DOTALL)
    sections = [section for block in blocks for section in tomllib.loads(block)["actions"]]
    made = [build_action(ActionSection.model_validate(section)).name for section in sections]
    assert made == ["snapkv-half", "snapkv-half-int4", "sliding-512"]


def code_of(path: Path) -> str:
    """The parts of a document that are code."""
    text = path.read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", text, re.DOTALL) and [
        block or inline for block, inline in re.findall(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", text, re.DOTALL)
    ])  # fmt: skip
