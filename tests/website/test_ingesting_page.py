"""The page on events of other generators: its simulator and its commands, called in their order, give what it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from fixtures.command import call
from fixtures.house import ROOT

from kvdrift.ingestion.files import MOST_GROUPS
from kvdrift.ingestion.formats import MOST_ROWS
from kvdrift.schema.tables import DOCUMENTS, PAIR_COLUMNS

PAGE = (ROOT / "docs" / "ingesting.md").read_text(encoding="utf-8")
FIRST, *_ = PAGE.partition("## An event")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", FIRST, re.DOTALL)
(SIMULATOR,) = [text for kind, text in BLOCKS if kind == "python"]
(PRINTED,) = [text for kind, text in BLOCKS if kind == "text"]
COMMANDS = [
    shlex.split(command)
    for kind, text in BLOCKS
    if kind == "sh"
    for command in re.findall(r"^kvdrift ((?:\"[^\"]*\"|[^\n])*)", text, re.MULTILINE)
]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_from_a_simulator_to_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, whole: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len([line for line in SIMULATOR.splitlines() if line.strip()]) <= 32
    exec(SIMULATOR, {})  # noqa: S102 - the page's own code
    assert [command[0] for command in COMMANDS] == ["ingest", "derive", "sql", "analyze", "report"]
    for command in COMMANDS if whole else COMMANDS[:3]:
        code, out, _ = call(capsys, *command)
        assert code == 0, command
        if command[0] == "ingest":
            assert "horizon: 32 (mine, bigram), as given" in re.sub(" +", " ", out)
            assert "horizon: 32 (mine, bigram), as given" in " ".join(PAGE.split())
        if command[0] == "sql":
            assert out == PRINTED
    assert (tmp_path / "stores" / "mine" / "report" / "mine" / "index.html").is_file() == whole


def test_the_page_has_every_column_and_limit() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE.partition("## An event")[2], re.MULTILINE)
    assert set(PAIR_COLUMNS) <= {name for row in rows for name in re.findall(r"\w+", row)}
    documents = PAGE.partition("**Documents.**")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", documents)) - {"development", "evaluation"} == {*DOCUMENTS.columns} - {
        "document_revision"
    }
    for number in (MOST_ROWS, MOST_GROUPS):
        assert f"{number:,}" in PAGE
