"""Run the code blocks of the documents: `make docs-check` loads this module as a plugin of pytest.

The blocks of a page run in their order, in a separate folder that has the quickstart's store and the shipped studies:
`sh` by bash, `python` in one namespace, `sql` on the quickstart's store. Other languages are only parsed. A
block below a line such as "`my_selector.py`:" is written to that file. `<!-- skip: next "needs a GPU" -->` leaves out
the next block; a reader does not see it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

import kvdrift

ROOT = Path(__file__).parents[1]
_FILE = re.compile(r"^`([\w.-]+\.\w+)`[^\n`]*:\n\n\Z", re.MULTILINE)
_GATE_CODES = {0, 1, 3}  # answers, not failures
_run_python = PythonEvaluator()


def make_folder(namespace: dict[str, Any]) -> None:
    """Make the folder of a page, a copy of what a reader has after `make study`."""
    folder = Path(tempfile.mkdtemp(prefix="kvdrift-docs-"))
    clone = folder / "kvdrift"
    clone.mkdir()
    for name in ("studies", "generator", "training"):
        (clone / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "stores" / "quickstart", clone / "stores" / "quickstart")
    programs = clone / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, module in {"python": "", "python3": "", "kvdrift": "-m kvdrift"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    namespace |= {"_top": folder, "_folder": clone}


def remove_folder(namespace: dict[str, Any]) -> None:
    """Remove the folder of a page."""
    shutil.rmtree(namespace["_top"])


def run_shell(example: Example) -> None:
    """Run commands in the page's folder; a `cd` holds for the blocks that follow."""
    folder, top = example.namespace["_folder"], example.namespace["_top"]
    programs = top / "kvdrift" / ".venv" / "bin"
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(  # noqa: S603 - the documents' own commands
        [shutil.which("bash") or "bash", "-ec", f"{example.parsed}\npwd > '{top}/.place'"], cwd=folder, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    accepted = _GATE_CODES if "kvdrift gate" in example.parsed else {0}
    if done.returncode not in accepted:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    place = top / ".place"
    if place.is_file():
        example.namespace["_folder"] = Path(place.read_text(encoding="utf-8").strip())


def run_python(example: Example) -> None:
    """Run Python in the page's folder, from which modules can be imported."""
    before, folder = Path.cwd(), example.namespace["_folder"]
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        _run_python(example)
    finally:
        sys.path.remove(str(folder))
        os.chdir(before)


def run_sql(example: Example) -> None:
    """Run a query on the quickstart's store; a query without a result or with an error fails."""
    with kvdrift.open(ROOT / "stores" / "quickstart") as views:
        views.sql(example.parsed).fetchall()


def parsed_by(read: Callable[[str], object]) -> Callable[[Example], None]:
    """Return an evaluator that does not run a block, but only parses it by the function ``read``."""

    def evaluate(example: Example) -> None:
        read(example.parsed)

    return evaluate


def read_json(text: str) -> None:
    """Parse a text as one JSON document or, if that fails, each line as a JSON document."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        for line in text.splitlines():
            json.loads(line)


EVALUATORS = {
    "sh": run_shell, "python": run_python, "sql": run_sql, "toml": parsed_by(tomllib.loads),
    "json": parsed_by(read_json), "yaml": parsed_by(yaml.safe_load),
}  # fmt: skip


def parser_of(language: str) -> Callable[[Document], Iterator[Region]]:
    """Return the parser of a language's blocks; a block below the name of a file is written to that file."""
    blocks = CodeBlockParser(language=language, evaluator=EVALUATORS[language])

    def parse(document: Document) -> Iterator[Region]:
        for region in blocks(document):
            if name := _FILE.search(document.text[: region.start]):
                region.evaluator = written_to(name[1])
            yield region

    return parse


def written_to(name: str) -> Callable[[Example], None]:
    """Return an evaluator that writes a block to a file of the page's folder."""

    def evaluate(example: Example) -> None:
        (example.namespace["_folder"] / name).write_text(example.parsed, encoding="utf-8")

    return evaluate


pytest_collect_file = Sybil(
    parsers=[SkipParser(), *map(parser_of, EVALUATORS)],
    path=str(ROOT),
    patterns=["*.md"],
    setup=make_folder,
    teardown=remove_folder,
).pytest()
