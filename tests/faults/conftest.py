"""The table of trials at the end of ``make faults``, which docs/reliability.md shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.disk.failing import build_library
from faults.outcomes import table
from fixtures.finite_study import write_smallest_study
from fixtures.processes import run_command


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes changes on the disk fail, or records them."""
    built = build_library(tmp_path_factory.mktemp("library"))
    if built is None:
        pytest.skip("no C compiler for Linux, so no change on the disk can be made to fail")
    return built


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in table():
        terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study."""
    folder = tmp_path_factory.mktemp("smallest")
    assert run_command("run", write_smallest_study(folder), "--store", folder / "store")[0] == 0
    return folder
