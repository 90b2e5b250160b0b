"""``kvdrift check``: the checks of a selector, line by line, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.command import call, mistake
from fixtures.own_selectors import write_module

from kvdrift.generator.checks.selectors import SelectorTrial

NAME = "my_selector:Mine"
CHECKS = SelectorTrial.checks


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_check_is_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_module(folder)
    code, out, _ = call(capsys, "check", NAME, "--parameter", "coordinate=3", "--parameter", "sign = -0.5")
    *lines, last = out.splitlines()
    assert (code, last) == (0, f"{NAME}: all {len(CHECKS)} checks hold")
    assert [line[:5] for line in lines] == ["holds"] * len(CHECKS)
    for line, check in zip(lines, CHECKS, strict=True):
        assert line[5:].strip().startswith(check.name)
        assert f"  {check.tried}: " in line


@pytest.mark.slow
def test_an_edit_that_breaks_it_is_found_in_the_same_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_module(folder, ("* self.sign", "* self.sign + 1 / (layer.key.shape[0] - 1)"))
    code, out, _ = call(capsys, "check", NAME)
    lines = out.splitlines()
    assert (code, lines[-1]) == (1, f"{NAME}: 1 of {len(CHECKS)} checks fail")
    (failed,) = [line for line in lines if line.startswith("FAILS")]
    assert f"ZeroDivisionError: division by zero ({folder}/my_selector.py, line " in failed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("my_selecter:Mine",), " my_selecter.py"),
        (("my_selector:Yours",), "'Yours'"),
        ((NAME, "--parameter", "coordinate"), "--parameter coordinate: "),
        ((NAME, "--parameter", "coordinate=one"), "coordinate = 'one': "),
        ((NAME, "--parameter", "coordinate=[1]"), "--parameter coordinate=[1]: "),
        ((NAME, "--parameter", "zoom=1"), "'zoom'; it takes budget, coordinate, sign"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    write_module(folder)
    line = mistake(capsys, "check", *arguments)
    assert says in line
    assert "action" not in line, "the user has named none"
