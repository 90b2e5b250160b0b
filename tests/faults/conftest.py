"""The table of trials at the end of ``make faults``, which docs/reliability.md shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faults.disk.failing import build_library
from faults.outcomes import add, table, told
from fixtures.finite_study import write_smallest_study
from fixtures.processes import run_command


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes changes on the disk fail, or records them."""
    built = build_library(tmp_path_factory.mktemp("library"))
    if built is None:
        pytest.skip("no C compiler for Linux, so no change on the disk can be made to fail")
    return built


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the trials of one of several test processes to the process that prints the table."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["trials"] = told()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    add(node.workeroutput["trials"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in table():
        terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study."""
    folder = tmp_path_factory.mktemp("smallest")
    assert run_command("run", write_smallest_study(folder), "--store", folder / "store")[0] == 0
    return folder
