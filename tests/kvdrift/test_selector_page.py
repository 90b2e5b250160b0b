"""Follow ``docs/adding-a-selector.md``: write its files and call its commands in their order.

The runs themselves are replaced by plain functions: each generates a document's units of the study's actions.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pyarrow as pa
import pytest
from fixtures.command import call
from fixtures.house import ROOT

from generator.actions import build_actions
from generator.documents.registry import stratum_documents
from generator.generation import PendingUnit, generate_units
from generator.selectors.own.kinds import SELECTOR_KIND
from generator.transformer.loading import load_model
from schema.study import load_studies

PAGE, *_ = (ROOT / "docs" / "adding-a-selector.md").read_text(encoding="utf-8").partition("## What the definitions")
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
FILE = re.compile(r"^`([\w.-]+\.\w+)`[^\n]*:\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE)
COMMANDS = [line for kind, text in BLOCK.findall(PAGE) if kind == "sh" for line in text.splitlines()]


def generated(study_file: Path) -> dict[str, tuple[pa.Table, str]]:
    """One document's events of each action, as a run of the study generates them, and the selector's fingerprint."""
    (study,) = load_studies(study_file)
    (document, *_) = stratum_documents(study.documents[0], study.study.seed, lambda: None)["evaluation"]
    pending = [PendingUnit(action, 0, 2) for action in build_actions(study)]
    units = generate_units(
        load_model(study.model.id), study.name, document, pending, study.study.horizon, study.study.seed
    )
    return {unit.record["action"]: (unit.events, unit.record["selector_sha256"]) for unit in units}


@pytest.mark.slow
def test_the_page_works_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILE.findall(PAGE):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert {path.name for path in tmp_path.iterdir()} == {"my_selector.py", "my-study.toml"}
    runs: list[dict[str, tuple[pa.Table, str]]] = []
    for line in COMMANDS:
        program, *arguments = shlex.split(line)
        if program != "kvdrift":
            subprocess.run([program, *arguments], check=True)
        elif arguments[0] == "run" and "--dry-run" not in arguments:
            runs.append(generated(tmp_path / arguments[1]))
        else:
            code, out, err = call(capsys, *arguments)
            assert (code, err) == (0, ""), out
    before, after = runs
    assert set(before) == {"peak-half", "snapkv-half", "recent-half", "full"}
    assert {name for name in before if not before[name][0].equals(after[name][0])} == {"peak-half"}
    assert {name for name in before if before[name][1] != after[name][1]} == {"peak-half"}
    assert "kvdrift run my-study.toml --redo peak-half" in COMMANDS


def test_the_pages_other_pieces_are_right(tmp_path: Path) -> None:
    files = dict(FILE.findall(PAGE))
    (tmp_path / "my_selector.py").write_text(files["my_selector.py"], encoding="utf-8")
    pieces = [text for kind, text in BLOCK.findall(PAGE) if kind == "toml" and text != files["my-study.toml"]]
    action, entry_points = pieces
    assert tomllib.loads(entry_points)["project"]["entry-points"] == {
        SELECTOR_KIND.group: {"peak": "my_selector:PeakAttention"}
    }
    study = tmp_path / "my-study.toml"
    study.write_text(files["my-study.toml"] + "\n" + action, encoding="utf-8")
    added = build_actions(load_studies(study)[0])[3]
    assert (added.name, added.selector.window) == ("peak-half-16", 16)
