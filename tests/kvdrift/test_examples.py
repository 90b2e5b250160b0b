"""The scripts of ``examples/`` are short, and do what they say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from fixtures.command import call
from fixtures.house import ROOT
from fixtures.small_study import write_study

from kvdrift.generator.checks.selectors import SelectorTrial
from kvdrift.log.store import Store

EXAMPLES = ROOT / "examples"
ACTIONS = {"full", "recent-half", "snapkv-half"}


def ran(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run an example in this process; return its exit code."""
    monkeypatch.setattr("sys.argv", [f"examples/{name}.py", *map(str, arguments)])
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_each_has_at_most_30_lines() -> None:
    lines = {path.name: len(path.read_text("utf-8").splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lines) == 5
    assert max(lines.values()) <= 30, lines


def test_a_study_a_query_and_a_gate(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("study", monkeypatch, write_study(tmp_path), finished) == 0
    _, *rows, page = capsys.readouterr().out.splitlines()
    assert {row.split()[0] for row in rows} == ACTIONS
    assert Path(page.removeprefix("page: ")).is_file()
    assert ran("first_divergence", monkeypatch, finished) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(": ")[0] for line in lines} == ACTIONS
    assert ran("gate", monkeypatch, finished, "recent-half", "0.9") == 0
    assert "recent-half: equivalent or better: " in capsys.readouterr().out


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.by_default("False")
def test_a_custom_selector(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, whole: bool) -> None:
    """By default with two of the checks; those that generate or start a second interpreter take longest."""
    monkeypatch.chdir(EXAMPLES)
    if not whole:
        few = [check for check in SelectorTrial.checks if check.name in {"kept sets", "identity"}]
        assert len(few) == 2
        monkeypatch.setattr(SelectorTrial, "checks", (*few,))
    code, out, err = call(capsys, "check", "long_keys:LongKeys")
    assert (code, err) == (0, ""), out
    assert out.endswith(f"long_keys:LongKeys: all {len(SelectorTrial.checks)} checks hold\n")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.by_default("False")
def test_events_of_another_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, whole: bool
) -> None:
    """Its commands are called in this process, by default without the last two."""
    asked, said = list[str](), list[str]()

    def called(command: list[str], *, check: bool) -> None:
        assert (command[:3], check) == ([sys.executable, "-m", "kvdrift"], True)
        asked.append(command[3])
        if whole or command[3] in {"ingest", "derive"}:
            code, out, _ = call(capsys, *command[3:])
            assert code == 0, out
            said.append(out)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", called)
    assert ran("ingest", monkeypatch, "store") == 0
    assert asked == ["ingest", "derive", "analyze", "report"]
    page = Path(said[-1].splitlines()[-1].removeprefix("report: "))
    assert (tmp_path / page).is_file() == whole
    assert Store.open(tmp_path / "store").row_count("events") == 12 * 3 * 16 * 32
